//! Why a configuration or a request is refused. Each message names the limit and the flag that sets it.

use baton_core::{ParamError, RequestId, TokenId};
use baton_kv::KvError;
use thiserror::Error;

#[derive(Clone, Debug, PartialEq, Error)]
pub enum SchedError {
    #[error(transparent)]
    Kv(#[from] KvError),
    #[error("--{name} must be at least {minimum}, got {got}: {why}")]
    LimitTooLow { name: &'static str, got: usize, minimum: usize, why: &'static str },
    #[error(
        "one sequence of --max-model-len {max_model_len} needs {needed} KV blocks and there are {got}: \
         lower --max-model-len to {fits} or give the KV cache more memory (--gpu-memory-utilization)"
    )]
    PoolTooSmall { max_model_len: usize, needed: usize, got: usize, fits: usize },
    #[error("the number of plans in flight must be 1 or 2, got {0}")]
    PlansInFlight(usize),
    #[error("preemption costs must be finite and not negative, got swap {swap} and recompute {recompute}")]
    Cost { swap: f64, recompute: f64 },

    #[error(transparent)]
    Params(#[from] ParamError),
    #[error("the prompt is empty: it must have at least one token")]
    EmptyPrompt,
    #[error("prompt token {token_id} at position {position} is not a token of any vocabulary")]
    InvalidToken { token_id: TokenId, position: usize },
    #[error(
        "the prompt has {num_tokens} tokens and at least one is to follow, but the model's limit is \
         {max_model_len} tokens (--max-model-len)"
    )]
    PromptTooLong { num_tokens: usize, max_model_len: usize },
    #[error(
        "the request can grow to {needed} KV blocks ({num_sequences} sequences of up to {max_tokens} tokens) and \
         the cache has {available}: lower max_tokens, n or best_of"
    )]
    NeverFits { needed: usize, available: usize, num_sequences: usize, max_tokens: usize },
    #[error(
        "the request asks for {num_sequences} sequences and at most {max_num_seqs} run at a time (--max-num-seqs)"
    )]
    TooManySequences { num_sequences: usize, max_num_seqs: usize },
    #[error(
        "the request brings up to {needed} penalised tokens and biases to a step and the device takes {limit}: lower \
         n, max_tokens or the number of logit_bias entries, or leave the penalties out"
    )]
    TooManyEntries { needed: usize, limit: usize },
    #[error("a request with id {0} is already here: ids must be unique")]
    DuplicateId(RequestId),
    #[error("{limit} requests are waiting already (--max-num-queued-reqs): try again later")]
    QueueFull { limit: usize },
    #[error(
        "{limit} requests of this key are waiting already (--max-num-queued-reqs-per-key): try again later"
    )]
    KeyQueueFull { limit: usize },
    #[error("max-step-slowdown is {0}: it must be 0 (no limit) or at least 1")]
    Slowdown(f64),
}
