//! What a request may ask for: parallel sampling, beams, penalties, stops, log-probabilities, aborts, bad input.

mod common;

use baton_core::{BeamParams, FinishReason, Request, SamplingParams, TokenId};
use baton_engine::{Engine, EngineConfig, EngineError};
use common::{assert_idle, engine, golden, greedy, reference, small_config, tokens};

fn llama() -> Engine {
    let golden = golden("llama");
    engine(&golden, reference(), &small_config(&golden))
}

fn prompt() -> Vec<TokenId> {
    golden("llama").prompts[1].token_ids.clone()
}

fn run(engine: &mut Engine, params: &SamplingParams) -> Vec<Vec<TokenId>> {
    let output = engine.generate(vec![prompt()], params).expect("completes").remove(0);
    assert_idle(engine);
    tokens(&output)
}

#[test]
fn seeds_reproduce_and_differ() {
    let mut engine = llama();
    let sampled = |seed| SamplingParams { temperature: 1.5, seed: Some(seed), ..greedy(12) };
    let first = run(&mut engine, &sampled(7));
    assert_eq!(first, run(&mut engine, &sampled(7)));
    assert_eq!(first, run(&mut llama(), &sampled(7)));
    assert_ne!(first, run(&mut engine, &sampled(8)));
    let unseeded = SamplingParams { seed: None, ..sampled(0) };
    assert_ne!(run(&mut engine, &unseeded), run(&mut engine, &unseeded));
}

#[test]
fn parallel_samples_share_the_prompt_and_differ() {
    let mut engine = llama();
    let params = SamplingParams { temperature: 1.5, seed: Some(7), n: 4, ..greedy(12) };
    let four = run(&mut engine, &params);
    assert_eq!(four.len(), 4);
    assert!((1..4).all(|i| four[i] != four[0]), "{four:?}");
    // The first continuation is the one that n = 1 gives.
    assert_eq!(run(&mut engine, &SamplingParams { n: 1, ..params.clone() })[0], four[0]);
    // Greedy continuations are all the same.
    let greedy = run(&mut engine, &SamplingParams { temperature: 0.0, ..params });
    assert!(greedy.iter().all(|tokens| *tokens == greedy[0]));
}

#[test]
fn best_of_returns_the_likeliest() {
    let mut engine = llama();
    let params = SamplingParams { temperature: 1.5, seed: Some(3), n: 5, logprobs: Some(0), ..greedy(6) };
    let all = engine.generate(vec![prompt()], &params).expect("n = 5").remove(0);
    let mut scores: Vec<f32> = all.outputs.iter().map(|output| output.cumulative_logprob).collect();
    scores.sort_by(|a, b| b.total_cmp(a));
    let best = SamplingParams { n: 2, best_of: Some(5), ..params };
    let best = engine.generate(vec![prompt()], &best).expect("best of 5").remove(0);
    let got: Vec<f32> = best.outputs.iter().map(|output| output.cumulative_logprob).collect();
    assert_eq!(got, scores[..2]);
    assert_idle(&engine);
}

/// Beam search by exhaustive bookkeeping: every beam's continuations are scored by running it as a prompt of its own.
fn naive_beams(engine: &mut Engine, width: usize, length: usize) -> Vec<Vec<TokenId>> {
    let mut beams: Vec<(f32, Vec<TokenId>)> = vec![(0.0, Vec::new())];
    for _ in 0..length {
        let mut candidates = Vec::new();
        for (score, tokens) in &beams {
            let prompt = [prompt(), tokens.clone()].concat();
            let params = SamplingParams { logprobs: Some(2 * width as u32), ..greedy(1) };
            let output = engine.generate(vec![prompt], &params).expect("one step").remove(0);
            for top in &output.outputs[0].logprobs[0].top {
                candidates.push((score + top.logprob, [tokens.clone(), vec![top.token_id]].concat()));
            }
        }
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
        candidates.truncate(width);
        beams = candidates;
    }
    beams.into_iter().map(|(_, tokens)| tokens).collect()
}

#[test]
fn beams_are_those_of_the_naive_search() {
    for (width, n) in [(2, 2), (4, 3)] {
        let mut engine = llama();
        let beam = Some(BeamParams::default());
        let params = SamplingParams { beam, n, best_of: Some(width), ..greedy(7) };
        let got = run(&mut engine, &params);
        assert_eq!(got, naive_beams(&mut engine, width as usize, 7)[..n as usize]);
    }
}

