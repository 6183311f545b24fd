//! Attention of one work unit: some queries of one item, all heads that share one key head.
//!
//! Keys are taken in tiles of 64 whose borders are absolute positions, in ascending order, with an online softmax in
//! f32. A tile that a row does not see leaves the row exactly as it was. So the result of a row depends neither on the
//! rows beside it nor on whether it came in a prompt or as a decode. Long contexts are made of segments: see
//! [`super::segments`]. The products of a tile are those of [`super::float_products`] in f32 or of `super::pairs` in bf16.
//!
//! Layouts: keys `[block][kv head][block_size / 16][head_dim][16 keys]`, so that a lane is a key; values
//! `[block][kv head][block_size][value_dim]`, so that a lane is an output dimension. Where products are of pairs, the pairs lie
//! side by side: see `super::pairs`. See [`super::int8_cache`] for what 8-bit caches keep beside.
//!
//! # Safety
//! As in [`super::simd`]; further, the pointers of [`AttentionArgs`] cover what its fields say.
#![allow(unsafe_op_in_unsafe_fn)]

use baton_backend::NO_PARTIAL;

use super::int8_cache::{scale_scores, scale_weights};
use super::rows::scale_row;
use super::segments::{RowStates, SEGMENT_KEYS};
use super::simd::Simd;
use super::softmax::weigh_scores;

/// Keys of a tile.
pub const TILE_KEYS: usize = 64;
/// Keys that lie side by side.
pub const PANEL_KEYS: usize = 16;
/// Rows (queries × heads of a group) of a unit, unless a single query has more heads.
pub const UNIT_ROWS: usize = 96;

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
    /// One per head; null without.
    pub slopes: *const f32,
    /// The same.
    pub sinks: *const f32,
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
    pub(super) unsafe fn run_of(&self, query: usize, tile: usize) -> (usize, usize) {
        let panels = self.panels_seen(query, tile);
        let mut end = query + 1;
        while end < self.num_queries && self.panels_seen(end, tile) == panels {
            end += 1;
        }
        (end, panels)
    }
}

/// The two products of a tile, in one arithmetic. For each row the order of additions is one, whatever rows are beside it.
pub(super) trait Products<S: Simd> {
    /// Takes a row's query, times the scale, into the scratch. Rows come in their order.
    unsafe fn load_query(&self, args: &AttentionArgs, row: usize, from: *const f32);
    /// The scores of all rows with the keys `first..last` of a tile, in whole panels; those that a row does not see may be
    /// left out.
    unsafe fn score(&self, args: &AttentionArgs, rows: usize, tile: usize, first: usize, last: usize);
    /// Weights of the scores, see [`weigh_scores`].
    #[inline(always)]
    unsafe fn weigh_scores(&self, args: &AttentionArgs, rows: usize, tile: usize) {
        weigh_scores::<S, false>(args, rows, tile);
    }
    /// `outputs = outputs · factor + weights · values` for the keys `first..last` of a tile, as far as rows see them.
    unsafe fn add_values(&self, args: &AttentionArgs, rows: usize, tile: usize, first: usize, last: usize);
}

/// Runs a unit.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd, P: Products<S>>(args: &AttentionArgs, products: &P) {
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
        products.load_query(args, row, args.query.add(query));
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
        products.score(args, rows, tile, first, last);
        if args.scale_bytes > 0 {
            scale_scores::<S>(args, rows, tile, first, last);
        }
        products.weigh_scores(args, rows, tile);
        if args.scale_bytes > 0 {
            scale_weights::<S>(args, rows, tile, first, last);
        }
        products.add_values(args, rows, tile, first, last);
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

/// Divides by the sum and writes the output.
#[inline(always)]
pub(super) unsafe fn finish_row<S: Simd>(args: &AttentionArgs, states: &RowStates, row: usize) {
    let outputs = states.outputs.add(row * args.value_dim);
    let mut sum = S::sum(S::load(states.sums.add(row * 16)));
    let (query, head) = (row / args.group, args.kv_head * args.group + row % args.group);
    if !args.sinks.is_null() && sum > 0.0 {
        // A sink far above all scores leaves nothing of them, as it should.
        sum += (*args.sinks.add(head) - *states.maxima.add(row)).exp();
    }
    // A row that saw no key has nothing to say.
    let factor = if sum > 0.0 { 1.0 / sum } else { 0.0 };
    let out = args.output.add((args.query_start + query) * args.stride + head * args.head_dim);
    scale_row::<S>(outputs, args.head_dim, factor, out);
}
