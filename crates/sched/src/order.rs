//! The order of a step's sequences: those that begin alike stand side by side, so that what they have in common can be read
//! once for all of them (relay attention). Which spans are worth it is for the planner of attention to say.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::ops::Range;

use baton_core::RequestId;

use crate::PlannedSeq;

/// The order in which requests had stood in the step before: with few changes, sorting is looking once.
#[derive(Debug, Default)]
pub(crate) struct PrefixOrder {
    ranks: HashMap<RequestId, usize>,
}

impl PrefixOrder {
    /// Sorts the decodes of a step by their blocks and puts them first. The sequences of a request stay together. A decode has
    /// at most `max_queries` tokens.
    pub(crate) fn sort(&mut self, seqs: &mut Vec<PlannedSeq>, max_queries: usize) {
        let is_decode = |seq: &PlannedSeq| seq.start > 0 && seq.token_ids.len() <= max_queries;
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
        let mut old: Vec<Option<PlannedSeq>> = std::mem::take(seqs).into_iter().map(Some).collect();
        seqs.extend(starts.into_iter().flat_map(|(_, group)| group).filter_map(|place| old[place].take()));
    }
}

fn by_blocks(a: &PlannedSeq, b: &PlannedSeq) -> Ordering {
    a.block_tables.cmp(&b.block_tables)
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
            num_drafts: 0,
            branches: Vec::new(),
            num_redrawn: 0,
            draft_masks: Vec::new(),
            block_tables: vec![blocks.iter().map(|&block| BlockId(block)).collect()],
            samples: Vec::new(),
            mask: None,
            scored: 0..0,
            next_token_id: None,
            adapter: None,
            params: Arc::new(SamplingParams::default()),
            end_token_ids: Arc::from([]),
        }
    }

    fn sorted(order: &mut PrefixOrder, seqs: &mut Vec<PlannedSeq>) -> Vec<u64> {
        order.sort(seqs, 8);
        seqs.iter().map(|seq| seq.seq_id.0).collect()
    }

    #[test]
    fn decodes_stand_by_their_blocks_and_requests_stay_together() {
        let mut seqs = vec![
            seq(1, 10, &[5, 6, 20], 1),
            seq(2, 11, &[1, 2, 21], 1),
            seq(3, 12, &[9, 22], 12), // a chunk of a prompt
            seq(4, 13, &[5, 6, 23], 1),
            seq(4, 14, &[1, 24], 1), // the second continuation goes with the first
            seq(5, 15, &[1, 2, 3, 25], 1),
        ];
        let mut order = PrefixOrder::default();
        assert_eq!(sorted(&mut order, &mut seqs), [15, 11, 10, 13, 14, 12]);
        assert_eq!(sorted(&mut order, &mut seqs), [15, 11, 10, 13, 14, 12]);
    }

    #[test]
    fn a_single_decode_stays_where_it_is() {
        let mut seqs = vec![seq(1, 10, &[5, 6], 12), seq(2, 11, &[1, 2], 1), seq(3, 12, &[0, 9], 12)];
        assert_eq!(sorted(&mut PrefixOrder::default(), &mut seqs), [10, 11, 12]);
    }
}
