//! The sixteen-lane machine as plain arrays: the fallback of every processor and the reading copy of the others.
#![allow(unsafe_op_in_unsafe_fn)]

use half::{bf16, f16};

use super::simd::Simd;

#[derive(Clone, Copy, Debug)]
pub struct Portable;

#[inline(always)]
fn map<A: Copy, R>(a: [A; 16], f: impl Fn(A) -> R) -> [R; 16] {
    std::array::from_fn(|i| f(a[i]))
}

#[inline(always)]
fn zip<A: Copy, R>(a: [A; 16], b: [A; 16], f: impl Fn(A, A) -> R) -> [R; 16] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// Adds the upper half to the lower one until one lane is left, as the vector machines do.
#[inline(always)]
fn fold<A: Copy>(mut a: [A; 16], f: impl Fn(A, A) -> A) -> A {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            a[i] = f(a[i], a[i + width]);
        }
    }
    a[0]
}

impl Simd for Portable {
    type F = [f32; 16];
    type I = [i32; 16];
    type B = [u8; 64];
    const TILE: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        from.cast::<[f32; 16]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Self::F) {
        to.cast::<[f32; 16]>().write_unaligned(x);
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        map(from.cast::<[u16; 16]>().read_unaligned(), |bits| f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        map(from.cast::<[u16; 16]>().read_unaligned(), |bits| bf16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self::F {
        map(from.cast::<[u8; 16]>().read_unaligned(), f32::from)
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::F {
        map(from.cast::<[i8; 16]>().read_unaligned(), f32::from)
    }
    #[inline(always)]
    unsafe fn load_u4(from: *const u8) -> (Self::F, Self::F) {
        let bytes = from.cast::<[u8; 16]>().read_unaligned();
        (map(bytes, |byte| f32::from(byte & 15)), map(bytes, |byte| f32::from(byte >> 4)))
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // Not fused: without the instruction a fused product is a slow library call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn abs(a: Self::F) -> Self::F {
        map(a, f32::abs)
    }
    #[inline(always)]
    unsafe fn zero_below(value: Self::F, x: Self::F, limit: f32) -> Self::F {
        zip(value, x, |value, x| if x >= limit { value } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn sum(a: Self::F) -> f32 {
        fold(a, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn maximum(a: Self::F) -> f32 {
        fold(a, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn to_int(a: Self::F) -> Self::I {
        // Adding 1.5 · 2^23 leaves the number, rounded to even, in the low bits; it stands for any |a| < 2^22.
        map(a, |a| ((a + 12_582_912.0).to_bits() as i32).wrapping_sub(0x4b40_0000))
    }
    #[inline(always)]
    unsafe fn to_float(a: Self::I) -> Self::F {
        map(a, |a| a as f32)
    }
    #[inline(always)]
    unsafe fn exp2_int(a: Self::I) -> Self::F {
        map(a, |a| f32::from_bits((a.wrapping_add(127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn splat_int(x: i32) -> Self::I {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn shift_left(a: Self::I, bits: u32) -> Self::I {
        map(a, |a| a << bits)
    }
    #[inline(always)]
    unsafe fn sum_int(a: Self::I) -> i32 {
        fold(a, i32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, a: Self::I) {
        to.cast::<[i8; 16]>().write_unaligned(map(a, |a| a as i8));
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::B {
        from.cast::<[u8; 64]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn splat_byte(x: u8) -> Self::B {
        [x; 64]
    }
    #[inline(always)]
    unsafe fn and(a: Self::B, b: Self::B) -> Self::B {
        std::array::from_fn(|i| a[i] & b[i])
    }
    #[inline(always)]
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    unsafe fn bytes_right(a: Self::B, bits: u32) -> Self::B {
        std::array::from_fn(|i| a[i] >> bits)
    }
    #[inline(always)]
    unsafe fn bytes_left(a: Self::B, bits: u32) -> Self::B {
        std::array::from_fn(|i| a[i] << bits)
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], index: Self::B) -> Self::B {
        std::array::from_fn(|i| table[usize::from(index[i] & 15)])
    }

    #[inline(always)]
    unsafe fn dot<const BITS: u32>(
        mut sum: Self::I,
        weights: [Self::B; 4],
        activations: *const i8,
    ) -> Self::I {
        let activations = activations.cast::<[[i8; 4]; 4]>().read_unaligned();
        for (weights, activations) in weights.iter().zip(activations) {
            for (row, sum) in sum.iter_mut().enumerate() {
                for (i, &activation) in activations.iter().enumerate() {
                    // Wraps only where the activations were no numbers.
                    *sum = sum.wrapping_add(i32::from(weights[row * 4 + i]) * i32::from(activation));
                }
            }
        }
        sum
    }
}
