//! A draft model changes when tokens come, never which. A model that drafts for itself is always right, so that any key or value
//! of the draft that is missing or wrong shows as a wrong guess.

mod common;

use baton_backend::{Backend, ReferenceBackend};
use baton_core::{Request, RequestOutput, SamplingParams, TokenId};
use baton_cpu::{CpuBackend, CpuOptions};
use baton_engine::{Engine, EngineConfig, SpeculationStats, SpeculativeConfig};
use baton_model::{LoadFormat, ModelFiles};
use baton_sched::PreemptionMode;
use common::{Golden, assert_idle, engine, golden, greedy, reference, small_config, tokens};

fn open(golden: &Golden) -> ModelFiles {
    ModelFiles::open(&golden.folder, LoadFormat::Auto).expect("golden model")
}

fn speculative(num_tokens: usize, adaptive: bool) -> SpeculativeConfig {
    let json = format!(
        r#"{{"method": "draft_model", "model": "x", "num_speculative_tokens": {num_tokens}, "adaptive": {adaptive}}}"#
    );
    serde_json::from_str(&json).expect("a configuration")
}

/// Every place for a guess is used.
fn drafting(
    [target, draft]: [&str; 2],
    backend: Box<dyn Backend>,
    change: impl FnOnce(&mut EngineConfig),
) -> Engine {
    let (target, draft) = (golden(target), golden(draft));
    let mut config = EngineConfig { speculative: Some(speculative(4, false)), ..small_config(&target) };
    change(&mut config);
    Engine::with_draft(&open(&target), Some(&open(&draft)), backend, &config, &mut |_| {}).expect("both load")
}

fn plain(name: &str) -> Engine {
    let golden = golden(name);
    engine(&golden, reference(), &small_config(&golden))
}

fn prompts(name: &str) -> Vec<Vec<TokenId>> {
    golden(name).prompts.iter().map(|prompt| prompt.token_ids.clone()).collect()
}

fn kinds() -> Vec<(&'static str, SamplingParams)> {
    let sampled = SamplingParams { temperature: 0.8, seed: Some(7), ..greedy(24) };
    vec![
        ("greedy", greedy(24)),
        ("sampled", sampled.clone()),
        ("top_p and top_k", SamplingParams { top_p: 0.7, top_k: 20, ..sampled.clone() }),
        ("min_p", SamplingParams { temperature: 1.5, min_p: 0.2, ..sampled.clone() }),
        ("penalties", SamplingParams { repetition_penalty: 1.2, frequency_penalty: 0.2, ..sampled.clone() }),
        ("bias", SamplingParams { logit_bias: vec![(5, 3.0), (9, -4.0)], ..sampled.clone() }),
        ("logprobs", SamplingParams { logprobs: Some(3), ..greedy(20) }),
        ("several", SamplingParams { n: 3, ..sampled.clone() }),
        ("best of", SamplingParams { best_of: Some(3), ..sampled }),
    ]
}

fn same(what: &str, got: &[RequestOutput], want: &[RequestOutput]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert_eq!(tokens(got), tokens(want), "{what}");
    }
}

fn assert_all_right(what: &str, stats: &SpeculationStats) {
    assert!(stats.num_draft_tokens > 20, "{what}: {stats:?}");
    assert_eq!(stats.num_accepted_tokens, stats.num_draft_tokens, "{what}: {stats:?}");
}

#[test]
fn a_model_is_always_right_about_itself_and_another_does_no_harm() {
    for target in ["llama", "gemma3", "qwen2-window", "deepseek-v3"] {
        let mut without = plain(target);
        let mut itself = drafting([target, target], reference(), |_| {});
        // Another shape of heads, other windows.
        let mut another = drafting([target, "qwen3"], reference(), |_| {});
        for (what, params) in kinds() {
            let want = without.generate(prompts(target), &params).expect("completes");
            let before = itself.stats().speculation;
            let got = itself.generate(prompts(target), &params).expect("completes");
            same(&format!("{target}, {what}"), &got, &want);
            let after = itself.stats().speculation;
            if what != "penalties" {
                let num_made = after.num_draft_tokens - before.num_draft_tokens;
                let num_right = after.num_accepted_tokens - before.num_accepted_tokens;
                assert!(num_made > 20, "{target}, {what}");
                assert_eq!(num_right, num_made, "{target}, {what}");
            }
            same(what, &another.generate(prompts(target), &params).expect("completes"), &want);
        }
        assert!(another.stats().speculation.num_draft_tokens > 100);
        assert_idle(&itself);
        assert_idle(&another);
    }
}

