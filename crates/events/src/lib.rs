//! News of cached KV blocks for routers and stores, as vLLM publishes them.
//!
//! `hub` is the history that the engine writes and everybody else reads; `wire` is what is said, `msgpack` how it is written,
//! `zmq` the sockets. Bytes that come from the network are checked and bounded here; whoever
//! reads events trusts none of their numbers.
#![forbid(unsafe_code)]

mod config;
mod hub;
mod msgpack;
mod wire;
mod zmq;

pub use config::KvEventsConfig;
pub use hub::{EventHub, Read};
pub use msgpack::{DecodeError, decode, encode};
pub use wire::{Event, EventBatch};
pub use zmq::{Publisher, Received, Subscriber, ZmqError};
