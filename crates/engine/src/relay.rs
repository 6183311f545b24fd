//! Relay attention: requests that begin alike stand side by side in a step, so that what they have in common is read once for
//! all of them. Which stretches are worth it is for the planner of attention to say
//! ([`SharedPrefixes`](baton_backend::SharedPrefixes)).

use std::cmp::Ordering;
use std::collections::HashMap;
use std::ops::Range;

use baton_backend::{AttentionPlan, SequenceQueries};
use baton_core::RequestId;
use baton_sched::{Plan, PlannedSeq};
use serde::Serialize;

/// What relay attention has done, in tokens whose keys and values a layer reads, over all steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RelayStats {
    /// Read for several sequences at once.
    pub num_tokens_read: u64,
    /// That would have been read besides, had each sequence read them for itself.
    pub num_tokens_saved: u64,
    /// The same in bytes of all layers.
    pub num_bytes_saved: u64,
    /// What decodes have read in all, shared or not, in bytes of all layers.
    pub num_bytes_read: u64,
}

/// Sequences of a step that read keys and values together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayGroup {
    pub num_seqs: usize,
    /// Keys and values of a layer that are read once for all of them.
    pub num_tokens: usize,
}

/// What was shared in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepRelay {
    /// Of the attention kinds one after the other, outer groups first.
    pub groups: Vec<RelayGroup>,
    pub num_tokens_saved: u64,
}

impl RelayStats {
    /// What was added since an earlier reading.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            num_tokens_read: self.num_tokens_read - earlier.num_tokens_read,
            num_tokens_saved: self.num_tokens_saved - earlier.num_tokens_saved,
            num_bytes_saved: self.num_bytes_saved - earlier.num_bytes_saved,
            num_bytes_read: self.num_bytes_read - earlier.num_bytes_read,
        }
    }

    /// The part of the reads of decodes that sharing has saved, 0 to 1.
    pub fn share_saved(&self) -> f64 {
        let all = self.num_bytes_saved + self.num_bytes_read;
        self.num_bytes_saved as f64 / all.max(1) as f64
    }
}

/// Appends the groups that a plan reads for. Long prefixes and large groups are cut into several items, which follow each other: for
/// the same keys the next queries, then the next keys for all of them.
pub(crate) fn add_groups(plan: &AttentionPlan, seqs: &[SequenceQueries], groups: &mut Vec<RelayGroup>) {
    let seqs_before = |row: u32| seqs.partition_point(|seq| seq.query_start < row);
    let num_seqs = |queries: &Range<u32>| seqs_before(queries.end) - seqs_before(queries.start);
    // Queries and keys.
    let mut spans: Vec<(Range<u32>, Range<u32>)> = Vec::new();
    for item in plan.shared_items() {
        let queries = item.query_start..item.query_start + item.num_queries;
        let keys = item.kv_start..item.kv_start + item.kv_len;
        match spans.last_mut() {
            Some(last) if last.1 == keys && last.0.end == queries.start => last.0.end = queries.end,
            _ => spans.push((queries, keys)),
        }
    }
    let parts_of_one = |one: &(Range<u32>, Range<u32>), next: &(Range<u32>, Range<u32>)| {
        one.0 == next.0 && one.1.end == next.1.start
    };
    groups.extend(spans.chunk_by(parts_of_one).map(|parts| RelayGroup {
        num_seqs: num_seqs(&parts[0].0),
        num_tokens: parts.iter().map(|(_, keys)| keys.len()).sum(),
    }));
}

/// The order in which requests had stood in the step before: with few changes, sorting is looking once.
#[derive(Debug, Default)]
pub(crate) struct Relay {
    ranks: HashMap<RequestId, usize>,
}

impl Relay {
    /// Sorts the decodes of a step by their blocks and puts them first. The sequences of a request stay together.
    pub(crate) fn sort(&mut self, plan: &mut Plan, max_queries: u32) {
        let is_decode = |seq: &PlannedSeq| seq.start > 0 && seq.token_ids.len() <= max_queries as usize;
        let seqs = &plan.seqs;
        let mut starts = Vec::with_capacity(seqs.len());
        let mut next = 0;
        for group in seqs.chunk_by(|one, next| one.request_id == next.request_id) {
            starts.push((group.iter().all(is_decode), next..next + group.len()));
            next += group.len();
        }
        let num_decodes = starts.iter().filter(|(is_decode, _)| *is_decode).count();
        if num_decodes < 2 {
            return;
        }
        let first = |group: &Range<usize>| &seqs[group.start];
        starts.sort_by_key(|(is_decode, group)| {
            (!is_decode, self.ranks.get(&first(group).request_id).copied().unwrap_or(usize::MAX))
        });
        starts[..num_decodes].sort_by(|(_, a), (_, b)| by_blocks(first(a), first(b)));
        self.ranks.clear();
        self.ranks
            .extend(starts.iter().enumerate().map(|(rank, (_, group))| (first(group).request_id, rank)));
        if starts.windows(2).all(|pair| pair[0].1.end == pair[1].1.start) {
            return;
        }
        let mut old: Vec<Option<PlannedSeq>> = std::mem::take(&mut plan.seqs).into_iter().map(Some).collect();
        plan.seqs
            .extend(starts.into_iter().flat_map(|(_, group)| group).filter_map(|place| old[place].take()));
    }
}

