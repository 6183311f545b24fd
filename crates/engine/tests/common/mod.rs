//! What the engine's tests share: tiny golden models on any backend, and the greedy tokens that PyTorch gave for them.
#![allow(dead_code)] // each test file uses its own part

use std::path::{Path, PathBuf};

use baton_backend::{Backend, KvDtype, ReferenceBackend};
use baton_core::{RequestOutput, SamplingParams, TokenId};
use baton_engine::{Engine, EngineConfig};
use baton_model::{LoadFormat, ModelFiles};

pub struct GoldenPrompt {
    pub token_ids: Vec<TokenId>,
    pub greedy: Vec<TokenId>,
}

pub struct Golden {
    pub folder: PathBuf,
    pub max_model_len: usize,
    pub prompts: Vec<GoldenPrompt>,
}

/// A checkpoint of `crates/model/tests/data/golden`.
pub fn golden(name: &str) -> Golden {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/data/golden").join(name);
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("golden.json")).expect("golden.json"))
            .expect("JSON");
    let ids = |value: &serde_json::Value| -> Vec<TokenId> {
        value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("id") as TokenId).collect()
    };
    let prompts = json["prompts"].as_array().expect("prompts").iter();
    Golden {
        max_model_len: json["max_model_len"].as_u64().expect("length") as usize,
        prompts: prompts
            .map(|prompt| GoldenPrompt {
                token_ids: ids(&prompt["token_ids"]),
                greedy: ids(&prompt["greedy"]),
            })
            .collect(),
        folder,
    }
}

/// f32 KV, so that the numbers are PyTorch's; a pool large enough unless the test says otherwise.
pub fn small_config(golden: &Golden) -> EngineConfig {
    EngineConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: Some(golden.max_model_len),
        block_size: Some(4),
        kv_dtype: KvDtype::F32,
        swap_space: 1 << 20,
        deterministic: true,
        ..EngineConfig::default()
    }
}

/// Device KV for so many rows of all lanes.
pub fn with_blocks(golden: &Golden, config: &EngineConfig, blocks: usize) -> EngineConfig {
    let files = ModelFiles::open(&golden.folder, LoadFormat::Auto).expect("golden model");
    let spec = files.config().kv_spec(config.kv_dtype, config.block_size.expect("set"));
    EngineConfig {
        kv_cache_memory: Some((blocks * spec.num_lanes() * spec.bytes_per_block()) as u64),
        ..config.clone()
    }
}

pub fn reference() -> Box<dyn Backend> {
    Box::new(ReferenceBackend::new())
}

pub fn engine(golden: &Golden, backend: Box<dyn Backend>, config: &EngineConfig) -> Engine {
    let files = ModelFiles::open(&golden.folder, LoadFormat::Auto).expect("golden model");
    Engine::new(&files, backend, config, &mut |_| {}).expect("the golden model loads")
}

pub fn greedy(max_tokens: u32) -> SamplingParams {
    SamplingParams { ignore_eos: true, ..SamplingParams::greedy(max_tokens) }
}

/// The tokens of each continuation.
pub fn tokens(output: &RequestOutput) -> Vec<Vec<TokenId>> {
    output.outputs.iter().map(|output| output.token_ids.clone()).collect()
}

/// All blocks are free again and nothing waits.
pub fn assert_idle(engine: &Engine) {
    engine.check_invariants();
    assert!(!engine.has_unfinished());
    let stats = engine.stats().scheduler;
    assert_eq!((stats.num_running, stats.num_waiting, stats.num_swapped), (0, 0, 0));
    assert_eq!(stats.kv.num_device_blocks_used, 0, "{stats:?}");
}
