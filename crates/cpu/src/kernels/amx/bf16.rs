//! Float weights of 16 bits times rows of f32, in tiles of bf16 with sums of f32.
//!
//! One `tdpbf16ps` multiplies 16 tokens × 32 k with 32 k × 16 output rows (one panel). Nothing of f32's precision is given
//! up for it that matters: a value `x` is `hi + lo`, `hi` being the bf16 nearest to `x` and `lo` the one nearest to the
//! rest, which leaves 16 bits or more. Rows are split once a product ([`split_row`]); bf16 weights are what they
//! are; f16 weights are split too, exactly, and of the four products the one of both `lo`s, the smallest, is left out.
//!
//! The panels `[k][16]` are opened to `[k / 2][16][2]`, the order that tiles want, some k at a time into the first-level
//! cache. For each (row, output) the additions are those of k in order, `hi` before `lo`; a tile has as many rows as there
//! are tokens left, so all numbers of tokens come here and a row's result does not depend on them.
//!
//! # Safety
//! As in [`super`]; further, the processor has AVX-512 F, BW, DQ and VL.
#![allow(unsafe_op_in_unsafe_fn, clippy::wildcard_imports)]

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::{Config, TILE_ROWS, configure, release};
use crate::kernels::gemm::{MAX_PANELS, PanelArgs};
use crate::weights::formats::PANEL_ROWS;

/// Values along k of one instruction; rows are split in groups of as many.
pub const GROUP: usize = 32;
/// The most tokens of a tile.
pub const TOKENS: usize = TILE_ROWS;

/// Bytes of an opened panel: 256 k of one plane or 128 of two. Three of them are half of the first-level cache.
const OPENED_BYTES: usize = 8192;
/// How far ahead of the use weights are asked for: the processor's own prefetching stops at every page.
const AHEAD: usize = 2048;

/// `CONFIGS[n]` is for tiles of `n` tokens. Registers 0 to 2 hold sums, 3 and 4 `hi` and `lo` of the tokens, 5 to 7 weights.
static CONFIGS: [Config; TOKENS + 1] = {
    let mut configs = [const { Config::new([(0, 0); 8]) }; TOKENS + 1];
    let mut tokens = 1;
    while tokens <= TOKENS {
        let (some, all) = ((tokens, 64), (GROUP / 2, 64));
        configs[tokens] = Config::new([some, some, some, some, some, all, all, all]);
        tokens += 1;
    }
    configs
};

/// The nearest bf16 (the even one of two), in the upper halves. What is not a number stays none.
#[inline]
#[target_feature(enable = "avx512f")]
fn round(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    // A carry would make a number of it.
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
    let rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), quiet);
    _mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000_u32 as i32))
}

/// `x ≈ hi + lo`, both bf16 in the upper halves; `lo` is zero where `hi` is not finite.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn split(x: __m512) -> (__m512i, __m512i) {
    /// Quiet and signalling NaN, both infinities.
    const NOT_FINITE: i32 = 0x01 | 0x80 | 0x08 | 0x10;
    let hi = round(x);
    let finite = !_mm512_fpclass_ps_mask::<NOT_FINITE>(_mm512_castsi512_ps(hi));
    (hi, round(_mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(hi))))
}

/// Splits a row: each [`GROUP`] of f32 becomes, in as many bytes, all their `hi` and then all their `lo`. `out` may be `x`;
/// `len` is a multiple of [`GROUP`].
#[target_feature(enable = "avx512f,avx512dq")]
pub unsafe fn split_row(x: *const f32, len: usize, out: *mut f32) {
    for group in (0..len).step_by(GROUP) {
        let halves = [_mm512_loadu_ps(x.add(group)), _mm512_loadu_ps(x.add(group + 16))];
        let to = out.add(group).cast::<u8>();
        for (i, half) in halves.into_iter().enumerate() {
            let (hi, lo) = split(half);
            let narrow = |bits| _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits));
            _mm256_storeu_si256(to.add(i * 32).cast(), narrow(hi));
            _mm256_storeu_si256(to.add(64 + i * 32).cast(), narrow(lo));
        }
    }
}

/// One tile of tokens and some opened panels.
#[derive(Debug)]
pub struct Tile {
    /// Split rows of the tokens, from the first k of the panels on, and the bytes between two.
    rows: *const u8,
    row_stride: usize,
    /// [`OPENED_BYTES`] each.
    weights: *const u8,
    num_groups: usize,
    /// Sums, `[panels][tokens, 16]`, that are added to, and the floats between two panels.
    out: *mut f32,
    out_stride: usize,
}

