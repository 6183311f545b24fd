//! Small pools: swaps happen, results are the same to the last bit, nothing is leaked.

mod common;

use std::sync::Arc;

use baton_backend::graph::{GraphDevice, RowDtype};
use baton_graph::{
    Aggregation, FeaturePolicy, GraphConfig, GraphData, GraphModel, GraphModelConfig, GraphPolicy,
    GraphRequest, GraphStats, RequestStatus, Sampling,
};
use common::{Kind, cpu, data, engine, model, power_law, reference, with_blocks};

fn run(
    model: &GraphModel,
    device: Box<dyn GraphDevice>,
    config: &GraphConfig,
    requests: &[GraphRequest],
) -> (Vec<Vec<f32>>, GraphStats) {
    let mut engine = engine(model.clone(), device, config.clone());
    let ids: Vec<_> =
        requests.iter().map(|request| engine.add_graph(request.clone()).expect("fits")).collect();
    let mut results = vec![Vec::new(); ids.len()];
    while engine.has_requests() {
        for output in engine.step().expect("runs") {
            let place = ids.iter().position(|id| *id == output.request_id).expect("known");
            results[place] = output.result.expect("finishes").values;
        }
        engine.check_invariants();
    }
    engine.check_invariants();
    (results, engine.stats())
}

fn same_bits(a: &[Vec<f32>], b: &[Vec<f32>]) -> bool {
    let same = |a: &Vec<f32>, b: &Vec<f32>| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.len() == b.len() && !a.is_empty() && same(a, b))
}

/// Three graphs, whole, targets and sampled.
fn requests() -> Vec<GraphRequest> {
    let graphs: Vec<Arc<GraphData>> = (0..3)
        .map(|i| data(&format!("g{i}"), power_law(700 + 100 * i, 6000, i as u64), 24, 50 + i as u64))
        .collect();
    let targets = Some((0..90).map(|i| i * 7 + 3).rev().collect());
    let sampling = Some(Sampling { fan_outs: vec![4, 6], seed: 5 });
    vec![
        GraphRequest::whole(Arc::clone(&graphs[0])),
        GraphRequest { targets: targets.clone(), ..GraphRequest::whole(Arc::clone(&graphs[1])) },
        GraphRequest { sampling: sampling.clone(), ..GraphRequest::whole(Arc::clone(&graphs[2])) },
        GraphRequest { targets, sampling, ..GraphRequest::whole(Arc::clone(&graphs[0])) },
    ]
}

#[test]
fn a_pool_of_an_eighth_changes_no_bit() {
    let requests = requests();
    for kind in [Kind::Sage, Kind::Project, Kind::Gcn] {
        for aggr in [Aggregation::Mean, Aggregation::Max] {
            let config = GraphModelConfig { aggr, normalize_output: true, ..GraphModelConfig::default() };
            let model = model(kind, &[24, 40, 16], config, 3);
            let base = GraphConfig { block_size: 16, ..GraphConfig::default() };
            let needed: usize = requests.iter().map(|request| request.data.num_nodes().div_ceil(16)).sum();
            let ample = with_blocks(&model, needed, 0, base.clone());
            let (expected, stats) = run(&model, cpu(), &ample, &requests);
            assert_eq!(stats.swaps.swapped_out, 0, "everything fits");
            for threads_apart in [base.clone(), GraphConfig { max_step_nodes: 100, quantum_steps: 2, ..base }]
            {
                let small = with_blocks(&model, needed / 8, needed, threads_apart);
                let (results, stats) = run(&model, cpu(), &small, &requests);
                assert!(same_bits(&expected, &results), "{kind:?} {aggr:?}");
                assert!(stats.swaps.swapped_out > 0 && stats.swaps.swapped_in > 0, "{stats:?}");
                assert!(stats.swaps.saved_ahead > 0, "the high-water mark does its work: {stats:?}");
                assert_eq!(stats.requests_finished, 4);
            }
        }
    }
}

