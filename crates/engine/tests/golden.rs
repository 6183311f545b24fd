//! The whole engine on tiny models: however the work is cut, batched, cached, preempted or planned ahead, the greedy
//! tokens are PyTorch's.

mod common;

use baton_backend::Backend;
use baton_core::TokenId;
use baton_cpu::{CpuBackend, CpuOptions};
use baton_engine::{Engine, EngineConfig};
use baton_sched::PreemptionMode;
use common::{Golden, assert_idle, engine, golden, greedy, reference, small_config, tokens, with_blocks};

const MODELS: &[&str] =
    &["llama", "llama-bias", "llama3", "mistral", "qwen2", "qwen2-window", "qwen3", "gemma3", "gpt2"];

/// Of the families in tables those that differ most: slopes, halves in parallel, layers without rotation, norms after.
const FAMILIES: &[&str] = &[
    "opt",
    "gpt-neox",
    "bloom",
    "mpt",
    "falcon-new",
    "falcon-alibi",
    "phi",
    "phi3-longrope",
    "cohere-plus",
    "cohere2",
    "olmo2",
    "granite",
    "gemma2",
    "smollm3",
    "glm4",
    "baichuan-alibi",
    "exaone4",
];

/// Mixtures of experts, and attention over latents.
const MIXTURES: &[&str] = &[
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe",
    "granite-moe",
    "gpt-oss",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
];

fn cpu() -> Box<dyn Backend> {
    Box::new(CpuBackend::new(CpuOptions::default()).expect("the CPU is always there"))
}

/// Each backend with the smallest block it takes: small blocks make for many of them.
fn backends() -> [(Box<dyn Backend>, usize); 2] {
    [(reference(), 4), (cpu(), 16)]
}

fn config(golden: &Golden, block_size: usize) -> EngineConfig {
    EngineConfig { block_size: Some(block_size), ..small_config(golden) }
}

/// Prompts whose greedy continuation fits the model, with the tokens PyTorch gave.
fn expected(golden: &Golden) -> Vec<(Vec<TokenId>, Vec<TokenId>)> {
    let fits =
        |prompt: &&common::GoldenPrompt| prompt.token_ids.len() + prompt.greedy.len() <= golden.max_model_len;
    golden
        .prompts
        .iter()
        .filter(fits)
        .map(|prompt| (prompt.token_ids.clone(), prompt.greedy.clone()))
        .collect()
}

/// Runs all prompts at once and compares.
fn check(engine: &mut Engine, expected: &[(Vec<TokenId>, Vec<TokenId>)], what: &str) {
    let num_tokens = expected.iter().map(|(_, greedy)| greedy.len()).max().expect("prompts") as u32;
    let prompts = expected.iter().map(|(prompt, _)| prompt.clone()).collect();
    let outputs = engine.generate(prompts, &greedy(num_tokens)).expect("all prompts complete");
    for ((prompt, want), output) in expected.iter().zip(&outputs) {
        let got = &tokens(output)[0];
        assert_eq!(&got[..want.len()], want, "{what}: prompt of {} tokens", prompt.len());
    }
    assert_idle(engine);
}

#[test]
fn batched_together() {
    for name in MODELS.iter().chain(FAMILIES).chain(MIXTURES) {
        let golden = golden(name);
        for (backend, block_size) in backends() {
            let mut engine = engine(&golden, backend, &config(&golden, block_size));
            check(&mut engine, &expected(&golden), name);
        }
    }
}

#[test]
fn one_at_a_time_and_again_from_the_prefix_cache() {
    let dense = ["llama", "gemma3", "mistral", "bloom", "cohere2", "gemma2", "smollm3", "olmo2"];
    for name in dense.iter().chain(MIXTURES) {
        let golden = golden(name);
        for (backend, block_size) in backends() {
            let mut engine = engine(&golden, backend, &config(&golden, block_size));
            for prompt in expected(&golden) {
                check(&mut engine, std::slice::from_ref(&prompt), name);
                check(&mut engine, &[prompt], "from the cache");
            }
            assert!(engine.stats().scheduler.kv.prefix_cache_hits > 0);
        }
    }
}