/// Adds a tile's products. For each panel its registers of sums and of weights, where its weights lie (of `lo` too, if there
/// are any) and its sums. Neighbouring products have different sums: one takes three times as long as it keeps the
/// unit busy.
macro_rules! add_products {
    ($tile:ident: $($sums:literal += $weights:literal at $at:literal $(and $low:literal)?, $out:ident = $panel:literal;)+) => {
        asm!(
            $(concat!("tileloadd ", $sums, ", [{", stringify!($out), "} + {line}*1]"),)+
            "2:",
            "tileloadd tmm3, [{rows} + {row_stride}*1]",
            $(
                concat!("tileloadd ", $weights, ", [{weights} + {line}*1 + ", $at, "]"),
                concat!("tdpbf16ps ", $sums, ", tmm3, ", $weights),
            )+
            "tileloadd tmm4, [{rows} + {row_stride}*1 + 64]",
            $(concat!("tdpbf16ps ", $sums, ", tmm4, ", $weights),)+
            $($(
                concat!("tileloadd ", $weights, ", [{weights} + {line}*1 + ", $low, "]"),
                concat!("tdpbf16ps ", $sums, ", tmm3, ", $weights),
            )?)+
            "add {rows}, 128",
            "add {weights}, 1024",
            "dec {num_groups}",
            "jnz 2b",
            $(concat!("tilestored [{", stringify!($out), "} + {line}*1], ", $sums),)+
            rows = inout(reg) $tile.rows => _,
            row_stride = in(reg) $tile.row_stride,
            weights = inout(reg) $tile.weights => _,
            num_groups = inout(reg) $tile.num_groups => _,
            line = in(reg) 64usize,
            $($out = in(reg) $tile.out.add($panel * $tile.out_stride),)+
            options(nostack),
        )
    };
}

/// A format of weights.
pub trait Weights: 'static {
    /// k that are opened at once.
    const CHUNK: usize;
    /// Opens `num_k` k of a panel, an even number, at most [`Self::CHUNK`].
    unsafe fn open(from: *const u8, num_k: usize, to: *mut u8);
    /// Adds the products of `num_panels` panels.
    unsafe fn multiply(tile: &Tile, num_panels: usize);
}

#[derive(Debug)]
pub struct Bf16;
#[derive(Debug)]
pub struct F16;

const _: () = assert!(OPENED_BYTES == 8192 && MAX_PANELS == 3, "written out below");

impl Weights for Bf16 {
    const CHUNK: usize = OPENED_BYTES / (2 * PANEL_ROWS);

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn open(from: *const u8, num_k: usize, to: *mut u8) {
        // Word `2 row + i` is word `row` of line `i`.
        let lanes = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
            18, 2, 17, 1, 16, 0,
        );
        for at in (0..num_k * PANEL_ROWS * 2).step_by(64) {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + AHEAD).cast());
            let pair = _mm512_loadu_si512(from.add(at).cast());
            _mm512_store_si512(to.add(at).cast(), _mm512_permutexvar_epi16(lanes, pair));
        }
    }

    #[inline(always)]
    unsafe fn multiply(tile: &Tile, num_panels: usize) {
        match num_panels {
            1 => add_products!(tile:
                "tmm0" += "tmm5" at "0", out0 = 0;
            ),
            2 => add_products!(tile:
                "tmm0" += "tmm5" at "0", out0 = 0;
                "tmm1" += "tmm6" at "8192", out1 = 1;
            ),
            _ => add_products!(tile:
                "tmm0" += "tmm5" at "0", out0 = 0;
                "tmm1" += "tmm6" at "8192", out1 = 1;
                "tmm2" += "tmm7" at "16384", out2 = 2;
            ),
        }
    }
}

impl Weights for F16 {
    const CHUNK: usize = OPENED_BYTES / (4 * PANEL_ROWS);

