//! Attention of one work unit: some queries of one item, all heads that share one key head.
//!
//! Keys are taken in tiles of 64 whose borders are absolute positions, in ascending order, with an online softmax in
//! f32. A tile that a row does not see leaves the row exactly as it was. So the result of a row depends neither on the
//! rows beside it nor on whether it came in a prompt or as a decode. Long contexts are made of segments: see
//! [`super::segments`]. Where a unit has many rows, the keys and then the
//! values of a tile are first opened to f32 in the worker's scratch; the order of additions is the same.
//!
//! Layouts: keys `[block][kv head][block_size / 16][head_dim][16 keys]`, so that a lane is a key; values
//! `[block][kv head][block_size][value_dim]`, so that a lane is an output dimension. See [`super::int8_cache`] for what
//! 8-bit caches keep beside.
//!
//! # Safety
//! As in [`super::simd`]; further, the pointers of [`AttentionArgs`] cover what its fields say.
#![allow(unsafe_op_in_unsafe_fn)]

use baton_backend::NO_PARTIAL;

use super::floats::{self, ChunkKernel, Element, ElementF32, FloatArgs};
use super::int8_cache::{scale_scores, scale_weights};
use super::rows::scale_row;
use super::segments::{RowStates, SEGMENT_KEYS};
use super::simd::Simd;
use super::softmax::soften;

/// Keys of a tile.
pub const TILE_KEYS: usize = 64;
/// Keys that lie side by side.
pub const PANEL_KEYS: usize = 16;
/// Rows (queries × heads of a group) of a unit, unless a single query has more heads.
pub const UNIT_ROWS: usize = 96;
/// From this many rows on a tile's keys and values are opened first.
const OPENED_ROWS: usize = 5;

/// Everything a unit needs.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs {
    /// The layer's keys and values.
    pub keys: *const u8,
    pub values: *const u8,
    /// The page that holds position `kv_start`, and those after it.
    pub pages: *const u32,
    pub block_size: usize,
    /// Bytes of the factor beside a key and a value of a head; 0 without.
    pub scale_bytes: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// `head_dim` rounded up to 16.
    pub value_dim: usize,
    pub kv_head: usize,
    /// Query heads of a key head.
    pub group: usize,
    pub kv_start: usize,
    pub kv_end: usize,
    /// The keys of this unit, as far as there are any: all, or one segment of them, of which the states are left in the
    /// scratch.
    pub keys_start: usize,
    pub keys_end: usize,
    pub is_segment: bool,
    /// First row and number of queries, and the positions of all rows.
    pub query_start: usize,
    pub num_queries: usize,
    pub positions: *const u32,
    /// `[tokens, stride]`, both.
    pub query: *const f32,
    pub output: *mut f32,
    pub stride: usize,
    pub window: Option<u32>,
    pub scale: f32,
    pub softcap: Option<f32>,
    /// One a head; null without.
    pub slopes: *const f32,
    /// Where results of parts of a query's keys are kept; null where a query has one part.
    pub chain: Chain,
    pub scratch: AttentionScratch,
}

/// The parts of queries whose keys are spread over several items. A part goes on where the one before it ended, as if there
/// were one item: so that the result is the same to the last bit if parts end where segments do.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    /// `[slots, num heads]` states of rows, of [`Chain::floats`] each; null where there are no parts.
    pub states: *mut f32,
    /// The slot of the unit's first query; the next ones follow.
    pub slot: usize,
    /// For each slot the one of the part before, or [`NO_PARTIAL`].
    pub before: *const u32,
    /// For each slot whether it is the last part.
    pub is_last: *const bool,
}

impl Chain {
    pub const NONE: Self =
        Self { states: std::ptr::null_mut(), slot: 0, before: std::ptr::null(), is_last: std::ptr::null() };

    /// Floats of the state of a row: outputs, sums and the maximum.
    pub fn floats(value_dim: usize) -> usize {
        value_dim + 2 * 16
    }

    pub fn is_none(&self) -> bool {
        self.states.is_null()
    }

    /// The state of a row in a slot.
    unsafe fn state(&self, slot: usize, args: &AttentionArgs, row: usize) -> *mut f32 {
        let head = args.kv_head * args.group + row % args.group;
        let number = slot * args.num_kv_heads * args.group + head;
        self.states.add(number * Self::floats(args.value_dim))
    }

