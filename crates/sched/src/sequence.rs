//! One token sequence of a request and how far it has been computed.

use baton_core::{FinishReason, PositionLogprobs, SeqId, TokenId};

use crate::SampledToken;

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
    pub(crate) cumulative_logprob: f32,
    /// Kept for requests that select at the end and asked for `logprobs`; else handed out at once.
    pub(crate) logprobs: Vec<PositionLogprobs>,
    pub(crate) finish: Option<Finish>,
    /// The next token may not be drawn yet: the engine is still computing which tokens it may be.
    pub(crate) is_held: bool,
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
            cumulative_logprob: 0.0,
            logprobs: Vec::new(),
            finish: None,
            is_held: false,
            has_table: false,
        }
    }

    /// A copy that continues on its own, under a new id and without a share in Plans in flight.
    pub(crate) fn fork(&self, id: SeqId, index: u32) -> Self {
        Self { id, index, num_pending: 0, num_in_flight: 0, ..self.clone() }
    }

    /// Known tokens and those that are going to be sampled.
    pub(crate) fn num_tokens_coming(&self) -> usize {
        self.token_ids.len() + self.num_pending
    }

    /// Tokens whose KV no Plan has been asked for yet.
    pub(crate) fn num_remaining(&self) -> usize {
        self.num_tokens_coming() - self.num_computed
    }

    /// The KV is lost and has to be computed again.
    pub(crate) fn forget_computed(&mut self) {
        debug_assert!(self.num_in_flight == 0, "a sequence in flight keeps its KV");
        self.num_computed = 0;
        self.num_applied = 0;
    }

    /// Takes a sampled token.
    pub(crate) fn push(&mut self, sampled: &SampledToken) {
        self.token_ids.push(sampled.token_id);
        if let Some(logprobs) = &sampled.logprobs {
            self.cumulative_logprob += logprobs.chosen.logprob;
        }
    }
}
