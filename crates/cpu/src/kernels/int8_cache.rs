//! Keys and values cached as i8: how a head is written, and how the factors come back in.
//!
//! Each head of a token's key has one f32 factor, and so has its value. Within a block the factors follow the quants of
//! their kv head, `[block][kv head] { quants, [block_size] factors }`, so that whatever moves a block moves them too.
//! Attention multiplies with the bare quants and never opens a factor into them: a key's factor multiplies its finished
//! score (a lane is a key), a value's factor its weight after the sum of weights is taken. So the order of operations is
//! one for decodes and prompts.
//!
//! # Safety
//! As in [`super::attention`].
#![allow(unsafe_op_in_unsafe_fn)]

use super::attention::{AttentionArgs, PANEL_KEYS, TILE_KEYS};
use super::rows::{Spread, load_some};
use super::simd::Simd;

/// Largest magnitudes up to here are stored as zero: their inverse would overflow.
const TINY: f32 = 1e-30;

/// Writes one head: its quants and its factor. What is not finite makes the factor NaN, so that it shows.
#[inline(always)]
pub unsafe fn write_int8<S: Simd>(
    x: *const f32,
    len: usize,
    quants: *mut i8,
    spread: Spread,
    scale: *mut f32,
) {
    let (mut largest, mut infinite) = (S::splat(0.0), S::splat(0.0));
    for i in (0..len).step_by(16) {
        let lanes = load_some::<S>(x.add(i), len - i);
        largest = S::max(largest, S::abs(lanes));
        infinite = S::fma(lanes, S::splat(0.0), infinite);
    }
    let largest = S::maximum(largest);
    let inverse = S::splat(if largest > TINY { 127.0 / largest } else { 0.0 });
    *scale = if largest > TINY { largest / 127.0 } else { 0.0 } + S::sum(infinite);
    let mut bytes = [0i8; 16];
    for i in (0..len).step_by(16) {
        let left = (len - i).min(16);
        S::store_i8(bytes.as_mut_ptr(), S::to_int(S::mul(load_some::<S>(x.add(i), left), inverse)));
        for (j, &byte) in bytes[..left].iter().enumerate() {
            *quants.add(spread.place(i + j)) = byte;
        }
    }
}

/// Multiplies the scores of all rows with the factors of the keys `first..last` of a tile.
#[inline(always)]
pub unsafe fn scale_scores<S: Simd>(
    args: &AttentionArgs,
    rows: usize,
    tile: usize,
    first: usize,
    last: usize,
) {
    scale::<S, false>(args, rows, tile, first, last);
}

/// Multiplies the weights of all rows with the factors of the values `first..last` of a tile.
#[inline(always)]
pub unsafe fn scale_weights<S: Simd>(
    args: &AttentionArgs,
    rows: usize,
    tile: usize,
    first: usize,
    last: usize,
) {
    scale::<S, true>(args, rows, tile, first, last);
}

/// In whole panels: what lies outside of `first..last` is masked or not read afterwards.
#[inline(always)]
unsafe fn scale<S: Simd, const VALUES: bool>(
    args: &AttentionArgs,
    rows: usize,
    tile: usize,
    first: usize,
    last: usize,
) {
    for panel in first / PANEL_KEYS..last.div_ceil(PANEL_KEYS) {
        let key = panel * PANEL_KEYS;
        let (keys, values, inside) = args.place(key, 1);
        let (quants, dim) = if VALUES { (values, args.value_dim) } else { (keys, args.head_dim) };
        let factors = S::load(quants.add(args.block_size * dim).cast::<f32>().add(inside));
        for row in 0..rows {
            let at = args.scratch.scores.add(row * TILE_KEYS + key - tile);
            S::store(at, S::mul(S::load(at), factors));
        }
    }
}