#[test]
fn requests_that_begin_alike_are_read_once() {
    for name in MODELS.iter().chain(MIXTURES).chain(&[
        "bloom",
        "mpt",
        "falcon-alibi",
        "baichuan-alibi",
        "smollm3",
        "phi",
    ]) {
        let golden = golden(name);
        let longest = expected(&golden).into_iter().max_by_key(|(prompt, _)| prompt.len()).expect("prompts");
        for enable_relay_attention in [true, false] {
            let config = EngineConfig { deterministic: false, enable_relay_attention, ..config(&golden, 4) };
            let mut engine = engine(&golden, reference(), &config);
            check(&mut engine, std::slice::from_ref(&longest), "alone");
            assert_eq!(engine.stats().relay.num_tokens_saved, 0, "{name}: there is nobody to share with");
            // The blocks of the first are there. Others that share nothing stand between them.
            let mut mixed = vec![longest.clone(); 5];
            mixed.insert(2, expected(&golden).swap_remove(0));
            check(&mut engine, &mixed, name);
            let relay = engine.stats().relay;
            // The windows of mistral are too short for it.
            assert_eq!(
                relay.num_tokens_saved > 0,
                enable_relay_attention && *name != "mistral",
                "{name}: {relay:?}"
            );
            // Five share all there is; a first block may be the sixth one's too.
            assert!(relay.num_tokens_saved >= 4 * relay.num_tokens_read, "{name}: {relay:?}");
        }
    }
}

#[test]
fn prompts_in_small_chunks() {
    let dense = ["llama", "gemma3", "qwen2-window", "bloom", "cohere2", "falcon-new", "gemma2", "opt"];
    for name in dense.iter().chain(MIXTURES) {
        let golden = golden(name);
        for budget in [8, 11] {
            for (backend, block_size) in backends() {
                let config = EngineConfig { max_num_batched_tokens: budget, ..config(&golden, block_size) };
                check(&mut engine(&golden, backend, &config), &expected(&golden), name);
            }
        }
    }
}

#[test]
fn with_a_pool_that_makes_them_give_way() {
    for mode in [PreemptionMode::Swap, PreemptionMode::Recompute, PreemptionMode::Auto] {
        let dense = ["llama", "gemma3", "bloom", "cohere2", "phi"];
        for name in dense.iter().chain(MIXTURES) {
            let golden = golden(name);
            for (backend, block_size) in backends() {
                let blocks = golden.max_model_len.div_ceil(block_size) + 2;
                let config = EngineConfig { preemption_mode: mode, ..config(&golden, block_size) };
                let mut engine = engine(&golden, backend, &with_blocks(&golden, &config, blocks));
                let prompts: Vec<_> = expected(&golden).into_iter().cycle().take(9).collect();
                check(&mut engine, &prompts, name);
                let stats = engine.stats().scheduler;
                assert!(
                    stats.num_preemptions_swap + stats.num_preemptions_recompute > 0,
                    "{mode:?}: {stats:?}"
                );
            }
        }
    }
}

#[test]
fn a_batch_changes_nothing_bit_for_bit() {
    let golden = golden("llama");
    let params = baton_core::SamplingParams { logprobs: Some(3), ..greedy(16) };
    let prompts: Vec<_> = expected(&golden).into_iter().map(|(prompt, _)| prompt).collect();
    let config = EngineConfig { enable_prefix_caching: false, ..config(&golden, 16) };
    let together = engine(&golden, cpu(), &config).generate(prompts.clone(), &params).expect("together");
    for (prompt, together) in prompts.into_iter().zip(together) {
        let alone = engine(&golden, cpu(), &config).generate(vec![prompt], &params).expect("alone").remove(0);
        assert_eq!(alone.outputs[0].logprobs, together.outputs[0].logprobs);
    }
}
