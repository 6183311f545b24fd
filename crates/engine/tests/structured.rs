//! Structured outputs through the engine, with a constraint made for the test: each token must follow the one before by
//! one of a few steps, and after some tokens only the end is left. Grammars themselves are tested where they are compiled.

mod common;

use std::sync::Arc;
use std::time::Duration;

use baton_core::{
    Constraint, ConstraintMatcher, FinishReason, Request, RequestOutput, SamplingParams, StructuredOutput,
    TokenId, mask_words,
};
use baton_engine::{Engine, EngineConfig, EngineError};
use baton_model::{LoadFormat, ModelFiles};
use baton_sched::PreemptionMode;
use common::{assert_idle, engine, golden, greedy, reference, small_config, with_blocks};

const VOCAB_SIZE: usize = 160;
const END: TokenId = 2;
const FIRST: [TokenId; 3] = [40, 50, 60];
const STEPS: [TokenId; 3] = [1, 4, 9];

#[derive(Debug)]
struct Chain {
    length: usize,
    first: Vec<u32>,
    /// How long each mask takes.
    delay: Duration,
    /// Which mask cannot be computed.
    fails_at: usize,
}

#[derive(Clone)]
struct Follower {
    left: usize,
    delay: Duration,
    until_failure: usize,
}

fn mask_of(tokens: &[TokenId], mask: &mut Vec<u32>) {
    mask.clear();
    mask.resize(mask_words(VOCAB_SIZE), 0);
    for &token in tokens {
        mask[token as usize / 32] |= 1 << (token % 32);
    }
}

impl Chain {
    fn new(length: usize) -> Self {
        let mut first = Vec::new();
        mask_of(&FIRST, &mut first);
        Self { length, first, delay: Duration::ZERO, fails_at: usize::MAX }
    }
}

impl Constraint for Chain {
    fn first_mask(&self) -> &[u32] {
        &self.first
    }

    fn start(&self) -> Box<dyn ConstraintMatcher> {
        Box::new(Follower { left: self.length, delay: self.delay, until_failure: self.fails_at })
    }
}

impl ConstraintMatcher for Follower {
    fn advance(&mut self, token_id: TokenId, mask: &mut Vec<u32>) -> Result<(), String> {
        std::thread::sleep(self.delay);
        self.until_failure -= 1;
        if self.until_failure == 0 {
            return Err("the test wants it so".to_owned());
        }
        self.left -= 1;
        if self.left == 0 {
            mask_of(&[END], mask);
        } else {
            mask_of(&STEPS.map(|step| token_id + step), mask);
        }
        Ok(())
    }

    fn fork(&self) -> Box<dyn ConstraintMatcher> {
        Box::new(self.clone())
    }
}

fn structured(params: SamplingParams) -> SamplingParams {
    SamplingParams { structured_outputs: Some(StructuredOutput::JsonObject), ..params }
}

fn request(engine: &mut Engine, params: &SamplingParams, chain: Option<Chain>) -> Request {
    let prompt = golden("llama").prompts[1].token_ids.clone();
    let constraint = chain.map(|chain| Arc::new(chain) as Arc<dyn Constraint>);
    Request {
        constraint,
        eos_token_ids: Arc::from([END]),
        ..Request::new(engine.new_request_id(), prompt, params.clone())
    }
}

/// Runs all requests to their ends; the outputs are in their order.
fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<RequestOutput> {
    let ids: Vec<_> = requests.iter().map(|request| request.id).collect();
    for request in requests {
        engine.add_request(request).expect("taken");
    }
    let mut outputs: Vec<Option<RequestOutput>> = vec![None; ids.len()];
    while engine.has_unfinished() {
        for output in engine.step() {
            let index = ids.iter().position(|id| *id == output.request_id).expect("a known request");
            match &mut outputs[index] {
                Some(known) => known.extend(output),
                empty => *empty = Some(output),
            }
        }
    }
    assert_idle(engine);
    let mut outputs: Vec<_> = outputs.into_iter().map(|output| output.expect("every request ends")).collect();
    for output in &mut outputs {
        output.outputs.sort_by_key(|output| output.index);
    }
    outputs
}

fn assert_chain(tokens: &[TokenId], length: usize) {
    assert_eq!(tokens.len(), length + 1, "{tokens:?}");
    assert!(FIRST.contains(&tokens[0]), "{tokens:?}");
    assert!(tokens[..length].windows(2).all(|pair| STEPS.contains(&(pair[1] - pair[0]))), "{tokens:?}");
    assert_eq!(tokens[length], END);
}

fn llama(change: impl FnOnce(&mut EngineConfig)) -> Engine {
    let golden = golden("llama");
    let mut config = small_config(&golden);
    change(&mut config);
    engine(&golden, reference(), &config)
}

fn sampled(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 3.0, seed: Some(seed), ..structured(greedy(40)) }
}

