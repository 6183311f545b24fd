//! `baton route`: one address in front of the servers of a site.
//!
//! A request comes in (`server`), its body is read within limits and looked at just enough to know where it belongs
//! (`body`), a policy picks a worker (`policy`, fed by the counts of `worker` and by the prefixes that workers say they
//! hold, `index`), and the answer is passed on frame by frame as it comes (`upstream`). A request that has not begun to be
//! answered may go to another worker (`proxy`); one that has begun is never repeated. Where there are prefill and decode
//! workers, a request visits one of each (`pd`).
//!
//! The router holds no model and no tokenizer, and knows nothing of an engine: it works in front of anything that speaks
//! OpenAI's API. What it needs to know of a worker it asks over HTTP (`probe`, `events`).
#![forbid(unsafe_code)]

mod admin;
mod body;
mod breaker;
mod config;
mod error;
mod events;
mod fleet;
mod hashing;
mod index;
mod merge;
mod metrics;
mod pd;
mod policy;
mod probe;
mod proxy;
mod responses;
mod server;
mod tokenize;
mod upstream;
mod worker;

pub use body::{BodySummary, Kind};
pub use config::{ConfigError, Policy, Role, RouterConfig, WorkerSpec, parse_workers_file};
pub use index::{BlockHashes, PrefixIndex, Stored};
pub use policy::{Candidate, Choice, Chooser};
pub use server::{RouteError, Router};
