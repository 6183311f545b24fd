//! Attention by the step's work items.
//!
//! Items that are parts of a query's keys come one after the other: what its first part has come to is where the second
//! begins. So nothing is merged, and sequences that share a beginning (relay attention) have the bits that they would have
//! alone. Items of the same number of parts before them are done together, and then there is a barrier.
//!
//! Where there are too few units for the threads, long contexts are split: a piece is one segment of a unit's keys, and
//! after a barrier the segments of each unit are folded in their order. The result is the same to the last bit.
//!
//! A unit is (key head, some queries of an item). Units of one item and different key heads are far apart in the
//! numbering on purpose: neighbours then share pages, not heads.

use std::ops::Range;

use baton_backend::{Attention, AttentionItem, BackendError, NO_PARTIAL, first_key};

use super::{OpResult, Step, require, wrong};
use crate::buffers::{Matrix, Shared};
use crate::kernels::attention::{AttentionArgs, AttentionScratch, Chain, UNIT_ROWS};
use crate::kernels::segments::{RowStates, SEGMENT_KEYS};
use crate::pool::Worker;
use crate::scratch::{AttentionPiece, AttentionUnit, Chains, Scratch};
use crate::units::Units;

/// Contexts are split where there are fewer units (of all key heads) for each thread, so that threads end at the same time.
const ENOUGH_UNITS: usize = 4;
/// Opening a tile's keys and values takes as long as multiplying them with so many rows.
const OPENING_ROWS: usize = 4;
/// The most rows of a unit that is split: prompts have units enough.
const SPLIT_ROWS: usize = 16;

/// Cuts the items that `is_wanted` into units of at most `max_queries`, of one size as far as that goes.
fn cut_items(
    units: &mut Vec<AttentionUnit>,
    items: &[AttentionItem],
    max_queries: u32,
    is_wanted: impl Fn(&AttentionItem) -> bool,
) {
    for (index, item) in items.iter().enumerate().filter(|(_, item)| is_wanted(item)) {
        let size = item.num_queries.div_ceil(item.num_queries.div_ceil(max_queries).max(1)).max(1);
        for first in (0..item.num_queries).step_by(size as usize) {
            let num_queries = size.min(item.num_queries - first);
            units.push(AttentionUnit { item: index as u32, first, num_queries });
        }
    }
}

/// Queries of a unit where few items have many: large units open keys for more rows, but no thread should wait for the last
/// one. Whatever the size, results are the same to the last bit.
fn share_queries(num_queries: u32, group: usize, num_kv_heads: usize, num_threads: usize) -> u32 {
    let time = |num_units: u32| {
        let rounds = (num_units as usize * num_kv_heads).div_ceil(num_threads);
        rounds * (num_queries.div_ceil(num_units) as usize * group + OPENING_ROWS)
    };
    let num_units = (1..=num_queries).min_by_key(|&num_units| time(num_units)).unwrap_or(1);
    num_queries.div_ceil(num_units)
}

/// Cuts units into their segments.
fn cut_units(
    pieces: &mut Vec<AttentionPiece>,
    units: &[AttentionUnit],
    items: &[AttentionItem],
    positions: &[u32],
    window: Option<u32>,
) {
    pieces.clear();
    for (index, unit) in units.iter().enumerate() {
        let item = &items[unit.item as usize];
        let queries = (item.query_start + unit.first) as usize..;
        let queries = &positions[queries][..unit.num_queries as usize];
        let first = queries.iter().min().map_or(0, |&position| first_key(position, window));
        let last = queries.iter().max().map_or(0, |&position| position);
        let first = first.max(item.kv_start) as usize / SEGMENT_KEYS;
        let last = last.min((item.kv_start + item.kv_len).saturating_sub(1)) as usize / SEGMENT_KEYS;
        let start = pieces.len() as u32;
        // One at least: it writes the row that sees nothing.
        for segment in first..=last.max(first) {
            pieces.push(AttentionPiece { unit: index as u32, segment: segment as u32, first: start });
        }
    }
}

/// Everything that all units of an op have in common.
struct Common {
    args: AttentionArgs,
    scratch: Matrix,
    unit_rows: usize,
    pages: *const u32,
    /// One a piece and key head, each for [`SPLIT_ROWS`] rows.
    states: *mut f32,
    chain: Chain,
}

impl Common {
    fn states(&self, number: usize) -> *mut f32 {
        self.states.wrapping_add(number * RowStates::floats(SPLIT_ROWS, self.args.value_dim))
    }

