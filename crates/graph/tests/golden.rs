//! Embeddings against PyTorch Geometric's: every aggregation, full and sampled neighbourhoods, random graphs and a real one.
//! `tests/data/make_golden.py` wrote the files.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_graph::{
    Graph, GraphConfig, GraphData, GraphModel, GraphModelConfig, GraphRequest, HostRows, NanPolicy, Sampling,
};
use baton_model::{Safetensors, WeightSource};
use common::{cpu, engine, reference};
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    model: String,
    config: GraphModelConfig,
    graph: String,
    fan_outs: Vec<usize>,
    out: String,
}

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// A matrix of the golden file.
fn matrix(golden: &Safetensors, name: &str) -> (usize, usize, Vec<f32>) {
    let tensor = golden.tensor(name).expect("readable").expect("there");
    let values = tensor.bytes().as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
    (tensor.rows(), tensor.cols(), values)
}

fn graph(golden: &Safetensors, name: &str) -> Arc<GraphData> {
    let (_, num_edges, edges) = matrix(golden, &format!("graph.{name}.edges"));
    let (num_nodes, cols, features) = matrix(golden, &format!("graph.{name}.x"));
    let edge = |edge: usize| (edges[edge] as i64, edges[num_edges + edge] as i64);
    let graph = Graph::from_columns(num_nodes, num_edges, edge).expect("a graph");
    let features = HostRows::from_f32(num_nodes, cols, features).expect("a matrix");
    Arc::new(GraphData::new(name, 1, graph, features, NanPolicy::Reject).expect("a graph"))
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| if a.is_finite() { (a - b).abs() } else { f32::INFINITY })
        .fold(0.0, f32::max)
}

#[test]
fn embeddings_are_those_of_pytorch_geometric() {
    let golden = Safetensors::open_files(&[path("golden.safetensors")]).expect("opens");
    let cases: Vec<Case> =
        serde_json::from_slice(&std::fs::read(path("golden.json")).expect("reads")).expect("parses");
    assert_eq!(cases.len(), 36);
    for case in cases {
        let model = GraphModel::open(&path(&format!("{}.safetensors", case.model)), Some(case.config))
            .expect("opens");
        let data = graph(&golden, &case.graph);
        let (_, cols, expected) = matrix(&golden, &case.out);
        let sampling =
            (!case.fan_outs.is_empty()).then(|| Sampling { fan_outs: case.fan_outs.clone(), seed: 42 });
        let targets: Vec<u32> = (0..data.num_nodes() as u32).step_by(7).rev().collect();
        let request = GraphRequest { sampling, ..GraphRequest::whole(data) };
        for device in [cpu(), reference(false)] {
            let config = GraphConfig {
                device_bytes: 1 << 20,
                host_bytes: 1 << 20,
                block_size: 8,
                ..GraphConfig::default()
            };
            let mut engine = engine(model.clone(), device, config);
            let name =
                format!("{} {} {:?} on {}", case.model, case.graph, case.fan_outs, engine.device().name);
            // Some targets first, so that the whole graph finds rows that are there.
            engine
                .add_graph(GraphRequest { targets: Some(targets.clone()), ..request.clone() })
                .expect("fits");
            let some = engine.run_all().expect("runs").pop().expect("ends").result.expect("finishes");
            engine.add_graph(request.clone()).expect("fits");
            let all = engine.run_all().expect("runs").pop().expect("ends").result.expect("finishes");
            let difference = largest_difference(&all.values, &expected);
            assert!(difference < 1e-5, "{name}: differs by {difference}");
            for (row, node) in some.values.chunks_exact(cols).zip(&targets) {
                assert_eq!(row, &all.values[*node as usize * cols..][..cols], "{name}: node {node}");
            }
            assert!(engine.stats().rows_reused > 0, "{name}");
        }
    }
}
