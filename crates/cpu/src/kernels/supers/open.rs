//! Weights times their small scales as two planes of bytes, as tiles read them.
//!
//! `w = q · scale` has up to 13 bits, so `w = high · 2^shift + low`, and tiles multiply both planes. Quants below 32 with scales of
//! six unsigned bits need no `w`: a scale is `8 · a + b`, the planes are `q · a` and `q · b`, and a product of bytes that stays
//! below 256 can be made two at a time in 16 bits.

use std::arch::x86_64::*;

use super::super::gemm::unpack;
use super::{BLOCKS, Vnni, has_mins, pair, signed, sub_scales, unsigned};
use crate::weights::formats::{PANEL_ROWS, Quant};

/// Bytes of a plane's tile: 64 columns of a panel, in groups of `16 rows × 4 k`.
pub const TILE: usize = 1024;
/// Bytes of an opened super-block, `[4 lines][high, low][16 groups][16 rows × 4 k]`.
pub const OPENED: usize = 4 * 2 * TILE;

/// What the high plane is multiplied with, as a power of two.
pub const fn high_shift<Q: Quant>() -> u32 {
    if has_mins::<Q>() { 3 } else { 8 }
}

/// Opens a super-block of a panel.
#[inline(always)]
pub unsafe fn open<Q: Quant>(quants: *const u8, header: *const u8, to: *mut u8) {
    for block in 0..BLOCKS {
        let groups = unpack::<Vnni, Q>(quants.add(block * Q::PLANES.bytes()));
        let to = to.add(block / 2 * 2 * TILE + block % 2 * 8 * 64);
        let sub = sub_scales::<Q>(header, block);
        if has_mins::<Q>() {
            open_unsigned(&groups, unsigned(sub), to);
        } else {
            open_signed(&groups[..4], signed(sub), to);
            open_signed(&groups[4..], signed(sub.add(PANEL_ROWS)), to.add(4 * 64));
        }
    }
}

/// Quants below 32, scales below 64.
#[inline(always)]
unsafe fn open_unsigned(groups: &[__m512i; 8], scale: __m512i, to: *mut u8) {
    let high = _mm512_srli_epi32::<3>(scale);
    let low = _mm512_and_si512(scale, _mm512_set1_epi32(7));
    let (high, low) = (pair(high, high), pair(low, low));
    for (i, &group) in groups.iter().enumerate() {
        _mm512_store_si512(to.add(i * 64).cast(), _mm512_mullo_epi16(group, high));
        _mm512_store_si512(to.add(TILE + i * 64).cast(), _mm512_mullo_epi16(group, low));
    }
}

/// Quants below 64 with an offset of 32, and scales of eight bits: the high plane is signed, the low one is not.
#[inline(always)]
unsafe fn open_signed(groups: &[__m512i], scale: __m512i, to: *mut u8) {
    const ODD: u64 = 0xaaaa_aaaa_aaaa_aaaa;
    // Bytes `scale, 0, scale, 0`: products with the even quants of each row.
    let even = _mm512_and_si512(pair(scale, scale), _mm512_set1_epi16(0xff));
    let odd = _mm512_slli_epi16::<8>(even);
    let offset = _mm512_slli_epi16::<5>(pair(scale, scale));
    for (i, &group) in groups.iter().enumerate() {
        let even = _mm512_sub_epi16(_mm512_maddubs_epi16(group, even), offset);
        let odd = _mm512_sub_epi16(_mm512_maddubs_epi16(group, odd), offset);
        let high = _mm512_mask_blend_epi8(ODD, _mm512_srli_epi16::<8>(even), odd);
        let low = _mm512_mask_blend_epi8(ODD, even, _mm512_slli_epi16::<8>(odd));
        _mm512_store_si512(to.add(i * 64).cast(), high);
        _mm512_store_si512(to.add(TILE + i * 64).cast(), low);
    }
}
