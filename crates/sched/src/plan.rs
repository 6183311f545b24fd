//! The contract between scheduler and engine: a `Plan` says what one step computes, a `StepResult` what came out.
//!
//! A Plan is immutable, self-contained and serialisable: it is also what other ranks will be sent.

use std::sync::Arc;

pub use baton_kv::BlockMove;

use baton_core::{BlockId, PositionLogprobs, RequestId, SamplingParams, SeqId, TokenId, TokenLogprob};
use serde::{Deserialize, Serialize};

/// Stands for a token that a step still in flight will sample for the same sequence.
/// The device takes it from its own feedback buffer.
pub const PENDING_TOKEN: TokenId = TokenId::MAX;

/// One step. The lists are executed in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    pub step: u64,
    /// Device → host.
    pub swap_out: Vec<BlockMove>,
    /// Host → device. May target device blocks that `swap_out` has just saved.
    pub swap_in: Vec<BlockMove>,
    /// Device → device, before any token of this step is written (copy-on-write).
    pub copies: Vec<BlockMove>,
    /// What is computed, decodes and prompt chunks alike.
    pub seqs: Vec<PlannedSeq>,
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
    /// Physical blocks of positions 0.., covering at least `start + token_ids.len()` tokens.
    pub block_table: Vec<BlockId>,
    /// Who takes a token from the logits of the last position. Empty for all but the last chunk of a prompt.
    pub samples: Vec<PlannedSample>,
    /// Positions `start + i` whose logits score the prompt token after them, for `i` in this range
    /// (`prompt_logprobs`; empty when not asked).
    pub scored: std::ops::Range<u32>,
    pub params: Arc<SamplingParams>,
    /// The end tokens of the request, which `ban_end` bans.
    pub end_token_ids: Arc<[TokenId]>,
}

/// One token to be drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedSample {
    /// The sequence that gets the token. After a prompt with n > 1 these are sequences still to be forked.
    pub seq_id: SeqId,
    /// Which of the `n` continuations.
    pub index: u32,
    /// How many output tokens the sequence has before this one: the counter of its random numbers.
    pub num_output_tokens: u32,
    /// End tokens may not be drawn (`min_tokens`).
    pub ban_end: bool,
}

impl Plan {
    pub fn num_tokens(&self) -> usize {
        self.seqs.iter().map(|seq| seq.token_ids.len()).sum()
    }

    /// True where nothing is left to compute or move.
    pub fn is_empty(&self) -> bool {
        self.seqs.is_empty() && self.swap_out.is_empty() && self.swap_in.is_empty() && self.copies.is_empty()
    }
}

impl PlannedSeq {
    /// How many rows of logits this run needs.
    pub fn num_logit_rows(&self) -> usize {
        // The last position may be both scored and sampled from; `scored` never includes it then, because the
        // token after the last prompt token is not a prompt token.
        self.scored.len() + usize::from(!self.samples.is_empty())
    }
}

/// What a step sampled, parallel to `Plan::seqs`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    pub seqs: Vec<SeqResult>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SeqResult {
    /// Parallel to `PlannedSeq::samples`; empty for beam search.
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