#[test]
fn outputs_stay_in_the_mask_and_end() {
    let mut engine = llama(|_| {});
    let kinds = [
        structured(greedy(40)),
        sampled(5),
        SamplingParams { top_k: 2, top_p: 0.7, min_p: 0.1, ..sampled(6) },
        SamplingParams {
            repetition_penalty: 1.3,
            presence_penalty: 1.0,
            logit_bias: vec![(5, 100.0)],
            ..sampled(7)
        },
        // The grammar says where the output ends, whatever else is asked.
        SamplingParams { min_tokens: 30, ignore_eos: true, ..sampled(8) },
        SamplingParams { min_tokens: 3, ignore_eos: false, ..sampled(9) },
    ];
    let requests = kinds.iter().map(|params| request(&mut engine, params, Some(Chain::new(11)))).collect();
    for output in run(&mut engine, requests) {
        assert_chain(&output.outputs[0].token_ids, 11);
        assert_eq!(output.outputs[0].finish_reason, Some(FinishReason::Stop));
        assert_eq!(output.outputs[0].stop_token_id, Some(END));
    }
    let short = SamplingParams { max_tokens: Some(4), ..sampled(1) };
    let requests = vec![request(&mut engine, &short, Some(Chain::new(11)))];
    assert_eq!(run(&mut engine, requests)[0].outputs[0].finish_reason, Some(FinishReason::Length));
}

#[test]
fn continuations_go_their_own_ways() {
    let mut engine = llama(|_| {});
    let four = SamplingParams { n: 4, ..sampled(3) };
    let best = SamplingParams { n: 2, best_of: Some(5), ..sampled(3) };
    let requests =
        [&four, &best, &sampled(3)].map(|params| request(&mut engine, params, Some(Chain::new(9))));
    let outputs = run(&mut engine, requests.into());
    let tokens = |output: &RequestOutput| -> Vec<Vec<TokenId>> {
        output.outputs.iter().map(|output| output.token_ids.clone()).collect()
    };
    assert_eq!((outputs[0].outputs.len(), outputs[1].outputs.len()), (4, 2));
    outputs.iter().flat_map(tokens).for_each(|tokens| assert_chain(&tokens, 9));
    let four = tokens(&outputs[0]);
    assert_eq!(four[0], tokens(&outputs[2])[0], "the first is the one that n = 1 gives");
    assert!((1..4).any(|index| four[index] != four[0]), "{four:?}");
}

#[test]
fn preemption_changes_nothing() {
    let golden = golden("llama");
    let roomy = small_config(&golden);
    let all = |engine: &mut Engine| -> Vec<Vec<Vec<TokenId>>> {
        let requests = (0..6).map(|seed| {
            let params = SamplingParams { n: 1 + (seed % 2) as u32, ..sampled(seed) };
            request(engine, &params, Some(Chain::new(10)))
        });
        let requests = requests.collect();
        let outputs = run(engine, requests);
        outputs
            .iter()
            .map(|output| output.outputs.iter().map(|one| one.token_ids.clone()).collect())
            .collect()
    };
    let expected = all(&mut engine(&golden, reference(), &roomy));
    expected.iter().flatten().for_each(|tokens| assert_chain(tokens, 10));
    for preemption_mode in [PreemptionMode::Swap, PreemptionMode::Recompute] {
        // As few blocks as the longest possible request of the test may need.
        let tight = with_blocks(
            &golden,
            &EngineConfig { preemption_mode, max_model_len: Some(60), ..roomy.clone() },
            32,
        );
        let mut engine = engine(&golden, reference(), &tight);
        assert_eq!(all(&mut engine), expected, "{preemption_mode:?}");
        let stats = engine.stats().scheduler;
        let preempted = stats.num_preemptions_swap + stats.num_preemptions_recompute;
        assert!(preempted > 0, "the test must preempt to show anything: {stats:?}");
    }
}

#[test]
fn others_neither_notice_nor_wait() {
    let mut engine = llama(|_| {});
    let plain = SamplingParams { structured_outputs: None, ..sampled(4) };
    let alone = {
        let requests = vec![request(&mut engine, &plain, None)];
        run(&mut engine, requests).remove(0).outputs[0].token_ids.clone()
    };
    let slow = Chain { delay: Duration::from_millis(150), ..Chain::new(8) };
    let slow = request(&mut engine, &sampled(1), Some(slow));
    let quick = request(&mut engine, &plain, None);
    let (slow_id, quick_id) = (slow.id, quick.id);
    engine.add_request(slow).expect("taken");
    engine.add_request(quick).expect("taken");
    let (mut num_slow_tokens, mut tokens) = (0, Vec::new());
    while engine.has_unfinished() {
        for output in engine.step() {
            let new = &output.outputs[0].token_ids;
            if output.request_id == quick_id {
                tokens.extend_from_slice(new);
                assert!(!output.finished || num_slow_tokens < 8, "the slow masks held up the other request");
            } else {
                assert_eq!(output.request_id, slow_id);
                num_slow_tokens += new.len();
            }
        }
    }
    assert_eq!((tokens, num_slow_tokens), (alone, 9));
    assert_idle(&engine);
}

