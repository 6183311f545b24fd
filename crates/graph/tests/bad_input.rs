//! Wrong requests, graphs and models get an error that says what is wrong, and disturb nobody.

mod common;

use std::path::Path;
use std::sync::Arc;

use baton_graph::{
    Graph, GraphConfig, GraphData, GraphModel, GraphModelConfig, GraphRequest, HostRows, NanPolicy, Sampling,
};
use common::{Kind, checkpoint, cpu, data, engine, model, power_law, with_blocks};

#[test]
fn wrong_requests_are_named_and_others_go_on() {
    let model = model(Kind::Sage, &[24, 40, 16], GraphModelConfig::default(), 3);
    let config = GraphConfig { block_size: 16, max_waiting: 2, ..GraphConfig::default() };
    let config = with_blocks(&model, 40, 10, config);
    let mut engine = engine(model, cpu(), config);
    let good = data("good", power_law(300, 2000, 1), 24, 1);
    let whole = GraphRequest::whole(Arc::clone(&good));
    let expected = {
        engine.add_graph(whole.clone()).expect("fits");
        engine.run_all().expect("runs").pop().expect("ends").result.expect("finishes")
    };
    let sampled = |fan_outs: Vec<usize>| GraphRequest {
        sampling: Some(Sampling { fan_outs, seed: 1 }),
        ..whole.clone()
    };
    let targets = |nodes: &[u32]| GraphRequest { targets: Some(nodes.to_vec()), ..whole.clone() };
    let narrow = GraphRequest::whole(data("narrow", power_law(30, 20, 1), 23, 1));
    let large = GraphRequest::whole(data("large", power_law(900, 20, 1), 24, 1));
    let other = GraphRequest::whole(data("good", power_law(301, 2000, 1), 24, 1));
    let wrong = [
        (targets(&[]), "no targets"),
        (targets(&[0, 300]), "target 300 is not a node: the graph has nodes 0 to 299"),
        (targets(&[7, 3, 7]), "node 7 is asked for twice"),
        (sampled(vec![3]), "1 fan-outs, but the model has 2 layers"),
        (sampled(vec![3, 0]), "a fan-out is 0"),
        (narrow, "the features have 23 columns, but the model takes 24"),
        (large, "the request needs 57 blocks and the engine has"),
        (other, "already known with another size"),
    ];
    engine.add_graph(GraphRequest { targets: Some(vec![5, 2]), ..whole.clone() }).expect("fits");
    for (request, says) in wrong {
        let error = engine.add_graph(request).expect_err(says).to_string();
        assert!(error.contains(says), "{error}");
    }
    engine.add_graph(whole.clone()).expect("fits");
    let error = engine.add_graph(whole).expect_err("the queue is full").to_string();
    assert!(error.contains("2 requests are waiting"), "{error}");
    let mut outputs = engine.run_all().expect("runs");
    outputs.sort_by_key(|output| output.request_id);
    let results: Vec<_> = outputs.into_iter().map(|output| output.result.expect("finishes")).collect();
    assert_eq!(results[1], expected);
    assert_eq!(results[0].values[..16], expected.values[5 * 16..6 * 16]);
    engine.check_invariants();
}

#[test]
fn wrong_graphs_are_named() {
    let graph = || Graph::new(2, &[(0, 1)]).expect("a graph");
    let rows = |values: &[f32]| HostRows::from_f32(values.len(), 1, values.to_vec()).expect("a matrix");
    for bad in [f32::NAN, f32::INFINITY] {
        let error =
            GraphData::new("g", 1, graph(), rows(&[0.0, bad]), NanPolicy::Reject).expect_err("not finite");
        assert!(error.to_string().contains("features of node 1 hold a NaN"), "{error}");
        GraphData::new("g", 1, graph(), rows(&[0.0, bad]), NanPolicy::Allow).expect("allowed");
    }
    let error = GraphData::new("g", 1, graph(), rows(&[0.0]), NanPolicy::Reject).expect_err("one row");
    assert!(error.to_string().contains("one for each node"), "{error}");
    assert!(HostRows::from_f32(usize::MAX, 2, vec![0.0]).is_none());
}

