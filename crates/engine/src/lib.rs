//! The engine: requests in, tokens out.
//!
//! One owner changes the state of requests: [`Engine`], driven either by hand (`add_request`, `step`, `abort`,
//! `generate`) or by its own loop thread behind an [`EngineHandle`]. A step is
//! mailbox → `sched` Plan → runner → backend → sampled tokens → `sched` apply → outbox.
//!
//! Not here: text (prompts and outputs are token ids), HTTP, and any knowledge of the device beyond `Backend`.
#![forbid(unsafe_code)]

mod config;
mod encoder;
mod engine;
mod error;
mod handle;
mod masks;
mod memory;
mod observe;
mod outbox;
mod pace;
mod priority;
mod relay;
mod runner;
mod speculate;
mod stores;
mod tiers;

pub use baton_kv::{BlockHash, BlockKey, StorePolicy, StoredRow};
/// Why the scheduler refused a request: part of [`EngineError`].
pub use baton_sched::{KvEvent, SchedError};
pub use config::EngineConfig;
pub use encoder::EncoderEngine;
pub use engine::{Engine, EngineStats, ExpertsTouched};
pub use error::EngineError;
pub use handle::EngineHandle;
pub use memory::{MemoryPlan, MemoryRequest};
pub use observe::{
    DeviceReport, Heartbeat, HeartbeatSnapshot, Observer, OutputReport, Phase, RelayReport, Span, StepReport,
    TurnReport,
};
pub use outbox::{OutputReceiver, RequestClock, RequestTimes};
pub use priority::lower_priority;
pub use relay::{RelayGroup, RelayStats, StepRelay};
pub use speculate::{
    DraftRequest, Guess, NUM_CLASSES, Owner, Proposer, SpeculationStats, SpeculativeConfig, SpeculativeMethod,
};
pub use tiers::{BlockStore, KvIdentity, Prompt, StoreStats, TierStats};