#[test]
fn stops_at_tokens_and_lengths() {
    let mut engine = llama();
    let free = run(&mut engine, &greedy(12)).remove(0);
    let stop = free[4];
    let first = free.iter().position(|&token| token == stop).expect("it is there");
    let stopped = SamplingParams { stop_token_ids: vec![stop], ..greedy(12) };
    let output = engine.generate(vec![prompt()], &stopped).expect("stops").remove(0).outputs.remove(0);
    assert_eq!(output.token_ids, free[..=first]);
    assert_eq!((output.finish_reason, output.stop_token_id), (Some(FinishReason::Stop), Some(stop)));
    // Not before min_tokens: the token is not even drawn.
    let later = SamplingParams { min_tokens: 9, ..stopped };
    let output = engine.generate(vec![prompt()], &later).expect("goes on").remove(0).outputs.remove(0);
    assert!(output.token_ids.len() >= 9 && !output.token_ids[..9].contains(&stop), "{output:?}");
    // So are end tokens that only the request knows: the tokenizer's and the generation config's.
    for (min_tokens, ends) in [(0, true), (9, false)] {
        let params = SamplingParams { min_tokens, ..greedy(12) };
        let mut request = baton_core::Request::new(engine.new_request_id(), prompt(), params);
        request.eos_token_ids = std::sync::Arc::from([stop]);
        engine.add_request(request).expect("fits");
        let mut tokens = Vec::new();
        while engine.has_unfinished() {
            for output in engine.step() {
                tokens.extend(output.outputs.into_iter().flat_map(|output| output.token_ids));
            }
        }
        assert_eq!(
            tokens[..9.min(tokens.len())].contains(&stop),
            ends,
            "min_tokens {min_tokens}: {tokens:?}"
        );
    }
    // Without a limit it goes on to the model's length.
    let unlimited = SamplingParams { max_tokens: None, ..greedy(1) };
    let output = engine.generate(vec![prompt()], &unlimited).expect("ends").remove(0).outputs.remove(0);
    assert_eq!(output.finish_reason, Some(FinishReason::Length));
    assert_eq!(prompt().len() + output.token_ids.len(), golden("llama").max_model_len);
    assert_idle(&engine);
}

#[test]
fn penalties_and_biases_move_the_choice() {
    let mut engine = llama();
    let free = run(&mut engine, &greedy(12)).remove(0);
    let banned = SamplingParams { logit_bias: vec![(free[0], -100.0)], ..greedy(12) };
    assert!(!run(&mut engine, &banned)[0].contains(&free[0]));
    let forced = SamplingParams { logit_bias: vec![(9, 100.0)], ..greedy(3) };
    assert_eq!(run(&mut engine, &forced)[0], [9, 9, 9]);
    // With a strong enough penalty no token comes twice, prompt included.
    let penalised = SamplingParams { repetition_penalty: 1e9, ..greedy(12) };
    let mut seen = [prompt(), run(&mut engine, &penalised).remove(0)].concat();
    let len = seen.len() - prompt().len() + prompt().iter().collect::<std::collections::HashSet<_>>().len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), len);
}

#[test]
fn prompt_logprobs_are_those_of_generation() {
    let golden = golden("llama");
    // A budget of rows far below the prompt's length: scoring is cut into chunks.
    let config = EngineConfig { max_num_seqs: 2, max_num_batched_tokens: 6, ..small_config(&golden) };
    let mut engine = engine(&golden, reference(), &config);
    let params = SamplingParams { logprobs: Some(2), ..greedy(5) };
    let output = engine.generate(vec![prompt()], &params).expect("generates").remove(0).outputs.remove(0);
    let whole = [prompt(), output.token_ids.clone()].concat();
    let score = SamplingParams { prompt_logprobs: Some(2), ..greedy(1) };
    let scored = engine.generate(vec![whole.clone()], &score).expect("scores").remove(0);
    assert_eq!(scored.prompt_logprobs.len(), whole.len() - 1);
    for (logprobs, &token) in scored.prompt_logprobs.iter().zip(&whole[1..]) {
        assert_eq!(logprobs.chosen.token_id, token);
    }
    assert_eq!(scored.prompt_logprobs[prompt().len() - 1..], output.logprobs);
    assert_idle(&engine);
}

#[test]
fn requests_of_another_salt_share_nothing() {
    let mut engine = llama();
    let ask = |engine: &mut Engine, salt: Option<&str>| {
        let id = engine.new_request_id();
        let cache_salt = salt.map(Into::into);
        engine.add_request(Request { cache_salt, ..Request::new(id, prompt(), greedy(2)) }).expect("taken");
        let mut cached = 0;
        while engine.has_unfinished() {
            cached = engine.step().iter().map(|output| output.num_cached_tokens).fold(cached, u32::max);
        }
        cached
    };
    assert_eq!(ask(&mut engine, None), 0);
    assert_eq!(ask(&mut engine, None), 12);
    assert_eq!(ask(&mut engine, Some("tenant")), 0);
    assert_eq!(ask(&mut engine, Some("tenant")), 12);
}