    /// Here `hi` is cut off, not rounded: it has eight of the eleven bits and `lo` the others, so nothing is lost.
    #[inline]
    #[target_feature(enable = "avx512f,f16c")]
    unsafe fn open(from: *const u8, num_k: usize, to: *mut u8) {
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        let load = |at: usize| _mm512_cvtph_ps(_mm256_loadu_si256(from.add(at).cast()));
        let cut = |x: __m512| _mm512_and_si512(_mm512_castps_si512(x), upper);
        let rest = |x: __m512, hi: __m512i| _mm512_castps_si512(_mm512_sub_ps(x, _mm512_castsi512_ps(hi)));
        let pair = |even: __m512i, odd: __m512i| _mm512_or_si512(_mm512_srli_epi32::<16>(even), odd);
        for at in (0..num_k * PANEL_ROWS * 2).step_by(64) {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + AHEAD).cast());
            let (even, odd) = (load(at), load(at + 32));
            let (even_hi, odd_hi) = (cut(even), cut(odd));
            let lo = pair(rest(even, even_hi), rest(odd, odd_hi));
            _mm512_store_si512(to.add(at).cast(), pair(even_hi, odd_hi));
            _mm512_store_si512(to.add(OPENED_BYTES / 2 + at).cast(), lo);
        }
    }

    #[inline(always)]
    unsafe fn multiply(tile: &Tile, num_panels: usize) {
        match num_panels {
            1 => add_products!(tile:
                "tmm0" += "tmm5" at "0" and "4096", out0 = 0;
            ),
            2 => add_products!(tile:
                "tmm0" += "tmm5" at "0" and "4096", out0 = 0;
                "tmm1" += "tmm6" at "8192" and "12288", out1 = 1;
            ),
            _ => add_products!(tile:
                "tmm0" += "tmm5" at "0" and "4096", out0 = 0;
                "tmm1" += "tmm6" at "8192" and "12288", out1 = 1;
                "tmm2" += "tmm7" at "16384" and "20480", out2 = 2;
            ),
        }
    }
}

/// Some opened panels.
#[repr(align(64))]
struct Opened([MaybeUninit<u8>; MAX_PANELS * OPENED_BYTES]);

/// The [`PanelKernel`](crate::kernels::gemm::PanelKernel) for rows that were split; the columns are a multiple of [`GROUP`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn panels<W: Weights>(args: &PanelArgs, first: usize, count: usize, out: *mut f32) {
    debug_assert!(args.cols.is_multiple_of(GROUP) && (1..=MAX_PANELS).contains(&args.num_panels));
    #[allow(clippy::large_stack_arrays)]
    // It must stay in the first-level cache, and a step allocates nothing.
    let mut opened = Opened([MaybeUninit::uninit(); MAX_PANELS * OPENED_BYTES]);
    let opened = opened.0.as_mut_ptr().cast::<u8>();
    for panel in 0..args.num_panels {
        out.add(panel * args.out_stride).write_bytes(0, count * PANEL_ROWS);
    }
    let mut configured = 0;
    for first_k in (0..args.cols).step_by(W::CHUNK) {
        let num_k = W::CHUNK.min(args.cols - first_k);
        for panel in 0..args.num_panels {
            let from = args.quants.add(panel * args.quants_stride + first_k * PANEL_ROWS * 2);
            W::open(from, num_k, opened.add(panel * OPENED_BYTES));
        }
        for token in (0..count).step_by(TOKENS) {
            let tokens = TOKENS.min(count - token);
            if tokens != configured {
                configure(&CONFIGS[tokens]);
                configured = tokens;
            }
            let tile = Tile {
                rows: args.floats.add((first + token) * args.stride + first_k).cast(),
                row_stride: 4 * args.stride,
                weights: opened,
                num_groups: num_k / GROUP,
                out: out.add(token * PANEL_ROWS),
                out_stride: args.out_stride,
            };
            W::multiply(&tile, args.num_panels);
        }
    }
    release();
}

#[cfg(test)]
mod tests {
    use baton_backend::testing::Random;
    use half::{bf16, f16};

    use super::super::is_available;
    use super::*;
    use crate::isa::Isa;
    use crate::memory::AlignedBytes;

    /// Panels of one test, `[panels][k][16]`, as bytes and as numbers.
    struct Panels {
        bytes: Vec<u16>,
        values: Vec<f32>,
    }

