//! The sixteen-lane machine that all kernels are written for.
//!
//! A kernel is one generic function over [`Simd`]; `portable`, `avx2` and `avx512` say what the machine's instructions
//! are. Every method is `#[inline(always)]`, so that it melts into the entry points of [`super::table`], which carry
//! the target features.
//!
//! # Safety
//! All methods have one contract: the processor has the instructions of the implementation, and pointers are valid for
//! what the method says it reads or writes (no alignment is needed).

use crate::quantize::ActivationBlock;

/// Sixteen lanes of f32 (`F`), of i32 (`I`), and sixteen times four bytes (`B`).
pub trait Simd: Copy + 'static {
    type F: Copy;
    type I: Copy;
    type B: Copy;
    /// How many rows of activations a kernel that works on one panel holds in registers at once.
    const TILE: usize;
    /// Panels and tokens that the blocked product of quantised weights holds in registers.
    const QUANT_TILE: (usize, usize);
    /// Blocked products sum up from [`START_BITS`](crate::quantize::START_BITS), with weights of eight bits at no cost.
    const BIASED: bool;
    /// There are 32 registers, each of a whole vector, so that a tile of 24 sums fits.
    const WIDE: bool;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, x: Self::F);
    unsafe fn load_f16(from: *const u16) -> Self::F;
    unsafe fn load_bf16(from: *const u16) -> Self::F;
    /// Rounds to the nearest f16, ties to even.
    unsafe fn store_f16(to: *mut u16, x: Self::F);
    /// Sixteen u8 as floats.
    unsafe fn load_u8(from: *const u8) -> Self::F;
    /// Sixteen i8 as floats.
    unsafe fn load_i8(from: *const u8) -> Self::F;
    /// Sixteen bytes as low and high nibbles.
    unsafe fn load_u4(from: *const u8) -> (Self::F, Self::F);

    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// 1 / a to about one unit in the last place, for finite `a` from 1 on.
    #[inline(always)]
    unsafe fn reciprocal(a: Self::F) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { Self::div(Self::splat(1.0), a) }
    }
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The same, the result surely in the register that `c` had: in a loop nothing need be moved back.
    #[inline(always)]
    unsafe fn fma_into(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { Self::fma(a, b, c) }
    }
    unsafe fn abs(a: Self::F) -> Self::F;
    /// The nearest bf16 of a number that is no NaN, ties away from zero. Only where bf16 is multiplied.
    #[inline(always)]
    unsafe fn round_bf16(a: Self::F) -> Self::F {
        a
    }
    /// `value` where `x >= limit`, else 0.
    unsafe fn zero_below(value: Self::F, x: Self::F, limit: f32) -> Self::F;
    /// Lanes `first..last` of `x`; minus infinity in the others.
    unsafe fn only(x: Self::F, first: usize, last: usize) -> Self::F;
    unsafe fn sum(a: Self::F) -> f32;
    unsafe fn maximum(a: Self::F) -> f32;
    /// The maximum of each of sixteen vectors.
    #[inline(always)]
    unsafe fn maxima(vectors: &[Self::F; 16]) -> Self::F {
        let mut maxima = [0.0f32; 16];
        for i in 0..16 {
            // SAFETY: the caller's promise.
            maxima[i] = unsafe { Self::maximum(vectors[i]) };
        }
        // SAFETY: the caller's promise, and the array has sixteen lanes.
        unsafe { Self::load(maxima.as_ptr()) }
    }

    /// Rounds to nearest, ties to even.
    unsafe fn to_int(a: Self::F) -> Self::I;
    unsafe fn to_float(a: Self::I) -> Self::F;
    /// Two to the power of each lane, which is in -126..=127.
    unsafe fn exp2_int(a: Self::I) -> Self::F;
    unsafe fn splat_int(x: i32) -> Self::I;
    /// The integer at `from` in `N` registers.
    #[inline(always)]
    unsafe fn splat_ints<const N: usize>(from: *const i32) -> [Self::I; N] {
        // SAFETY: the caller's promise.
        unsafe { [Self::splat_int(*from); N] }
    }
    /// The floats with these bits.
    unsafe fn from_bits(a: Self::I) -> Self::F;
    /// Stores lanes that fit in i8 and returns their sum.
    unsafe fn store_i8(to: *mut i8, a: Self::I) -> i32;
    /// Writes the block of 32 quants that fit in i8, with its sums.
    #[inline(always)]
    unsafe fn store_block(to: *mut ActivationBlock, low: Self::I, high: Self::I, d: f32) {
        let mut quants = [0i8; 32];
        let target = quants.as_mut_ptr();
        // SAFETY: the caller's promise, and the array has room for both halves.
        unsafe {
            let sums = [Self::store_i8(target, low), Self::store_i8(target.add(16), high)];
            to.write(ActivationBlock::new(quants, sums, d));
        }
    }
    /// Asks for the cache line at `from`, which may be any address.
    unsafe fn prefetch(from: *const u8);
    /// The same for a line that will be written.
    unsafe fn prefetch_write(to: *const u8);
    /// Asks for the line, but no nearer than the second-level cache.
    unsafe fn prefetch_far(from: *const u8);

    unsafe fn load_bytes(from: *const u8) -> Self::B;
    unsafe fn store_bytes(to: *mut u8, x: Self::B);
    unsafe fn splat_byte(x: u8) -> Self::B;
    unsafe fn and(a: Self::B, b: Self::B) -> Self::B;
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B;
    unsafe fn add_bytes(a: Self::B, b: Self::B) -> Self::B;
    /// Shifts, in which bits may cross into the neighbour byte: mask them away.
    unsafe fn bytes_right(a: Self::B, bits: u32) -> Self::B;
    unsafe fn bytes_left(a: Self::B, bits: u32) -> Self::B;
    /// Each byte, below 16, picks an entry of the table.
    unsafe fn lookup(table: &[u8; 16], index: Self::B) -> Self::B;

    /// Adds to each lane the dot product of its 4 × 4 unsigned weights (below `2^BITS`) with 16 signed activations,
    /// exactly.
    unsafe fn dot<const BITS: u32>(sum: Self::I, weights: [Self::B; 4], activations: *const i8) -> Self::I;

    /// The same for `R` panels, `panel_stride` bytes apart, and `T` tokens, `token_stride` bytes apart.
    #[inline(always)]
    unsafe fn dot_tile<const BITS: u32, const R: usize, const T: usize>(
        sums: &mut [[Self::I; R]; T],
        weights: *const u8,
        panel_stride: usize,
        activations: *const i8,
        token_stride: usize,
    ) {
        for r in 0..R {
            // SAFETY: the caller's promise, which covers four lines of each panel and 16 activations of each token.
            unsafe {
                let weights = weights.add(r * panel_stride);
                let lines = [
                    Self::load_bytes(weights),
                    Self::load_bytes(weights.add(64)),
                    Self::load_bytes(weights.add(128)),
                    Self::load_bytes(weights.add(192)),
                ];
                for t in 0..T {
                    sums[t][r] = Self::dot::<BITS>(sums[t][r], lines, activations.add(t * token_stride));
                }
            }
        }
    }

    /// The same for a whole block: twice as many lines of each panel and activations of each token.
    #[inline(always)]
    unsafe fn dot_block<const BITS: u32, const R: usize, const T: usize>(
        sums: &mut [[Self::I; R]; T],
        weights: *const u8,
        panel_stride: usize,
        activations: *const i8,
        token_stride: usize,
    ) {
        // SAFETY: the caller's promise covers both halves.
        unsafe {
            Self::dot_tile::<BITS, R, T>(sums, weights, panel_stride, activations, token_stride);
            let (weights, activations) = (weights.add(256), activations.add(16));
            Self::dot_tile::<BITS, R, T>(sums, weights, panel_stride, activations, token_stride);
        }
    }
}
