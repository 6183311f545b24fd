//! Random graphs and models, and embeddings computed the plain way.
#![allow(dead_code)] // Each test file uses a part.

use std::path::Path;
use std::sync::Arc;

use baton_backend::SharedBytes;
use baton_backend::graph::{GraphDevice, ReferenceGraph};
use baton_backend::testing::Random;
use baton_cpu::{CpuGraph, CpuOptions};
use baton_graph::{
    Graph, GraphConfig, GraphData, GraphEngine, GraphModel, GraphModelConfig, HostRows, NanPolicy,
};
use baton_model::Safetensors;
use safetensors::tensor::{Dtype, TensorView};

pub fn cpu() -> Box<dyn GraphDevice> {
    Box::new(CpuGraph::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).expect("starts"))
}

pub fn reference(reads_host_memory: bool) -> Box<dyn GraphDevice> {
    Box::new(ReferenceGraph::new(reads_host_memory))
}

/// A checkpoint in memory from names, shapes and values.
pub fn checkpoint(tensors: &[(String, Vec<usize>, Vec<f32>)]) -> Safetensors {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, _, values)| values.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).expect("sizes fit"))
    });
    let file = safetensors::serialize(views, None).expect("serialises");
    Safetensors::from_bytes(Path::new("test"), SharedBytes::from_vec(file)).expect("reads back")
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Sage,
    Project,
    Gcn,
}

/// A random model of some widths: `[features, hidden, …, outputs]`.
pub fn model(kind: Kind, widths: &[usize], config: GraphModelConfig, seed: u64) -> GraphModel {
    let mut random = Random::new(seed);
    let mut tensors = Vec::new();
    for (layer, pair) in widths.windows(2).enumerate() {
        let (inputs, outputs) = (pair[0], pair[1]);
        let mut add = |name: &str, shape: Vec<usize>| {
            let len = shape.iter().product();
            let scale = 1.0 / (inputs as f32).sqrt();
            let values = random.normals(len).iter().map(|x| x * scale).collect();
            tensors.push((format!("convs.{layer}.{name}"), shape, values));
        };
        match kind {
            Kind::Gcn => {
                add("lin.weight", vec![outputs, inputs]);
                add("bias", vec![outputs]);
            }
            Kind::Sage | Kind::Project => {
                add("lin_l.weight", vec![outputs, inputs]);
                add("lin_l.bias", vec![outputs]);
                add("lin_r.weight", vec![outputs, inputs]);
                if kind == Kind::Project {
                    add("lin.weight", vec![inputs, inputs]);
                    add("lin.bias", vec![inputs]);
                }
            }
        }
    }
    GraphModel::from_weights(Path::new("test"), &checkpoint(&tensors), config).expect("a model")
}

/// A graph whose degrees follow a power law: new nodes link to old ones, mostly to those with many links.
pub fn power_law(num_nodes: usize, num_edges: usize, seed: u64) -> Graph {
    let mut random = Random::new(seed);
    let mut ends: Vec<u32> = vec![0];
    let mut edges = Vec::with_capacity(num_edges);
    for number in 0..num_edges {
        let newest = (number * num_nodes / num_edges.max(1)) as u32;
        let other = if random.below(4) == 0 {
            random.below(num_nodes) as u32
        } else {
            ends[random.below(ends.len())]
        };
        edges.push(if random.below(2) == 0 { (newest, other) } else { (other, newest) });
        ends.push(newest);
        ends.push(other);
    }
    Graph::new(num_nodes, &edges).expect("a graph")
}

pub fn data(id: &str, graph: Graph, cols: usize, seed: u64) -> Arc<GraphData> {
    let rows = graph.num_nodes();
    let values = Random::new(seed).normals(rows * cols);
    let features = HostRows::from_f32(rows, cols, values).expect("a matrix");
    Arc::new(GraphData::new(id, 1, graph, features, NanPolicy::Reject).expect("a graph"))
}

pub fn engine(model: GraphModel, device: Box<dyn GraphDevice>, config: GraphConfig) -> GraphEngine {
    GraphEngine::new(model, device, config).expect("an engine")
}

/// Memory for so many device and host blocks.
#[allow(clippy::needless_pass_by_value)]
pub fn with_blocks(
    model: &GraphModel,
    num_device: usize,
    num_host: usize,
    config: GraphConfig,
) -> GraphConfig {
    let width: usize = model.stages().iter().map(baton_graph::Stage::width).sum();
    let block = (width * config.dtype.bytes() * config.block_size) as u64;
    let sums = model.stages().iter().filter_map(|stage| Some(model.width(stage.neighbours?.0))).max();
    let sums = 4 * sums.unwrap_or(1) as u64;
    let features =
        config.feature_rows.unwrap_or(0) as u64 * (model.num_features() * config.dtype.bytes()) as u64;
    // The sums take a sixteenth of all, in whole rows.
    let mut device_bytes = num_device as u64 * block + features;
    while {
        let rows = (device_bytes / 16 / sums).clamp(1, 1 << 13);
        device_bytes - rows * sums < num_device as u64 * block + features
    } {
        device_bytes += sums;
    }
    GraphConfig { device_bytes, host_bytes: num_host as u64 * block, ..config }
}