    /// Takes over what the parts before have come to. True if there is any.
    #[inline(always)]
    unsafe fn begin<S: Simd>(&self, args: &AttentionArgs, rows: usize) -> bool {
        let before = |row: usize| *self.before.add(self.slot + row / args.group);
        if self.is_none() || (0..rows).all(|row| before(row) == NO_PARTIAL) {
            return false;
        }
        args.scratch.folded.clear::<S>(rows, args.value_dim);
        for row in (0..rows).filter(|&row| before(row) != NO_PARTIAL) {
            args.scratch.folded.load_row::<S>(
                row,
                args.value_dim,
                self.state(before(row) as usize, args, row),
            );
        }
        true
    }

    /// Whether a row has come to its end; otherwise its state is kept for the part after this.
    #[inline(always)]
    unsafe fn end<S: Simd>(&self, args: &AttentionArgs, states: &RowStates, row: usize) -> bool {
        let slot = self.slot + row / args.group;
        if self.is_none() || *self.is_last.add(slot) {
            return true;
        }
        states.store_row::<S>(row, args.value_dim, self.state(slot, args, row));
        false
    }
}

/// One worker's memory. Rows are `(query, head of the group)`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionScratch {
    /// Opened keys, `[panels, head_dim, 16]`, then values, `[TILE_KEYS, value_dim]`.
    pub opened: *mut f32,
    pub queries: *mut f32, // [rows, value_dim]
    pub scores: *mut f32,  // [rows, TILE_KEYS]
    pub factors: *mut f32, // [rows]
    /// Of the segment at hand, and of those before it.
    pub states: RowStates,
    pub folded: RowStates,
}

impl AttentionScratch {
    /// Floats that `rows` rows take.
    pub fn floats(rows: usize, value_dim: usize) -> usize {
        rows.next_multiple_of(16) * (value_dim + TILE_KEYS + 1)
            + 2 * RowStates::floats(rows, value_dim)
            + TILE_KEYS * value_dim
    }

    /// Cuts `floats(rows, value_dim)` floats at `base` into the arrays.
    ///
    /// # Safety
    /// `base` is valid for that many floats.
    pub unsafe fn at(base: *mut f32, rows: usize, value_dim: usize) -> Self {
        // Whole vectors of rows.
        let whole_rows = rows.next_multiple_of(16);
        let queries = base.add(TILE_KEYS * value_dim);
        let states = queries.add(whole_rows * value_dim);
        let scores = states.add(RowStates::floats(rows, value_dim));
        let factors = scores.add(whole_rows * TILE_KEYS);
        Self {
            opened: base,
            queries,
            scores,
            factors,
            states: RowStates::at(states, rows, value_dim),
            folded: RowStates::at(factors.add(whole_rows), rows, value_dim),
        }
    }
}

/// The keys a query at `position` sees: `low..high`.
#[inline(always)]
fn seen(position: u32, window: Option<u32>) -> (usize, usize) {
    let high = position as usize + 1;
    (window.map_or(0, |window| high.saturating_sub(window as usize)), high)
}

impl AttentionArgs {
    /// The keys and values of `key`'s block and this key head, and the key's place in the block.
    #[inline(always)]
    pub(super) unsafe fn place(&self, key: usize, bytes: usize) -> (*const u8, *const u8, usize) {
        let offset = key - self.kv_start;
        let block = *self.pages.add(offset / self.block_size) as usize;
        let head = block * self.num_kv_heads + self.kv_head;
        let keys = self.keys.add(head * self.block_size * (self.head_dim * bytes + self.scale_bytes));
        let values = self.values.add(head * self.block_size * (self.value_dim * bytes + self.scale_bytes));
        (keys, values, offset % self.block_size)
    }

    /// The keys of a tile, counted from its first, that a query sees: empty where the end is not after the start.
    #[inline(always)]
    pub unsafe fn seen_in(&self, query: usize, tile: usize) -> (usize, usize) {
        let (low, high) = seen(*self.positions.add(self.query_start + query), self.window);
        let (low, high) = (low.max(self.kv_start).max(tile), high.min(self.kv_end).min(tile + TILE_KEYS));
        (low.saturating_sub(tile), high.saturating_sub(tile))
    }

    /// Panels of a tile that a query needs, counted from the tile's first.
    #[inline(always)]
    unsafe fn panels_seen(&self, query: usize, tile: usize) -> usize {
        let (first, last) = self.seen_in(query, tile);
        if first < last { last.div_ceil(PANEL_KEYS) } else { 0 }
    }

