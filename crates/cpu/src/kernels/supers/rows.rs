//! Rows of f32 as int8 with a scale per super-block.

use std::arch::x86_64::*;

use crate::quantize::{SUPER_LINES, SuperPlaces, SuperSums};
use crate::weights::formats::SUPER_BLOCK;

/// Vectors of a super-block.
const VECTORS: usize = SUPER_BLOCK / 16;

/// Quantises row `row` of `num_tiles` tiles of tokens, or the only one where that is zero. `len` is a multiple of 256.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn quantize_row(x: *const f32, len: usize, out: *mut u8, row: usize, num_tiles: usize) {
    let places = SuperPlaces::new(len, num_tiles);
    for super_block in 0..places.num_supers() {
        let x = x.add(super_block * SUPER_BLOCK);
        let mut largest = _mm512_setzero_ps();
        for i in 0..VECTORS {
            largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_loadu_ps(x.add(i * 16))));
        }
        let largest = _mm512_reduce_max_ps(largest);
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let mut lines = [_mm512_setzero_si512(); SUPER_LINES];
        for (i, line) in lines.iter_mut().enumerate() {
            *line = quantize_line(x.add(i * 64), _mm512_set1_ps(inverse));
            let to = out.add(places.quants(row, super_block) + i * places.line_stride());
            _mm512_storeu_si512(to.cast(), *line);
        }
        write_sums(&lines, largest / 127.0, out.add(places.sums(row, super_block)).cast());
    }
}

/// 64 values as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn quantize_line(x: *const f32, inverse: __m512) -> __m512i {
    // SAFETY: the caller's 64 values are four parts of 16.
    let part =
        |i: usize| unsafe { _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x.add(i * 16)), inverse)) };
    let low = _mm512_packs_epi32(part(0), part(1));
    let bytes = _mm512_packs_epi16(low, _mm512_packs_epi32(part(2), part(3)));
    // Each quarter of the register holds four values of each part.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, bytes)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn write_sums(lines: &[__m512i; SUPER_LINES], d: f32, to: *mut SuperSums) {
    // The sum of absolute differences to zero sums eight unsigned bytes, so the sign is moved away first. Of each line the sums
    // take 16 of every 64 bits.
    let eights = |line: __m512i| {
        _mm512_sad_epu8(_mm512_xor_si512(line, _mm512_set1_epi8(-128)), _mm512_setzero_si512())
    };
    let low = _mm512_or_si512(eights(lines[0]), _mm512_slli_epi64::<16>(eights(lines[1])));
    let high =
        _mm512_or_si512(_mm512_slli_epi64::<32>(eights(lines[2])), _mm512_slli_epi64::<48>(eights(lines[3])));
    let eights = _mm512_or_si512(low, high);
    let halves = _mm512_add_epi16(eights, _mm512_shuffle_epi32::<0b01_00_11_10>(eights));
    let halves = _mm512_sub_epi16(halves, _mm512_set1_epi16(16 * 128));
    // Quarter `q` of the register has the `q`-th sum of each of the four lines.
    let order = _mm256_setr_epi16(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    let halves = _mm512_castsi512_si256(_mm512_permutexvar_epi16(_mm512_castsi256_si512(order), halves));
    let pairs = _mm256_madd_epi16(halves, _mm256_set1_epi16(1));
    _mm_store_si128(to.cast(), _mm_castps_si128(_mm_set_ss(d)));
    _mm_store_si128((&raw mut (*to).sums).cast(), _mm256_cvtepi32_epi16(pairs));
    _mm256_store_si256((&raw mut (*to).halves).cast(), halves);
}
