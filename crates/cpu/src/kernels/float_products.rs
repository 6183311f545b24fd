//! The products of attention in f32: keys and values of any format, opened to f32.
//!
//! Where a unit has many rows, the keys and then the values of a tile are first opened in the worker's scratch; the order of
//! additions is the same.
//!
//! # Safety
//! As in [`super::attention`].
#![allow(unsafe_op_in_unsafe_fn)]

use std::marker::PhantomData;

use super::attention::{AttentionArgs, PANEL_KEYS, Products, TILE_KEYS};
use super::floats::{self, ChunkKernel, Element, ElementF32, FloatArgs};
use super::rows::scale_row;
use super::simd::Simd;

/// From this many rows on a tile's keys and values are opened first.
const OPENED_ROWS: usize = 5;

/// The kernels for opened keys and values, which do not depend on the format of the cache.
#[derive(Clone, Copy, Debug)]
pub struct OpenedKernels {
    pub multiply: ChunkKernel,
    /// `(args, tile, first, last)`.
    pub add_values: unsafe fn(&AttentionArgs, usize, usize, usize),
}

/// The products of a cache of `E`.
#[derive(Debug)]
pub struct FloatProducts<E> {
    opened: OpenedKernels,
    format: PhantomData<E>,
}

impl<E> FloatProducts<E> {
    pub fn new(opened: OpenedKernels) -> Self {
        Self { opened, format: PhantomData }
    }
}

impl<S: Simd, E: Element> Products<S> for FloatProducts<E> {
    #[inline(always)]
    unsafe fn load_query(&self, args: &AttentionArgs, row: usize, from: *const f32) {
        scale_row::<S>(from, args.head_dim, args.scale, args.scratch.queries.add(row * args.value_dim));
    }

    #[inline(always)]
    unsafe fn score(&self, args: &AttentionArgs, rows: usize, tile: usize, first: usize, last: usize) {
        score::<S, E>(args, rows, tile, first, last, self.opened.multiply);
    }

    #[inline(always)]
    unsafe fn add_values(&self, args: &AttentionArgs, rows: usize, tile: usize, first: usize, last: usize) {
        if rows >= OPENED_ROWS {
            open_values::<S, E>(args, tile, first, last);
            (self.opened.add_values)(args, tile, first, last);
        } else {
            add_values::<S, E, false>(args, tile, first, last);
        }
    }
}

#[inline(always)]
unsafe fn score<S: Simd, E: Element>(
    args: &AttentionArgs,
    rows: usize,
    tile: usize,
    first: usize,
    last: usize,
    multiply: ChunkKernel,
) {
    let scratch = &args.scratch;
    let panels = first / PANEL_KEYS..last.div_ceil(PANEL_KEYS);
    let panel_floats = args.head_dim * PANEL_KEYS;
    let all = FloatArgs {
        panels: scratch.opened.cast_const().cast(),
        panel_stride: panel_floats * 4,
        num_panels: panels.len(),
        cols: args.head_dim,
        rows: scratch.queries,
        stride: args.value_dim,
        num_rows: rows,
        out: scratch.scores.add(panels.start * PANEL_KEYS - tile),
        out_stride: TILE_KEYS,
        out_panel_stride: PANEL_KEYS,
        accumulate: false,
    };
    let first_panel = panels.start - tile / PANEL_KEYS;
    for (i, panel) in panels.enumerate() {
        let (keys, _, inside) = args.place(panel * PANEL_KEYS, E::BYTES);
        let keys = keys.add(inside * args.head_dim * E::BYTES);
        if rows >= OPENED_ROWS {
            floats::open::<S, E>(keys, panel_floats, scratch.opened.add(i * panel_floats));
        } else {
            prefetch_around::<S, E>(args, panel * PANEL_KEYS);
            let out = all.out.add(i * PANEL_KEYS);
            floats::multiply_few::<S, E>(&FloatArgs { panels: keys, num_panels: 1, out, ..all });
        }
    }
    let mut query = 0;
    while rows >= OPENED_ROWS && query < args.num_queries {
        let (end, panels) = args.run_of(query, tile);
        if panels > first_panel {
            let (row, num_rows) = (query * args.group, (end - query) * args.group);
            let num_panels = panels - first_panel;
            floats::multiply_opened(&FloatArgs { num_panels, num_rows, ..all.at(0, row) }, multiply);
        }
        query = end;
    }
}

/// Asks for the values of the panel at `key`, which are needed next, and for the keys of the same panel of the next tile.
/// Panels are too short for the processor to see the stream by itself.
#[inline(always)]
pub(super) unsafe fn prefetch_around<S: Simd, E: Element>(args: &AttentionArgs, key: usize) {
    let (_, values, inside) = args.place(key, E::BYTES);
    let values = values.add(inside * args.value_dim * E::BYTES);
    for line in (0..PANEL_KEYS * (args.value_dim * E::BYTES + args.scale_bytes)).step_by(64) {
        S::prefetch(values.wrapping_add(line));
    }
    let next = key + TILE_KEYS;
    if next < args.kv_end {
        let (keys, _, inside) = args.place(next, E::BYTES);
        let keys = keys.add(inside * args.head_dim * E::BYTES);
        for line in (0..PANEL_KEYS * (args.head_dim * E::BYTES + args.scale_bytes)).step_by(64) {
            S::prefetch(keys.wrapping_add(line));
        }
    }
}

