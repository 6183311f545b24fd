//! Relay attention: requests that begin alike stand side by side in a step, so that what they have in common is read once for
//! all of them. Which stretches are worth it is for the planner of attention to say
//! ([`SharedPrefixes`](baton_backend::SharedPrefixes)).

use std::cmp::Ordering;
use std::collections::HashMap;

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
}

impl RelayStats {
    /// What was added since an earlier reading.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            num_tokens_read: self.num_tokens_read - earlier.num_tokens_read,
            num_tokens_saved: self.num_tokens_saved - earlier.num_tokens_saved,
        }
    }
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
        let first = |group: &std::ops::Range<usize>| &seqs[group.start];
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

    #[test]
    fn a_single_decode_stays_where_it_is() {
        let seqs = vec![seq(1, 10, &[5, 6], 12), seq(2, 11, &[1, 2], 1), seq(3, 12, &[0, 9], 12)];
        let mut plan = Plan { seqs, ..Plan::default() };
        Relay::default().sort(&mut plan, 8);
        assert_eq!(order(&plan), [10, 11, 12]);
    }
}
