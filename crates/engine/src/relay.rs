//! What relay attention did: requests that begin alike stand side by side in a step (`baton_sched` sees to that), and what they
//! have in common is read once for all of them where the planner of attention finds that it pays
//! ([`SharedPrefixes`](baton_backend::SharedPrefixes)).

use std::ops::Range;

use baton_backend::{AttentionPlan, SequenceQueries};
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

#[cfg(test)]
mod tests {
    use baton_backend::{PlannerOptions, ShareOptions, SharedPrefixes, plan_relay};

    use super::*;

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
            plan_relay(&seqs, &[], &shared, &options, &mut plan);
            add_groups(&plan, &seqs, &mut groups);
            let group = |num_seqs, num_tokens| RelayGroup { num_seqs, num_tokens };
            assert_eq!(groups, [group(5, 320), group(3, 320)], "{max_kv_per_item} {max_queries_per_item}");
        }
    }
}
