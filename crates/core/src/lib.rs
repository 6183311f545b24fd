//! The words that every room of Baton shares: ids, requests, sampling parameters, outputs.
//!
//! This crate holds plain data and its validation. It knows no tensor, no thread, no file and no protocol;
//! it depends on nothing but `serde` and `thiserror`, so any other crate may depend on it.
#![forbid(unsafe_code)]

mod constraint;
mod ids;
mod output;
mod params;
mod request;
mod structured;

pub use constraint::{Constraint, ConstraintMatcher, mask_allows, mask_words};
pub use ids::{BlockId, RequestId, SeqId, TokenId};
pub use output::{FinishReason, PositionLogprobs, RequestOutput, SequenceOutput, TokenLogprob};
pub use params::{BeamParams, MAX_LOGPROBS, MAX_SEQUENCES_PER_REQUEST, ParamError, SamplingParams};
pub use request::Request;
pub use structured::{StructuredOutput, TokenFilter};