#[test]
fn two_blocks_are_enough() {
    let model = model(Kind::Gcn, &[24, 8, 5], GraphModelConfig::default(), 9);
    let requests = &requests()[..2];
    let base = GraphConfig { block_size: 4, ..GraphConfig::default() };
    let (expected, _) = run(&model, cpu(), &with_blocks(&model, 1000, 0, base.clone()), requests);
    let (results, stats) = run(&model, cpu(), &with_blocks(&model, 2, 1000, base), requests);
    assert!(same_bits(&expected, &results));
    assert!(stats.swaps.swapped_in > 100, "{stats:?}");
}

#[test]
fn features_come_through_a_cache_of_any_policy() {
    let requests = requests();
    for kind in [Kind::Sage, Kind::Project, Kind::Gcn] {
        let model = model(kind, &[24, 40, 16], GraphModelConfig::default(), 3);
        let base = GraphConfig { block_size: 16, ..GraphConfig::default() };
        let ample = with_blocks(&model, 400, 0, base.clone());
        let (expected, _) = run(&model, reference(true), &ample, &requests);
        for feature_policy in [FeaturePolicy::Lru, FeaturePolicy::Lfu, FeaturePolicy::Static] {
            for rows in [3000, 300, 8] {
                let config = GraphConfig { feature_rows: Some(rows), feature_policy, ..base.clone() };
                let config = with_blocks(&model, 400, 0, config);
                let (results, stats) = run(&model, reference(false), &config, &requests);
                assert!(same_bits(&expected, &results), "{kind:?} {feature_policy:?} {rows}");
                assert!(stats.features.misses + stats.features.preloaded > 0, "{stats:?}");
                if rows == 300 {
                    assert!(stats.features.hits > 0, "{stats:?}");
                }
            }
        }
    }
}

#[test]
fn features_that_fit_are_on_the_device_and_the_others_go_through_the_cache() {
    let requests = requests();
    for kind in [Kind::Sage, Kind::Project, Kind::Gcn] {
        let model = model(kind, &[24, 40, 16], GraphModelConfig::default(), 3);
        let base = GraphConfig { block_size: 16, ..GraphConfig::default() };
        let (expected, _) = run(&model, reference(true), &base, &requests);
        // An eighth of it is 77 KB: the first graph has 67 KB of features, all three have 230 KB.
        let small = GraphConfig { device_bytes: 77 << 13, ..base.clone() };
        let (results, stats) = run(&model, reference(false), &small, &requests);
        assert!(same_bits(&expected, &results), "{kind:?}");
        assert!(stats.features.misses > 0, "the second and third graph: {stats:?}");
        let (results, stats) = run(&model, reference(false), &base, &requests);
        assert!(same_bits(&expected, &results), "{kind:?}");
        assert_eq!(stats.features.misses, 0, "all fit: {stats:?}");
    }
}

#[test]
fn bf16_rounds_rows_and_nothing_else() {
    let requests = requests();
    let model = model(Kind::Sage, &[24, 40, 16], GraphModelConfig::default(), 3);
    let base = GraphConfig { block_size: 16, dtype: RowDtype::BF16, ..GraphConfig::default() };
    let exact = GraphConfig { dtype: RowDtype::F32, ..base.clone() };
    let (expected, _) = run(&model, cpu(), &with_blocks(&model, 400, 0, exact), &requests);
    let (results, _) = run(&model, cpu(), &with_blocks(&model, 400, 0, base.clone()), &requests);
    let (small, stats) = run(&model, cpu(), &with_blocks(&model, 20, 400, base), &requests);
    assert!(same_bits(&results, &small) && stats.swaps.swapped_in > 0);
    for (a, b) in expected.iter().flatten().zip(results.iter().flatten()) {
        assert!((a - b).abs() < 0.03, "{a} and {b}");
    }
    assert!(!same_bits(&expected, &results));
}