    fn unit(
        &self,
        worker: usize,
        kv_head: usize,
        unit: &AttentionUnit,
        item: &AttentionItem,
    ) -> AttentionArgs {
        let (kv_start, kv_len) = (item.kv_start as usize, item.kv_len as usize);
        let chain = if item.partial == NO_PARTIAL {
            Chain::NONE
        } else {
            Chain { slot: item.partial as usize + unit.first as usize, ..self.chain }
        };
        // SAFETY: the step's check has compared pages and partials with their lists; the scratch row is this worker's.
        unsafe {
            AttentionArgs {
                pages: self.pages.add(item.pages_start as usize),
                kv_head,
                kv_start,
                kv_end: kv_start + kv_len,
                keys_start: 0,
                keys_end: usize::MAX,
                is_segment: false,
                query_start: (item.query_start + unit.first) as usize,
                num_queries: unit.num_queries as usize,
                chain,
                scratch: AttentionScratch::at(self.scratch.row(worker), self.unit_rows, self.args.value_dim),
                ..self.args
            }
        }
    }
}

/// The units of an op, whole or in pieces.
struct Work<'a> {
    items: &'a [AttentionItem],
    units: &'a [AttentionUnit],
    pieces: &'a [AttentionPiece],
    /// Units that are done before a barrier each, and numbers of them and all key heads.
    phases: &'a [(Range<usize>, Units)],
    numbers: Units,
    folds: Units,
    attend: unsafe fn(&AttentionArgs),
    fold_segments: unsafe fn(&AttentionArgs, *mut f32, usize),
}

impl Work<'_> {
    fn attend_units(&self, worker: &Worker<'_>, common: &Common) {
        for (number, (units, numbers)) in self.phases.iter().enumerate() {
            if number > 0 {
                worker.barrier();
            }
            let units = &self.units[units.clone()];
            while let Some(number) = numbers.take() {
                // Later queries see more keys: the long units first, so that no worker ends with one.
                let unit = &units[units.len() - 1 - number % units.len()];
                let item = &self.items[unit.item as usize];
                // SAFETY: the shapes were checked, and the kernels are those of this processor. What units of the phases
                // before have left is there.
                unsafe { (self.attend)(&common.unit(worker.index, number / units.len(), unit, item)) };
            }
        }
    }

    /// Pieces, then a barrier, then the folding of each unit's.
    fn attend_pieces(&self, worker: &Worker<'_>, common: &Common) {
        let num_pieces = self.pieces.len();
        while let Some(number) = self.numbers.take() {
            let piece = &self.pieces[number % num_pieces];
            let segment = piece.segment as usize * SEGMENT_KEYS;
            let mut args = self.unit_of(worker, common, piece, number / num_pieces);
            (args.keys_start, args.keys_end) = (segment, segment + SEGMENT_KEYS);
            args.is_segment = true;
            // SAFETY: as above; there are states for each piece of each key head, which its worker alone writes.
            unsafe {
                args.scratch.states = RowStates::at(common.states(number), SPLIT_ROWS, args.value_dim);
                (self.attend)(&args);
            }
        }
        worker.barrier();
        while let Some(number) = self.folds.take() {
            let piece = &self.pieces[number % num_pieces];
            // The first of a unit's pieces stands for the unit.
            if piece.first as usize != number % num_pieces {
                continue;
            }
            let same = self.pieces[number % num_pieces..].iter().take_while(|next| next.unit == piece.unit);
            let args = self.unit_of(worker, common, piece, number / num_pieces);
            // SAFETY: as above; all states are written (the barrier), and those of a unit lie side by side.
            unsafe { (self.fold_segments)(&args, common.states(number), same.count()) };
        }
    }

    fn unit_of(
        &self,
        worker: &Worker<'_>,
        common: &Common,
        piece: &AttentionPiece,
        kv_head: usize,
    ) -> AttentionArgs {
        let unit = &self.units[piece.unit as usize];
        common.unit(worker.index, kv_head, unit, &self.items[unit.item as usize])
    }
}