#[test]
fn a_mask_that_fails_ends_its_request_only() {
    let mut engine = llama(|_| {});
    let failing = Chain { fails_at: 4, ..Chain::new(8) };
    let requests = vec![
        request(&mut engine, &sampled(1), Some(failing)),
        request(&mut engine, &sampled(1), Some(Chain::new(8))),
        request(&mut engine, &greedy(12), None),
    ];
    let outputs = run(&mut engine, requests);
    let reasons: Vec<_> = outputs.iter().map(|output| output.outputs[0].finish_reason).collect();
    assert_eq!(reasons[0], Some(FinishReason::Error));
    assert_eq!(outputs[0].outputs[0].token_ids.len(), 4);
    assert_chain(&outputs[1].outputs[0].token_ids, 8);
    assert_eq!(reasons[2], Some(FinishReason::Length));
    // Whoever asked is told why; the others are not.
    assert_eq!(outputs[0].shape_failure.as_deref(), Some("the test wants it so"));
    assert!(outputs[1..].iter().all(|output| output.shape_failure.is_none()));
    let cause = engine.stats().last_failure.expect("a cause");
    assert_eq!(cause, "structured output: the test wants it so");
}

#[test]
fn shapes_must_be_compiled_for_this_model() {
    let mut engine = llama(|_| {});
    let mut small = Chain::new(3);
    small.first.pop();
    let refused = [
        request(&mut engine, &sampled(1), None),
        request(&mut engine, &greedy(3), Some(Chain::new(3))),
        request(&mut engine, &sampled(1), Some(small)),
    ];
    for request in refused {
        assert!(matches!(engine.add_request(request), Err(EngineError::NotCompiled)));
    }
    assert_idle(&engine);
}

#[test]
fn probabilities_are_those_of_the_raw_logits() {
    let mut engine = llama(|_| {});
    let params = SamplingParams { logprobs: Some(3), ..structured(greedy(40)) };
    let requests = vec![request(&mut engine, &params, Some(Chain::new(5)))];
    let output = run(&mut engine, requests).remove(0);
    let logprobs = &output.outputs[0].logprobs;
    assert_eq!(logprobs.len(), 6);
    assert!(logprobs.iter().all(|position| position.chosen.logprob < -0.01 && position.top.len() == 3));
    assert!(logprobs.iter().any(|position| position.chosen.rank > 3), "the mask was of no use");
}

#[test]
fn clients_may_leave_at_any_time() {
    let mut engine = llama(|_| {});
    let slow = || Chain { delay: Duration::from_millis(30), ..Chain::new(20) };
    for steps in 1..6 {
        let leaving = request(&mut engine, &SamplingParams { n: 2, ..sampled(1) }, Some(slow()));
        let id = leaving.id;
        engine.add_request(leaving).expect("taken");
        for _ in 0..steps {
            engine.step();
        }
        assert!(engine.abort_sequence(id, 1).is_some());
        assert!(engine.abort(id).is_some());
        while engine.has_unfinished() {
            engine.step();
        }
        assert_idle(&engine);
    }
    let handle = engine.spawn();
    let submit = |chain| {
        let prompt = golden("llama").prompts[1].token_ids.clone();
        let request = Request {
            constraint: Some(Arc::new(chain)),
            eos_token_ids: Arc::from([END]),
            ..Request::new(handle.new_request_id(), prompt, sampled(2))
        };
        handle.submit(request).expect("submitted")
    };
    drop(submit(slow()));
    let mut receiver = submit(Chain::new(6));
    let mut tokens = Vec::new();
    while let Some(output) = receiver.recv() {
        tokens.extend_from_slice(&output.expect("goes well").outputs[0].token_ids);
    }
    assert_chain(&tokens, 6);
    handle.shutdown();
}

/// A model that drafts for itself under the same masks is always right.
#[test]
fn a_draft_model_guesses_within_the_mask() {
    let golden = golden("llama");
    let json = r#"{"method": "draft_model", "model": "x", "num_speculative_tokens": 4, "adaptive": false}"#;
    let speculative = serde_json::from_str(json).expect("a configuration");
    let config = EngineConfig { speculative: Some(speculative), ..small_config(&golden) };
    let files = ModelFiles::open(&golden.folder, LoadFormat::Auto).expect("golden model");
    let mut drafting =
        Engine::with_draft(&files, Some(&files), reference(), &config, &mut |_| {}).expect("both load");
    let mut plain = llama(|_| {});
    let kinds = [structured(greedy(40)), sampled(5), SamplingParams { n: 3, top_p: 0.9, ..sampled(6) }];
    let all = |engine: &mut Engine| -> Vec<Vec<TokenId>> {
        let requests = kinds.iter().map(|params| request(engine, params, Some(Chain::new(13)))).collect();
        let outputs = run(engine, requests);
        outputs.iter().flat_map(|output| output.outputs.iter().map(|one| one.token_ids.clone())).collect()
    };
    let (got, want) = (all(&mut drafting), all(&mut plain));
    assert_eq!(got, want);
    for tokens in &got {
        assert_chain(tokens, 13);
    }
    let stats = drafting.stats().speculation;
    assert!(stats.num_accepted_tokens > 20, "{stats:?}");
    assert_eq!(stats.num_accepted_tokens, stats.num_draft_tokens, "{stats:?}");
}
