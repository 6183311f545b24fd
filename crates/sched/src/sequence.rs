//! One token sequence of a request and how far it has been computed.

use std::sync::Arc;

use baton_core::{FinishReason, PositionLogprobs, SeqId, TokenId};

use crate::history::History;
use crate::{Drafts, SampledToken};

/// What a sequence may have to wait for while others go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The engine still computes which tokens may be drawn next.
    Mask = 1,
    /// Its KV is on the way to the device.
    Transfer = 2,
    /// The inputs of its prompt are not encoded yet.
    Encoder = 4,
    /// A tier beyond the host's memory was asked for its prefix. It has no KV yet.
    Store = 8,
}

/// How a sequence ended, with the token that ended it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Finish {
    pub(crate) reason: FinishReason,
    pub(crate) stop_token_id: Option<TokenId>,
}

#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SeqId,
    /// Which continuation of the request; the rank of a beam.
    pub(crate) index: u32,
    /// Prompt and output as far as known. Empty in a sequence still to be forked.
    pub(crate) token_ids: Vec<TokenId>,
    /// Positions whose KV is computed or in a Plan in flight.
    pub(crate) num_computed: usize,
    /// Positions whose KV is computed for certain.
    pub(crate) num_applied: usize,
    /// Tokens that Plans in flight are going to sample.
    pub(crate) num_pending: usize,
    /// Plans in flight that this sequence is part of.
    pub(crate) num_in_flight: usize,
    /// The step that it had its turn in last.
    pub(crate) last_step: u64,
    pub(crate) cumulative_logprob: f32,
    /// Kept for requests that select at the end and asked for `logprobs`; else handed out at once.
    pub(crate) logprobs: Vec<PositionLogprobs>,
    pub(crate) finish: Option<Finish>,
    /// A set of [`Wait`]s: it is left out of Plans as long as there is one.
    waits: u8,
    /// Guesses of what follows its last token, for the next Plan.
    pub(crate) drafts: Drafts,
    /// Guesses are made from its last token: it is not planned before that is known.
    pub(crate) awaits_tokens: bool,
    /// Tokens before the last one that are known by a branch of guesses: their keys and values were computed in the branch's own
    /// blocks, and are computed again.
    pub(crate) num_from_branch: usize,
    /// Guesses that a Plan in flight checks.
    pub(crate) num_drafts_in_flight: usize,
    /// Which tokens may be drawn next, where that is limited.
    pub(crate) mask: Option<Arc<Vec<u32>>>,
    pub(crate) history: History,
    /// The KV cache has a table of this sequence.
    pub(crate) has_table: bool,
}

impl Sequence {
    pub(crate) fn new(id: SeqId, index: u32) -> Self {
        Self {
            id,
            index,
            token_ids: Vec::new(),
            num_computed: 0,
            num_applied: 0,
            num_pending: 0,
            num_in_flight: 0,
            last_step: 0,
            cumulative_logprob: 0.0,
            logprobs: Vec::new(),
            finish: None,
            waits: 0,
            drafts: Drafts::default(),
            awaits_tokens: false,
            num_from_branch: 0,
            num_drafts_in_flight: 0,
            mask: None,
            history: History::default(),
            has_table: false,
        }
    }

    /// A copy that continues on its own, under a new id and without a share in Plans in flight.
    pub(crate) fn fork(&self, id: SeqId, index: u32) -> Self {
        Self {
            id,
            index,
            num_pending: 0,
            num_in_flight: 0,
            num_drafts_in_flight: 0,
            waits: 0,
            ..self.clone()
        }
    }

    pub(crate) fn set_wait(&mut self, wait: Wait, waits: bool) {
        self.waits = if waits { self.waits | wait as u8 } else { self.waits & !(wait as u8) };
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.waits != 0
    }

    pub(crate) fn waits_for(&self, wait: Wait) -> bool {
        self.waits & wait as u8 != 0
    }

    /// Known tokens and those that are going to be sampled.
    pub(crate) fn num_tokens_coming(&self) -> usize {
        self.token_ids.len() + self.num_pending
    }

    /// Tokens whose KV no Plan has been asked for yet. None while guesses are being checked.
    pub(crate) fn num_remaining(&self) -> usize {
        self.num_tokens_coming().saturating_sub(self.num_computed)
    }

    /// It needs one more run to draw its next token, and this is not a prompt's.
    pub(crate) fn is_decoding(&self) -> bool {
        (1..=1 + self.num_from_branch).contains(&self.num_remaining())
    }

    /// The KV is lost and has to be computed again.
    pub(crate) fn forget_computed(&mut self) {
        debug_assert!(self.num_in_flight == 0, "a sequence in flight keeps its KV");
        self.num_computed = 0;
        self.num_applied = 0;
        self.num_from_branch = 0;
    }

    /// Takes a sampled token.
    pub(crate) fn push(&mut self, sampled: &SampledToken) {
        self.token_ids.push(sampled.token_id);
        if let Some(logprobs) = &sampled.logprobs {
            self.cumulative_logprob += logprobs.chosen.logprob;
        }
    }
}
