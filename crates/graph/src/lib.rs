//! Graph networks on paged blocks: the embeddings of a graph's nodes are a cache, as the KV of tokens is.
//!
//! [`GraphEngine`] has the shape of the engine for language models. Requests ([`GraphRequest`]: a graph, some or all of its
//! nodes, full or sampled neighbourhoods) go into queues; each [`GraphEngine::step`] plans tasks of several graphs with the
//! block moves that they need, runs them on a [`GraphDevice`](baton_backend::graph::GraphDevice) and returns what has ended.
//! A block holds some nodes' embeddings of all layers. What is there is not computed again, whoever asked for it first; what
//! does not fit on the device is swapped to the host, ahead of need and beside the computing.
//!
//! The way of a request: `scheduler` (queues, memory) → `planner` (a Plan) → `engine` (device, outputs). `view` knows what is
//! computed, `blocks` where it is, `features` which input rows the device has, `files` reads graphs.
//!
//! Not here: kernels (`cpu`, `cuda`), HTTP (`serve`), token sequences (`sched`, `engine`).
#![forbid(unsafe_code)]

mod bits;
mod blocks;
mod config;
mod csr;
mod data;
mod engine;
mod error;
mod features;
pub mod files;
mod model;
mod plan;
mod planner;
mod request;
mod sample;
mod scheduler;
mod service;
mod stats;
pub mod synthetic;
mod view;

pub use baton_backend::graph::{HostRows, RowDtype, RowValues};
pub use blocks::SwapCounts;
pub use config::{FeaturePolicy, GraphConfig, GraphPolicy};
pub use csr::{Graph, MAX_EDGES, MAX_NODES};
pub use data::{GraphData, NanPolicy};
pub use engine::GraphEngine;
pub use error::GraphError;
pub use features::FeatureCounts;
pub use model::{Aggregation, BetweenLayers, GraphModel, GraphModelConfig, Stage};
pub use request::{Embeddings, GraphOutput, GraphRequest, Progress, RequestStatus};
pub use sample::Sampling;
pub use service::{GraphService, Reply, ServiceInfo, Ticket};
pub use stats::GraphStats;
