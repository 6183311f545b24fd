//! `/v1/graphs`: graphs in, embeddings of their nodes out.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::embeddings::{EmbeddingVector, EncodingFormat};

/// Edges in one of three ways, features in one of two.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GraphUpload {
    /// Name of the graph: letters, digits, `.`, `_` and `-`; without it, one is made up.
    pub id: Option<String>,
    /// A graph that changed comes again under its name with a higher version; 1 without it.
    pub version: Option<u64>,
    /// Sources and targets in two lists, as PyTorch Geometric has them. Messages go from source to target.
    pub edge_index: Option<[Vec<u32>; 2]>,
    /// The same as pairs `[source, target]`.
    pub edges: Option<Vec<(u32, u32)>>,
    /// The same as `[2, edges]` unsigned 32-bit little-endian numbers in base64.
    pub edge_index_base64: Option<String>,
    /// A row for each node.
    pub features: Option<Vec<Vec<f32>>>,
    /// The same as `[nodes, features]` 32-bit little-endian floats in base64.
    pub features_base64: Option<String>,
    /// Every edge goes both ways.
    pub undirected: Option<bool>,
    /// What to do about NaNs and infinities in the features.
    pub nan: Option<NanField>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NanField {
    /// An error that names the node.
    #[default]
    Reject,
    /// They go through the network.
    Allow,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GraphEmbeddingRequest {
    /// The nodes that are wanted, each once; without it, all.
    pub nodes: Option<Vec<u32>>,
    /// Neighbours to draw, those of the wanted nodes first (-1 is all); without it, all neighbours.
    pub fan_outs: Option<Vec<i64>>,
    /// Seed of the draw; 0 without it.
    pub seed: Option<u64>,
    /// Numbers, or their bytes in base64.
    pub encoding_format: Option<EncodingFormat>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GraphInfo {
    pub object: &'static str,
    pub id: String,
    pub version: u64,
    pub num_nodes: usize,
    pub num_edges: usize,
    pub num_features: usize,
    /// Host memory that it takes.
    pub bytes: usize,
    pub created: u64,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GraphList {
    pub object: &'static str,
    /// What computes the embeddings.
    pub model: GraphModelInfo,
    pub data: Vec<GraphInfo>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GraphModelInfo {
    pub id: String,
    /// Columns that features must have.
    pub num_features: usize,
    /// Numbers of an embedding.
    pub num_outputs: usize,
    /// Fan-outs that a sampled request needs.
    pub num_layers: usize,
    pub device: String,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DeletedGraph {
    pub id: String,
    pub object: &'static str,
    pub deleted: bool,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GraphEmbeddings {
    pub object: &'static str,
    pub model: String,
    pub graph: String,
    pub version: u64,
    /// In the order in which the nodes were asked for.
    pub data: Vec<NodeEmbedding>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct NodeEmbedding {
    pub object: &'static str,
    pub index: usize,
    pub node: u32,
    pub embedding: EmbeddingVector,
}
