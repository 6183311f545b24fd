//! A graph with its features and its name: what requests refer to.

use std::sync::{Arc, OnceLock};

use baton_backend::graph::HostRows;

use crate::{Graph, GraphError};

/// What is done about NaNs and infinities in features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NanPolicy {
    /// They are an error that names the node.
    #[default]
    Reject,
    /// They go through the network: every node that hears of one may become NaN. A maximum may lose them.
    Allow,
}

/// A graph and what is known of its nodes. Never changed: a changed graph has a new version.
#[derive(Clone, Debug)]
pub struct GraphData {
    id: String,
    version: u64,
    graph: Arc<Graph>,
    loopless: Arc<OnceLock<Arc<Graph>>>,
    features: HostRows,
}

impl GraphData {
    pub fn new(
        id: impl Into<String>,
        version: u64,
        graph: Graph,
        features: HostRows,
        nan_policy: NanPolicy,
    ) -> Result<Self, GraphError> {
        if features.rows() != graph.num_nodes() {
            let (what, allowed) = ("the number of feature rows", "there must be one for each node");
            return Err(GraphError::Config { what, got: features.rows().to_string(), allowed });
        }
        if nan_policy == NanPolicy::Reject
            && let Some(node) = features.first_non_finite()
        {
            return Err(GraphError::NotFinite { node });
        }
        let loopless = Arc::new(OnceLock::new());
        Ok(Self { id: id.into(), version, graph: Arc::new(graph), loopless, features })
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn version(&self) -> u64 {
        self.version
    }

    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    pub fn num_nodes(&self) -> usize {
        self.graph.num_nodes()
    }

    pub fn features(&self) -> &HostRows {
        &self.features
    }

    /// Host memory that it takes.
    pub fn bytes(&self) -> usize {
        self.graph.bytes() + self.features.bytes()
    }

    /// The graph as GCN sees it.
    pub(crate) fn loopless(&self) -> Arc<Graph> {
        Arc::clone(self.loopless.get_or_init(|| {
            let has_loops = (0..self.graph.num_nodes() as u32)
                .any(|node| self.graph.neighbours(node).binary_search(&node).is_ok());
            if has_loops { Arc::new(self.graph.without_loops()) } else { Arc::clone(&self.graph) }
        }))
    }
}