    fn random_panels(random: &mut Random, len: usize, is_f16: bool) -> Panels {
        let numbers = random.normals(len);
        let bytes: Vec<u16> = numbers
            .iter()
            .map(|&x| if is_f16 { f16::from_f32(x).to_bits() } else { bf16::from_f32(x).to_bits() })
            .collect();
        let value =
            |&bits: &u16| if is_f16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() };
        let values = bytes.iter().map(value).collect();
        Panels { bytes, values }
    }

    fn lacks_avx512() -> bool {
        let lacks = !Isa::Avx512.is_available();
        if lacks {
            println!("skipped: this processor has no AVX-512");
        }
        lacks
    }

    #[test]
    fn rows_are_split_into_nearest_numbers() {
        if lacks_avx512() {
            return;
        }
        let mut random = Random::new(5);
        let mut row: Vec<f32> = random.normals(3 * GROUP);
        for (i, x) in row.iter_mut().enumerate() {
            *x *= 10.0f32.powi(i as i32 % 70 - 35);
        }
        let ties = [0x3f80_8000, 0x3f81_8000, 0x3f80_7fff, 0x3f80_8001, 0xbf80_8000].map(f32::from_bits);
        let special = [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN, 1e-41];
        let not_numbers = [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001].map(f32::from_bits);
        for (x, &value) in row.iter_mut().zip(ties.iter().chain(&special).chain(&not_numbers)) {
            *x = value;
        }
        let mut apart = vec![0.0f32; row.len()];
        let mut in_place = row.clone();
        // SAFETY: the processor has the instructions; the rows have whole groups.
        unsafe {
            split_row(row.as_ptr(), row.len(), apart.as_mut_ptr());
            split_row(in_place.as_ptr(), row.len(), in_place.as_mut_ptr());
        }
        let halves = |row: &[f32]| -> Vec<u16> {
            row.iter().flat_map(|x| [x.to_bits() as u16, (x.to_bits() >> 16) as u16]).collect()
        };
        assert_eq!(halves(&apart), halves(&in_place));
        let halves = halves(&apart);
        for (k, &x) in row.iter().enumerate() {
            let at = k / GROUP * 2 * GROUP + k % GROUP;
            let (hi, lo) = (bf16::from_bits(halves[at]), bf16::from_bits(halves[at + GROUP]));
            if x.is_nan() {
                assert!(hi.is_nan() && lo.to_f32() == 0.0, "{k}: {x} is {hi} + {lo}");
                continue;
            }
            let expected = bf16::from_f32(x);
            assert_eq!(hi.to_bits(), expected.to_bits(), "{k}: {x}");
            let rest = if expected.is_finite() { x - expected.to_f32() } else { 0.0 };
            assert_eq!(lo.to_bits(), bf16::from_f32(rest).to_bits(), "{k}: {x}");
            if x.is_finite() && hi.is_finite() && x.abs() > 1e-30 {
                let both = f64::from(hi.to_f32()) + f64::from(lo.to_f32());
                assert!((both - f64::from(x)).abs() <= f64::from(x).abs() / f64::from(1 << 17), "{k}: {x}");
            }
        }
    }

    #[test]
    fn bf16_panels_are_opened_in_pairs() {
        if lacks_avx512() {
            return;
        }
        let num_k = Bf16::CHUNK;
        let panel: Vec<u16> = (0..num_k * PANEL_ROWS).map(|i| i as u16).collect();
        let opened = AlignedBytes::zeroed(OPENED_BYTES, "a test").expect("small");
        // SAFETY: the processor has the instructions; the panel has as many k and fits.
        let opened = unsafe {
            Bf16::open(panel.as_ptr().cast(), num_k, opened.as_mut_ptr());
            std::slice::from_raw_parts(opened.as_mut_ptr().cast::<u16>(), panel.len()).to_vec()
        };
        for (at, &value) in panel.iter().enumerate() {
            let (k, row) = (at / PANEL_ROWS, at % PANEL_ROWS);
            assert_eq!(opened[k / 2 * 32 + 2 * row + k % 2], value, "k {k}, row {row}");
        }
    }

    #[test]
    fn every_f16_is_the_sum_of_its_halves() {
        if lacks_avx512() {
            return;
        }
        let opened = AlignedBytes::zeroed(OPENED_BYTES, "a test").expect("small");
        let all: Vec<u16> = (0..=u16::MAX).filter(|&bits| f16::from_bits(bits).is_finite()).collect();
        assert!(all.len().is_multiple_of(F16::CHUNK * PANEL_ROWS));
        for panel in all.chunks(F16::CHUNK * PANEL_ROWS) {
            // SAFETY: the processor has the instructions; the panel has as many k and fits.
            let opened = unsafe {
                F16::open(panel.as_ptr().cast(), F16::CHUNK, opened.as_mut_ptr());
                std::slice::from_raw_parts(opened.as_mut_ptr().cast::<u16>(), OPENED_BYTES / 2)
            };
            for (at, &bits) in panel.iter().enumerate() {
                let (k, row) = (at / PANEL_ROWS, at % PANEL_ROWS);
                let at = k / 2 * 32 + 2 * row + k % 2;
                let (hi, lo) = (bf16::from_bits(opened[at]), bf16::from_bits(opened[OPENED_BYTES / 4 + at]));
                let value = f16::from_bits(bits);
                let difference = hi.to_f32() + lo.to_f32() - value.to_f32();
                assert!(difference.abs() <= 0.0, "{value}: {hi} + {lo}");
            }
        }
    }

    /// Multiplies tokens `first..first + count` of `rows` (already split); what lies behind the results must stay.
    unsafe fn multiply(
        panels: &Panels,
        is_f16: bool,
        (num_panels, cols): (usize, usize),
        rows: &[f32],
        (first, count): (usize, usize),
    ) -> Vec<f32> {
        const UNTOUCHED: f32 = -7.0;
        let out_stride = (count + 1) * PANEL_ROWS;
        let mut out = vec![UNTOUCHED; num_panels * out_stride];
        let args = PanelArgs {
            quants: panels.bytes.as_ptr().cast(),
            scales: std::ptr::null(),
            quants_stride: cols * PANEL_ROWS * 2,
            scales_stride: 0,
            num_panels,
            cols,
            blocks: std::ptr::null(),
            lanes: 1,
            floats: rows.as_ptr(),
            stride: cols,
            out_stride,
            target: std::ptr::null(),
            target_stride: 0,
        };
        let kernel = if is_f16 { super::panels::<F16> } else { super::panels::<Bf16> };
        kernel(&args, first, count, out.as_mut_ptr());
        let (results, behind): (Vec<_>, Vec<_>) =
            out.chunks(out_stride).map(|panel| panel.split_at(count * PANEL_ROWS)).unzip();
        assert!(behind.concat().iter().all(|&x| x == UNTOUCHED), "more than {count} tokens were written");
        results.concat()
    }

    #[test]
    fn tiles_agree_with_exact_arithmetic_for_any_number_of_tokens() {
        if !is_available() {
            println!("skipped: this processor, or the system, has no AMX");
            return;
        }
        let num_tokens = 40;
        let shapes = [(1, 32), (2, 96), (3, 128), (3, 256), (2, 416), (1, 544), (3, 608)];
        for (is_f16, (num_panels, cols)) in
            [false, true].into_iter().flat_map(|f16| shapes.map(|shape| (f16, shape)))
        {
            let mut random = Random::new(11);
            let panels = random_panels(&mut random, num_panels * cols * PANEL_ROWS, is_f16);
            let rows = random.normals(num_tokens * cols);
            let mut split = rows.clone();
            // SAFETY: available; all arrays have the sizes that are said.
            unsafe { split_row(rows.as_ptr(), rows.len(), split.as_mut_ptr()) };
            let shape = (num_panels, cols);
            // SAFETY: as above.
            let all = unsafe { multiply(&panels, is_f16, shape, &split, (0, num_tokens)) };
            for (at, got) in all.iter().enumerate() {
                let (panel, token, row) =
                    (at / PANEL_ROWS / num_tokens, at / PANEL_ROWS % num_tokens, at % PANEL_ROWS);
                let products = (0..cols).map(|k| {
                    let weight = panels.values[(panel * cols + k) * PANEL_ROWS + row];
                    f64::from(weight) * f64::from(rows[token * cols + k])
                });
                let (expected, scale) = (products.clone().sum::<f64>(), products.map(f64::abs).sum::<f64>());
                assert!(
                    (f64::from(*got) - expected).abs() <= scale / f64::from(1 << 16),
                    "f16 {is_f16}, {num_panels} panels of {cols}, token {token}, row {row}: {got}, not {expected}"
                );
            }
            // A token's results are the same bits in every batch.
            for (first, count) in (1..=num_tokens).map(|count| (0, count)).chain([(8, 1), (24, 16), (32, 8)])
            {
                // SAFETY: as above.
                let some = unsafe { multiply(&panels, is_f16, shape, &split, (first, count)) };
                for (panel, some) in some.chunks(count * PANEL_ROWS).enumerate() {
                    let all = &all[(panel * num_tokens + first) * PANEL_ROWS..][..count * PANEL_ROWS];
                    assert!(
                        some.iter().zip(all).all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{count} from {first}"
                    );
                }
            }
        }
    }
}
