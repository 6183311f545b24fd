//! The flags of `baton graph`.

use std::path::PathBuf;

use baton_graph::{FeaturePolicy, GraphConfig, RowDtype};
use clap::{Args, Subcommand, ValueEnum};

use crate::size::parse_size;

pub const GRAPH_EXAMPLES: &str = "\
Examples:
  baton graph run sage.safetensors --edges edges.csv --features x.npy --out embeddings.npy
  baton graph run ./model --edges edges.parquet --features x.npy --targets nodes.npy --fan-outs 10,25
  baton graph bench --nodes 100000 --edges 1000000";

#[derive(Debug, Subcommand)]
pub enum GraphCommand {
    /// Compute embeddings of a graph's nodes
    Run(Box<GraphRunArgs>),
    /// Measure whole-graph inference, on files or on a synthetic graph
    Bench(Box<GraphBenchArgs>),
}

#[derive(Debug, Args)]
pub struct GraphRunArgs {
    /// A .safetensors file with PyTorch Geometric's names, or a directory with one and a config.json
    pub model: PathBuf,
    /// Edges, source and target: .npy or .npz ([2, edges] or [edges, 2]), .csv, .tsv or .parquet
    #[arg(long, value_name = "FILE")]
    pub edges: PathBuf,
    /// Features of the nodes, one row each: .npy, .npz, .csv or .parquet
    #[arg(long, value_name = "FILE")]
    pub features: PathBuf,
    /// Nodes whose embeddings are wanted [default: all]
    #[arg(long, value_name = "FILE")]
    pub targets: Option<PathBuf>,
    /// Where the embeddings go, in the order of the targets
    #[arg(long, value_name = "FILE", default_value = "embeddings.npy")]
    pub out: PathBuf,
    /// Every edge goes both ways
    #[arg(long)]
    pub undirected: bool,
    /// Neighbours to draw, by distance from the targets, such as 10,25 (-1 is all); without it, all neighbours
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', allow_hyphen_values = true)]
    pub fan_outs: Vec<i64>,
    /// Seed of the draw
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// What to do about NaNs and infinities in the features
    #[arg(long, value_name = "POLICY", default_value = "reject")]
    pub nan: NanArg,
    #[command(flatten)]
    pub engine: GraphEngineArgs,
}

#[derive(Debug, Args)]
pub struct GraphBenchArgs {
    /// A model; without one, GraphSAGE with random weights
    pub model: Option<PathBuf>,
    /// Edges from a file instead of synthetic ones
    #[arg(long, value_name = "FILE", requires = "features", conflicts_with_all = ["nodes", "num_edges"])]
    pub edges_file: Option<PathBuf>,
    /// Features from a file
    #[arg(long, value_name = "FILE", requires = "edges_file")]
    pub features: Option<PathBuf>,
    /// Nodes of the synthetic graph
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub nodes: usize,
    /// Edges of the synthetic graph, whose degrees follow a power law
    #[arg(long = "edges", value_name = "N", default_value_t = 1_000_000)]
    pub num_edges: usize,
    /// Widths of the synthetic model: features, hidden layers, embeddings
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', default_value = "128,128,128")]
    pub widths: Vec<usize>,
    /// Number of measurements
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub repeat: usize,
    /// Overlapping sets of targets instead of the whole graph, with and without sharing
    #[arg(long, value_name = "SETS")]
    pub overlap: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: GraphEngineArgs,
}

/// Graphs beside a language model.
#[derive(Debug, Args)]
#[command(next_help_heading = "Graph engine")]
pub struct GraphServeArgs {
    /// Also serve a graph model under /v1/graphs: a .safetensors file with PyTorch Geometric's names, or a directory
    #[arg(long, value_name = "PATH")]
    pub graph_model: Option<PathBuf>,
    /// The most graphs that are kept for clients; with several keys, one may have half
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_graphs: usize,
    /// Host memory of all graphs that are kept; with several keys, one may have half
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size)]
    pub max_graph_memory: u64,
    /// The most requests for embeddings at a time; with several keys, one may have half
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_graph_requests: usize,
    #[command(flatten)]
    pub engine: GraphEngineArgs,
}

/// What a graph engine is told.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Graph engine")]
pub struct GraphEngineArgs {
    /// cpu, cuda or cuda:N
    #[arg(long = "graph-device", value_name = "DEVICE", default_value = "cpu")]
    pub graph_device: String,
    /// Threads of the graph engine [default: one per physical core]
    #[arg(long, value_name = "N")]
    pub graph_threads: Option<usize>,
    /// Memory of the device for embeddings and cached features
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size)]
    pub graph_memory: u64,
    /// Host memory for embeddings that do not fit there
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size)]
    pub graph_swap_space: u64,
    /// Nodes per block: a power of two
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub graph_block_size: usize,
    /// How embeddings and features are kept
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub graph_dtype: GraphDtypeArg,
    /// Rows of a cache of input features; without it, none on the CPU, and elsewhere an eighth of the memory beside
    /// another for the features of graphs that fit there
    #[arg(long, value_name = "ROWS")]
    pub feature_cache_rows: Option<usize>,
    /// Which input rows are kept
    #[arg(long, value_name = "POLICY", default_value = "lru")]
    pub feature_cache_policy: FeaturePolicyArg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GraphDtypeArg {
    F32,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FeaturePolicyArg {
    Lru,
    Lfu,
    /// Those of the nodes that most others listen to
    Static,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NanArg {
    Reject,
    Allow,
}

impl GraphEngineArgs {
    pub fn config(&self) -> GraphConfig {
        // A GPU has more to do in a step, and each costs it a launch and a wait.
        let steps = if self.graph_device.starts_with("cuda") { 8 } else { 1 };
        let small = GraphConfig::default();
        GraphConfig {
            max_step_nodes: steps * small.max_step_nodes,
            max_step_edges: steps * small.max_step_edges,
            device_bytes: self.graph_memory,
            host_bytes: self.graph_swap_space,
            block_size: self.graph_block_size,
            dtype: match self.graph_dtype {
                GraphDtypeArg::F32 => RowDtype::F32,
                GraphDtypeArg::Bf16 => RowDtype::BF16,
            },
            feature_rows: self.feature_cache_rows,
            feature_policy: match self.feature_cache_policy {
                FeaturePolicyArg::Lru => FeaturePolicy::Lru,
                FeaturePolicyArg::Lfu => FeaturePolicy::Lfu,
                FeaturePolicyArg::Static => FeaturePolicy::Static,
            },
            ..GraphConfig::default()
        }
    }
}