/// Two blocks' worth of tokens in a step, so that the draft follows prompts in many chunks.
#[test]
fn small_steps_and_a_small_cache_lose_nothing_of_the_draft() {
    let long: Vec<Vec<TokenId>> =
        prompts("llama").iter().map(|one| one.iter().copied().cycle().take(25).collect()).collect();
    let want = plain("llama").generate(long.clone(), &greedy(24)).expect("completes");
    for mode in [PreemptionMode::Swap, PreemptionMode::Recompute] {
        let mut engine = drafting(["llama", "llama"], reference(), |config| {
            config.preemption_mode = mode;
            config.max_num_batched_tokens = 11;
            // Both models' layers are in a block.
            let spec = open(&golden("llama")).config().kv_spec(config.kv_dtype, 4);
            config.kv_cache_memory = Some((26 * 2 * spec.bytes_per_block()) as u64);
        });
        same("a small cache", &engine.generate(long.clone(), &greedy(24)).expect("completes"), &want);
        let stats = engine.stats();
        let preempted = stats.scheduler.num_preemptions_swap + stats.scheduler.num_preemptions_recompute;
        assert!(preempted > 0, "{:?}", stats.scheduler);
        assert_all_right("a small cache", &stats.speculation);
        assert_idle(&engine);
    }
}

#[test]
fn prefixes_bring_the_drafts_keys_and_what_lacks_them_is_caught_up() {
    let prompt: Vec<TokenId> = (0..40).map(|token| token * 7 % 150).collect();
    let mut engine = drafting(["llama", "llama"], reference(), |config| config.deterministic = false);
    let ask = |engine: &mut Engine, speculative_tokens| {
        let params = SamplingParams { speculative_tokens, ..greedy(16) };
        engine.generate(vec![prompt.clone()], &params).expect("completes").remove(0)
    };
    // Cached without the draft, then used with it, then with all there is.
    let first = ask(&mut engine, Some(0));
    assert_eq!(engine.stats().speculation.num_drafts, 0);
    for _ in 0..2 {
        let again = ask(&mut engine, None);
        assert!(again.num_cached_tokens >= 36, "{}", again.num_cached_tokens);
        assert_eq!(tokens(&again), tokens(&first));
    }
    assert_all_right("a cached prefix", &engine.stats().speculation);
}

#[test]
fn requests_with_and_without_drafts_share_a_batch_and_may_be_aborted() {
    let mut without = plain("llama");
    let all: Vec<Vec<TokenId>> = prompts("llama").into_iter().flat_map(|one| [one.clone(), one]).collect();
    let want = without.generate(all.clone(), &greedy(24)).expect("completes");
    let mut engine = drafting(["llama", "llama"], reference(), |_| {});
    let mut got: Vec<Vec<TokenId>> = vec![Vec::new(); all.len()];
    let first = engine.new_request_id().0 + 1;
    for (index, prompt) in all.iter().cloned().enumerate() {
        let speculative_tokens = [Some(0), Some(2), None, Some(7)][index % 4];
        let id = engine.new_request_id();
        let params = SamplingParams { speculative_tokens, ..greedy(24) };
        engine.add_request(Request::new(id, prompt, params)).expect("taken");
    }
    let aborted = baton_core::RequestId(first + 2);
    let mut num_steps = 0;
    while engine.has_unfinished() {
        for output in engine.step() {
            let index = (output.request_id.0 - first) as usize;
            got[index].extend(output.outputs.iter().flat_map(|output| &output.token_ids));
        }
        num_steps += 1;
        if num_steps == 4 {
            engine.abort(aborted);
        }
    }
    for (index, (got, want)) in got.iter().zip(&want).enumerate() {
        let want = &want.outputs[0].token_ids;
        if index == 2 {
            assert!(got.len() < want.len() && want.starts_with(got), "{got:?}");
        } else {
            assert_eq!(got, want, "request {index}");
        }
    }
    assert_all_right("a mixed batch", &engine.stats().speculation);
    assert_idle(&engine);
}