#[test]
fn priority_drives_out_and_the_quantum_shares() {
    let model = model(Kind::Sage, &[24, 40, 16], GraphModelConfig::default(), 3);
    let graphs: Vec<_> = (0..2).map(|i| data(&format!("g{i}"), power_law(800, 6000, i), 24, i)).collect();
    let base = GraphConfig { block_size: 16, max_step_nodes: 64, quantum_steps: 3, ..GraphConfig::default() };
    for policy in [GraphPolicy::Fcfs, GraphPolicy::Priority] {
        // One graph fits, two do not.
        let config = with_blocks(&model, 60, 200, GraphConfig { policy, ..base.clone() });
        let mut engine = engine(model.clone(), cpu(), config);
        let request = |graph: usize, priority| GraphRequest {
            priority,
            ..GraphRequest::whole(Arc::clone(&graphs[graph]))
        };
        let first = engine.add_graph(request(0, 5)).expect("fits");
        engine.step().expect("runs");
        let second = engine.add_graph(request(1, 1)).expect("fits");
        engine.step().expect("runs");
        let status = |id| engine.progress(id).expect("in work").status;
        match policy {
            GraphPolicy::Fcfs => {
                assert_eq!((status(first), status(second)), (RequestStatus::Running, RequestStatus::Waiting));
            }
            GraphPolicy::Priority => {
                assert_eq!((status(first), status(second)), (RequestStatus::Swapped, RequestStatus::Running));
            }
        }
        let mut ended = Vec::new();
        while engine.has_requests() {
            ended.extend(engine.step().expect("runs").into_iter().map(|output| output.request_id));
        }
        assert!(engine.stats().preemptions > 0);
        if policy == GraphPolicy::Priority {
            assert_eq!(ended, [second, first]);
        }
        engine.check_invariants();
    }
}

#[test]
fn requests_of_one_class_advance_together() {
    let model = model(Kind::Sage, &[24, 40, 16], GraphModelConfig::default(), 3);
    let big = data("big", power_law(4000, 30000, 1), 24, 1);
    let small = data("small", power_law(300, 2000, 2), 24, 2);
    let config = GraphConfig { block_size: 16, max_step_nodes: 200, ..GraphConfig::default() };
    let mut engine = engine(model, cpu(), config);
    let big = engine.add_graph(GraphRequest::whole(big)).expect("fits");
    engine.step().expect("runs");
    let small = engine.add_graph(GraphRequest::whole(small)).expect("fits");
    let mut steps = 0;
    while engine.progress(small).is_some() {
        engine.step().expect("runs");
        steps += 1;
    }
    // 600 rows at half of the steps' 200 nodes, and a few steps around them.
    assert!(steps <= 10, "{steps} steps");
    let progress = engine.progress(big).expect("still in work");
    assert!(progress.num_rows_done * 2 < progress.num_rows, "{progress:?}");
    engine.run_all().expect("runs");
    engine.check_invariants();
}

#[test]
fn an_abort_frees_everything_and_disturbs_nobody() {
    let requests = requests();
    let model = model(Kind::Sage, &[24, 40, 16], GraphModelConfig::default(), 3);
    let base = GraphConfig { block_size: 16, max_step_nodes: 50, ..GraphConfig::default() };
    let config = with_blocks(&model, 40, 400, base);
    let (expected, _) = run(&model, cpu(), &config, &requests);
    for steps in [0, 1, 7, 15] {
        let mut engine = engine(model.clone(), cpu(), config.clone());
        let ids: Vec<_> =
            requests.iter().map(|request| engine.add_graph(request.clone()).expect("fits")).collect();
        let mut outputs = Vec::new();
        for _ in 0..steps {
            outputs.extend(engine.step().expect("runs"));
        }
        assert!(engine.abort(ids[0]) && !engine.abort(ids[0]), "it is in work");
        assert_eq!(engine.remove_graph("g2"), [ids[2]]);
        outputs.extend(engine.run_all().expect("runs"));
        outputs.sort_by_key(|output| output.request_id);
        let results: Vec<Vec<f32>> =
            outputs.into_iter().map(|output| output.result.expect("finishes").values).collect();
        assert!(same_bits(&[expected[1].clone(), expected[3].clone()], &results), "after {steps} steps");
        assert_eq!(engine.stats().requests_aborted, 2);
        engine.check_invariants();
    }
}
