//! A device that fails now and then: the requests of a failed step end with an error, all others as if nothing had been.

mod common;

use baton_backend::{
    Backend, BackendError, BufferId, DeviceInfo, KvSpec, Program, ProgramId, RopeId, RopeSpec, StepExecutor,
    StepInput, StepLimits, StepOutput, Tensor, VectorId, WeightId, WeightUse,
};
use baton_core::{FinishReason, Request, RequestId, SamplingParams, TokenId};
use baton_engine::{Engine, EngineError};
use common::{assert_idle, engine, golden, greedy, reference, small_config};

/// The reference with mishaps: every so many submits and collects fail.
struct Failing {
    inner: Box<dyn Backend>,
    submit_every: usize,
    collect_every: usize,
    num_submits: usize,
    num_collects: usize,
    num_in_flight: usize,
    max_sample_entries: usize,
}

fn failure(what: &str) -> BackendError {
    BackendError::Device { cause: format!("{what} failed") }
}

impl StepExecutor for Failing {
    fn submit(&mut self, input: &StepInput, program: ProgramId) -> Result<(), BackendError> {
        self.num_submits += 1;
        // Always beside a step in flight.
        if self.num_in_flight > 0 && self.num_submits.is_multiple_of(self.submit_every) {
            return Err(failure("submit"));
        }
        if self.max_sample_entries > 0 && input.history.len() + input.biases.len() > self.max_sample_entries {
            return Err(failure("the packed area"));
        }
        self.num_in_flight += 1;
        self.inner.submit(input, program)
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        self.num_collects += 1;
        self.num_in_flight -= 1;
        self.inner.collect(output)?;
        if self.num_collects.is_multiple_of(self.collect_every) { Err(failure("collect")) } else { Ok(()) }
    }

    fn read_buffer(&mut self, buffer: BufferId, rows: usize) -> Result<Vec<f32>, BackendError> {
        self.inner.read_buffer(buffer, rows)
    }
}

impl Backend for Failing {
    fn device(&self) -> DeviceInfo {
        DeviceInfo { max_sample_entries: self.max_sample_entries, ..self.inner.device() }
    }

    fn load_weight(&mut self, parts: &[Tensor], usage: WeightUse) -> Result<WeightId, BackendError> {
        self.inner.load_weight(parts, usage)
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        self.inner.load_vector(values)
    }

    fn create_rope(&mut self, spec: &RopeSpec) -> Result<RopeId, BackendError> {
        self.inner.create_rope(spec)
    }

    fn set_limits(&mut self, limits: &StepLimits) -> Result<(), BackendError> {
        self.inner.set_limits(limits)
    }

    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, BackendError> {
        self.inner.create_buffer(rows, cols)
    }

    fn create_logits(&mut self, rows: usize, vocab_size: usize) -> Result<BufferId, BackendError> {
        self.inner.create_logits(rows, vocab_size)
    }

    fn compile(&mut self, program: &Program) -> Result<ProgramId, BackendError> {
        self.inner.compile(program)
    }

    fn create_kv_cache(&mut self, spec: &KvSpec, device: usize, host: usize) -> Result<(), BackendError> {
        self.inner.create_kv_cache(spec, device, host)
    }

    fn weight_bytes(&self) -> u64 {
        self.inner.weight_bytes()
    }
}

fn failing(submit_every: usize, collect_every: usize, max_sample_entries: usize) -> Engine {
    let golden = golden("llama");
    let backend = Failing {
        inner: reference(),
        submit_every,
        collect_every,
        num_submits: 0,
        num_collects: 0,
        num_in_flight: 0,
        max_sample_entries,
    };
    engine(&golden, Box::new(backend), &small_config(&golden))
}

fn prompt() -> Vec<TokenId> {
    golden("llama").prompts[1].token_ids.clone()
}

/// Runs requests that come one after the other; (tokens, end) of each.
fn run(engine: &mut Engine, requests: usize) -> Vec<(Vec<TokenId>, Option<FinishReason>)> {
    let mut results = vec![(Vec::new(), None); requests];
    let mut num_sent = 0;
    while num_sent < requests || engine.has_unfinished() {
        if num_sent < requests {
            let id = RequestId(num_sent as u64);
            engine.add_request(Request::new(id, prompt(), greedy(20))).expect("taken");
            num_sent += 1;
        }
        for output in engine.step() {
            let result = &mut results[output.request_id.0 as usize];
            for part in output.outputs {
                result.0.extend(part.token_ids);
                result.1 = part.finish_reason.or(result.1);
            }
        }
        engine.check_invariants();
    }
    results
}

#[test]
fn a_failed_submit_beside_a_step_in_flight_fails_its_own_requests_only() {
    for (submit_every, collect_every) in [(50, usize::MAX), (usize::MAX, 50), (60, 90)] {
        let mut engine = failing(submit_every, collect_every, 0);
        let results = run(&mut engine, 40);
        assert_idle(&engine);
        let expected = &golden("llama").prompts[1].greedy[..20];
        let failed = results.iter().filter(|(_, end)| *end == Some(FinishReason::Error)).count();
        assert!((1..40).contains(&failed), "{failed} of 40 failed");
        for (tokens, end) in results {
            assert!(expected.starts_with(&tokens), "{tokens:?}");
            assert!(end == Some(FinishReason::Error) || tokens == expected, "{tokens:?} {end:?}");
        }
    }
}

#[test]
fn what_no_step_has_room_for_is_refused_and_the_rest_takes_turns() {
    let len = prompt().len();
    let mut engine = failing(usize::MAX, usize::MAX, 2 * len + 10);
    let penalised = SamplingParams { presence_penalty: 0.5, ..greedy(6) };
    let wide = SamplingParams { n: 4, ..penalised.clone() };
    let refused = engine.add_request(Request::new(RequestId(0), prompt(), wide));
    assert!(matches!(refused, Err(EngineError::Sched(_))), "{refused:?}");
    let biased = SamplingParams { logit_bias: (0..150).map(|id| (id, 1.0)).collect(), ..greedy(6) };
    engine.add_request(Request::new(RequestId(1), prompt(), biased)).expect_err("too many biases");
    // Four of these bring more than a step has room for; each fits.
    for id in 2..6 {
        engine.add_request(Request::new(RequestId(id), prompt(), penalised.clone())).expect("taken");
    }
    let mut ends = Vec::new();
    while engine.has_unfinished() {
        let outputs = engine.step().into_iter().flat_map(|output| output.outputs);
        ends.extend(outputs.filter_map(|output| output.finish_reason));
    }
    assert_eq!(ends, [FinishReason::Length; 4]);
    assert_idle(&engine);
}
