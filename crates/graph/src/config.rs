//! What an engine is told at start.

use baton_backend::graph::RowDtype;
use baton_kv::EvictionPolicy;

use crate::GraphError;

/// Who runs first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GraphPolicy {
    /// Who came first.
    #[default]
    Fcfs,
    /// The lowest `priority` first; it also drives others out.
    Priority,
}

/// Which input rows a cache of features keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FeaturePolicy {
    /// The rows that were read last.
    #[default]
    Lru,
    /// The rows that were read most often.
    Lfu,
    /// The rows of the nodes that most others listen to, chosen once (as PaGraph does).
    Static,
}

/// Sizes and habits of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphConfig {
    /// Memory of the device for embeddings, sums and cached features.
    pub device_bytes: u64,
    /// Host memory for blocks that do not fit.
    pub host_bytes: u64,
    /// Nodes of a block: a power of two.
    pub block_size: usize,
    pub dtype: RowDtype,
    pub policy: GraphPolicy,
    pub eviction: EvictionPolicy,
    /// Rows of the cache of input features. `None`: none on a device that reads host memory; elsewhere an eighth of its memory,
    /// beside another eighth for the features of graphs that fit there whole.
    pub feature_rows: Option<usize>,
    pub feature_policy: FeaturePolicy,
    /// Blocks are saved to the host ahead of need from this share of the pool on.
    pub high_water: f64,
    /// The most nodes and edges of a step.
    pub max_step_nodes: usize,
    pub max_step_edges: usize,
    /// Steps that a request runs before others that do not fit beside it get their turn.
    pub quantum_steps: usize,
    pub max_running: usize,
    pub max_waiting: usize,
    /// Graphs without a request whose embeddings are kept.
    pub max_idle_views: usize,
    /// Requests for the same graph and samples share what is computed.
    pub enable_sharing: bool,
}

impl Default for GraphConfig {
    fn default() -> Self {
        Self {
            device_bytes: 1 << 30,
            host_bytes: 1 << 30,
            block_size: 64,
            dtype: RowDtype::F32,
            policy: GraphPolicy::Fcfs,
            eviction: EvictionPolicy::Lru,
            feature_rows: None,
            feature_policy: FeaturePolicy::Lru,
            high_water: 0.8,
            max_step_nodes: 1 << 15,
            max_step_edges: 1 << 20,
            quantum_steps: 16,
            max_running: 64,
            max_waiting: 1024,
            max_idle_views: 64,
            enable_sharing: true,
        }
    }
}

impl GraphConfig {
    pub fn validate(&self) -> Result<(), GraphError> {
        let wrong = |what, got: String, allowed| Err(GraphError::Config { what, got, allowed });
        if !self.block_size.is_power_of_two() || self.block_size > 1 << 16 {
            return wrong(
                "the block size",
                self.block_size.to_string(),
                "a power of two up to 65536 is needed",
            );
        }
        if !(0.0..=1.0).contains(&self.high_water) {
            return wrong(
                "the high-water mark",
                self.high_water.to_string(),
                "a share from 0 to 1 is needed",
            );
        }
        for (what, value) in [
            ("the most nodes of a step", self.max_step_nodes),
            ("the most edges of a step", self.max_step_edges),
            ("the quantum", self.quantum_steps),
            ("the most running requests", self.max_running),
        ] {
            if value == 0 {
                return wrong(what, "0".to_owned(), "at least 1 is needed");
            }
        }
        Ok(())
    }

    pub(crate) fn shift(&self) -> u32 {
        self.block_size.trailing_zeros()
    }
}
