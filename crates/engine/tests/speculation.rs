//! Speculation changes when tokens come, never which: with every proposer, sampled or greedy, alone or in a batch.

mod common;

use std::sync::Arc;

use baton_core::{Request, RequestOutput, SamplingParams, TokenId};
use baton_cpu::{CpuBackend, CpuOptions};
use baton_engine::{Engine, EngineConfig, SpeculativeConfig};
use baton_sched::PreemptionMode;
use common::{assert_idle, engine, golden, greedy, reference, small_config, tokens, with_blocks};

fn speculative(json: &str) -> SpeculativeConfig {
    serde_json::from_str(json).expect("a configuration")
}

/// Every guess is checked, however little it promises.
const ALWAYS: [&str; 2] = [
    r#"{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": false}"#,
    r#"{"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_max_spec_factor": 4, "adaptive": false}"#,
];

fn llama(config: Option<SpeculativeConfig>, change: impl FnOnce(&mut EngineConfig)) -> Engine {
    let golden = golden("llama");
    let mut settings = EngineConfig { speculative: config, ..small_config(&golden) };
    change(&mut settings);
    engine(&golden, reference(), &settings)
}

/// Prompts that repeat themselves, so that there is something to look up.
fn prompts() -> Vec<Vec<TokenId>> {
    let golden = golden("llama");
    let repeat = |prompt: &[TokenId]| {
        let part = &prompt[..prompt.len().min(9)];
        [part, part, &part[..3.min(part.len())]].concat()
    };
    golden.prompts.iter().map(|prompt| repeat(&prompt.token_ids)).collect()
}

/// Ways to sample that look at more than the logits of a position.
fn kinds() -> Vec<(&'static str, SamplingParams)> {
    let sampled = SamplingParams { temperature: 0.4, seed: Some(7), ..greedy(24) };
    vec![
        ("greedy", greedy(24)),
        ("sampled", sampled.clone()),
        ("top_p and top_k", SamplingParams { temperature: 1.0, top_p: 0.7, top_k: 20, ..sampled.clone() }),
        ("min_p", SamplingParams { temperature: 1.5, min_p: 0.2, ..sampled.clone() }),
        (
            "penalties",
            SamplingParams {
                repetition_penalty: 1.2,
                presence_penalty: 0.3,
                frequency_penalty: 0.2,
                ..sampled.clone()
            },
        ),
        ("bias", SamplingParams { logit_bias: vec![(5, 3.0), (9, -4.0)], ..sampled.clone() }),
        ("logprobs", SamplingParams { logprobs: Some(3), ..greedy(20) }),
        ("several", SamplingParams { n: 3, ..sampled.clone() }),
        ("best of", SamplingParams { best_of: Some(3), ..sampled }),
    ]
}

fn generate(engine: &mut Engine, params: &SamplingParams) -> Vec<RequestOutput> {
    let outputs = engine.generate(prompts(), params).expect("all complete");
    assert_idle(engine);
    outputs
}

fn same(what: &str, got: &[RequestOutput], want: &[RequestOutput]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert_eq!(tokens(got), tokens(want), "{what}");
        for (got, want) in got.outputs.iter().zip(&want.outputs) {
            assert_eq!((got.finish_reason, got.stop_token_id), (want.finish_reason, want.stop_token_id));
            let chosen = |output: &baton_core::SequenceOutput| -> Vec<(TokenId, u32)> {
                output.logprobs.iter().map(|one| (one.chosen.token_id, one.chosen.rank)).collect()
            };
            assert_eq!(chosen(got), chosen(want), "{what}");
        }
    }
}

#[test]
fn every_way_to_sample_gives_the_same_tokens() {
    let mut plain = llama(None, |_| {});
    for json in ALWAYS {
        let mut engine = llama(Some(speculative(json)), |_| {});
        for (what, params) in kinds() {
            let (got, want) = (generate(&mut engine, &params), generate(&mut plain, &params));
            same(&format!("{what} with {json}"), &got, &want);
        }
        let stats = engine.stats().speculation;
        assert!(stats.num_accepted_tokens > 50, "{stats:?}");
        assert!(stats.num_draft_tokens > stats.num_accepted_tokens + 50, "{stats:?}");
        let by_position: u64 = stats.num_accepted_per_position.iter().sum();
        assert_eq!(by_position, stats.num_accepted_tokens);
    }
}

#[test]
fn ends_come_where_they_came() {
    let mut plain = llama(None, |_| {});
    let first = generate(&mut plain, &greedy(24));
    // A token from the middle of an output ends it, and before `min_tokens` it may not be drawn.
    let stop = first[0].outputs[0].token_ids[9];
    for json in ALWAYS {
        let mut engine = llama(Some(speculative(json)), |_| {});
        for min_tokens in [0, 5, 14] {
            let params = SamplingParams { stop_token_ids: vec![stop], min_tokens, ..greedy(24) };
            let (got, want) = (generate(&mut engine, &params), generate(&mut plain, &params));
            same(&format!("min_tokens {min_tokens} with {json}"), &got, &want);
        }
    }
}

