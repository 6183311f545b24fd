//! Guesses of what a sequence draws next, which the next Plan checks.

use std::sync::Arc;

use baton_core::TokenId;

use crate::{PlannedSeq, Scheduler};

/// A chain of guesses. Where the request's output is masked, each comes with what may be drawn after it; guesses without a
/// mask are not checked then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drafts {
    pub token_ids: Vec<TokenId>,
    pub masks: Vec<Arc<Vec<u32>>>,
}

impl From<Vec<TokenId>> for Drafts {
    fn from(token_ids: Vec<TokenId>) -> Self {
        Self { token_ids, masks: Vec::new() }
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
    /// Only the first `count` guesses of a planned sequence are going to be checked: its run is cut there, and the blocks for the
    /// others are given back. For a Plan that was just scheduled.
    pub fn keep_drafts(&mut self, planned: &mut PlannedSeq, count: usize) {
        let num_dropped = (planned.num_drafts as usize).saturating_sub(count);
        planned.token_ids.truncate(planned.token_ids.len() - num_dropped);
        planned.num_drafts -= num_dropped as u32;
        planned.draft_masks.truncate(planned.num_drafts as usize);
        let Some(seq) = self.sequence_mut(planned.seq_id).filter(|_| num_dropped > 0) else { return };
        seq.num_computed -= num_dropped;
        seq.num_drafts_in_flight -= num_dropped;
        let (id, num_computed) = (seq.id, seq.num_computed);
        self.kv.truncate(id, num_computed);
    }
}
