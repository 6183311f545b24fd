//! A request: what is asked for, and how far it has come.

use std::sync::Arc;

use baton_core::RequestId;

use crate::view::ViewId;
use crate::{GraphData, GraphError, Sampling};

/// Embeddings of a graph's nodes are wanted.
#[derive(Clone, Debug)]
pub struct GraphRequest {
    pub data: Arc<GraphData>,
    /// `None` for all nodes.
    pub targets: Option<Vec<u32>>,
    /// `None` for full neighbourhoods.
    pub sampling: Option<Sampling>,
    /// Under [`crate::GraphPolicy::Priority`] the lowest runs first.
    pub priority: i32,
}

impl GraphRequest {
    /// Every node, with full neighbourhoods.
    pub fn whole(data: Arc<GraphData>) -> Self {
        Self { data, targets: None, sampling: None, priority: 0 }
    }
}

/// Rows in the order of the targets.
#[derive(Clone, Debug, PartialEq)]
pub struct Embeddings {
    /// `None` for all nodes in their order.
    pub nodes: Option<Vec<u32>>,
    pub cols: usize,
    pub values: Vec<f32>, // [nodes, cols]
}

/// A request that has ended.
#[derive(Debug)]
pub struct GraphOutput {
    pub request_id: RequestId,
    pub result: Result<Embeddings, GraphError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestStatus {
    Waiting,
    Running,
    /// It has begun, and gave its blocks to others.
    Swapped,
}

/// A group of nodes whose neighbours do not fit together: their sums are made in several steps.
#[derive(Debug)]
pub(crate) struct Cut {
    pub(crate) nodes: Vec<u32>,
    /// Neighbours of each node, in rising order, and how many were planned.
    pub(crate) offsets: Vec<u32>,
    pub(crate) sources: Vec<u32>,
    pub(crate) taken: Vec<u32>,
    /// Pages of the neighbours, in rising order, and the first that no plan has held.
    pub(crate) pages: Vec<u32>,
    pub(crate) next_page: usize,
    pub(crate) has_begun: bool,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) id: RequestId,
    pub(crate) view: ViewId,
    pub(crate) status: RequestStatus,
    pub(crate) priority: i32,
    /// Its place among requests of the same priority.
    pub(crate) turn: u64,
    pub(crate) targets: Option<Vec<u32>>,
    /// Where each target is among the targets, by rising node.
    pub(crate) order: Vec<u32>,
    /// Of each stage, the nodes to compute, and the first that is not planned.
    pub(crate) work: Vec<Vec<u32>>,
    pub(crate) stage: usize,
    pub(crate) next: usize,
    /// The plan in which the stage before was finished: the next one begins later.
    pub(crate) last_plan: u64,
    /// Blocks that it holds against being given up; empty while it waits.
    pub(crate) blocks: Vec<u32>,
    pub(crate) cut: Option<Cut>,
    /// Targets that were not read by the plan that computed them, and the first that is not planned.
    pub(crate) leftover: Option<(Vec<u32>, usize)>,
    /// Targets whose row was read by no plan yet.
    pub(crate) num_unread: usize,
    pub(crate) output: Vec<f32>,
    /// Edges and nodes that were computed for it: who has the least comes next.
    pub(crate) served: u64,
    pub(crate) steps_in_turn: usize,
    /// Rows to compute, for progress.
    pub(crate) num_rows: u64,
    pub(crate) num_rows_done: u64,
}

impl State {
    /// The rows of these nodes in the output.
    pub(crate) fn places<'a>(&'a self, nodes: &'a [u32]) -> impl Iterator<Item = usize> + 'a {
        nodes.iter().map(|node| match &self.targets {
            None => *node as usize,
            Some(targets) => {
                let found = self.order.binary_search_by_key(node, |&place| targets[place as usize]);
                self.order[found.expect("only targets are read")] as usize
            }
        })
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.targets.is_none()
    }
}

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub status: RequestStatus,
    pub num_rows: u64,
    pub num_rows_done: u64,
}

/// Checks targets against a graph.
pub(crate) fn check_targets(targets: &[u32], num_nodes: usize) -> Result<(), GraphError> {
    if targets.is_empty() {
        return Err(GraphError::NoTargets);
    }
    let last = num_nodes - 1;
    if let Some(&node) = targets.iter().find(|&&node| node as usize > last) {
        return Err(GraphError::TargetOutOfRange { node: i64::from(node), last });
    }
    let mut sorted = targets.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(GraphError::DuplicateTarget { node: pair[0] }),
        None => Ok(()),
    }
}
