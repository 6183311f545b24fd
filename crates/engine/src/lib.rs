//! The engine: requests in, tokens out.
//!
//! One owner changes the state of requests: [`Engine`], driven either by hand (`add_request`, `step`, `abort`,
//! `generate`) or by its own loop thread behind an [`EngineHandle`]. A step is
//! mailbox → `sched` Plan → runner → backend → sampled tokens → `sched` apply → outbox.
//!
//! Not here: text (prompts and outputs are token ids), HTTP, and any knowledge of the device beyond `Backend`.
#![forbid(unsafe_code)]

mod config;
mod engine;
mod error;
mod handle;
mod masks;
mod memory;
mod observe;
mod outbox;
mod relay;
mod runner;

/// Why the scheduler refused a request: part of [`EngineError`].
pub use baton_sched::SchedError;
pub use config::EngineConfig;
pub use engine::{Engine, EngineStats};
pub use error::EngineError;
pub use handle::EngineHandle;
pub use memory::{MemoryPlan, MemoryRequest};
pub use observe::{
    Beat, DeviceReport, Observer, OutputReport, Phase, Pulse, RelayReport, Span, StepReport, TurnReport,
};
pub use outbox::{OutputReceiver, RequestTimes};
pub use relay::{RelayGroup, RelayStats, StepRelay};