/// What is worth it is decided by measured times, and no output depends on it.
#[test]
fn costs_decide_and_change_nothing() {
    let mut without = plain("llama");
    for draft in ["llama", "qwen3"] {
        let mut engine = drafting(["llama", draft], reference(), |config| {
            config.speculative = Some(speculative(6, true));
        });
        for (what, params) in kinds() {
            let want = without.generate(prompts("llama"), &params).expect("completes");
            same(what, &engine.generate(prompts("llama"), &params).expect("completes"), &want);
        }
        assert_idle(&engine);
    }
}

#[test]
fn cpu_drafts_are_right_too() {
    for [target, draft] in [["llama", "llama"], ["qwen3", "llama"], ["gemma3", "gemma3"]] {
        let cpu = || Box::new(CpuBackend::new(CpuOptions::default()).expect("the CPU is always there"));
        let golden = golden(target);
        let config = EngineConfig { block_size: Some(16), ..small_config(&golden) };
        let want = engine(&golden, cpu(), &config).generate(prompts(target), &greedy(20)).expect("completes");
        let mut engine = drafting([target, draft], cpu(), |config| config.block_size = Some(16));
        let got = engine.generate(prompts(target), &greedy(20)).expect("completes");
        same(target, &got, &want);
        let stats = engine.stats().speculation;
        assert!(stats.num_draft_tokens > 20, "{stats:?}");
        if target == draft {
            assert_all_right(target, &stats);
        }
    }
}

/// Its positions end where it ends, and the target goes on without it.
#[test]
fn a_draft_with_a_shorter_context_stops_drafting_there() {
    let prompt: Vec<TokenId> = (0..20).map(|token| token * 11 % 150).collect();
    let want = plain("llama").generate(vec![prompt.clone()], &greedy(40)).expect("completes");
    let mut engine = drafting(["llama", "llama"], reference(), |config| {
        let limited = SpeculativeConfig { max_model_len: Some(32), ..speculative(4, false) };
        config.speculative = Some(limited);
    });
    let got = engine.generate(vec![prompt], &greedy(40)).expect("completes");
    same("a short draft", &got, &want);
    let stats = engine.stats().speculation;
    assert_eq!(stats.num_accepted_tokens, stats.num_draft_tokens);
    assert!((6..=12).contains(&stats.num_draft_tokens), "{stats:?}");
}

#[test]
fn a_draft_model_must_be_opened_where_it_is_named() {
    let golden = golden("llama");
    let config = EngineConfig { speculative: Some(speculative(4, false)), ..small_config(&golden) };
    let error = Engine::new(&open(&golden), reference(), &config, &mut |_| {}).expect_err("no draft");
    assert!(error.to_string().contains("--speculative-config"), "{error}");
}

fn tree(num_tokens: usize, adaptive: bool) -> SpeculativeConfig {
    let json = format!(
        r#"{{"method": "tree", "model": "x", "num_speculative_tokens": {num_tokens}, "tree_width": 4, "adaptive": {adaptive}}}"#
    );
    serde_json::from_str(&json).expect("a configuration")
}

/// A draft that differs a little is often right about a token that it found likely and did not draw.
#[test]
fn trees_give_the_same_tokens_and_more_of_them_in_a_step() {
    for (target, draft) in [("llama", "llama-bias"), ("qwen2", "llama-bias"), ("deepseek-v3", "llama-bias")] {
        let mut without = plain(target);
        let mut chain = drafting([target, draft], reference(), |config| {
            config.speculative = Some(speculative(12, false));
        });
        // As a device has it that records its steps: rows that are computed again draw too.
        let recording = Box::new(ReferenceBackend::new().with_large_steps());
        let mut tree = drafting([target, draft], recording, |config| {
            config.speculative = Some(self::tree(12, false));
        });
        for (what, params) in kinds() {
            let want = without.generate(prompts(target), &params).expect("completes");
            for engine in [&mut chain, &mut tree] {
                let got = engine.generate(prompts(target), &params).expect("completes");
                same(&format!("{target}, {what}"), &got, &want);
                assert_idle(engine);
            }
        }
        let (chain, tree) = (chain.stats().speculation, tree.stats().speculation);
        let lengths = (chain.mean_acceptance_length(), tree.mean_acceptance_length());
        assert!(lengths.1 > lengths.0, "{target}: {lengths:?} of {chain:?} and {tree:?}");
    }
}

