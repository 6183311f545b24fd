//! What is there of one graph with one way of sampling: which rows were computed, and in which blocks they are.
//!
//! A look-up is O(1): a bit for each node and level says whether its row is there, a table says in which block. Requests for
//! the same graph, version and samples have one view, and so share all of it.

use std::sync::Arc;

use baton_backend::graph::Reduce;

use crate::bits::Bits;
use crate::model::Stage;
use crate::sample::{Adjacency, Sampling};
use crate::{GraphData, GraphModel};

pub(crate) const NONE: u32 = u32::MAX;
pub(crate) type ViewId = usize;

/// What makes two requests share.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ViewKey {
    pub(crate) graph: String,
    pub(crate) version: u64,
    pub(crate) fan_outs: Vec<usize>,
    pub(crate) seed: u64,
    /// Of a request that shares with nobody.
    pub(crate) private: u64,
}

#[derive(Debug)]
pub(crate) struct View {
    pub(crate) key: ViewKey,
    pub(crate) data: Arc<GraphData>,
    /// Of each layer.
    pub(crate) adjacency: Vec<Adjacency>,
    /// Of each layer, `1 / sqrt(degree + 1)` of every node; empty without GCN.
    pub(crate) scales: Vec<Vec<f32>>,
    /// The device block of each block of nodes.
    pub(crate) pages: Vec<u32>,
    pub(crate) host: Vec<u32>,
    /// Requests that need the block and are running or swapped; and only those that are running.
    pub(crate) reserved: Vec<u32>,
    pub(crate) running: Vec<u32>,
    /// The plan that holds the block.
    pub(crate) pinned_by: Vec<u64>,
    /// Whose nodes are being counted; see the planner.
    pub(crate) counted_by: Vec<u64>,
    /// Of each level from 1 on: nodes whose row is there, or will be when the plans that were made have run.
    present: Vec<Bits>,
    pub(crate) num_requests: usize,
    /// Plans that were made and not applied.
    pub(crate) num_plans: usize,
    pub(crate) last_used: u64,
    pub(crate) is_removed: bool,
}

impl View {
    pub(crate) fn new(
        key: ViewKey,
        data: Arc<GraphData>,
        sampling: Option<&Sampling>,
        model: &GraphModel,
        shift: u32,
    ) -> Self {
        let num_nodes = data.num_nodes();
        let num_blocks = num_nodes.div_ceil(1 << shift);
        let graph = if model.uses_gcn() { data.loopless() } else { Arc::clone(data.graph()) };
        let adjacency: Vec<Adjacency> = (0..model.num_layers())
            .map(|layer| Adjacency::new(Arc::clone(&graph), sampling, layer))
            .collect();
        let scales = if model.uses_gcn() {
            adjacency.iter().map(|layer| gcn_scales(layer, num_nodes)).collect()
        } else {
            Vec::new()
        };
        Self {
            key,
            data,
            adjacency,
            scales,
            pages: vec![NONE; num_blocks],
            host: vec![NONE; num_blocks],
            reserved: vec![0; num_blocks],
            running: vec![0; num_blocks],
            pinned_by: vec![0; num_blocks],
            counted_by: vec![0; num_blocks],
            present: vec![Bits::new(num_nodes); model.stages().len()],
            num_requests: 0,
            num_plans: 0,
            last_used: 0,
            is_removed: false,
        }
    }

    pub(crate) fn num_blocks(&self) -> usize {
        self.pages.len()
    }

    pub(crate) fn is_present(&self, level: usize, node: u32) -> bool {
        level == 0 || self.present[level - 1].contains(node)
    }

    /// True where it was not there before.
    pub(crate) fn set_present(&mut self, level: usize, node: u32) -> bool {
        self.present[level - 1].insert(node)
    }

    /// The content of a block is gone.
    pub(crate) fn forget_block(&mut self, block: u32, shift: u32) {
        let first = block << shift;
        let last = (first + (1 << shift)).min(self.data.num_nodes() as u32);
        for level in &mut self.present {
            (first..last).for_each(|node| level.remove(node));
        }
    }

    /// Whether a stage reads its nodes' neighbours, and in which layer.
    pub(crate) fn adjacency_of(&self, stage: &Stage) -> Option<&Adjacency> {
        stage.neighbours.is_some().then(|| &self.adjacency[stage.layer])
    }

    pub(crate) fn scales_of(&self, stage: &Stage) -> Option<&[f32]> {
        matches!(stage.neighbours, Some((_, Reduce::Gcn))).then(|| self.scales[stage.layer].as_slice())
    }
}

fn gcn_scales(adjacency: &Adjacency, num_nodes: usize) -> Vec<f32> {
    (0..num_nodes as u32).map(|node| 1.0 / ((adjacency.degree(node) + 1) as f32).sqrt()).collect()
}

/// Nodes of each level that a request needs, and of each stage those that it has to compute.
pub(crate) struct Need {
    /// Of each stage, in rising order.
    pub(crate) work: Vec<Vec<u32>>,
    /// Blocks of all levels from 1 on, in rising order.
    pub(crate) blocks: Vec<u32>,
    /// Rows that were there already.
    pub(crate) num_reused: u64,
}

impl Need {
    /// From the targets back to the features. What is there is not looked behind.
    pub(crate) fn of(view: &View, model: &GraphModel, targets: &[u32], shift: u32) -> Self {
        let num_nodes = view.data.num_nodes();
        let stages = model.stages();
        let mut needed = vec![Bits::new(num_nodes); stages.len() + 1];
        for &node in targets {
            needed[stages.len()].insert(node);
        }
        let mut blocks = Bits::new(view.num_blocks());
        let mut work = vec![Vec::new(); stages.len()];
        let mut num_reused = 0;
        let mut neighbours = Vec::new();
        for (number, stage) in stages.iter().enumerate().rev() {
            let level = number + 1;
            let (inputs, outputs) = needed.split_at_mut(level);
            for node in outputs[0].iter() {
                blocks.insert(node >> shift);
                if view.is_present(level, node) {
                    num_reused += 1;
                    continue;
                }
                work[number].push(node);
                if let Some(own) = stage.own {
                    inputs[own].insert(node);
                }
                if let (Some((source, reduce)), Some(adjacency)) =
                    (stage.neighbours, view.adjacency_of(stage))
                {
                    if reduce == Reduce::Gcn {
                        inputs[source].insert(node);
                    }
                    neighbours.clear();
                    adjacency.extend(node, &mut neighbours);
                    for &neighbour in &neighbours {
                        inputs[source].insert(neighbour);
                    }
                }
            }
        }
        Self { work, blocks: blocks.iter().collect(), num_reused }
    }

    /// The same for every node of the graph, without a look at its edges.
    pub(crate) fn of_all(view: &View, model: &GraphModel) -> Self {
        let mut num_reused = 0;
        let num_nodes = view.data.num_nodes() as u32;
        let mut missing = |level| {
            let nodes: Vec<u32> = (0..num_nodes).filter(|&node| !view.is_present(level, node)).collect();
            num_reused += u64::from(num_nodes) - nodes.len() as u64;
            nodes
        };
        let work = (1..=model.stages().len()).map(&mut missing).collect();
        Self { work, blocks: (0..view.num_blocks() as u32).collect(), num_reused }
    }
}
