//! The engine of encoders: golden texts alone, together, over several steps and through the handle; what it refuses.

use std::path::Path;

use baton_backend::ReferenceBackend;
use baton_core::{FinishReason, Request, SamplingParams, TokenId};
use baton_engine::{EncoderEngine, EngineConfig, EngineError, SchedError};
use baton_model::{LoadFormat, ModelFiles};
use serde_json::Value;

struct Golden {
    texts: Vec<Vec<TokenId>>,
    results: Vec<Vec<f32>>,
}

fn golden(name: &str) -> (Golden, ModelFiles) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/data/golden").join(name);
    let text = std::fs::read_to_string(folder.join("encoder.json")).expect("encoder.json");
    let json: Value = serde_json::from_str(&text).expect("JSON");
    let golden = Golden {
        texts: serde_json::from_value(json["texts"].clone()).expect("texts"),
        results: serde_json::from_value(json["results"].clone()).expect("results"),
    };
    (golden, ModelFiles::open(&folder, LoadFormat::Auto).expect("the golden model"))
}

fn engine(files: &ModelFiles, config: &EngineConfig) -> EncoderEngine {
    EncoderEngine::new(files, Box::new(ReferenceBackend::new()), config, &mut |_| {}).expect("it loads")
}

fn close(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    for (a, b) in got.iter().zip(expected) {
        assert!((a - b).abs() < 1e-4, "{a} is not {b}");
    }
}

#[test]
fn texts_are_cut_into_steps_by_their_tokens() {
    for name in ["bert", "bert-cls", "bert-reranker", "roberta", "roberta-reranker", "nomic"] {
        let (golden, files) = golden(name);
        for max_num_batched_tokens in [64, 256] {
            let config = EngineConfig { max_num_batched_tokens, ..EngineConfig::default() };
            let mut engine = engine(&files, &config);
            let texts: Vec<Vec<TokenId>> = golden.texts.iter().cycle().take(11).cloned().collect();
            let results = engine.encode(&texts).expect("all texts are encoded");
            for (number, result) in results.iter().enumerate() {
                close(result, &golden.results[number % golden.texts.len()]);
            }
        }
    }
}

fn request(engine: &baton_engine::EngineHandle, text: &[TokenId], pooling: bool) -> Request {
    let params = SamplingParams { pooling, ignore_eos: true, ..SamplingParams::greedy(1) };
    Request::new(engine.new_request_id(), text.to_vec(), params)
}

#[test]
fn requests_are_answered_by_the_handle() {
    let (golden, files) = golden("bert");
    let handle = engine(&files, &EngineConfig::default()).spawn_observed(Box::new(()));
    let receivers: Vec<_> = golden
        .texts
        .iter()
        .map(|text| handle.submit(request(&handle, text, true)).expect("it is taken"))
        .collect();
    for (mut receiver, expected) in receivers.into_iter().zip(&golden.results) {
        let output = receiver.recv().expect("an output").expect("no error");
        assert!(output.finished);
        assert_eq!(output.outputs[0].finish_reason, Some(FinishReason::Stop));
        close(&output.pooled, expected);
    }
    let refused = |text: &[TokenId], pooling: bool| {
        let mut receiver = handle.submit(request(&handle, text, pooling)).expect("it is sent");
        receiver.recv().expect("an answer").expect_err("it is refused")
    };
    assert!(matches!(refused(&[1, 2], false), EngineError::NoGeneration));
    assert!(matches!(refused(&[1, 96], true), EngineError::TokenOutOfVocabulary { token_id: 96, .. }));
    assert!(matches!(refused(&[], true), EngineError::TextLength { num_tokens: 0, .. }));
    assert!(matches!(refused(&[5; 65], true), EngineError::TextLength { num_tokens: 65, max_model_len: 64 }));
    assert!(handle.stats().expect("stats").num_steps > 0);
    handle.shutdown();
    assert!(handle.submit(request(&handle, &[1, 2], true)).is_err());
}

#[test]
fn the_queue_has_a_limit() {
    let (_, files) = golden("bert");
    let config = EngineConfig { max_num_queued_reqs: 0, ..EngineConfig::default() };
    let handle = engine(&files, &config).spawn_observed(Box::new(()));
    let mut receiver = handle.submit(request(&handle, &[1, 2], true)).expect("it is sent");
    let error = receiver.recv().expect("an answer").expect_err("it is refused");
    assert!(matches!(error, EngineError::Sched(SchedError::QueueFull { .. })), "{error}");
}