impl Step<'_> {
    pub(super) fn run_attention(&mut self, op: &Attention) -> OpResult {
        let input = self.input;
        if input.num_tokens() == 0 {
            return Ok(());
        }
        let plan = input.attention.get(op.plan).ok_or_else(|| wrong("no such attention plan in the step"))?;
        let kv = self.backend.kv.as_ref().ok_or_else(|| wrong("there is no KV cache"))?;
        let layer = kv.layers.get(op.layer).ok_or_else(|| wrong("no such layer of the KV cache"))?;
        let (num_kv_heads, value_dim, is_paired) = (layer.num_kv_heads, layer.value_dim, layer.is_paired);
        require(
            num_kv_heads > 0 && op.num_heads > 0 && op.num_heads.is_multiple_of(num_kv_heads),
            "the heads of attention are no multiple of the key heads",
        )?;
        let group = op.num_heads / num_kv_heads;
        let dtype = kv.dtype;
        let scratch = &mut self.backend.scratch;
        scratch.reserve_attention(group, value_dim)?;
        scratch.reserve_parts(plan.num_partials as usize, op.num_heads, value_dim)?;
        let num_threads = self.backend.pool.num_threads();
        let max_queries = (UNIT_ROWS / group).max(1) as u32;
        let mut units = std::mem::take(&mut scratch.units);
        units.clear();
        let mut chains = std::mem::take(&mut scratch.chains);
        chains.fill(plan);
        let depth = |item: &AttentionItem| chains.depth(item.partial, item.num_queries);
        let mut phases = std::mem::take(&mut scratch.phases);
        phases.clear();
        for phase in 0..=plan.items.iter().map(depth).max().unwrap_or(0) {
            let start = units.len();
            let is_now = |item: &AttentionItem| depth(item) == phase;
            let queries = plan.items.iter().filter(|item| is_now(item)).map(|item| item.num_queries).sum();
            let share = if plan.merges.is_empty() {
                max_queries
            } else {
                share_queries(queries, group, num_kv_heads, num_threads)
            };
            cut_items(&mut units, &plan.items, share.clamp(1, max_queries), is_now);
            phases.push((start..units.len(), Units::new((units.len() - start) * num_kv_heads)));
        }
        let is_split = num_threads > 1
            && plan.merges.is_empty()
            && units.len() * num_kv_heads < ENOUGH_UNITS * num_threads
            && units.iter().all(|unit| unit.num_queries as usize * group <= SPLIT_ROWS);
        let mut pieces = std::mem::take(&mut scratch.pieces);
        pieces.clear();
        if is_split {
            cut_units(&mut pieces, &units, &plan.items, &input.positions, op.window);
            scratch.reserve_states(pieces.len() * num_kv_heads, RowStates::floats(SPLIT_ROWS, value_dim))?;
        }
        let common = self.attention_common(op, group, &chains)?;
        // SAFETY: a unit's rows of the output or its slots belong to the worker that took it, and so does its scratch; what
        // other units have left is read after a barrier.
        let common = unsafe { Shared::new(common) };
        let work = Work {
            items: &plan.items,
            units: &units,
            // Contexts of one segment have nothing to fold.
            pieces: if pieces.len() > units.len() { &pieces } else { &[] },
            phases: &phases,
            numbers: Units::new(pieces.len() * num_kv_heads),
            folds: Units::new(pieces.len() * num_kv_heads),
            attend: self.backend.kernels.attend(dtype, is_paired),
            fold_segments: self.backend.kernels.fold_segments,
        };
        self.backend.pool.run(&|worker| {
            let common = common.get();
            if work.pieces.is_empty() {
                work.attend_units(worker, common);
            } else {
                work.attend_pieces(worker, common);
            }
        });
        self.backend.scratch.units = units;
        self.backend.scratch.pieces = pieces;
        self.backend.scratch.chains = chains;
        self.backend.scratch.phases = phases;
        Ok(())
    }

    fn attention_common(
        &self,
        op: &Attention,
        group: usize,
        chains: &Chains,
    ) -> Result<Common, BackendError> {
        let num_tokens = self.input.num_tokens();
        let kv = self.backend.kv.as_ref().ok_or_else(|| wrong("there is no KV cache"))?;
        let layer = &kv.layers[op.layer];
        let width = op.num_heads * layer.head_dim;
        let (query, output) = (self.buffer(op.query, num_tokens)?, self.buffer(op.output, num_tokens)?);
        require(
            query.cols == width && output.cols == width,
            "query and output of attention are not heads x head_dim wide",
        )?;
        require(!query.same_memory(&output), "attention cannot be written over its queries")?;
        let scratch: &Scratch = &self.backend.scratch;
        let matrix = scratch.attention.matrix();
        let unit_rows = UNIT_ROWS.max(group);
        let args = AttentionArgs {
            keys: layer.keys(),
            values: layer.values(),
            pages: std::ptr::null(),
            block_size: kv.block_size,
            scale_bytes: kv.dtype.scale_bytes(),
            num_kv_heads: layer.num_kv_heads,
            head_dim: layer.head_dim,
            value_dim: layer.value_dim,
            kv_head: 0,
            group,
            kv_start: 0,
            kv_end: 0,
            keys_start: 0,
            keys_end: 0,
            is_segment: false,
            query_start: 0,
            num_queries: 0,
            positions: self.input.positions.as_ptr(),
            query: query.row(0),
            output: output.row(0),
            stride: width,
            window: op.window,
            scale: op.scale,
            softcap: op.softcap,
            slopes: self.optional_vector(op.alibi, op.num_heads)?,
            sinks: self.optional_vector(op.sinks, op.num_heads)?,
            chain: Chain::NONE,
            // SAFETY: `reserve_attention` made a row large enough for these rows; each worker gets its own later.
            scratch: unsafe { AttentionScratch::at(matrix.row(0), unit_rows, layer.value_dim) },
        };
        Ok(Common {
            args,
            scratch: matrix,
            unit_rows,
            pages: self.input.pages.as_ptr(),
            states: scratch.states.matrix().start(),
            chain: Chain {
                states: scratch.parts.matrix().start(),
                slot: 0,
                before: chains.before.as_ptr(),
                is_last: chains.is_last.as_ptr(),
            },
        })
    }
}
