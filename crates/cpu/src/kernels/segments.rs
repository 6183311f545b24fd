//! Contexts in segments of keys: each has a softmax of its own, and they are folded from left to right.
//!
//! The borders are absolute positions and the folding is the same whether one worker walks through all segments of a row
//! or each of several takes one: so a long context can be split over threads and gives the same bits. A segment of which
//! a row sees nothing leaves the row exactly as it was.
//!
//! # Safety
//! As in [`super::simd`]; further, the pointers of [`RowStates`] cover the rows given.
#![allow(unsafe_op_in_unsafe_fn)]

use super::attention::{AttentionArgs, finish_row};
use super::math::exp;
use super::simd::Simd;

/// Keys of a segment: whole tiles.
pub const SEGMENT_KEYS: usize = 512;

/// What rows have after some keys.
#[derive(Clone, Copy, Debug)]
pub struct RowStates {
    pub outputs: *mut f32, // [rows, value_dim]
    pub sums: *mut f32,    // [rows, 16]: lanes are added up at the end
    pub maxima: *mut f32,  // [rows]; NOTHING_SEEN before the first key
}

/// Not minus infinity, so that differences of maxima are never NaN.
const NOTHING_SEEN: f32 = f32::MIN;

impl RowStates {
    /// Floats that `rows` rows take.
    pub const fn floats(rows: usize, value_dim: usize) -> usize {
        rows.next_multiple_of(16) * (value_dim + 16 + 1)
    }

    /// Cuts `floats(rows, value_dim)` floats at `base` into the arrays.
    pub unsafe fn at(base: *mut f32, rows: usize, value_dim: usize) -> Self {
        // Whole vectors of rows.
        let rows = rows.next_multiple_of(16);
        let sums = base.add(rows * value_dim);
        Self { outputs: base, sums, maxima: sums.add(rows * 16) }
    }

    /// Rows before their first key.
    #[inline(always)]
    pub unsafe fn clear<S: Simd>(&self, rows: usize, value_dim: usize) {
        for row in 0..rows {
            *self.maxima.add(row) = NOTHING_SEEN;
            S::store(self.sums.add(row * 16), S::splat(0.0));
        }
        for i in (0..rows * value_dim).step_by(16) {
            S::store(self.outputs.add(i), S::splat(0.0));
        }
    }

    /// Takes a row over from where [`Self::store_row`] left it.
    #[inline(always)]
    pub unsafe fn load_row<S: Simd>(&self, row: usize, value_dim: usize, from: *const f32) {
        for i in (0..value_dim).step_by(16) {
            S::store(self.outputs.add(row * value_dim + i), S::load(from.add(i)));
        }
        S::store(self.sums.add(row * 16), S::load(from.add(value_dim)));
        *self.maxima.add(row) = *from.add(value_dim + 16);
    }

    #[inline(always)]
    pub unsafe fn store_row<S: Simd>(&self, row: usize, value_dim: usize, to: *mut f32) {
        for i in (0..value_dim).step_by(16) {
            S::store(to.add(i), S::load(self.outputs.add(row * value_dim + i)));
        }
        S::store(to.add(value_dim), S::load(self.sums.add(row * 16)));
        *to.add(value_dim + 16) = *self.maxima.add(row);
    }

    /// Adds the keys of `next`, which come after those of these rows.
    #[inline(always)]
    pub unsafe fn fold<S: Simd>(&self, next: &Self, rows: usize, value_dim: usize) {
        for row in 0..rows {
            let (before, after) = (*self.maxima.add(row), *next.maxima.add(row));
            if after == NOTHING_SEEN {
                continue;
            }
            let largest = before.max(after);
            // Exactly 0 and 1 where nothing was seen before.
            let (mut old, mut new) = (exp_of::<S>(before - largest), exp_of::<S>(after - largest));
            if before == NOTHING_SEEN {
                (old, new) = (S::splat(0.0), S::splat(1.0));
            }
            *self.maxima.add(row) = largest;
            add_scaled::<S>(self.sums.add(row * 16), old, next.sums.add(row * 16), new);
            for i in (row * value_dim..(row + 1) * value_dim).step_by(16) {
                add_scaled::<S>(self.outputs.add(i), old, next.outputs.add(i), new);
            }
        }
    }
}

#[inline(always)]
unsafe fn exp_of<S: Simd>(x: f32) -> S::F {
    exp::<S>(S::splat(x))
}

/// `to = to · old + from · new`.
#[inline(always)]
unsafe fn add_scaled<S: Simd>(to: *mut f32, old: S::F, from: *const f32, new: S::F) {
    S::store(to, S::fma(S::load(from), new, S::mul(S::load(to), old)));
}

/// Finishes the rows of a unit whose segments were attended one by one: their states lie at `states`, one after the other.
#[inline(always)]
pub unsafe fn fold_segments<S: Simd>(args: &AttentionArgs, states: *mut f32, num_segments: usize) {
    let rows = args.num_queries * args.group;
    let folded = args.scratch.folded;
    folded.clear::<S>(rows, args.value_dim);
    for segment in 0..num_segments {
        let base = states.add(segment * RowStates::floats(rows, args.value_dim));
        folded.fold::<S>(&RowStates::at(base, rows, args.value_dim), rows, args.value_dim);
    }
    for row in 0..rows {
        finish_row::<S>(args, &folded, row);
    }
}
