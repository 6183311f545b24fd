//! The one way from the sequences of a step to its attention plan: what is shared, where contexts are split, and whether the
//! partial results fit, from what the model is and the device likes.

use super::{
    AttentionTuning, BranchQueries, PlannerOptions, SequenceQueries, ShareOptions, SharedPrefixes,
    choose_shared_split, choose_split, plan_relay,
};
use crate::{AttentionPlan, DeviceInfo};

/// Query rows of one attention item: enough to read a page once for many queries, few enough to share among threads.
const MAX_QUERIES_PER_ITEM: u32 = 32;
/// Runs of up to this many queries are split over their keys: decodes, with or without a few drafts.
pub const MAX_SPLIT_QUERIES: u32 = 8;
/// Where contexts are split when the tokens of a request must not depend on the others.
const DETERMINISTIC_SPLIT: u32 = 1024;

/// What a query costs that merges shared results, in keys, on a device that does not say.
const QUERY_COST: u64 = 24;

/// The heads of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionHeads {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Of the keys and values of one token in one layer.
    pub token_bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutOptions {
    pub block_size: usize,
    /// What sequences have in common is read once for all of them.
    pub relays: bool,
    /// How a query's keys are split depends on its position alone.
    pub is_fixed: bool,
}

/// How attention is cut into items.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCut {
    block_size: usize,
    num_kv_heads: usize,
    max_queries_per_item: u32,
    /// The same for the device's kernels for decodes, and the most keys that such items of runs of more queries read. 0: none.
    decode_queries: u32,
    max_decode_keys: u64,
    /// Pairs of an item and a kv head that the device works on at once; 0 never splits.
    units: usize,
    /// The same for shared spans.
    shared_units: usize,
    /// What sequences have in common is read once for all of them.
    relays: bool,
    /// Of attention without a window.
    sharing: ShareOptions,
    /// Partial results that there is memory for.
    max_partials: u32,
    is_fixed: bool,
}

impl AttentionCut {
    pub fn new(device: &DeviceInfo, heads: &AttentionHeads, options: &CutOptions) -> Self {
        let AttentionHeads { num_heads, num_kv_heads, head_dim, token_bytes } = *heads;
        let slot_bytes = num_heads * head_dim * size_of::<f32>();
        let AttentionTuning { units, rows, decode_rows, decode_bytes, sharing, partial_bytes } =
            device.attention;
        let max_partials = match partial_bytes {
            0 => u32::MAX,
            bytes => (bytes / slot_bytes.max(1)) as u32,
        };
        let group = num_heads / num_kv_heads.max(1);
        let preferred = (rows / group.max(1)).max(1) as u32;
        let has_tiles = rows > 0;
        let gains = sharing.head_dims.is_empty() || sharing.head_dims.contains(&head_dim);
        let border = if gains { sharing.border.next_multiple_of(options.block_size) as u32 } else { 0 };
        let keys = |bytes: usize| (bytes / token_bytes.max(1)) as u64;
        let decode_queries = if gains { (decode_rows / group.max(1)) as u32 } else { 0 };
        Self {
            block_size: options.block_size,
            num_kv_heads,
            max_queries_per_item: if has_tiles { preferred } else { MAX_QUERIES_PER_ITEM },
            // With single queries a step would look like one of decodes.
            decode_queries: if decode_queries > 1 { decode_queries } else { 0 },
            max_decode_keys: keys(decode_bytes),
            units,
            shared_units: sharing.units,
            relays: options.relays && !options.is_fixed,
            sharing: ShareOptions {
                block_size: options.block_size,
                window: None,
                border,
                min_keys: border,
                min_seqs: sharing.min_seqs,
                max_queries: MAX_SPLIT_QUERIES,
                queries_per_read: if has_tiles { preferred } else { 0 },
                read_cost: sharing.read_cost as u64,
                query_cost: if sharing.query_bytes == 0 { QUERY_COST } else { keys(sharing.query_bytes) },
                step_cost: keys(sharing.step_bytes),
            },
            max_partials,
            is_fixed: options.is_fixed,
        }
    }

    /// Whether sequences of a step may share anything at all.
    pub fn shares(&self) -> bool {
        self.relays && self.sharing.border > 0
    }

    /// The fewest sequences that share anything; 0 where none do.
    pub fn min_sharers(&self) -> usize {
        if self.shares() { self.sharing.min_seqs } else { 0 }
    }

    /// Turns relay attention on or off from the next step on. It stays off where splits are fixed.
    pub fn set_relays(&mut self, relays: bool) {
        self.relays = relays && !self.is_fixed;
    }

    /// Plans the attention of one kind: `window` is its sliding window, `branches` says which of `seqs` are branches of guesses,
    /// `shared` what the sequences were found to share.
    pub fn plan(
        &self,
        seqs: &[SequenceQueries],
        branches: &[BranchQueries],
        pages: &[u32],
        window: Option<u32>,
        shared: &mut SharedPrefixes,
        out: &mut AttentionPlan,
    ) {
        let border = if self.relays { self.sharing.border } else { 0 };
        shared.find(seqs, pages, &ShareOptions { window, border, ..self.sharing });
        let options = self.options(window, seqs, shared);
        plan_relay(seqs, branches, shared, &options, out);
        if out.num_partials > self.max_partials {
            *shared = SharedPrefixes::default();
            let whole = PlannerOptions { max_kv_per_item: 0, ..options };
            plan_relay(seqs, branches, shared, &whole, out);
        }
    }

    fn options(
        &self,
        window: Option<u32>,
        seqs: &[SequenceQueries],
        shared: &SharedPrefixes,
    ) -> PlannerOptions {
        let options = PlannerOptions {
            block_size: self.block_size,
            window,
            max_kv_per_item: 0,
            max_kv_per_shared_item: 0,
            max_split_queries: MAX_SPLIT_QUERIES,
            max_queries_per_item: if self.is_for_decodes(seqs, shared) {
                self.decode_queries
            } else {
                self.max_queries_per_item
            },
        };
        if self.units == 0 {
            return options;
        }
        if self.is_fixed {
            let max_kv_per_item = DETERMINISTIC_SPLIT.next_multiple_of(self.block_size as u32);
            return PlannerOptions { max_kv_per_item, max_split_queries: 0, ..options };
        }
        let (heads, units) = (self.num_kv_heads, self.shared_units);
        PlannerOptions {
            max_kv_per_item: choose_split(seqs, shared, &options, heads, self.units),
            max_kv_per_shared_item: choose_shared_split(seqs, shared, &options, heads, units),
            ..options
        }
    }

    /// Whether short runs are better cut into items for the kernels of decodes: these start earlier, but read keys once for each item.
    fn is_for_decodes(&self, seqs: &[SequenceQueries], shared: &SharedPrefixes) -> bool {
        let has_such_kernels = self.decode_queries > 0 && !self.is_fixed && shared.spans().is_empty();
        let keys = |seq: &SequenceQueries| {
            let items = seq.num_queries.div_ceil(self.decode_queries);
            u64::from(seq.first_position + seq.num_queries) * u64::from(items)
        };
        has_such_kernels
            && seqs.iter().all(|seq| seq.num_queries <= MAX_SPLIT_QUERIES)
            && seqs.iter().map(keys).sum::<u64>() <= self.max_decode_keys
    }
}