    /// The neighbours from `query` on that need as many panels: their end, and the panels.
    #[inline(always)]
    unsafe fn run_of(&self, query: usize, tile: usize) -> (usize, usize) {
        let panels = self.panels_seen(query, tile);
        let mut end = query + 1;
        while end < self.num_queries && self.panels_seen(end, tile) == panels {
            end += 1;
        }
        (end, panels)
    }
}

/// The kernels for opened keys and values, which do not depend on the format of the cache.
#[derive(Clone, Copy, Debug)]
pub struct OpenedKernels {
    pub multiply: ChunkKernel,
    /// `(args, tile, first, last)`.
    pub add_values: unsafe fn(&AttentionArgs, usize, usize, usize),
}

/// Runs a unit.
#[inline(always)]
pub unsafe fn attend<S: Simd, E: Element>(args: &AttentionArgs, opened: &OpenedKernels) {
    let rows = args.num_queries * args.group;
    let scratch = &args.scratch;
    let (mut low, mut high) = (usize::MAX, 0);
    for i in 0..args.num_queries {
        let (first, end) = seen(*args.positions.add(args.query_start + i), args.window);
        (low, high) = (low.min(first), high.max(end));
    }
    for row in 0..rows {
        let head = args.kv_head * args.group + row % args.group;
        let query = (args.query_start + row / args.group) * args.stride + head * args.head_dim;
        let to = scratch.queries.add(row * args.value_dim);
        scale_row::<S>(args.query.add(query), args.head_dim, args.scale, to);
        if args.chain.is_none() {
            // Its lines are wanted at the end.
            for i in (0..args.head_dim).step_by(16) {
                S::prefetch_far(args.output.wrapping_add(query + i).cast_const().cast());
            }
        }
    }
    scratch.states.clear::<S>(rows, args.value_dim);
    let start = low.max(args.kv_start).max(args.keys_start);
    let end = high.min(args.kv_end).min(args.keys_end);
    let mut is_folded = args.chain.begin::<S>(args, rows);
    let mut tile = start / TILE_KEYS * TILE_KEYS;
    while tile < end {
        let (first, last) = (tile.max(start), (tile + TILE_KEYS).min(end));
        score::<S, E>(args, rows, tile, first, last, opened.multiply);
        if args.scale_bytes > 0 {
            scale_scores::<S>(args, rows, tile, first, last);
        }
        soften::<S>(args, rows, tile);
        if args.scale_bytes > 0 {
            scale_weights::<S>(args, rows, tile, first, last);
        }
        if rows >= OPENED_ROWS {
            open_values::<S, E>(args, tile, first, last);
            (opened.add_values)(args, tile, first, last);
        } else {
            add_values::<S, E, false>(args, tile, first, last);
        }
        tile += TILE_KEYS;
        if tile < end && tile.is_multiple_of(SEGMENT_KEYS) {
            if !is_folded {
                scratch.folded.clear::<S>(rows, args.value_dim);
                is_folded = true;
            }
            scratch.folded.fold::<S>(&scratch.states, rows, args.value_dim);
            scratch.states.clear::<S>(rows, args.value_dim);
        }
    }
    if args.is_segment {
        return;
    }
    if is_folded {
        scratch.folded.fold::<S>(&scratch.states, rows, args.value_dim);
    }
    let states = if is_folded { &scratch.folded } else { &scratch.states };
    for row in 0..rows {
        if args.chain.end::<S>(args, states, row) {
            finish_row::<S>(args, states, row);
        }
    }
}

/// The scores of all rows with the keys `first..last` of a tile, in whole panels; those that a row does not see may be
/// left out.
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
unsafe fn prefetch_around<S: Simd, E: Element>(args: &AttentionArgs, key: usize) {
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

/// `outputs = outputs · factor + weights · values` for the keys `first..last` of a tile, as far as rows see them.
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

/// Divides by the sum and writes the output.
#[inline(always)]
pub(super) unsafe fn finish_row<S: Simd>(args: &AttentionArgs, states: &RowStates, row: usize) {
    let outputs = states.outputs.add(row * args.value_dim);
    let sum = S::sum(S::load(states.sums.add(row * 16)));
    let (query, head) = (row / args.group, args.kv_head * args.group + row % args.group);
    // A row that saw no key has nothing to say.
    let factor = if sum > 0.0 { 1.0 / sum } else { 0.0 };
    let out = args.output.add((args.query_start + query) * args.stride + head * args.head_dim);
    scale_row::<S>(outputs, args.head_dim, factor, out);
}