fn by_blocks(a: &PlannedSeq, b: &PlannedSeq) -> Ordering {
    a.block_table.cmp(&b.block_table)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_backend::{PlannerOptions, ShareOptions, SharedPrefixes, plan_relay};
    use baton_core::{BlockId, SamplingParams, SeqId};

    use super::*;

    fn seq(request: u64, id: u64, blocks: &[u32], num_tokens: usize) -> PlannedSeq {
        PlannedSeq {
            request_id: RequestId(request),
            seq_id: SeqId(id),
            start: 16 * (blocks.len() as u32 - 1),
            token_ids: vec![7; num_tokens],
            block_table: blocks.iter().map(|&block| BlockId(block)).collect(),
            samples: Vec::new(),
            scored: 0..0,
            params: Arc::new(SamplingParams::default()),
            end_token_ids: Arc::from([]),
        }
    }

    fn order(plan: &Plan) -> Vec<u64> {
        plan.seqs.iter().map(|seq| seq.seq_id.0).collect()
    }

    #[test]
    fn decodes_stand_by_their_blocks_and_requests_stay_together() {
        let seqs = vec![
            seq(1, 10, &[5, 6, 20], 1),
            seq(2, 11, &[1, 2, 21], 1),
            seq(3, 12, &[9, 22], 12), // a chunk of a prompt
            seq(4, 13, &[5, 6, 23], 1),
            seq(4, 14, &[1, 24], 1), // the second continuation goes with the first
            seq(5, 15, &[1, 2, 3, 25], 1),
        ];
        let mut plan = Plan { seqs, ..Plan::default() };
        let mut relay = Relay::default();
        relay.sort(&mut plan, 8);
        assert_eq!(order(&plan), [15, 11, 10, 13, 14, 12]);
        relay.sort(&mut plan, 8);
        assert_eq!(order(&plan), [15, 11, 10, 13, 14, 12]);
    }

    /// Five decodes share 20 pages of 16, the first three of them 20 more; then there is a prompt.
    #[test]
    fn the_groups_of_a_plan_are_found_however_it_is_cut() {
        let mut pages = Vec::new();
        let seqs: Vec<SequenceQueries> = (0..6)
            .map(|seq: u32| {
                let shared = if seq < 3 { 40 } else { 20 };
                let pages_start = pages.len() as u32;
                pages.extend((0..48).map(|page| if page < shared { page } else { 100 + seq * 48 + page }));
                let num_queries = if seq == 5 { 20 } else { 1 };
                SequenceQueries { query_start: seq, num_queries, first_position: 740, pages_start }
            })
            .collect();
        let (block_size, window) = (16, None);
        let options = ShareOptions {
            block_size,
            window,
            border: 16,
            min_keys: 16,
            min_seqs: 2,
            max_queries: 8,
            queries_per_read: 0,
            read_cost: 1,
            query_cost: 24,
            step_cost: 0,
        };
        let mut shared = SharedPrefixes::default();
        shared.find(&seqs, &pages, &options);
        // Items of 2 or 4 queries leave one of a single sequence.
        for (max_kv_per_item, max_queries_per_item) in [(0, 0), (0, 2), (64, 0), (64, 2), (256, 4)] {
            let max_split_queries = 8;
            let options = PlannerOptions {
                block_size,
                window,
                max_kv_per_item,
                max_kv_per_shared_item: max_kv_per_item,
                max_split_queries,
                max_queries_per_item,
            };
            let (mut plan, mut groups) = (AttentionPlan::default(), Vec::new());
            plan_relay(&seqs, &shared, &options, &mut plan);
            add_groups(&plan, &seqs, &mut groups);
            let group = |num_seqs, num_tokens| RelayGroup { num_seqs, num_tokens };
            assert_eq!(groups, [group(5, 320), group(3, 320)], "{max_kv_per_item} {max_queries_per_item}");
        }
    }

    #[test]
    fn a_single_decode_stays_where_it_is() {
        let seqs = vec![seq(1, 10, &[5, 6], 12), seq(2, 11, &[1, 2], 1), seq(3, 12, &[0, 9], 12)];
        let mut plan = Plan { seqs, ..Plan::default() };
        Relay::default().sort(&mut plan, 8);
        assert_eq!(order(&plan), [10, 11, 12]);
    }
}
