//! The contract between scheduler and engine: a `Plan` says what one step computes, a `StepResult` what came out.
//!
//! A Plan is immutable, self-contained and serialisable: it is also what other ranks will be sent.

use std::sync::Arc;

pub use baton_kv::BlockMove;

use baton_core::{
    BlockId, PositionLogprobs, RequestId, SamplingParams, SeqId, TokenCount, TokenId, TokenLogprob,
};
use serde::{Deserialize, Serialize};

/// Stands for a token that a step still in flight will sample for the same sequence.
/// The device takes it from its own feedback buffer.
pub const PENDING_TOKEN: TokenId = TokenId::MAX;

/// One step. The lists are executed in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    pub step: u64,
    /// Device → host: sequences that make room, and cached prefixes that would be evicted next.
    pub swap_out: Vec<BlockMove>,
    /// Host → device. May target device blocks that `swap_out` has just saved.
    pub swap_in: Vec<BlockMove>,
    /// Device → device, before any token of this step is written (copy-on-write).
    pub copies: Vec<BlockMove>,
    /// Host → device, beside this step and later ones: nobody in the step reads these blocks.
    pub fetches: Vec<Fetch>,
    /// Nothing can be computed before a fetch is done: the device waits for all of them.
    pub waits_for_fetches: bool,
    /// What is computed, decodes and prompt chunks alike.
    pub seqs: Vec<PlannedSeq>,
}

/// KV that a sequence waits for. [`StepResult::fetched`] of this step or a later one says when it is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    pub id: u64,
    pub moves: Vec<BlockMove>,
}

/// A run of tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedSeq {
    pub request_id: RequestId,
    pub seq_id: SeqId,
    /// Position of the first token; the KV of all earlier positions is in the blocks.
    pub start: u32,
    /// The tokens to compute, at positions `start..`.
    pub token_ids: Vec<TokenId>,
    /// The last so many of `token_ids` are guesses. Each is checked against what is drawn at the position before it.
    pub num_drafts: u32,
    /// Physical blocks of positions 0.. for each lane of each KV group, covering at least `start + token_ids.len()` tokens.
    /// Rows behind a group's window are [`NO_BLOCK`](baton_kv::NO_BLOCK).
    pub block_tables: Vec<Vec<BlockId>>,
    /// Who takes a token from the logits of the last position, and of those before drafts. Empty for all but the last chunk of
    /// a prompt.
    pub samples: Vec<PlannedSample>,
    /// Which tokens the samples may draw, one bit per token of the vocabulary; all where there is none.
    pub mask: Option<Arc<Vec<u32>>>,
    /// The same after each of the guesses, where there is a mask.
    pub draft_masks: Vec<Arc<Vec<u32>>>,
    /// Positions `start + i` whose logits score the prompt token after them, for `i` in this range
    /// (`prompt_logprobs`; empty when not asked).
    pub scored: std::ops::Range<u32>,
    /// The prompt token after the run, where `scored` ends with the run.
    pub next_token_id: Option<TokenId>,
    /// Which adapter's weights are added. There are none yet.
    pub adapter: Option<u32>,
    pub params: Arc<SamplingParams>,
    /// The end tokens of the request, which `ban_end` bans.
    pub end_token_ids: Arc<[TokenId]>,
}

/// One token to be drawn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedSample {
    /// The sequence that gets the token. After a prompt with n > 1 these are sequences still to be forked.
    pub seq_id: SeqId,
    /// Which of the `n` continuations.
    pub index: u32,
    /// How many output tokens the sequence has before this one: the counter of its random numbers.
    pub num_output_tokens: u32,
    /// End tokens may not be drawn (`min_tokens`).
    pub ban_end: bool,
    /// The tokens so far, where a penalty depends on them.
    pub history: Option<Arc<Vec<TokenCount>>>,
}

impl Plan {
    pub fn num_tokens(&self) -> usize {
        self.seqs.iter().map(|seq| seq.token_ids.len()).sum()
    }

    /// True where nothing is left to compute or move.
    pub fn is_empty(&self) -> bool {
        self.seqs.is_empty()
            && self.swap_out.is_empty()
            && self.swap_in.is_empty()
            && self.copies.is_empty()
            && self.fetches.is_empty()
            && !self.waits_for_fetches
    }
}

impl PlannedSeq {
    /// How many rows of logits this run needs.
    pub fn num_logit_rows(&self) -> usize {
        // The last position may be both scored and sampled from; `scored` never includes it then, because the
        // token after the last prompt token is not a prompt token.
        self.scored.len() + if self.samples.is_empty() { 0 } else { 1 + self.num_drafts as usize }
    }
}

/// What a step sampled, parallel to `Plan::seqs`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    pub seqs: Vec<SeqResult>,
    /// Fetches of this step or of earlier ones that are done.
    pub fetched: Vec<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SeqResult {
    /// Parallel to `PlannedSeq::samples`; empty for beam search. With drafts: those that were accepted and the token after
    /// them, of the one sequence that draws.
    pub samples: Vec<SampledToken>,
    /// Beam search: the `2 × width` most likely next tokens, best first.
    pub candidates: Vec<TokenLogprob>,
    /// Parallel to `PlannedSeq::scored`.
    pub prompt_logprobs: Vec<PositionLogprobs>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    pub token_id: TokenId,
    /// Present when the request needs log-probabilities (`logprobs`, `best_of`).
    pub logprobs: Option<PositionLogprobs>,
}
