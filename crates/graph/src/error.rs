//! What can be wrong with graphs, models, files and requests. Each error says what to do.

use std::path::PathBuf;

use baton_backend::BackendError;
use baton_model::ModelError;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum GraphError {
    #[error("the graph has no nodes: give it at least one row of features")]
    EmptyGraph,
    #[error("{got} nodes are too many: a graph may have {limit}")]
    TooManyNodes { got: usize, limit: usize },
    #[error("{got} edges are too many: a graph may have {limit}")]
    TooManyEdges { got: usize, limit: usize },
    #[error(
        "edge {edge} goes from node {source_node} to node {target_node}, but the graph has nodes 0 to {last}"
    )]
    EdgeOutOfRange { edge: usize, source_node: i64, target_node: i64, last: usize },
    #[error("target {node} is not a node: the graph has nodes 0 to {last}")]
    TargetOutOfRange { node: i64, last: usize },
    #[error("node {node} is asked for twice: name each target once")]
    DuplicateTarget { node: u32 },
    #[error("no targets: name at least one node, or leave the targets out for the whole graph")]
    NoTargets,
    #[error("the features have {got} columns, but the model takes {expected}")]
    FeatureWidth { got: usize, expected: usize },
    #[error(
        "the features of node {node} hold a NaN or an infinity: clean them, or allow them with the NaN policy `allow`"
    )]
    NotFinite { node: usize },
    #[error(
        "{got} fan-outs, but the model has {expected} layers: give one for each hop, that of the targets first"
    )]
    FanOuts { got: usize, expected: usize },
    #[error("a fan-out is 0: a layer samples at least one neighbour")]
    ZeroFanOut,
    #[error(
        "graph {id:?} in version {version} is already known with another size: give changed graphs a new version"
    )]
    VersionReused { id: String, version: u64 },
    #[error("graph {id:?} is not known")]
    UnknownGraph { id: String },
    #[error(
        "the request needs {needed} blocks and the engine has {capacity}: give it more memory, or ask for fewer targets"
    )]
    TooLarge { needed: usize, capacity: usize },
    #[error("{waiting} requests are waiting already: try again later")]
    QueueFull { waiting: usize },
    #[error(
        "{what} does not fit: {bytes} bytes of memory give {blocks} blocks, and at least {needed} are needed"
    )]
    TooLittleMemory { what: &'static str, bytes: u64, blocks: usize, needed: usize },
    #[error("{what} is {got}: {allowed}")]
    Config { what: &'static str, got: String, allowed: &'static str },
    #[error("the model {path}: {what}")]
    Model { path: String, what: String },
    #[error("{path}: {what}")]
    File { path: PathBuf, what: String },
    #[error("the graph engine failed: {cause}")]
    Failed { cause: String },
    #[error(transparent)]
    Weights(#[from] ModelError),
    #[error(transparent)]
    Device(#[from] BackendError),
}

impl GraphError {
    pub(crate) fn model(path: &std::path::Path, what: impl Into<String>) -> Self {
        Self::Model { path: path.display().to_string(), what: what.into() }
    }
}