/// A NaN that is allowed reaches the nodes that hear of it, and no others.
#[test]
fn a_nan_stays_where_it_is_heard() {
    let model = model(Kind::Sage, &[1, 4, 2], GraphModelConfig::default(), 3);
    // A path 0 → 1 → 2 → 3.
    let graph = Graph::new(4, &[(0, 1), (1, 2), (2, 3)]).expect("a graph");
    let features = HostRows::from_f32(4, 1, vec![f32::NAN, 1.0, 2.0, 3.0]).expect("a matrix");
    let data = Arc::new(GraphData::new("g", 1, graph, features, NanPolicy::Allow).expect("allowed"));
    let mut engine = engine(model, cpu(), GraphConfig::default());
    engine.add_graph(GraphRequest::whole(data)).expect("fits");
    let output = engine.run_all().expect("runs").pop().expect("ends").result.expect("finishes");
    let has_nan: Vec<bool> =
        output.values.chunks(2).map(|row| row.iter().any(|value| value.is_nan())).collect();
    assert_eq!(has_nan, [true, true, true, false]);
}

#[test]
fn an_engine_without_memory_says_so() {
    let model = model(Kind::Sage, &[24, 40, 16], GraphModelConfig::default(), 3);
    let config = GraphConfig { device_bytes: 1000, ..GraphConfig::default() };
    let error = baton_graph::GraphEngine::new(model.clone(), cpu(), config).expect_err("too little");
    assert!(error.to_string().contains("at least 2 are needed"), "{error}");
    for config in [
        GraphConfig { block_size: 24, ..GraphConfig::default() },
        GraphConfig { block_size: 0, ..GraphConfig::default() },
        GraphConfig { high_water: f64::NAN, ..GraphConfig::default() },
        GraphConfig { max_step_nodes: 0, ..GraphConfig::default() },
    ] {
        baton_graph::GraphEngine::new(model.clone(), cpu(), config).expect_err("a wrong configuration");
    }
}

#[test]
fn wrong_models_are_named() {
    let tensor =
        |name: &str, shape: &[usize]| (name.to_owned(), shape.to_vec(), vec![0.5; shape.iter().product()]);
    for (tensors, says) in [
        (vec![tensor("convs.0.lin_l.weight", &[4, 3]), tensor("norms.0.weight", &[4])], "norms.0.weight"),
        (vec![tensor("convs.0.lin_r.weight", &[4, 3])], "neither lin_l.weight nor lin.weight"),
        (
            vec![tensor("convs.0.lin_l.weight", &[4, 3]), tensor("convs.0.lin_r.weight", &[5, 3])],
            "4 rows and lin_r 5",
        ),
        (vec![tensor("convs.0.lin_l.weight", &[4, 3]), tensor("convs.0.lin_l.bias", &[3])], "3 values"),
        (vec![tensor("convs.0.lin_l.weight", &[4, 3]), tensor("convs.1.lin_l.weight", &[2, 5])], "convs.1"),
        (
            vec![tensor("convs.0.lin.weight", &[4, 3]), tensor("convs.1.lin.weight", &[2, 5])],
            "takes 5 columns",
        ),
        (vec![tensor("a.lin_l.weight", &[4, 3]), tensor("b.lin_l.weight", &[2, 4])], "order of its layers"),
    ] {
        let weights = checkpoint(&tensors);
        let error =
            GraphModel::from_weights(Path::new("m"), &weights, GraphModelConfig::default()).expect_err(says);
        assert!(error.to_string().contains(says), "{error}");
    }
    let named = [tensor("conv1.lin_l.weight", &[4, 3]), tensor("conv2.lin_l.weight", &[2, 4])];
    let model = GraphModel::from_weights(Path::new("m"), &checkpoint(&named), GraphModelConfig::default());
    assert_eq!(model.expect("other names").num_outputs(), 2);
}
