//! The sixteen-lane machine on 64-bit Arm: four vectors of 128 bits, and the 8-bit dot products of ARMv8.2.
//!
//! `sdot` multiplies signed with signed bytes. Weights of up to seven bits are the same either way; of eight-bit ones 128 is
//! taken (the top bit flipped) and 128 · Σ activations added, which is exact. Its intrinsic is not stable, hence `asm!`.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::aarch64::*;
use std::arch::asm;

use super::simd::Simd;

#[derive(Clone, Copy, Debug)]
pub struct Neon;

/// One operation on each of the four vectors.
macro_rules! each {
    ($f:ident, $a:expr) => {{
        let a = $a;
        [$f(a[0]), $f(a[1]), $f(a[2]), $f(a[3])]
    }};
    ($f:ident, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        [$f(a[0], b[0]), $f(a[1], b[1]), $f(a[2], b[2]), $f(a[3], b[3])]
    }};
}

/// Adds to each of four lanes the dot product of its four weights with the quad `$lane` of the activations.
macro_rules! dot_quad {
    ($sum:expr, $weights:expr, $activations:expr, $lane:literal) => {
        asm!(
            concat!("sdot {sum:v}.4s, {weights:v}.16b, {activations:v}.4b[", $lane, "]"),
            sum = inlateout(vreg) $sum,
            weights = in(vreg) $weights,
            activations = in(vreg) $activations,
            options(pure, nomem, nostack, preserves_flags),
        )
    };
}

/// One line of weights (16 rows × 4 k) with the quad `i` of some activations.
#[inline(always)]
unsafe fn dot_line(sum: &mut [int32x4_t; 4], line: [int8x16_t; 4], activations: int8x16_t, i: usize) {
    for j in 0..4 {
        match i {
            0 => dot_quad!(sum[j], line[j], activations, "0"),
            1 => dot_quad!(sum[j], line[j], activations, "1"),
            2 => dot_quad!(sum[j], line[j], activations, "2"),
            _ => dot_quad!(sum[j], line[j], activations, "3"),
        }
    }
}

/// Weights as signed bytes: less 128 where they have eight bits.
#[inline(always)]
unsafe fn signed<const BITS: u32>(line: [uint8x16_t; 4]) -> [int8x16_t; 4] {
    if BITS < 8 {
        return each!(vreinterpretq_s8_u8, line);
    }
    let flip = vdupq_n_u8(0x80);
    let line = each!(veorq_u8, line, [flip; 4]);
    each!(vreinterpretq_s8_u8, line)
}

/// What [`signed`] has taken away: 128 times the sum of the activations.
#[inline(always)]
unsafe fn taken<const BITS: u32>(sum: [int32x4_t; 4], activations: int8x16_t) -> [int32x4_t; 4] {
    if BITS < 8 {
        return sum;
    }
    let taken = vdupq_n_s32(i32::from(vaddlvq_s8(activations)) << 7);
    each!(vaddq_s32, sum, [taken; 4])
}

/// Four f16 as f32.
#[inline(always)]
unsafe fn widen(from: *const u16) -> float32x4_t {
    vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)))
}

/// Sixteen unsigned bytes as floats.
#[inline(always)]
unsafe fn bytes_to_floats(bytes: uint8x16_t) -> [float32x4_t; 4] {
    let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
    [
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
        vcvtq_f32_u32(vmovl_high_u16(low)),
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
        vcvtq_f32_u32(vmovl_high_u16(high)),
    ]
}

