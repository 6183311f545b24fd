//! The types that every crate of Baton shares: ids, requests, sampling parameters, outputs; and the random numbers.
//!
//! This crate holds plain data and its validation. It knows no tensor, no thread, no file and no protocol;
//! it depends on nothing but `serde` and `thiserror`, so any other crate may depend on it.
#![forbid(unsafe_code)]

mod constraint;
mod history;
mod ids;
mod output;
mod params;
pub mod random;
mod request;
mod structured;

pub use constraint::{Constraint, ConstraintMatcher, mask_allows, mask_words};
pub use history::TokenCount;
pub use ids::{BlockId, RequestId, SeqId, TokenId};
pub use output::{DraftCounts, FinishReason, PositionLogprobs, RequestOutput, SequenceOutput, TokenLogprob};
pub use params::{
    BeamParams, MAX_LOGPROBS, MAX_SEQUENCES_PER_REQUEST, MAX_SPECULATIVE_TOKENS, ParamError, SamplingParams,
};
pub use request::Request;
pub use structured::{StructuredOutput, TokenFilter};
