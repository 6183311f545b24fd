//! What is there is not computed again.

mod common;

use std::sync::Arc;

use baton_graph::{GraphConfig, GraphModelConfig, GraphRequest, Sampling};
use common::{Kind, cpu, data, engine, model, power_law};

#[allow(clippy::needless_pass_by_value)]
fn overlapping(num_sets: usize, sampling: Option<Sampling>) -> Vec<GraphRequest> {
    let data = data("g", power_law(3000, 24000, 1), 32, 2);
    let set = |i: usize| {
        // A common half and a part of its own.
        let common = (0..200u32).map(|node| node * 5);
        let own = (0..200u32).map(|node| (node * 7 + i as u32 * 13) % 3000).filter(|node| node % 5 != 0);
        let mut nodes: Vec<u32> = common.chain(own).collect();
        nodes.sort_unstable();
        nodes.dedup();
        GraphRequest {
            targets: Some(nodes),
            sampling: sampling.clone(),
            ..GraphRequest::whole(Arc::clone(&data))
        }
    };
    (0..num_sets).map(set).collect()
}

#[test]
fn overlapping_targets_are_computed_once() {
    let model = model(Kind::Sage, &[32, 32, 16], GraphModelConfig::default(), 3);
    for sampling in [None, Some(Sampling { fan_outs: vec![5, 5], seed: 1 })] {
        let requests = overlapping(16, sampling);
        let config = GraphConfig { block_size: 16, ..GraphConfig::default() };
        let mut all =
            requests.iter().flat_map(|request| request.targets.clone().expect("targets")).collect::<Vec<_>>();
        all.sort_unstable();
        all.dedup();
        // What one request for all of the targets computes is what the sixteen may compute together.
        let mut union = engine(model.clone(), cpu(), config.clone());
        union.add_graph(GraphRequest { targets: Some(all), ..requests[0].clone() }).expect("fits");
        union.run_all().expect("runs");
        let once = union.stats().rows_computed;
        for together in [true, false] {
            let mut shared = engine(model.clone(), cpu(), config.clone());
            let mut outputs = Vec::new();
            for request in &requests {
                shared.add_graph(request.clone()).expect("fits");
                if !together {
                    outputs.extend(shared.run_all().expect("runs"));
                }
            }
            outputs.extend(shared.run_all().expect("runs"));
            outputs.sort_by_key(|output| output.request_id);
            assert_eq!(shared.stats().rows_computed, once, "each row once, together {together}");
            assert!(shared.stats().rows_reused > once);
            let mut apart =
                engine(model.clone(), cpu(), GraphConfig { enable_sharing: false, ..config.clone() });
            for (request, output) in requests.iter().zip(outputs) {
                apart.add_graph(request.clone()).expect("fits");
                let alone = apart.run_all().expect("runs").pop().expect("ends").result.expect("finishes");
                assert_eq!(alone, output.result.expect("finishes"), "sharing changes no bit");
            }
            assert!(apart.stats().rows_computed > 3 * once, "{} and {once}", apart.stats().rows_computed);
            apart.check_invariants();
        }
    }
}

#[test]
fn other_samples_and_versions_are_not_shared() {
    let model = model(Kind::Sage, &[32, 32, 16], GraphModelConfig::default(), 3);
    let mut engine = engine(model, cpu(), GraphConfig { block_size: 16, ..GraphConfig::default() });
    let request = overlapping(1, Some(Sampling { fan_outs: vec![5, 5], seed: 1 })).remove(0);
    let mut run = |request: &GraphRequest| {
        engine.add_graph(request.clone()).expect("fits");
        let output = engine.run_all().expect("runs").pop().expect("ends").result.expect("finishes");
        (output.values, engine.stats().rows_reused)
    };
    let (first, _) = run(&request);
    let other =
        GraphRequest { sampling: Some(Sampling { fan_outs: vec![5, 5], seed: 2 }), ..request.clone() };
    let (second, reused) = run(&other);
    assert!(first != second && reused == 0);
    let (again, reused) = run(&request);
    assert!(again == first && reused == request.targets.as_ref().map_or(0, |targets| targets.len() as u64));
}