impl Simd for Neon {
    type F = [float32x4_t; 4];
    type I = [int32x4_t; 4];
    type B = [uint8x16_t; 4];
    const TILE: usize = 4;
    const QUANT_TILE: (usize, usize) = (1, 4);
    const BIASED: bool = false;
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [vdupq_n_f32(x); 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        [vld1q_f32(from), vld1q_f32(from.add(4)), vld1q_f32(from.add(8)), vld1q_f32(from.add(12))]
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Self::F) {
        for i in 0..4 {
            vst1q_f32(to.add(4 * i), x[i]);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        [widen(from), widen(from.add(4)), widen(from.add(8)), widen(from.add(12))]
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        let (low, high) = (vld1q_u16(from), vld1q_u16(from.add(8)));
        let wide = [
            vshll_n_u16::<16>(vget_low_u16(low)),
            vshll_high_n_u16::<16>(low),
            vshll_n_u16::<16>(vget_low_u16(high)),
            vshll_high_n_u16::<16>(high),
        ];
        each!(vreinterpretq_f32_u32, wide)
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: Self::F) {
        for i in 0..4 {
            vst1_u16(to.add(4 * i), vreinterpret_u16_f16(vcvt_f16_f32(x[i])));
        }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self::F {
        bytes_to_floats(vld1q_u8(from))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::F {
        let bytes = vld1q_s8(from.cast());
        let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
        [
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
            vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
            vcvtq_f32_s32(vmovl_high_s16(high)),
        ]
    }
    #[inline(always)]
    unsafe fn load_u4(from: *const u8) -> (Self::F, Self::F) {
        let bytes = vld1q_u8(from);
        (bytes_to_floats(vandq_u8(bytes, vdupq_n_u8(15))), bytes_to_floats(vshrq_n_u8::<4>(bytes)))
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        each!(vaddq_f32, a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        each!(vsubq_f32, a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        each!(vmulq_f32, a, b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        each!(vdivq_f32, a, b)
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        each!(vmaxq_f32, a, b)
    }
    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        each!(vminq_f32, a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        [
            vfmaq_f32(c[0], a[0], b[0]),
            vfmaq_f32(c[1], a[1], b[1]),
            vfmaq_f32(c[2], a[2], b[2]),
            vfmaq_f32(c[3], a[3], b[3]),
        ]
    }
    #[inline(always)]
    unsafe fn abs(a: Self::F) -> Self::F {
        each!(vabsq_f32, a)
    }
    #[inline(always)]
    unsafe fn zero_below(value: Self::F, x: Self::F, limit: f32) -> Self::F {
        let keep = each!(vcgeq_f32, x, [vdupq_n_f32(limit); 4]);
        let bits = each!(vandq_u32, keep, each!(vreinterpretq_u32_f32, value));
        each!(vreinterpretq_f32_u32, bits)
    }
    #[inline(always)]
    unsafe fn only(x: Self::F, first: usize, last: usize) -> Self::F {
        let mut lanes = [0.0f32; 16];
        Self::store(lanes.as_mut_ptr(), x);
        for (lane, x) in lanes.iter_mut().enumerate() {
            if lane < first || lane >= last {
                *x = f32::NEG_INFINITY;
            }
        }
        Self::load(lanes.as_ptr())
    }
    #[inline(always)]
    unsafe fn sum(a: Self::F) -> f32 {
        let four = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
        let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
    }
    #[inline(always)]
    unsafe fn maximum(a: Self::F) -> f32 {
        vmaxvq_f32(vmaxq_f32(vmaxq_f32(a[0], a[2]), vmaxq_f32(a[1], a[3])))
    }

    #[inline(always)]
    unsafe fn to_int(a: Self::F) -> Self::I {
        each!(vcvtnq_s32_f32, a)
    }
    #[inline(always)]
    unsafe fn to_float(a: Self::I) -> Self::F {
        each!(vcvtq_f32_s32, a)
    }
    #[inline(always)]
    unsafe fn exp2_int(a: Self::I) -> Self::F {
        let biased = each!(vaddq_s32, a, [vdupq_n_s32(127); 4]);
        let bits = [
            vshlq_n_s32::<23>(biased[0]),
            vshlq_n_s32::<23>(biased[1]),
            vshlq_n_s32::<23>(biased[2]),
            vshlq_n_s32::<23>(biased[3]),
        ];
        each!(vreinterpretq_f32_s32, bits)
    }
    #[inline(always)]
    unsafe fn splat_int(x: i32) -> Self::I {
        [vdupq_n_s32(x); 4]
    }
    #[inline(always)]
    unsafe fn from_bits(a: Self::I) -> Self::F {
        each!(vreinterpretq_f32_s32, a)
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, a: Self::I) -> i32 {
        let low = vmovn_high_s32(vmovn_s32(a[0]), a[1]);
        let high = vmovn_high_s32(vmovn_s32(a[2]), a[3]);
        vst1q_s8(to, vmovn_high_s16(vmovn_s16(low), high));
        vaddvq_s32(vaddq_s32(vaddq_s32(a[0], a[1]), vaddq_s32(a[2], a[3])))
    }
    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        asm!("prfm pldl1keep, [{}]", in(reg) from, options(nomem, nostack, preserves_flags));
    }
    #[inline(always)]
    unsafe fn prefetch_far(from: *const u8) {
        asm!("prfm pldl2keep, [{}]", in(reg) from, options(nomem, nostack, preserves_flags));
    }
    #[inline(always)]
    unsafe fn prefetch_write(to: *const u8) {
        asm!("prfm pstl1keep, [{}]", in(reg) to, options(nomem, nostack, preserves_flags));
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::B {
        [vld1q_u8(from), vld1q_u8(from.add(16)), vld1q_u8(from.add(32)), vld1q_u8(from.add(48))]
    }
    #[inline(always)]
    unsafe fn store_bytes(to: *mut u8, x: Self::B) {
        for i in 0..4 {
            vst1q_u8(to.add(16 * i), x[i]);
        }
    }
    #[inline(always)]
    unsafe fn splat_byte(x: u8) -> Self::B {
        [vdupq_n_u8(x); 4]
    }
    #[inline(always)]
    unsafe fn and(a: Self::B, b: Self::B) -> Self::B {
        each!(vandq_u8, a, b)
    }
    #[inline(always)]
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B {
        each!(vorrq_u8, a, b)
    }
    #[inline(always)]
    unsafe fn add_bytes(a: Self::B, b: Self::B) -> Self::B {
        each!(vaddq_u8, a, b)
    }
    #[inline(always)]
    unsafe fn bytes_right(a: Self::B, bits: u32) -> Self::B {
        // A shift to the left by a negative number.
        each!(vshlq_u8, a, [vdupq_n_s8(-(bits as i8)); 4])
    }
    #[inline(always)]
    unsafe fn bytes_left(a: Self::B, bits: u32) -> Self::B {
        each!(vshlq_u8, a, [vdupq_n_s8(bits as i8); 4])
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], index: Self::B) -> Self::B {
        each!(vqtbl1q_u8, [vld1q_u8(table.as_ptr()); 4], index)
    }

    #[inline(always)]
    unsafe fn dot<const BITS: u32>(
        mut sum: Self::I,
        weights: [Self::B; 4],
        activations: *const i8,
    ) -> Self::I {
        let activations = vld1q_s8(activations);
        for i in 0..4 {
            dot_line(&mut sum, signed::<BITS>(weights[i]), activations, i);
        }
        taken::<BITS>(sum, activations)
    }

    #[inline(always)]
    unsafe fn dot_tile<const BITS: u32, const R: usize, const T: usize>(
        sums: &mut [[Self::I; R]; T],
        weights: *const u8,
        panel_stride: usize,
        activations: *const i8,
        token_stride: usize,
    ) {
        let mut tokens = [vdupq_n_s8(0); T];
        for t in 0..T {
            tokens[t] = vld1q_s8(activations.add(t * token_stride));
        }
        for r in 0..R {
            for i in 0..4 {
                // One line at a time: all four would not fit beside the sums.
                let line = signed::<BITS>(Self::load_bytes(weights.add(r * panel_stride + i * 64)));
                for t in 0..T {
                    dot_line(&mut sums[t][r], line, tokens[t], i);
                }
            }
            for t in 0..T {
                sums[t][r] = taken::<BITS>(sums[t][r], tokens[t]);
            }
        }
    }
}
