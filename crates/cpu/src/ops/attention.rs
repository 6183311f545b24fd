//! Attention by the step's work items, then the merge of partials.
//!
//! A unit is (key head, some queries of an item). Units of one item and different key heads are far apart in the
//! numbering on purpose: neighbours then share pages, not heads.

use baton_backend::{Attention, AttentionItem, BackendError, NO_PARTIAL};

use super::{OpResult, Step, require, wrong};
use crate::buffers::{Matrix, Shared};
use crate::kernels::attention::{AttentionArgs, AttentionScratch, MergeArgs, UNIT_ROWS};
use crate::pool::Units;
use crate::scratch::{AttentionUnit, Scratch};

/// Cuts the items into units of at most `max_queries`.
fn cut_items(units: &mut Vec<AttentionUnit>, items: &[AttentionItem], max_queries: u32) {
    units.clear();
    for (index, item) in items.iter().enumerate() {
        for first in (0..item.num_queries).step_by(max_queries as usize) {
            let num_queries = max_queries.min(item.num_queries - first);
            units.push(AttentionUnit { item: index as u32, first, num_queries });
        }
    }
}

/// Everything that all units of an op have in common.
struct Common {
    args: AttentionArgs,
    scratch: Matrix,
    unit_rows: usize,
    num_heads: usize,
    pages: *const u32,
    partials: *mut f32,
    partial_lse: *mut f32,
}

impl Common {
    fn unit(
        &self,
        worker: usize,
        kv_head: usize,
        unit: &AttentionUnit,
        item: &AttentionItem,
    ) -> AttentionArgs {
        let (kv_start, kv_len) = (item.kv_start as usize, item.kv_len as usize);
        let slot = (item.partial as usize + unit.first as usize) * self.num_heads;
        // SAFETY: the step's check has compared pages and partials with their lists; the scratch row is this worker's.
        unsafe {
            let (partial, partial_lse) = if item.partial == NO_PARTIAL {
                (std::ptr::null_mut(), std::ptr::null_mut())
            } else {
                (self.partials.add(slot * self.args.value_dim), self.partial_lse.add(slot))
            };
            AttentionArgs {
                pages: self.pages.add(item.pages_start as usize),
                kv_head,
                kv_start,
                kv_end: kv_start + kv_len,
                query_start: (item.query_start + unit.first) as usize,
                num_queries: unit.num_queries as usize,
                partial,
                partial_lse,
                scratch: AttentionScratch::at(self.scratch.row(worker), self.unit_rows, self.args.value_dim),
                ..self.args
            }
        }
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
        let (num_kv_heads, value_dim) = (layer.num_kv_heads, layer.value_dim);
        require(
            num_kv_heads > 0 && op.num_heads > 0 && op.num_heads.is_multiple_of(num_kv_heads),
            "the heads of attention are no multiple of the key heads",
        )?;
        let group = op.num_heads / num_kv_heads;
        let dtype = kv.dtype;
        let scratch = &mut self.backend.scratch;
        scratch.reserve_attention(group, value_dim)?;
        scratch.reserve_partials(plan.num_partials as usize, op.num_heads, value_dim)?;
        let mut units = std::mem::take(&mut scratch.units);
        cut_items(&mut units, &plan.items, (UNIT_ROWS / group).max(1) as u32);
        let common = self.attention_common(op, group)?;
        // SAFETY: a unit's rows of the output or partials belong to the worker that took it, and so does its scratch;
        // the merges read after the barrier.
        let common = unsafe { Shared::new(common) };
        let (attend, merge) = (self.backend.kernels.attend(dtype), self.backend.kernels.merge);
        let num_units = units.len();
        let (numbers, merges) = (Units::new(num_units * num_kv_heads), Units::new(plan.merges.len()));
        self.backend.pool.run(&|worker| {
            let common = common.get();
            while let Some(number) = numbers.take() {
                // Later queries see more keys: the long units first, so that no worker ends with one.
                let unit = &units[num_units - 1 - number % num_units];
                let item = &plan.items[unit.item as usize];
                // SAFETY: the shapes were checked, and the kernels are those of this processor.
                unsafe { attend(&common.unit(worker.index, number / num_units, unit, item)) };
            }
            if plan.merges.is_empty() {
                return;
            }
            worker.barrier();
            while let Some(number) = merges.take() {
                let list = &plan.merges[number];
                let slots = &plan.merge_slots[list.first as usize..(list.first + list.count) as usize];
                // SAFETY: slots and query were checked with the step; each query is merged once.
                unsafe {
                    merge(&MergeArgs {
                        partials: common.partials,
                        partial_lse: common.partial_lse,
                        slots: slots.as_ptr(),
                        num_slots: slots.len(),
                        num_heads: common.num_heads,
                        head_dim: common.args.head_dim,
                        value_dim: common.args.value_dim,
                        output: common.args.output.add(list.query as usize * common.args.stride),
                    });
                }
            }
        });
        self.backend.scratch.units = units;
        Ok(())
    }

    fn attention_common(&self, op: &Attention, group: usize) -> Result<Common, BackendError> {
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
        let nothing = std::ptr::null_mut();
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
            partial: nothing,
            partial_lse: nothing,
            // SAFETY: `reserve_attention` made a row large enough for these rows; each worker gets its own later.
            scratch: unsafe { AttentionScratch::at(matrix.row(0), unit_rows, layer.value_dim) },
        };
        Ok(Common {
            args,
            scratch: matrix,
            unit_rows,
            num_heads: op.num_heads,
            pages: self.input.pages.as_ptr(),
            partials: scratch.partials.matrix().start(),
            partial_lse: scratch.partial_lse.matrix().start(),
        })
    }
}