#[test]
fn trees_lose_nothing_in_a_small_cache_and_on_the_cpu() {
    let want = plain("llama").generate(prompts("llama"), &greedy(24)).expect("completes");
    for mode in [PreemptionMode::Swap, PreemptionMode::Recompute] {
        let mut engine = drafting(["llama", "llama-bias"], reference(), |config| {
            config.speculative = Some(tree(8, false));
            config.preemption_mode = mode;
            config.max_num_batched_tokens = 11;
            let spec = open(&golden("llama")).config().kv_spec(config.kv_dtype, 4);
            config.kv_cache_memory = Some((48 * 2 * spec.bytes_per_block()) as u64);
        });
        same("a small cache", &engine.generate(prompts("llama"), &greedy(24)).expect("completes"), &want);
        assert_idle(&engine);
    }
    let cpu = || Box::new(CpuBackend::new(CpuOptions::default()).expect("the CPU is always there"));
    for deterministic in [true, false] {
        let golden = golden("llama");
        let config = EngineConfig { block_size: Some(16), deterministic, ..small_config(&golden) };
        let want =
            engine(&golden, cpu(), &config).generate(prompts("llama"), &greedy(24)).expect("completes");
        let mut engine = drafting(["llama", "llama-bias"], cpu(), |config| {
            config.block_size = Some(16);
            config.deterministic = deterministic;
            config.speculative = Some(tree(12, false));
        });
        same("cpu", &engine.generate(prompts("llama"), &greedy(24)).expect("completes"), &want);
        assert_idle(&engine);
    }
}

/// How often each token was the third of an answer, over so many seeds.
fn third_tokens(engine: &mut Engine, params: &SamplingParams, seeds: std::ops::Range<u64>) -> Vec<f64> {
    let prompt = golden("llama").prompts[0].token_ids.clone();
    let mut counts = vec![0.0; 160];
    for seed in seeds {
        let id = engine.new_request_id();
        let params = SamplingParams { seed: Some(seed), ..params.clone() };
        engine.add_request(Request::new(id, prompt.clone(), params)).expect("taken");
        if seed % 500 == 499 {
            let mut known: std::collections::HashMap<_, Vec<TokenId>> = std::collections::HashMap::new();
            while engine.has_unfinished() {
                for output in engine.step() {
                    known.entry(output.request_id).or_default().extend(&output.outputs[0].token_ids);
                }
            }
            for tokens in known.values() {
                counts[tokens[2] as usize] += 1.0;
            }
        }
    }
    counts
}

/// The same seed gives the same token, which the tests above show; here other seeds must give the same distribution.
#[test]
fn ten_thousand_sampled_tokens_are_distributed_as_without_a_draft() {
    let mut without = plain("llama");
    let mut engines = [speculative(4, false), tree(8, false)].map(|config| {
        drafting(["llama", "llama-bias"], reference(), |settings| settings.speculative = Some(config))
    });
    let warm = SamplingParams { temperature: 0.9, ..greedy(4) };
    for params in [warm.clone(), SamplingParams { temperature: 0.6, top_p: 0.8, ..warm }] {
        let want = third_tokens(&mut without, &params, 0..10_000);
        for engine in &mut engines {
            assert_alike(&want, &third_tokens(engine, &params, 10_000..20_000));
        }
    }
    for engine in &engines {
        let stats = engine.stats().speculation;
        assert!(stats.num_accepted_tokens > 50 && stats.num_draft_tokens > 10_000, "{stats:?}");
    }
}

/// A chi-square test of two samples of equal size.
fn assert_alike(want: &[f64], got: &[f64]) {
    let (mut statistic, mut cells, mut rare) = (0.0_f64, 0.0_f64, (0.0_f64, 0.0_f64));
    for (&want, &got) in want.iter().zip(got) {
        if want + got < 20.0 {
            rare = (rare.0 + want, rare.1 + got);
        } else {
            statistic += (want - got) * (want - got) / (want + got);
            cells += 1.0;
        }
    }
    if rare.0 + rare.1 > 0.0 {
        statistic += (rare.0 - rare.1).powi(2) / (rare.0 + rare.1);
        cells += 1.0;
    }
    // Four standard deviations above what chance gives.
    let most = cells + 4.0 * (2.0 * cells).sqrt();
    assert!(cells > 5.0 && statistic < most, "{statistic} in {cells} cells, at most {most}");
}
