//! The sixteen-lane machine on AVX-512 (F, BW, DQ, VL), with or without VNNI.
#![allow(unsafe_op_in_unsafe_fn, clippy::wildcard_imports)]

use std::arch::asm;
use std::arch::x86_64::*;

use super::simd::Simd;
use crate::quantize::{ActivationBlock, START_BITS, START_SHIFT};

/// `c += a * b`. The compiler would rather have the result where `a` was and move it back at the end of a loop: a dozen moves a
/// block of a tile, which the processor does not always get for nothing.
#[inline]
#[target_feature(enable = "avx512f")]
fn multiply_add_into(a: __m512, b: __m512, c: __m512) -> __m512 {
    let mut sum = c;
    // SAFETY: registers only.
    unsafe {
        asm!(
            "vfmadd231ps {}, {}, {}",
            inout(zmm_reg) sum,
            in(zmm_reg) a,
            in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// One load. The compiler would move the first of several equal ones instead, which takes a place among the dot products.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_splat(from: *const i32) -> __m512i {
    let lanes: __m512i;
    asm!(
        "vpbroadcastd {}, dword ptr [{}]",
        out(zmm_reg) lanes,
        in(reg) from,
        options(pure, readonly, nostack, preserves_flags)
    );
    lanes
}

/// `VNNI` chooses the 8-bit dot products.
#[derive(Clone, Copy, Debug)]
pub struct Avx512<const VNNI: bool>;

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;
    const TILE: usize = 8;
    // With VNNI loads are the scarce thing: three panels share each broadcast, four tokens each line of weights.
    const QUANT_TILE: (usize, usize) = if VNNI { (3, 4) } else { (1, 8) };
    const BIASED: bool = VNNI;
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        _mm512_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Self::F) {
        _mm512_storeu_ps(to, x);
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: Self::F) {
        let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
        _mm256_storeu_si256(to.cast(), halves);
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self::F {
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::F {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))
    }
    #[inline(always)]
    unsafe fn load_u4(from: *const u8) -> (Self::F, Self::F) {
        let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
        let low = _mm512_and_si512(wide, _mm512_set1_epi32(15));
        (_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(wide)))
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn reciprocal(a: Self::F) -> Self::F {
        // 14 bits and one step of Newton's: a division takes as long as a dozen multiplications.
        let near = _mm512_rcp14_ps(a);
        let rest = _mm512_fnmadd_ps(a, near, _mm512_set1_ps(1.0));
        _mm512_fmadd_ps(near, rest, near)
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        _mm512_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn fma_into(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        multiply_add_into(a, b, c)
    }
    #[inline(always)]
    unsafe fn abs(a: Self::F) -> Self::F {
        _mm512_abs_ps(a)
    }
    #[inline(always)]
    unsafe fn round_bf16(a: Self::F) -> Self::F {
        let bits = _mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x8000));
        _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
    }
    #[inline(always)]
    unsafe fn zero_below(value: Self::F, x: Self::F, limit: f32) -> Self::F {
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, _mm512_set1_ps(limit)), value)
    }
    #[inline(always)]
    unsafe fn only(x: Self::F, first: usize, last: usize) -> Self::F {
        let lanes = (1u32 << last) - (1u32 << first);
        _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), lanes as u16, x)
    }
    #[inline(always)]
    unsafe fn sum(a: Self::F) -> f32 {
        _mm512_reduce_add_ps(a)
    }
    #[inline(always)]
    unsafe fn maximum(a: Self::F) -> f32 {
        _mm512_reduce_max_ps(a)
    }
    #[inline(always)]
    unsafe fn maxima(vectors: &[Self::F; 16]) -> Self::F {
        // Each step takes the larger of two halves of neighbours: half as many vectors, with twice as many results each.
        let mut eight = [_mm512_setzero_ps(); 8];
        for i in 0..8 {
            let (a, b) = (vectors[i], vectors[i + 8]);
            let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
            eight[i] = _mm512_max_ps(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b));
        }
        let mut four = [_mm512_setzero_ps(); 4];
        for i in 0..4 {
            let (a, b) = (eight[i], eight[i + 4]);
            let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
            four[i] = _mm512_max_ps(low, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
        }
        let mut two = [_mm512_setzero_ps(); 2];
        for i in 0..2 {
            let (a, b) = (four[i], four[i + 2]);
            let low = _mm512_unpacklo_ps(a, b);
            two[i] = _mm512_max_ps(low, _mm512_unpackhi_ps(a, b));
        }
        let low = _mm512_unpacklo_ps(two[0], two[1]);
        let mixed = _mm512_max_ps(low, _mm512_unpackhi_ps(two[0], two[1]));
        // Of lane l the quarter l / 4 told in the first two steps, the rest in the others.
        let order = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
        _mm512_permutexvar_ps(order, mixed)
    }

    #[inline(always)]
    unsafe fn to_int(a: Self::F) -> Self::I {
        _mm512_cvtps_epi32(a)
    }
    #[inline(always)]
    unsafe fn to_float(a: Self::I) -> Self::F {
        _mm512_cvtepi32_ps(a)
    }
    #[inline(always)]
    unsafe fn exp2_int(a: Self::I) -> Self::F {
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(a, _mm512_set1_epi32(127))))
    }
    #[inline(always)]
    unsafe fn splat_int(x: i32) -> Self::I {
        _mm512_set1_epi32(x)
    }
    #[inline(always)]
    unsafe fn splat_ints<const N: usize>(from: *const i32) -> [Self::I; N] {
        let mut lanes = [_mm512_setzero_si512(); N];
        for lane in &mut lanes {
            *lane = load_splat(from);
        }
        lanes
    }
    #[inline(always)]
    unsafe fn from_bits(a: Self::I) -> Self::F {
        _mm512_castsi512_ps(a)
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, a: Self::I) -> i32 {
        let bytes = _mm512_cvtepi32_epi8(a);
        _mm_storeu_si128(to.cast(), bytes);
        // The sum of absolute differences to zero sums unsigned bytes, so the sign is moved away first.
        let shifted = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
        let sums = _mm_sad_epu8(shifted, _mm_setzero_si128());
        _mm_cvtsi128_si32(sums) + _mm_extract_epi32::<2>(sums) - 16 * 128
    }
    #[inline(always)]
    unsafe fn store_block(to: *mut ActivationBlock, low: Self::I, high: Self::I, d: f32) {
        let quants = _mm256_set_m128i(_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low));
        // As in `store_i8`, both halves at once: each is summed into two places of its own half.
        let sums = _mm256_sad_epu8(_mm256_xor_si256(quants, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
        let sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32::<0b01_00_11_10>(sums));
        let whole = _mm256_add_epi32(sums, _mm256_permute4x64_epi64::<0b01_00_11_10>(sums));
        // The fields after the quants: _, whole, first, second, whole, first, second, 0.
        let places = _mm256_setr_epi32(8, 8, 0, 4, 8, 0, 4, 9);
        let shifts = _mm256_setr_epi32(4096, 4096, 2048, 2048, 4096, 2048, 2048, 0);
        let sums = _mm256_sub_epi32(_mm256_permutex2var_epi32(sums, places, whole), shifts);
        let starts = _mm256_sub_epi32(
            _mm256_set1_epi32(START_BITS),
            _mm256_slli_epi32::<{ START_SHIFT as i32 }>(sums),
        );
        let d = _mm256_set1_ps(d);
        let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), d);
        let fields = _mm256_mask_mov_ps(_mm256_castsi256_ps(starts), 0b0111_0000, scaled);
        let fields = _mm256_mask_mov_ps(fields, 1, d);
        let fields = _mm256_maskz_mov_ps(0b0111_1111, fields);
        let block = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(quants), _mm256_castps_si256(fields));
        _mm512_storeu_si512(to.cast(), block);
    }
    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(from.cast());
    }

    #[inline(always)]
    unsafe fn prefetch_write(to: *const u8) {
        _mm_prefetch::<_MM_HINT_ET0>(to.cast());
    }
    #[inline(always)]
    unsafe fn prefetch_far(from: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(from.cast());
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::B {
        _mm512_loadu_si512(from.cast())
    }
    #[inline(always)]
    unsafe fn store_bytes(to: *mut u8, x: Self::B) {
        _mm512_storeu_si512(to.cast(), x);
    }
    #[inline(always)]
    unsafe fn splat_byte(x: u8) -> Self::B {
        _mm512_set1_epi8(x as i8)
    }
    #[inline(always)]
    unsafe fn and(a: Self::B, b: Self::B) -> Self::B {
        _mm512_and_si512(a, b)
    }
    #[inline(always)]
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B {
        _mm512_or_si512(a, b)
    }
    #[inline(always)]
    unsafe fn add_bytes(a: Self::B, b: Self::B) -> Self::B {
        _mm512_add_epi8(a, b)
    }
    #[inline(always)]
    unsafe fn bytes_right(a: Self::B, bits: u32) -> Self::B {
        _mm512_srl_epi16(a, _mm_cvtsi32_si128(bits as i32))
    }
    #[inline(always)]
    unsafe fn bytes_left(a: Self::B, bits: u32) -> Self::B {
        _mm512_sll_epi16(a, _mm_cvtsi32_si128(bits as i32))
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], index: Self::B) -> Self::B {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        _mm512_shuffle_epi8(table, index)
    }

    #[inline(always)]
    unsafe fn dot<const BITS: u32>(
        mut sum: Self::I,
        weights: [Self::B; 4],
        activations: *const i8,
    ) -> Self::I {
        let quad = |i: usize| _mm512_set1_epi32(activations.cast::<i32>().add(i).read_unaligned());
        if VNNI {
            for (i, weights) in weights.into_iter().enumerate() {
                sum = _mm512_dpbusd_epi32(sum, weights, quad(i));
            }
            return sum;
        }
        let ones = _mm512_set1_epi16(1);
        if BITS <= 5 {
            // Four products of pairs stay below 4 · 2 · 31 · 127 < 2^15.
            let pair = |i: usize| _mm512_maddubs_epi16(weights[i], quad(i));
            let low = _mm512_add_epi16(pair(0), pair(1));
            let all = _mm512_add_epi16(low, _mm512_add_epi16(pair(2), pair(3)));
            return _mm512_add_epi32(sum, _mm512_madd_epi16(all, ones));
        }
        for (i, weights) in weights.into_iter().enumerate() {
            // The eighth bit alone, so that no sum of two products passes 2 · 128 · 127 < 2^15.
            let low = _mm512_and_si512(weights, _mm512_set1_epi8(0x7f));
            sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(low, quad(i)), ones));
            if BITS == 8 {
                let high = _mm512_and_si512(weights, _mm512_set1_epi8(-128));
                sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(high, quad(i)), ones));
            }
        }
        sum
    }

    #[inline(always)]
    unsafe fn dot_tile<const BITS: u32, const R: usize, const T: usize>(
        sums: &mut [[Self::I; R]; T],
        weights: *const u8,
        panel_stride: usize,
        activations: *const i8,
        token_stride: usize,
    ) {
        if VNNI {
            for i in 0..4 {
                let mut lines = [_mm512_setzero_si512(); R];
                for r in 0..R {
                    lines[r] = _mm512_loadu_si512(weights.add(r * panel_stride + i * 64).cast());
                }
                for t in 0..T {
                    let quad = activations.add(t * token_stride + i * 4).cast::<i32>();
                    let quad = _mm512_set1_epi32(quad.read_unaligned());
                    for r in 0..R {
                        sums[t][r] = _mm512_dpbusd_epi32(sums[t][r], lines[r], quad);
                    }
                }
            }
            return;
        }
        for r in 0..R {
            let weights = weights.add(r * panel_stride);
            let lines = [
                _mm512_loadu_si512(weights.cast()),
                _mm512_loadu_si512(weights.add(64).cast()),
                _mm512_loadu_si512(weights.add(128).cast()),
                _mm512_loadu_si512(weights.add(192).cast()),
            ];
            for t in 0..T {
                sums[t][r] = Self::dot::<BITS>(sums[t][r], lines, activations.add(t * token_stride));
            }
        }
    }
}