/// Opens the values `first..last` of a tile.
#[inline(always)]
unsafe fn open_values<S: Simd, E: Element>(args: &AttentionArgs, tile: usize, first: usize, last: usize) {
    let mut key = first;
    while key < last {
        let stop = last.min((key / PANEL_KEYS + 1) * PANEL_KEYS);
        let (_, values, inside) = args.place(key, E::BYTES);
        let values = values.add(inside * args.value_dim * E::BYTES);
        let to = args.scratch.opened.add((key - tile) * args.value_dim);
        floats::open::<S, E>(values, (stop - key) * args.value_dim, to);
        key = stop;
    }
}

/// Values as they are stored, or opened.
#[inline(always)]
unsafe fn add_values<S: Simd, E: Element, const OPENED: bool>(
    args: &AttentionArgs,
    tile: usize,
    first: usize,
    last: usize,
) {
    let mut query = 0;
    while query < args.num_queries {
        let (end, panels) = args.run_of(query, tile);
        let last = last.min(tile + panels * PANEL_KEYS);
        if first < last {
            add_values_of::<S, E, OPENED>(args, query * args.group, end * args.group, tile, first, last);
        }
        query = end;
    }
}

/// The same for the rows `row..end`.
#[inline(always)]
unsafe fn add_values_of<S: Simd, E: Element, const OPENED: bool>(
    args: &AttentionArgs,
    mut row: usize,
    end: usize,
    tile: usize,
    first: usize,
    last: usize,
) {
    while row < end {
        let left = end - row;
        row += if S::WIDE && OPENED && left >= 6 {
            add_values_to::<S, E, OPENED, 6, 4>(args, row, tile, first, last);
            6
        } else if left >= 4 {
            add_values_to::<S, E, OPENED, 4, 2>(args, row, tile, first, last);
            4
        } else if left >= 3 {
            add_values_to::<S, E, OPENED, 3, 2>(args, row, tile, first, last);
            3
        } else if left >= 2 {
            add_values_to::<S, E, OPENED, 2, 4>(args, row, tile, first, last);
            2
        } else {
            add_values_to::<S, E, OPENED, 1, 4>(args, row, tile, first, last);
            1
        };
    }
}

/// The same with opened values.
#[inline(always)]
pub unsafe fn add_opened<S: Simd>(args: &AttentionArgs, tile: usize, first: usize, last: usize) {
    add_values::<S, ElementF32, true>(args, tile, first, last);
}

/// The same for `T` rows, `D` vectors of dimensions at a time.
#[inline(always)]
unsafe fn add_values_to<S: Simd, E: Element, const OPENED: bool, const T: usize, const D: usize>(
    args: &AttentionArgs,
    row: usize,
    tile: usize,
    first: usize,
    last: usize,
) {
    let mut dim = 0;
    while dim + 16 * D <= args.value_dim {
        add_value_columns::<S, E, OPENED, T, D>(args, row, tile, first, last, dim);
        dim += 16 * D;
    }
    while dim < args.value_dim {
        add_value_columns::<S, E, OPENED, T, 1>(args, row, tile, first, last, dim);
        dim += 16;
    }
}

#[inline(always)]
unsafe fn add_value_columns<S: Simd, E: Element, const OPENED: bool, const T: usize, const D: usize>(
    args: &AttentionArgs,
    row: usize,
    tile: usize,
    first: usize,
    last: usize,
    dim: usize,
) {
    let outputs = args.scratch.states.outputs.add(row * args.value_dim + dim);
    let weights = args.scratch.scores.add(row * TILE_KEYS);
    let mut sums = [[S::splat(0.0); D]; T];
    for t in 0..T {
        let factor = S::splat(*args.scratch.factors.add(row + t));
        for d in 0..D {
            sums[t][d] = S::mul(S::load(outputs.add(t * args.value_dim + d * 16)), factor);
        }
    }
    let mut key = first;
    while key < last {
        // Opened values lie side by side, those of the cache in panels.
        let stop = if OPENED { last } else { last.min((key / PANEL_KEYS + 1) * PANEL_KEYS) };
        let values: *const u8 = if OPENED {
            args.scratch.opened.add((key - tile) * args.value_dim + dim).cast_const().cast()
        } else {
            let (_, values, inside) = args.place(key, E::BYTES);
            values.add((inside * args.value_dim + dim) * E::BYTES)
        };
        for i in 0..stop - key {
            let value = values.add(i * args.value_dim * E::BYTES);
            let mut lanes = [S::splat(0.0); D];
            for d in 0..D {
                lanes[d] = E::load::<S>(value.add(d * 16 * E::BYTES));
            }
            for t in 0..T {
                let weight = S::splat(*weights.add(t * TILE_KEYS + key + i - tile));
                for d in 0..D {
                    sums[t][d] = S::fma(weight, lanes[d], sums[t][d]);
                }
            }
        }
        key = stop;
    }
    for t in 0..T {
        for d in 0..D {
            S::store(outputs.add(t * args.value_dim + d * 16), sums[t][d]);
        }
    }
}
