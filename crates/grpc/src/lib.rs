//! vLLM's gRPC services, `vllm.Inference` and `vllm.Control`, as the sidecar of Dynamo drives them.
//!
//! A request takes the way of an HTTP request: [`baton_serve::Frontend`] checks its key, reads its body within the server's limits,
//! and hands its tokens to the same engine, so that queues, tenants, metrics and the drain are shared. This crate only translates:
//! `request` from protobuf to the fields that all APIs share, `response` back, `inference` and `control` are the services, `server`
//! the connections. It holds no state of a request but a way to abort it by its name.
#![forbid(unsafe_code)]

mod abort;
mod control;
mod inference;
pub mod request;
mod response;
mod server;
mod structs;

pub use control::ControlFacts;
pub use server::{GrpcError, GrpcServer};
