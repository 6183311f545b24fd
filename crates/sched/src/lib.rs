//! The scheduler. Being built.
#![forbid(unsafe_code)]

mod plan;

pub use plan::{
    BlockMove, PENDING_TOKEN, Plan, PlannedSample, PlannedSeq, SampledToken, SeqResult, StepResult,
};
