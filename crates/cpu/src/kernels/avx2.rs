//! The sixteen-lane machine on AVX2, FMA and F16C: every vector is a pair of 256-bit ones.
#![allow(unsafe_op_in_unsafe_fn, clippy::wildcard_imports)]

use std::arch::x86_64::*;

use super::simd::Simd;

#[derive(Clone, Copy, Debug)]
pub struct Avx2;

#[derive(Clone, Copy, Debug)]
pub struct Pair<T>(T, T);

/// Applies a two-operand instruction to both halves.
macro_rules! both {
    ($op:ident, $a:expr, $b:expr) => {
        Pair($op($a.0, $b.0), $op($a.1, $b.1))
    };
}

impl Simd for Avx2 {
    type F = Pair<__m256>;
    type I = Pair<__m256i>;
    type B = Pair<__m256i>;
    const TILE: usize = 4;
    const QUANT_TILE: (usize, usize) = (1, 4);
    const BIASED: bool = false;
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        Pair(_mm256_set1_ps(x), _mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        Pair(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Self::F) {
        _mm256_storeu_ps(to, x.0);
        _mm256_storeu_ps(to.add(8), x.1);
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        let half = |from: *const u16| _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
        Pair(half(from), half(from.add(8)))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        let half = |from: *const u16| {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        };
        Pair(half(from), half(from.add(8)))
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: Self::F) {
        _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.0));
        _mm_storeu_si128(to.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.1));
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self::F {
        let half = |from: *const u8| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())));
        Pair(half(from), half(from.add(8)))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::F {
        let half = |from: *const u8| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())));
        Pair(half(from), half(from.add(8)))
    }
    #[inline(always)]
    unsafe fn load_u4(from: *const u8) -> (Self::F, Self::F) {
        let wide = |from: *const u8| _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
        let low = |x| _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15)));
        let high = |x| _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(x));
        let (a, b) = (wide(from), wide(from.add(8)));
        (Pair(low(a), low(b)), Pair(high(a), high(b)))
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        Pair(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1))
    }
    #[inline(always)]
    unsafe fn abs(a: Self::F) -> Self::F {
        let sign = _mm256_set1_ps(-0.0);
        Pair(_mm256_andnot_ps(sign, a.0), _mm256_andnot_ps(sign, a.1))
    }
    #[inline(always)]
    unsafe fn zero_below(value: Self::F, x: Self::F, limit: f32) -> Self::F {
        let limit = _mm256_set1_ps(limit);
        let keep = |value, x| _mm256_and_ps(value, _mm256_cmp_ps::<_CMP_GE_OQ>(x, limit));
        Pair(keep(value.0, x.0), keep(value.1, x.1))
    }
    #[inline(always)]
    unsafe fn only(x: Self::F, first: usize, last: usize) -> Self::F {
        let (first, last) = (_mm256_set1_ps(first as f32), _mm256_set1_ps(last as f32));
        let lanes = _mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0);
        let half = |x, lanes| {
            let (from, to) =
                (_mm256_cmp_ps::<_CMP_GE_OQ>(lanes, first), _mm256_cmp_ps::<_CMP_LT_OQ>(lanes, last));
            _mm256_blendv_ps(_mm256_set1_ps(f32::NEG_INFINITY), x, _mm256_and_ps(from, to))
        };
        Pair(half(x.0, lanes), half(x.1, _mm256_add_ps(lanes, _mm256_set1_ps(8.0))))
    }
    #[inline(always)]
    unsafe fn sum(a: Self::F) -> f32 {
        let eight = _mm256_add_ps(a.0, a.1);
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
    #[inline(always)]
    unsafe fn maximum(a: Self::F) -> f32 {
        let eight = _mm256_max_ps(a.0, a.1);
        let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
    }

    #[inline(always)]
    unsafe fn to_int(a: Self::F) -> Self::I {
        Pair(_mm256_cvtps_epi32(a.0), _mm256_cvtps_epi32(a.1))
    }
    #[inline(always)]
    unsafe fn to_float(a: Self::I) -> Self::F {
        Pair(_mm256_cvtepi32_ps(a.0), _mm256_cvtepi32_ps(a.1))
    }
    #[inline(always)]
    unsafe fn exp2_int(a: Self::I) -> Self::F {
        let bias = _mm256_set1_epi32(127);
        let power = |a| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(a, bias)));
        Pair(power(a.0), power(a.1))
    }
    #[inline(always)]
    unsafe fn splat_int(x: i32) -> Self::I {
        Pair(_mm256_set1_epi32(x), _mm256_set1_epi32(x))
    }
    #[inline(always)]
    unsafe fn from_bits(a: Self::I) -> Self::F {
        Pair(_mm256_castsi256_ps(a.0), _mm256_castsi256_ps(a.1))
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, a: Self::I) -> i32 {
        // The packs work within 128-bit lanes; one permutation of quarters puts the words back in order.
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a.0, a.1));
        let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
        _mm_storeu_si128(to.cast(), bytes);
        // The sum of absolute differences to zero sums unsigned bytes, so the sign is moved away first.
        let shifted = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
        let sums = _mm_sad_epu8(shifted, _mm_setzero_si128());
        _mm_cvtsi128_si32(sums) + _mm_extract_epi32::<2>(sums) - 16 * 128
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
        Pair(_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast()))
    }
    #[inline(always)]
    unsafe fn store_bytes(to: *mut u8, x: Self::B) {
        _mm256_storeu_si256(to.cast(), x.0);
        _mm256_storeu_si256(to.add(32).cast(), x.1);
    }
    #[inline(always)]
    unsafe fn splat_byte(x: u8) -> Self::B {
        Pair(_mm256_set1_epi8(x as i8), _mm256_set1_epi8(x as i8))
    }
    #[inline(always)]
    unsafe fn and(a: Self::B, b: Self::B) -> Self::B {
        both!(_mm256_and_si256, a, b)
    }
    #[inline(always)]
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B {
        both!(_mm256_or_si256, a, b)
    }
    #[inline(always)]
    unsafe fn add_bytes(a: Self::B, b: Self::B) -> Self::B {
        both!(_mm256_add_epi8, a, b)
    }
    #[inline(always)]
    unsafe fn bytes_right(a: Self::B, bits: u32) -> Self::B {
        let bits = _mm_cvtsi32_si128(bits as i32);
        Pair(_mm256_srl_epi16(a.0, bits), _mm256_srl_epi16(a.1, bits))
    }
    #[inline(always)]
    unsafe fn bytes_left(a: Self::B, bits: u32) -> Self::B {
        let bits = _mm_cvtsi32_si128(bits as i32);
        Pair(_mm256_sll_epi16(a.0, bits), _mm256_sll_epi16(a.1, bits))
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], index: Self::B) -> Self::B {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        Pair(_mm256_shuffle_epi8(table, index.0), _mm256_shuffle_epi8(table, index.1))
    }

    #[inline(always)]
    unsafe fn dot<const BITS: u32>(sum: Self::I, weights: [Self::B; 4], activations: *const i8) -> Self::I {
        let quad = |i: usize| _mm256_set1_epi32(activations.cast::<i32>().add(i).read_unaligned());
        // Spelled out: the array methods of the standard library are not inlined across target features.
        let quads = [quad(0), quad(1), quad(2), quad(3)];
        let [a, b, c, d] = weights;
        Pair(
            dot_half::<BITS>(sum.0, [a.0, b.0, c.0, d.0], quads),
            dot_half::<BITS>(sum.1, [a.1, b.1, c.1, d.1], quads),
        )
    }
}

#[inline(always)]
unsafe fn dot_half<const BITS: u32>(mut sum: __m256i, weights: [__m256i; 4], quads: [__m256i; 4]) -> __m256i {
    let ones = _mm256_set1_epi16(1);
    if BITS <= 5 {
        // Four products of pairs stay below 4 · 2 · 31 · 127 < 2^15.
        let pair = |i: usize| _mm256_maddubs_epi16(weights[i], quads[i]);
        let low = _mm256_add_epi16(pair(0), pair(1));
        let all = _mm256_add_epi16(low, _mm256_add_epi16(pair(2), pair(3)));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(all, ones));
    }
    for i in 0..4 {
        let (weights, quad) = (weights[i], quads[i]);
        // The eighth bit alone, so that no sum of two products passes 2 · 128 · 127 < 2^15.
        let low = _mm256_and_si256(weights, _mm256_set1_epi8(0x7f));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(low, quad), ones));
        if BITS == 8 {
            let high = _mm256_and_si256(weights, _mm256_set1_epi8(-128));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(high, quad), ones));
        }
    }
    sum
}
