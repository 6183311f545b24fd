//! The hidden state of a prompt: the same however the prompt is cut, batched or found in the cache, and that of PyTorch.

use std::path::Path;

use baton_backend::{KvDtype, ReferenceBackend};
use baton_core::SamplingParams;
use baton_engine::{Engine, EngineConfig};
use baton_model::{LoadFormat, ModelFiles};

fn engine(max_num_batched_tokens: usize, enable_prefix_caching: bool) -> Engine {
    engine_of("llama", max_num_batched_tokens, enable_prefix_caching)
}

fn engine_of(name: &str, max_num_batched_tokens: usize, enable_prefix_caching: bool) -> Engine {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/data/golden").join(name);
    let files = ModelFiles::open(&folder, LoadFormat::Auto).expect("the golden model");
    let config = EngineConfig {
        max_num_seqs: 4,
        max_num_batched_tokens,
        max_model_len: Some(64),
        block_size: Some(4),
        kv_dtype: KvDtype::F32,
        enable_prefix_caching,
        ..EngineConfig::default()
    };
    Engine::new(&files, Box::new(ReferenceBackend::new()), &config, &mut |_| {}).expect("loads")
}

fn params(pooling: bool) -> SamplingParams {
    SamplingParams { pooling, ignore_eos: true, ..SamplingParams::greedy(3) }
}

fn close(one: &[f32], other: &[f32]) {
    assert_eq!(one.len(), other.len());
    for (a, b) in one.iter().zip(other) {
        assert!((a - b).abs() <= 1e-4 * a.abs().max(1.0), "{a} and {b}");
    }
}

#[test]
fn the_way_of_the_work_does_not_matter() {
    let prompts: Vec<Vec<u32>> =
        vec![(3..24).collect(), (3..20).collect(), vec![7, 8, 9], (3..24).rev().collect()];
    let alone: Vec<Vec<f32>> = prompts
        .iter()
        .map(|prompt| {
            let mut outputs = engine(64, false).generate(vec![prompt.clone()], &params(true)).expect("runs");
            outputs.remove(0).pooled
        })
        .collect();
    assert!(alone[0].iter().any(|&x| x != 0.0));
    assert_ne!(alone[0], alone[1]);
    for (max_num_batched_tokens, caches) in [(64, true), (8, true), (5, false)] {
        let mut engine = engine(max_num_batched_tokens, caches);
        for _ in 0..2 {
            let outputs = engine.generate(prompts.clone(), &params(true)).expect("runs");
            for (output, expect) in outputs.iter().zip(&alone) {
                close(&output.pooled, expect);
                assert_eq!(output.outputs[0].token_ids.len(), 3, "tokens follow as ever");
            }
        }
        engine.check_invariants();
    }
}

#[test]
fn it_is_that_of_pytorch() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("data/hidden.json")).expect("JSON");
    let prompt: Vec<u32> = serde_json::from_value(golden["prompt"].clone()).expect("token ids");
    for (name, expect) in golden["hidden"].as_object().expect("models") {
        let expect: Vec<f32> = serde_json::from_value(expect.clone()).expect("numbers");
        let outputs = engine_of(name, 64, true).generate(vec![prompt.clone()], &params(true)).expect("runs");
        close(&outputs[0].pooled, &expect);
    }
}

#[test]
fn it_is_given_only_where_it_is_asked_for() {
    let mut engine = engine(64, true);
    let outputs = engine.generate(vec![vec![3, 4, 5]], &params(false)).expect("runs");
    assert!(outputs[0].pooled.is_empty());
    let hidden_size = engine.model_config().hidden_size;
    let outputs = engine.generate(vec![vec![3, 4, 5]], &params(true)).expect("runs");
    assert_eq!(outputs[0].pooled.len(), hidden_size);
}
