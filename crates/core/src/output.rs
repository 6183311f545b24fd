//! Outputs of the engine: token ids and log-probabilities, as they come.

use serde::{Deserialize, Serialize};

use crate::{RequestId, TokenId};

/// Why a sequence ended. The names on the wire are OpenAI's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// An end token, a stop token or a stop string.
    Stop,
    /// `max_tokens` or the model's length limit.
    Length,
    /// The client went away or asked for it.
    Abort,
    /// The request can never run, or its step failed.
    Error,
}

/// A token with its natural-log probability and its rank (1 is the most likely token).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    pub token_id: TokenId,
    pub logprob: f32,
    pub rank: u32,
}

/// The log-probabilities of one position, from the raw logits (before penalties and temperature).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PositionLogprobs {
    /// The token that stands at the position.
    pub chosen: TokenLogprob,
    /// The most likely tokens, best first.
    pub top: Vec<TokenLogprob>,
}

/// New tokens of one continuation of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequenceOutput {
    /// Which of the `n` continuations.
    pub index: u32,
    /// Tokens since the last output. An end token that stopped the sequence is included.
    pub token_ids: Vec<TokenId>,
    /// One entry a token when the request asked for `logprobs`, else empty.
    pub logprobs: Vec<PositionLogprobs>,
    /// Sum over all output tokens so far; 0 unless log-probabilities were computed.
    pub cumulative_logprob: f32,
    pub finish_reason: Option<FinishReason>,
    /// The end or stop token that finished the sequence: the text layer leaves it out of the text.
    pub stop_token_id: Option<TokenId>,
}

/// Speculation in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftCounts {
    pub num_accepted: u32,
    pub num_rejected: u32,
}

impl DraftCounts {
    pub fn add(&mut self, other: Self) {
        self.num_accepted += other.num_accepted;
        self.num_rejected += other.num_rejected;
    }
}

/// What one step produced for one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestOutput {
    pub request_id: RequestId,
    pub outputs: Vec<SequenceOutput>,
    /// Log-probabilities of prompt tokens 1.., handed over once, when the prompt is done.
    pub prompt_logprobs: Vec<PositionLogprobs>,
    /// Prompt tokens whose KV came from the prefix cache. Set with the first output.
    pub num_cached_tokens: u32,
    /// The hidden state of the last prompt token after the last norm, with `pooling`; empty otherwise. Set with the first
    /// output.
    pub pooled: Vec<f32>,
    /// Guesses of this request's tokens that the step checked, and how many of them were right.
    #[serde(default)]
    pub drafts: DraftCounts,
    /// No further output of this request follows.
    pub finished: bool,
    /// Why the structured output is not possible: a client error that ends the request.
    #[serde(default)]
    pub shape_failure: Option<String>,
}

impl SequenceOutput {
    /// Appends a later output of the same continuation.
    pub fn extend(&mut self, later: Self) {
        self.token_ids.extend(later.token_ids);
        self.logprobs.extend(later.logprobs);
        self.cumulative_logprob = later.cumulative_logprob;
        self.finish_reason = later.finish_reason;
        self.stop_token_id = later.stop_token_id;
    }
}

impl RequestOutput {
    /// Appends a later output of the same request.
    pub fn extend(&mut self, later: Self) {
        for new in later.outputs {
            match self.outputs.iter_mut().find(|old| old.index == new.index) {
                Some(old) => old.extend(new),
                None => self.outputs.push(new),
            }
        }
        self.prompt_logprobs.extend(later.prompt_logprobs);
        self.num_cached_tokens = self.num_cached_tokens.max(later.num_cached_tokens);
        if !later.pooled.is_empty() {
            self.pooled = later.pooled;
        }
        self.drafts.add(later.drafts);
        self.finished |= later.finished;
        self.shape_failure = later.shape_failure.or(self.shape_failure.take());
    }
}
