//! The default model in exact arithmetic (`--dtype float32`): the CPU backend gives PyTorch's tokens and logits. What is left between Baton and llama.cpp on the quantised file is then the rounding of activations
//! to 8 bits, which both do and which `crates/engine/tests/smollm2.rs` measures.
//!
//! `cargo xtask test` fetches the model and names it in `BATON_TEST_MODEL`.

#[allow(dead_code)] // this file uses a part of it
mod harness;

use std::path::{Path, PathBuf};

use baton_backend::{KvDtype, Precision};
use baton_cpu::{CpuBackend, CpuOptions};
use baton_model::{LoadFormat, ModelFiles};
use harness::{Harness, Options, Run, argmax};
use serde_json::Value;

/// f32 weights make each step slow; these already cross every layer thousands of times.
const NUM_PROMPTS: usize = 8;
const NUM_TOKENS: usize = 16;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("id") as u32).collect()
}

/// The default model: where `BATON_TEST_MODEL` says, or where `cargo xtask setup` puts it. Without it the test is skipped.
fn model_path() -> Option<PathBuf> {
    const FETCHED: &str = "../../.cache/home/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = std::env::var_os("BATON_TEST_MODEL")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(FETCHED), PathBuf::from);
    if !path.is_file() {
        println!("skipped: {} is not here; `cargo xtask setup` fetches it", path.display());
    }
    path.is_file().then_some(path)
}

#[test]
fn tokens_and_logits_are_pytorchs() {
    let Some(model) = model_path() else { return };
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/data/smollm2_exact.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(golden).expect("golden file")).expect("JSON");
    let files = ModelFiles::open(&model, LoadFormat::Auto).expect("the default model opens");
    let options = CpuOptions { precision: Precision::Full, ..CpuOptions::default() };
    let backend = CpuBackend::new(options).expect("the CPU is always there");
    let options = Options {
        max_model_len: 512,
        max_tokens: 128,
        block_size: 16,
        num_pages: 32,
        kv_dtype: KvDtype::F32,
        max_kv_per_item: 0,
        max_queries_per_item: 0,
    };
    let weights = files.weights().expect("weights");
    let mut harness = Harness::new(Box::new(backend), files.config().clone(), &*weights, options);
    let mut largest = 0.0f64;
    for case in golden["greedy"].as_array().expect("prompts").iter().take(NUM_PROMPTS) {
        let (prompt, want) = (ids(&case["token_ids"]), ids(&case["tokens"]));
        let pages = harness.take_pages(prompt.len() + NUM_TOKENS);
        let mut rows = harness.step(&[Run { tokens: &prompt, start: 0, pages: &pages }]);
        for step in 0..NUM_TOKENS {
            let row = rows.pop().expect("a row of logits");
            assert_eq!(argmax(&row), want[step], "{}, token {step}", case["name"]);
            for (&token, logit) in
                ids(&case["top2"][step]).iter().zip(case["top2_logits"][step].as_array().expect("two"))
            {
                largest =
                    largest.max((f64::from(row[token as usize]) - logit.as_f64().expect("logit")).abs());
            }
            let start = prompt.len() + step;
            rows = harness.step(&[Run { tokens: &want[step..=step], start, pages: &pages }]);
        }
        harness.give_pages(&pages);
    }
    println!("largest difference of a logit {largest:.1e}");
    assert!(largest < 1e-3, "a logit differs by {largest}");
}
