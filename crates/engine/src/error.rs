//! What can go wrong, from the model file to a single request.

use baton_backend::BackendError;
use baton_core::ParamError;
use baton_model::ModelError;
use baton_sched::SchedError;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum EngineError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Param(#[from] ParamError),
    #[error(transparent)]
    Sched(#[from] SchedError),
    #[error("{flag} must be {allowed}, got {got}")]
    Flag { flag: &'static str, allowed: String, got: String },
    #[error(
        "the KV cache has room for {kv_tokens} tokens, but one sequence of --max-model-len {max_model_len} needs \
         {needed}: lower --max-model-len to {kv_tokens}, or raise --kv-cache-memory to at least {needed_memory}"
    )]
    KvTooSmall { kv_tokens: usize, max_model_len: usize, needed: usize, needed_memory: String },
    #[error("prompt token {token_id} is outside the model's vocabulary of {vocab_size}")]
    TokenOutOfVocabulary { token_id: u32, vocab_size: usize },
    #[error("structured_outputs was not compiled for this model: compile it and send it with the request")]
    NotCompiled,
    #[error("the engine's threads could not be started: {reason}")]
    Threads { reason: String },
    #[error("nothing can be pinned without prefix caching: leave out --no-enable-prefix-caching")]
    PinNeedsPrefixCaching,
    #[error(
        "{num_tokens} tokens leave no place for a question within --max-model-len {max_model_len}: shorten the text, or raise \
         --max-model-len"
    )]
    PinTooLong { num_tokens: usize, max_model_len: usize },
    #[error(
        "{num_tokens} pinned tokens leave {left_tokens} in the KV cache, but one sequence of --max-model-len {max_model_len} \
         must fit beside them: shorten the text, lower --max-model-len to {left_tokens}, or raise --kv-cache-memory to at least \
         {needed_memory}"
    )]
    PinTooLarge { num_tokens: usize, left_tokens: usize, max_model_len: usize, needed_memory: String },
    #[error("{device} does not expose its host blocks, so KV cannot be stored or transferred")]
    NoHostBlocks { device: String },
    #[error(
        "KV is stored and transferred through blocks in the host's memory, by prefix: give --swap-space more than {needed_mib} MiB, and leave \
         --no-enable-prefix-caching out"
    )]
    StoreNeedsHostTier { needed_mib: u64 },
    #[error("prefixes are pinned before the first request, and requests are running")]
    PinTooLate,
    #[error(
        "the text has {num_tokens} tokens; this encoder takes 1 to {max_model_len}: shorten it, or set truncate_prompt_tokens"
    )]
    TextLength { num_tokens: usize, max_model_len: usize },
    #[error("this model is an encoder: it computes embeddings and scores, and does not generate text")]
    NoGeneration,
    #[error("the engine's mailbox is full ({limit} commands): try again later")]
    Busy { limit: usize },
    #[error("the engine has stopped")]
    Stopped,
}