#[test]
fn aborted_requests_leave_nothing_behind() {
    let mut engine = llama();
    let ids: Vec<_> = (0..6)
        .map(|_| {
            let id = engine.new_request_id();
            engine.add_request(Request::new(id, prompt(), greedy(40))).expect("taken");
            id
        })
        .collect();
    for id in ids {
        engine.step();
        let output = engine.abort(id).expect("it was running");
        assert!(output.finished);
        assert!(engine.abort(id).is_none());
    }
    while engine.has_unfinished() {
        assert!(engine.step().is_empty(), "an aborted request says nothing more");
    }
    assert_idle(&engine);
}

#[test]
fn the_loop_thread_serves_many_clients() {
    let golden = golden("llama");
    let expected = golden.prompts[1].greedy.clone();
    let handle = engine(&golden, reference(), &small_config(&golden)).spawn();
    let clients: Vec<_> = (0..12)
        .map(|client| {
            let handle = handle.clone();
            std::thread::spawn(move || {
                let id = handle.new_request_id();
                let mut outputs = handle.submit(Request::new(id, prompt(), greedy(20))).expect("submitted");
                if client % 4 == 3 {
                    return Vec::new(); // goes away at once
                }
                let mut tokens = Vec::new();
                while let Some(output) = outputs.recv() {
                    tokens.extend(output.expect("no error").outputs.remove(0).token_ids);
                }
                tokens
            })
        })
        .collect();
    for (client, thread) in clients.into_iter().enumerate() {
        let tokens = thread.join().expect("client");
        assert_eq!(tokens, if client % 4 == 3 { &[][..] } else { &expected[..20] });
    }
    let mut refused =
        handle.submit(Request::new(handle.new_request_id(), Vec::new(), greedy(1))).expect("sent");
    assert!(matches!(refused.recv(), Some(Err(EngineError::Sched(_)))));
    assert!(refused.recv().is_none());
    handle.shutdown();
    assert!(matches!(handle.stats(), Err(EngineError::Stopped)));
}

#[test]
fn bad_requests_and_settings_are_named() {
    let mut engine = llama();
    let mut refused = |prompt: Vec<TokenId>, params: SamplingParams| {
        engine.generate(vec![prompt], &params).expect_err("must be refused").to_string()
    };
    assert_eq!(refused(vec![], greedy(1)), "the prompt is empty: it must have at least one token");
    assert_eq!(refused(vec![160], greedy(1)), "prompt token 160 is outside the model's vocabulary of 160");
    assert!(refused(vec![1; 96], greedy(1)).contains("the model's limit is 96 tokens (--max-model-len)"));
    assert_eq!(
        refused(vec![1], SamplingParams { top_p: 2.0, ..greedy(1) }),
        "top_p must be in (0, 1], got 2"
    );
    assert!(refused(vec![1], SamplingParams { n: 9, ..greedy(1) }).contains("--max-num-seqs"));

    let golden = golden("llama");
    let files = baton_model::ModelFiles::open(&golden.folder, baton_model::LoadFormat::Auto).expect("model");
    let refused = |config: EngineConfig| {
        Engine::new(&files, reference(), &config, &mut |_| {}).expect_err("must be refused").to_string()
    };
    let base = small_config(&golden);
    let small = Box::new(baton_backend::ReferenceBackend::with_memory(1000));
    let large =
        Engine::new(&files, small, &base, &mut |_| panic!("nothing is loaded")).expect_err("too large");
    assert!(large.to_string().starts_with("the model with its workspace needs"), "{large}");
    let long = refused(EngineConfig { max_model_len: Some(1_000_000), ..base.clone() });
    assert!(long.contains("96"), "{long}");
    let tiny = refused(EngineConfig { kv_cache_memory: Some(1), ..base.clone() });
    assert!(tiny.contains("--kv-cache-memory"), "{tiny}");
    let block = refused(EngineConfig { block_size: Some(0), ..base.clone() });
    assert_eq!(block, "--block-size must be in 1..=1024, got 0");
    let batch = refused(EngineConfig { max_num_batched_tokens: 4, ..base });
    assert_eq!(batch, "--max-num-batched-tokens must be at least --max-num-seqs (8), got 4");
}
