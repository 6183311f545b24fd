//! K-quants times rows with one scale per super-block of 256: added up in integers over the whole super-block.
//!
//! The scales within a super-block are integers, so for a super-block of a weight's row and one of a token
//!
//! ```text
//! sum  = Σ (q · scale) · a        over 256 columns
//! mins = Σ min · Σ a              over the blocks of 32 columns
//! total += (d · sum − dmin · mins) · d_a
//! ```
//!
//! where only the last line is in f32. Both sums fit i32, and integers do not care in which order they are added: few tokens are
//! multiplied by VNNI straight from the packed planes ([`few`]), many in tiles ([`tiles`]), and a row's result is the
//! same to the last bit.
//!
//! # Safety
//! The processor has AVX-512 F, BW, DQ, VL and VNNI, tiles where [`tiles`] says so, and the pointers of [`PanelArgs`] cover what
//! its fields say.
#![allow(unsafe_op_in_unsafe_fn, clippy::wildcard_imports)]

#[cfg(test)]
mod emulated;
mod few;
mod open;
mod rows;
mod tiles;

use std::arch::x86_64::*;

use super::avx512::Avx512;
use super::gemm::PanelArgs;
use crate::weights::formats::{BLOCK, PANEL_ROWS, Quant, SUPER_BLOCK, Scales};

#[cfg(test)]
pub use emulated::Emulated;
pub use rows::quantize_row;
pub use tiles::{NEXT_TOKENS, Sums, TileUnit};

/// The machine that unpacks planes.
type Vnni = Avx512<true>;

/// Blocks of a super-block.
const BLOCKS: usize = SUPER_BLOCK / BLOCK;
/// From this many tokens on it pays to open weights for tiles.
const TILED_TOKENS: usize = 9;

/// The [`PanelKernel`](super::gemm::PanelKernel) of a k-quant.
#[inline(always)]
pub unsafe fn panels<U: TileUnit, Q: Quant>(args: &PanelArgs, first: usize, count: usize, out: *mut f32) {
    if count < TILED_TOKENS {
        few::panels::<Q>(args, first, count, out);
    } else {
        tiles::panels::<U, Q>(args, first, count, out);
    }
}

/// True where a format has mins, and not an offset of its quants.
const fn has_mins<Q: Quant>() -> bool {
    matches!(Q::SCALES, Scales::SubMin32)
}

/// What the floats of a super-block of a panel are multiplied with, one lane a row.
#[derive(Clone, Copy)]
struct FloatScales {
    d: __m512,
    /// Zero where there are no mins.
    dmin: __m512,
}

impl FloatScales {
    #[inline(always)]
    unsafe fn read<Q: Quant>(header: *const u8) -> Self {
        const { assert!(Q::FACTOR == 1.0) };
        let d = _mm512_cvtph_ps(_mm256_loadu_si256(header.cast()));
        if !has_mins::<Q>() {
            return Self { d, dmin: _mm512_setzero_ps() };
        }
        Self { d, dmin: _mm512_cvtph_ps(_mm256_loadu_si256(header.add(2 * PANEL_ROWS).cast())) }
    }

    /// Adds a super-block of a token. All products come here, so that all round alike.
    #[inline(always)]
    unsafe fn add<const MINS: bool>(
        self,
        total: __m512,
        sum: __m512i,
        mins: __m512i,
        d: *const f32,
    ) -> __m512 {
        let mut scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), self.d);
        if MINS {
            scaled = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(mins), self.dmin, scaled);
        }
        _mm512_fmadd_ps(scaled, _mm512_set1_ps(*d), total)
    }
}

/// Where the small scales of a block are: 16 bytes, one a row, and 16 more.
#[inline(always)]
unsafe fn sub_scales<Q: Quant>(header: *const u8, block: usize) -> *const u8 {
    header.add(Q::SCALES.header_bytes() + block * Q::SCALES.sub_bytes())
}

/// Sixteen bytes as i32.
#[inline(always)]
unsafe fn unsigned(from: *const u8) -> __m512i {
    _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))
}

#[inline(always)]
unsafe fn signed(from: *const u8) -> __m512i {
    _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))
}

/// Lanes of i32 that fit i16, as pairs of i16.
#[inline(always)]
unsafe fn pair(low: __m512i, high: __m512i) -> __m512i {
    _mm512_mask_blend_epi16(0xaaaa_aaaa, low, _mm512_slli_epi32::<16>(high))
}

/// The mins of blocks `2 i` and `2 i + 1` in pairs, as the sums of activations lie.
#[inline(always)]
unsafe fn min_pair<Q: Quant>(header: *const u8, i: usize) -> __m512i {
    let first = sub_scales::<Q>(header, 2 * i).add(PANEL_ROWS);
    pair(unsigned(first), unsigned(first.add(Q::SCALES.sub_bytes())))
}

#[cfg(test)]
mod tests;
