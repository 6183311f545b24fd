//! The sixteen-lane machine as plain arrays: the fallback of every processor and the reading copy of the others.
#![allow(unsafe_op_in_unsafe_fn)]

use super::simd::Simd;

#[derive(Clone, Copy, Debug)]
pub struct Portable;

// Plain loops: the array methods of the standard library end up as calls.
#[inline(always)]
fn map<A: Copy, R: Copy + Default, const N: usize>(a: [A; N], f: impl Fn(A) -> R) -> [R; N] {
    let mut result = [R::default(); N];
    for i in 0..N {
        result[i] = f(a[i]);
    }
    result
}

#[inline(always)]
fn zip<A: Copy, R: Copy + Default, const N: usize>(a: [A; N], b: [A; N], f: impl Fn(A, A) -> R) -> [R; N] {
    let mut result = [R::default(); N];
    for i in 0..N {
        result[i] = f(a[i], b[i]);
    }
    result
}

/// f16 to f32 without a branch, so that sixteen of them are vector instructions.
#[inline(always)]
fn widen(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // Times 2^112 moves the exponent to its place, subnormal numbers included.
    let value = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let infinite = if magnitude >= 0x0f80_0000 { 0x7f80_0000 } else { 0 };
    f32::from_bits(value.to_bits() | infinite | (u32::from(bits & 0x8000) << 16))
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
    const QUANT_TILE: (usize, usize) = (1, 4);
    const BIASED: bool = false;
    const WIDE: bool = false;

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
        map(from.cast::<[u16; 16]>().read_unaligned(), widen)
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        map(from.cast::<[u16; 16]>().read_unaligned(), |bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: Self::F) {
        to.cast::<[u16; 16]>().write_unaligned(map(x, |x| half::f16::from_f32(x).to_bits()));
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
        let product = zip(a, b, |a, b| a * b);
        zip(product, c, |product, c| product + c)
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
    unsafe fn only(mut x: Self::F, first: usize, last: usize) -> Self::F {
        for (lane, x) in x.iter_mut().enumerate() {
            if lane < first || lane >= last {
                *x = f32::NEG_INFINITY;
            }
        }
        x
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
    unsafe fn from_bits(a: Self::I) -> Self::F {
        map(a, |a| f32::from_bits(a as u32))
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, a: Self::I) -> i32 {
        to.cast::<[i8; 16]>().write_unaligned(map(a, |a| a as i8));
        fold(a, i32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn prefetch(_from: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_far(_from: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_write(_to: *const u8) {}

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::B {
        from.cast::<[u8; 64]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store_bytes(to: *mut u8, x: Self::B) {
        to.cast::<[u8; 64]>().write_unaligned(x);
    }
    #[inline(always)]
    unsafe fn splat_byte(x: u8) -> Self::B {
        [x; 64]
    }
    #[inline(always)]
    unsafe fn and(a: Self::B, b: Self::B) -> Self::B {
        zip(a, b, |a, b| a & b)
    }
    #[inline(always)]
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B {
        zip(a, b, |a, b| a | b)
    }
    #[inline(always)]
    unsafe fn add_bytes(a: Self::B, b: Self::B) -> Self::B {
        zip(a, b, u8::wrapping_add)
    }
    #[inline(always)]
    unsafe fn bytes_right(a: Self::B, bits: u32) -> Self::B {
        map(a, |a| a >> bits)
    }
    #[inline(always)]
    unsafe fn bytes_left(a: Self::B, bits: u32) -> Self::B {
        map(a, |a| a << bits)
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], index: Self::B) -> Self::B {
        map(index, |index| table[usize::from(index & 15)])
    }

    #[inline(always)]
    unsafe fn dot<const BITS: u32>(
        mut sum: Self::I,
        weights: [Self::B; 4],
        activations: *const i8,
    ) -> Self::I {
        let activations = activations.cast::<[i8; 16]>().read_unaligned();
        for group in 0..4 {
            let weights = &weights[group];
            for row in 0..16 {
                let mut dot = 0;
                for i in 0..4 {
                    dot += i32::from(weights[row * 4 + i]) * i32::from(activations[group * 4 + i]);
                }
                // Wraps only where the activations were no numbers.
                sum[row] = sum[row].wrapping_add(dot);
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::widen;

    #[test]
    fn every_f16_is_widened() {
        for bits in 0..=u16::MAX {
            let (got, expected) = (widen(bits), f16::from_bits(bits).to_f32());
            assert!(got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan()), "{bits:#x}");
        }
    }
}
