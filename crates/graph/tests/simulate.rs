//! The scheduler under random loads: a hundred thousand steps with graphs that come and go, aborts, tiny pools, all policies.
//! Every result is compared with one computed alone in an ample pool; the books are checked after every step.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_backend::testing::Random;
use baton_core::RequestId;
use baton_graph::{
    FeaturePolicy, GraphConfig, GraphData, GraphModel, GraphModelConfig, GraphPolicy, GraphRequest, Sampling,
};
use common::{Kind, data, engine, model, power_law, reference, with_blocks};

const NUM_STEPS: usize = 100_000;

struct World {
    graphs: Vec<Arc<GraphData>>,
    /// All embeddings of each graph and way of sampling.
    expected: BTreeMap<(usize, usize), Vec<f32>>,
}

fn sampling(way: usize) -> Option<Sampling> {
    [None, Some(Sampling { fan_outs: vec![2, 3], seed: 1 }), Some(Sampling { fan_outs: vec![3, 2], seed: 2 })]
        [way]
        .clone()
}

fn world(model: &GraphModel, random: &mut Random) -> World {
    let sizes = [(9, 20), (40, 200), (33, 0), (80, 500)];
    let graphs: Vec<_> = sizes
        .iter()
        .enumerate()
        .map(|(i, &(nodes, edges))| {
            data(&format!("g{i}"), power_law(nodes, edges, random.next_u64()), 3, i as u64)
        })
        .collect();
    let mut expected = BTreeMap::new();
    for (number, graph) in graphs.iter().enumerate() {
        for way in 0..3 {
            let config = GraphConfig { block_size: 4, ..GraphConfig::default() };
            let config = with_blocks(model, 100, 0, config);
            let mut ample = engine(model.clone(), reference(true), config);
            ample
                .add_graph(GraphRequest { sampling: sampling(way), ..GraphRequest::whole(Arc::clone(graph)) })
                .expect("fits");
            let output = ample.run_all().expect("runs").pop().expect("ends").result.expect("finishes");
            expected.insert((number, way), output.values);
        }
    }
    World { graphs, expected }
}

fn random_config(model: &GraphModel, random: &mut Random) -> (GraphConfig, bool) {
    let reads_host = random.below(2) == 0;
    let config = GraphConfig {
        block_size: 1 << random.below(4),
        policy: [GraphPolicy::Fcfs, GraphPolicy::Priority][random.below(2)],
        eviction: [baton_kv::EvictionPolicy::Lru, baton_kv::EvictionPolicy::Lfu][random.below(2)],
        feature_rows: (!reads_host).then(|| 2 + random.below(60)),
        feature_policy: [FeaturePolicy::Lru, FeaturePolicy::Lfu, FeaturePolicy::Static][random.below(3)],
        high_water: random.uniform().into(),
        max_step_nodes: 1 + random.below(40),
        max_step_edges: 1 + random.below(200),
        quantum_steps: 1 + random.below(8),
        max_running: 1 + random.below(5),
        max_waiting: 6,
        max_idle_views: random.below(4),
        ..GraphConfig::default()
    };
    let (device, host) = (2 + random.below(30), random.below(120));
    (with_blocks(model, device, host, config), reads_host)
}

#[test]
fn a_hundred_thousand_random_steps() {
    let mut random = Random::new(2024);
    let (mut steps, mut finished, mut swapped, mut preempted, mut refused) = (0, 0u64, 0, 0, 0);
    let mut trace = Vec::new();
    while steps < NUM_STEPS {
        let kind = [Kind::Sage, Kind::Project, Kind::Gcn][random.below(3)];
        let model = model(kind, &[3, 4, 2], GraphModelConfig::default(), random.next_u64());
        let world = world(&model, &mut random);
        let (config, reads_host) = random_config(&model, &mut random);
        let mut engine = engine(model, reference(reads_host), config);
        let mut asked: BTreeMap<RequestId, (usize, usize, Option<Vec<u32>>)> = BTreeMap::new();
        let until = steps + 1000;
        while steps < until || engine.has_requests() {
            if steps < until && random.below(4) == 0 {
                let (graph, way) = (random.below(world.graphs.len()), random.below(3));
                let num_nodes = world.graphs[graph].num_nodes();
                let targets = (random.below(3) > 0).then(|| {
                    let count = 1 + random.below(num_nodes);
                    (0..num_nodes as u32)
                        .filter(|_| random.below(num_nodes) < count)
                        .chain([])
                        .collect::<Vec<_>>()
                });
                if targets.as_ref().is_none_or(|targets| !targets.is_empty()) {
                    let request = GraphRequest {
                        data: Arc::clone(&world.graphs[graph]),
                        targets: targets.clone(),
                        sampling: sampling(way),
                        priority: random.below(3) as i32,
                    };
                    match engine.add_graph(request) {
                        Ok(id) => drop(asked.insert(id, (graph, way, targets))),
                        Err(_) => refused += 1,
                    }
                }
            }
            if random.below(50) == 0 && !asked.is_empty() {
                let place = random.below(asked.len());
                let id = *asked.keys().nth(place).expect("below the number");
                assert!(engine.abort(id));
                asked.remove(&id);
            }
            if random.below(200) == 0 {
                for id in engine.remove_graph(&format!("g{}", random.below(world.graphs.len()))) {
                    assert!(asked.remove(&id).is_some());
                }
            }
            for output in engine.step().expect("runs") {
                let (graph, way, targets) = asked.remove(&output.request_id).expect("asked for");
                let Ok(embeddings) = output.result else {
                    refused += 1;
                    continue;
                };
                let all = &world.expected[&(graph, way)];
                let nodes = targets.unwrap_or_else(|| (0..world.graphs[graph].num_nodes() as u32).collect());
                for (row, node) in embeddings.values.chunks_exact(2).zip(nodes) {
                    let same =
                        row.iter().zip(&all[node as usize * 2..]).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "graph {graph}, way {way}, node {node}: {row:?}");
                }
                finished += 1;
            }
            engine.check_invariants();
            steps += 1;
            assert!(steps < until + 100_000, "requests do not end");
        }
        assert!(asked.is_empty(), "every request ends");
        let stats = engine.stats();
        swapped += stats.swaps.swapped_in;
        preempted += stats.preemptions;
        trace.push(stats.rows_computed);
    }
    assert!(
        finished > 5_000 && swapped > 10_000 && preempted > 100 && refused > 100,
        "{finished} {swapped} {preempted} {refused}"
    );
}
