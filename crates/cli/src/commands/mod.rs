//! One module per command. Each takes its parsed flags and a writer, and returns an error to be shown.

pub mod bench;
pub mod chat;
pub mod complete;
pub mod docs;
pub mod graph;
#[cfg(feature = "grpc")]
pub mod grpc;
pub mod inspect;
pub mod models;
pub mod plan;
mod program;
pub mod ps;
pub mod pull;
pub mod quantize;
pub mod route;
pub mod serve;
pub mod shell;
