//! Embeds the nodes of a small graph with a model of random weights:
//!
//! ```text
//! cargo run --example embed_nodes -p baton-graph
//! ```

use std::sync::Arc;

use baton_cpu::{CpuGraph, CpuOptions};
use baton_graph::{
    Graph, GraphConfig, GraphData, GraphEngine, GraphModelConfig, GraphRequest, NanPolicy, Sampling,
    synthetic,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Messages go from source to target; a node hears from its incoming edges.
    let graph = Graph::new(4, &[(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])?;
    let features = synthetic::features(4, 8, 1).ok_or("too large")?;
    let data = Arc::new(GraphData::new("ring", 1, graph, features, NanPolicy::Reject)?);

    // A checkpoint of PyTorch Geometric is opened with `GraphModel::open(path, None)`.
    let model = synthetic::sage(&[8, 16, 4], GraphModelConfig::default(), 1)?;
    let device = Box::new(CpuGraph::new(CpuOptions::default())?);
    let mut engine = GraphEngine::new(model, device, GraphConfig::default())?;

    let whole = engine.add_graph(GraphRequest::whole(Arc::clone(&data)))?;
    let sampling = Some(Sampling { fan_outs: vec![2, 2], seed: 7 });
    engine.add_graph(GraphRequest { targets: Some(vec![2]), sampling, ..GraphRequest::whole(data) })?;
    while engine.has_requests() {
        for output in engine.step()? {
            let kind = if output.request_id == whole { "whole graph" } else { "node 2, sampled" };
            println!("{kind}: {:?}", output.result?.values);
        }
    }
    Ok(())
}