#[test]
fn requests_with_and_without_guesses_share_a_batch() {
    let mut plain = llama(None, |_| {});
    // Each prompt twice, once without guesses or with another number of them.
    let twice: Vec<Vec<TokenId>> =
        prompts().into_iter().flat_map(|prompt| [prompt.clone(), prompt]).collect();
    let want = plain.generate(twice.clone(), &greedy(24)).expect("all complete");
    for json in ALWAYS {
        let mut engine = llama(Some(speculative(json)), |_| {});
        let mut outputs: Vec<Option<RequestOutput>> = vec![None; want.len()];
        let first = engine.new_request_id().0 + 1;
        for (index, prompt) in twice.iter().cloned().enumerate() {
            let speculative_tokens = [Some(0), Some(4), None, Some(8)][index % 4];
            let params = SamplingParams { speculative_tokens, ..greedy(24) };
            let id = engine.new_request_id();
            engine.add_request(Request::new(id, prompt, params)).expect("taken");
        }
        while engine.has_unfinished() {
            for output in engine.step() {
                let known = &mut outputs[(output.request_id.0 - first) as usize];
                match known {
                    Some(known) => known.extend(output),
                    None => *known = Some(output),
                }
            }
        }
        let outputs: Vec<RequestOutput> =
            outputs.into_iter().map(|output| output.expect("it ends")).collect();
        same(json, &outputs, &want);
        let num_guesses = |output: &RequestOutput| output.drafts.num_accepted + output.drafts.num_rejected;
        let (without, with): (Vec<_>, Vec<_>) =
            outputs.iter().enumerate().partition(|(index, _)| index % 4 == 0);
        assert!(without.iter().all(|(_, output)| num_guesses(output) == 0), "guesses that nobody asked for");
        assert!(with.iter().any(|(_, output)| num_guesses(output) > 0), "{json}");
        assert_idle(&engine);
    }
}

#[test]
fn a_small_cache_and_small_steps_change_nothing() {
    let golden = golden("llama");
    let mut plain = llama(None, |_| {});
    let want = generate(&mut plain, &greedy(24));
    for mode in [PreemptionMode::Swap, PreemptionMode::Recompute] {
        for json in ALWAYS {
            let mut engine = llama(Some(speculative(json)), |config| {
                config.preemption_mode = mode;
                config.max_num_batched_tokens = 11;
                *config = with_blocks(&golden, config, 34);
            });
            same(json, &generate(&mut engine, &greedy(24)), &want);
            assert!(engine.stats().speculation.num_accepted_tokens > 0);
        }
    }
}

/// What is known of costs decides, and no output depends on it.
#[test]
fn deciding_by_cost_changes_nothing() {
    let mut plain = llama(None, |_| {});
    let mut engine = llama(Some(speculative(r#"{"method": "suffix"}"#)), |_| {});
    for (what, params) in kinds() {
        same(what, &generate(&mut engine, &params), &generate(&mut plain, &params));
    }
}

#[test]
fn a_prediction_is_used_and_a_wrong_one_does_no_harm() {
    let mut plain = llama(None, |_| {});
    let prompt = golden("llama").prompts[0].token_ids.clone();
    let want = plain.generate(vec![prompt.clone()], &greedy(24)).expect("completes").remove(0);
    for json in ALWAYS {
        let mut accepted = Vec::new();
        let wrong: Vec<TokenId> = (0..24).map(|token| 100 + token).collect();
        for prediction in [want.outputs[0].token_ids.clone(), wrong] {
            let mut engine = llama(Some(speculative(json)), |_| {});
            let id = engine.new_request_id();
            let request =
                Request { prediction: Arc::from(prediction), ..Request::new(id, prompt.clone(), greedy(24)) };
            engine.add_request(request).expect("taken");
            let mut got: Vec<TokenId> = Vec::new();
            while engine.has_unfinished() {
                got.extend(engine.step().iter().flat_map(|output| &output.outputs[0].token_ids));
            }
            assert_eq!(got, want.outputs[0].token_ids, "{json}");
            accepted.push(engine.stats().speculation.num_accepted_tokens);
        }
        assert!(accepted[0] >= 15 && accepted[0] > accepted[1], "{json}: {accepted:?}");
    }
}

#[test]
fn the_test_proposer_is_right_as_often_as_it_is_told() {
    let json =
        r#"{"method": "synthetic", "num_speculative_tokens": 4, "acceptance": 0.8, "adaptive": false}"#;
    let mut engine = llama(Some(speculative(json)), |config| config.max_num_seqs = 2);
    for _ in 0..20 {
        generate(&mut engine, &greedy(24));
    }
    let stats = engine.stats().speculation;
    // 0.8 + 0.8² + 0.8³ + 0.8⁴, a little less at the ends of outputs.
    assert!((2.9..3.5).contains(&stats.mean_acceptance_length()), "{stats:?}");
}

/// On the CPU the logits of a row do not depend on the rows beside it.
#[test]
fn cpu_tokens_are_the_same_too() {
    for name in ["llama", "gemma3", "qwen2"] {
        let golden = golden(name);
        let cpu = || Box::new(CpuBackend::new(CpuOptions::default()).expect("the CPU is always there"));
        let config = EngineConfig { block_size: Some(16), ..small_config(&golden) };
        let mut plain = engine(&golden, cpu(), &config);
        let prompts: Vec<Vec<TokenId>> = golden
            .prompts
            .iter()
            .map(|prompt| prompt.token_ids.repeat(2)[..].iter().copied().take(60).collect())
            .collect();
        let want = plain.generate(prompts.clone(), &greedy(20)).expect("completes");
        for json in ALWAYS {
            let config = EngineConfig { speculative: Some(speculative(json)), ..config.clone() };
            let mut engine = engine(&golden, cpu(), &config);
            let got = engine.generate(prompts.clone(), &greedy(20)).expect("completes");
            same(&format!("{name} with {json}"), &got, &want);
            assert!(engine.stats().speculation.num_accepted_tokens > 0, "{name}");
        }
    }
}
