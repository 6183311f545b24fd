//! Guesses of what a sequence draws next, which the next Plan checks.

use std::sync::Arc;

use baton_core::TokenId;

use crate::{PlannedSeq, Scheduler};

/// A chain of guesses, and others that depart from it. Where the request's output is masked, each of the chain comes with what may
/// be drawn after it; guesses without a mask are not checked then, and no branch is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drafts {
    pub token_ids: Vec<TokenId>,
    pub masks: Vec<Arc<Vec<u32>>>,
    pub branches: Vec<DraftBranch>,
}

/// Guesses that depart from the chain, or from an earlier branch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftBranch {
    /// What the first follows: 0 the last known token, `n` the `n`-th guess, those of the chain counted before those of branches.
    pub parent: usize,
    pub token_ids: Vec<TokenId>,
}

impl From<Vec<TokenId>> for Drafts {
    fn from(token_ids: Vec<TokenId>) -> Self {
        Self { token_ids, ..Self::default() }
    }
}

impl Drafts {
    pub(crate) fn is_empty(&self) -> bool {
        self.token_ids.is_empty()
    }

    /// How many can be checked.
    pub(crate) fn len(&self, is_masked: bool) -> usize {
        if is_masked { self.token_ids.len().min(self.masks.len()) } else { self.token_ids.len() }
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Scheduler {
    /// Only the first `count` guesses of a planned sequence's chain are going to be checked, and these branches in place of those
    /// that were planned: not more of them, nor more guesses in all, and each fits in a block. The blocks for the others are given
    /// back. For a Plan that was just scheduled.
    pub fn keep_drafts(&mut self, planned: &mut PlannedSeq, count: usize, branches: &[DraftBranch]) {
        let block_size = self.kv.config().block_size;
        assert!(
            branches.len() <= planned.branches.len()
                && branches.iter().all(|branch| (1..=block_size).contains(&branch.token_ids.len())),
            "there is a block for each branch that was planned"
        );
        let num_before = (planned.num_chain_drafts(), planned.branches.len());
        let num_dropped = num_before.0.saturating_sub(count);
        planned.token_ids.truncate((planned.end() - planned.start) as usize - num_dropped);
        planned.draft_masks.truncate(num_before.0 - num_dropped);
        planned.branches.truncate(branches.len());
        for (planned_branch, branch) in planned.branches.iter_mut().zip(branches) {
            planned_branch.parent = branch.parent as u32;
            planned_branch.num_tokens = branch.token_ids.len() as u32;
            planned.token_ids.extend_from_slice(&branch.token_ids);
        }
        planned.num_drafts = (num_before.0 - num_dropped + planned.num_branch_tokens()) as u32;
        let is_same = num_dropped == 0 && num_before.1 == branches.len();
        let Some(seq) = self.sequence_mut(planned.seq_id).filter(|_| !is_same) else { return };
        seq.num_computed -= num_dropped;
        seq.num_drafts_in_flight = planned.num_drafts as usize;
        let (id, num_computed) = (seq.id, seq.num_computed);
        // The rows of branches stay where they are.
        let num_rows = planned.branches.iter().map(|branch| branch.row as usize + 1).max().unwrap_or(0);
        self.kv.truncate(id, num_computed.max(num_rows * block_size));
    }
}
