//! Nothing but the two instructions that products are made of, on registers, and nothing but reads of memory: how fast this machine
//! could be at best.
//!
//! # Safety
//! As in [`super::simd`].
#![allow(unsafe_op_in_unsafe_fn)]

use std::hint::black_box;

use super::simd::Simd;

/// Multiply-adds of one round, and the rounds themselves, by instruction set: see [`dot`] and [`fma`].
pub type PeakKernel = unsafe fn(usize) -> f64;

/// Runs `rounds` rounds of dot products of bytes and returns how many multiply-adds that were.
#[inline(always)]
pub unsafe fn dot<S: Simd>(rounds: usize) -> f64 {
    if S::WIDE { dot_chains::<S, 12>(rounds) } else { dot_chains::<S, 2>(rounds) }
}

/// The same with multiply-adds of f32.
#[inline(always)]
pub unsafe fn fma<S: Simd>(rounds: usize) -> f64 {
    if S::WIDE { fma_chains::<S, 12>(rounds) } else { fma_chains::<S, 5>(rounds) }
}

/// Streams that a thread reads side by side, as products do with panels, and how far ahead lines are asked for.
const STREAMS: usize = 4;
const AHEAD: usize = 4096;

/// Reads `bytes` bytes, a multiple of 64 times [`STREAMS`], from a multiple of 64 on.
pub type ReadKernel = unsafe fn(*const u8, usize);

#[inline(always)]
pub unsafe fn read<S: Simd>(from: *const u8, bytes: usize) {
    let each = bytes / STREAMS;
    let mut sums = [S::splat(0.0); STREAMS];
    for at in (0..each).step_by(64) {
        for (stream, sum) in sums.iter_mut().enumerate() {
            let line = from.add(stream * each + at);
            S::prefetch(line.wrapping_add(AHEAD));
            *sum = S::add(*sum, S::load(line.cast()));
        }
    }
    for sum in sums {
        black_box(S::sum(sum));
    }
}

/// `CHAINS` sums that do not wait for each other.
#[inline(always)]
unsafe fn dot_chains<S: Simd, const CHAINS: usize>(rounds: usize) -> f64 {
    let activations = [1i8; 16];
    let weights = [S::splat_byte(black_box(3)); 4];
    let mut sums = [S::splat_int(0); CHAINS];
    for _ in 0..rounds {
        // Seen as new numbers, so that the compiler does not take the product out of the loop.
        let activations = black_box(&activations).as_ptr();
        for sum in &mut sums {
            *sum = S::dot::<5>(*sum, weights, activations);
        }
    }
    let mut total = S::splat(0.0);
    for sum in sums {
        total = S::add(total, S::to_float(sum));
    }
    black_box(S::sum(total));
    (rounds * CHAINS * 4 * 64) as f64
}

#[inline(always)]
unsafe fn fma_chains<S: Simd, const CHAINS: usize>(rounds: usize) -> f64 {
    let x = S::splat(black_box(0.5));
    let mut sums = [x; CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = S::fma(*sum, x, x);
        }
    }
    let mut total = S::splat(0.0);
    for sum in sums {
        total = S::add(total, sum);
    }
    black_box(S::sum(total));
    (rounds * CHAINS * 16) as f64
}
