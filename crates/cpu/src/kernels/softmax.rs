//! The softmax of a tile of attention's scores, all rows of a unit in passes: maxima, factors, weights.
//!
//! A pass has no branch that depends on scores, so that the processor works on several rows at once. What a row gets
//! depends on that row alone. The products before and after are [`super::attention`]'s.
//!
//! # Safety
//! As in [`super::attention`].
#![allow(unsafe_op_in_unsafe_fn)]

use super::attention::{AttentionArgs, AttentionScratch, TILE_KEYS};
use super::math::{exp, exp_not_above_0, softcap};
use super::simd::Simd;

/// Turns the scores of a tile into weights, and moves maxima and sums on. Rows that see nothing of the tile keep theirs.
/// With `NARROW` weights are rounded to bf16, and so are those in the sums: what the values are divided by is what they are
/// multiplied with.
#[inline(always)]
pub unsafe fn weigh_scores<S: Simd, const NARROW: bool>(args: &AttentionArgs, rows: usize, tile: usize) {
    let scratch = &args.scratch;
    for query in 0..args.num_queries {
        let (first, last) = args.seen_in(query, tile);
        for head in 0..args.group {
            let row = query * args.group + head;
            // For the moment the maximum before this tile.
            *scratch.factors.add(row) = *scratch.states.maxima.add(row);
            if first < last {
                find_maximum::<S>(args, query, head, tile, first, last);
            }
        }
    }
    for row in (0..rows).step_by(16) {
        let before = S::load(scratch.factors.add(row));
        let factors = exp::<S>(S::sub(before, S::load(scratch.states.maxima.add(row))));
        S::store(scratch.factors.add(row), factors);
    }
    for query in 0..args.num_queries {
        let (first, last) = args.seen_in(query, tile);
        for row in query * args.group..(query + 1) * args.group {
            if first < last {
                weigh_row::<S, NARROW>(scratch, row, first / 16, last.div_ceil(16));
            }
        }
    }
}

/// The maximum of a row's scores and of what was before; scores `first..last` of the tile are seen.
#[inline(always)]
unsafe fn find_maximum<S: Simd>(
    args: &AttentionArgs,
    query: usize,
    head: usize,
    tile: usize,
    first: usize,
    last: usize,
) {
    let row = query * args.group + head;
    let scores = args.scratch.scores.add(row * TILE_KEYS);
    let vectors = first / 16..last.div_ceil(16);
    if args.softcap.is_some() || !args.slopes.is_null() {
        for i in vectors.clone() {
            let at = scores.add(i * 16);
            let mut score = S::load(at);
            if let Some(cap) = args.softcap {
                score = softcap::<S>(score, cap);
            }
            if !args.slopes.is_null() {
                let slope = *args.slopes.add(args.kv_head * args.group + head);
                let position = *args.positions.add(args.query_start + query);
                let start = (tile + i * 16) as f32 - position as f32;
                let distance = S::add(S::splat(start), S::load(IOTA.as_ptr()));
                score = S::fma(S::splat(slope), distance, score);
            }
            S::store(at, score);
        }
    }
    let mut largest = S::splat(*args.scratch.states.maxima.add(row));
    if first == 0 && last == TILE_KEYS {
        // The usual case, without a branch between the vectors.
        for i in 0..TILE_KEYS / 16 {
            largest = S::max(largest, S::load(scores.add(i * 16)));
        }
    } else {
        for i in vectors {
            let seen = first.max(i * 16) - i * 16..last.min(i * 16 + 16) - i * 16;
            let score = S::only(S::load(scores.add(i * 16)), seen.start, seen.end);
            S::store(scores.add(i * 16), score);
            largest = S::max(largest, score);
        }
    }
    *args.scratch.states.maxima.add(row) = S::maximum(largest);
}

/// The weights of a row in vectors `start..end` of a tile, 0 before them, and their sum.
#[inline(always)]
unsafe fn weigh_row<S: Simd, const NARROW: bool>(
    scratch: &AttentionScratch,
    row: usize,
    start: usize,
    end: usize,
) {
    let scores = scratch.scores.add(row * TILE_KEYS);
    let largest = S::splat(*scratch.states.maxima.add(row));
    let sums = scratch.states.sums.add(row * 16);
    let mut sum = S::mul(S::load(sums), S::splat(*scratch.factors.add(row)));
    if start == 0 && end == TILE_KEYS / 16 {
        let mut weights = [largest; TILE_KEYS / 16];
        for (i, weight) in weights.iter_mut().enumerate() {
            *weight = S::sub(S::load(scores.add(i * 16)), largest);
        }
        for (i, mut weight) in exp_not_above_0::<S, _>(weights).into_iter().enumerate() {
            if NARROW {
                weight = S::round_bf16(weight);
            }
            sum = S::add(sum, weight);
            S::store(scores.add(i * 16), weight);
        }
    } else {
        for i in 0..start {
            S::store(scores.add(i * 16), S::splat(0.0));
        }
        for i in start..end {
            let mut weight = exp::<S>(S::sub(S::load(scores.add(i * 16)), largest));
            if NARROW {
                weight = S::round_bf16(weight);
            }
            sum = S::add(sum, weight);
            S::store(scores.add(i * 16), weight);
        }
    }
    S::store(sums, sum);
}

static IOTA: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];
