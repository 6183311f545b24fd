//! The scheduler: requests and KV blocks in, [`Plan`]s out; sampled tokens in, outputs out.
//!
//! [`Scheduler::schedule`] decides what one step computes, [`Scheduler::apply`] is the only place where sequences
//! move on. Requests wait in three queues, known from vLLM: *waiting* (no KV), *running* (KV on the device),
//! *swapped* (KV in the host tier). There is no prefill phase and no decode phase: every sequence has computed some
//! of its tokens and lacks the others, and each step spends one token budget on that.
//!
//! The scheduler is pure: no tensor, thread, clock or chance. The same calls give the same Plans.
#![forbid(unsafe_code)]

mod admit;
mod apply;
mod beam;
mod claims;
mod config;
mod cost;
mod drafts;
mod error;
mod group;
mod history;
mod loads;
mod order;
mod plan;
mod preempt;
mod schedule;
mod scheduler;
mod select;
mod sequence;
mod shares;
mod stats;
mod turns;

pub use baton_kv::{EvictionPolicy, KvConfig, KvEvent, KvGroup, NO_BLOCK};
pub use config::{Policy, PreemptionMode, SchedConfig};
pub use cost::{CostModel, StepCost};
pub use drafts::{DraftBranch, Drafts};
pub use error::SchedError;
pub use loads::StoreQuery;
pub use plan::{
    BlockMove, Fetch, PENDING_TOKEN, Plan, PlannedBranch, PlannedSample, PlannedSeq, SampledToken, SeqResult,
    StepResult,
};
pub use scheduler::{Scheduler, SequenceView};
pub use sequence::Wait;
pub use stats::{QueueRoom, SchedStats};
