//! A device that computes nothing: every step takes the same time and draws the same token.
//!
//! It keeps the contract of [`Backend`] towards the engine (handles, limits, steps in flight) and holds no weights, no
//! buffers and no KV. With it the scheduler, the runner, the server and a load generator can be measured without a
//! model in the way. Not for tests of numbers: the token does not depend on anything.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_core::{TokenId, TokenLogprob};

use crate::{
    AttentionTuning, Backend, BackendError, BufferId, BufferShape, DeviceInfo, DeviceSpan, Handles, KvSpec,
    Program, ProgramId, Programs, RopeId, RopeSpec, Sampled, StepExecutor, StepInput, StepLimits, StepOutput,
    Tensor, VectorId, WeightId, WeightShape, WeightUse,
};

/// As a GPU: the next step is submitted while one runs.
const MAX_IN_FLIGHT: usize = 2;
/// More than any model asks for; nothing of it is taken.
const MEMORY_BYTES: u64 = 1 << 40;
/// An ordinary piece of text in most vocabularies, past the control tokens and single bytes at their beginning.
const TOKEN: TokenId = 1000;

#[derive(Clone, Copy, Debug, Default)]
pub struct MockOptions {
    /// How long a step takes, whatever is in it.
    pub step_time: Duration,
}

/// See the module.
#[derive(Debug)]
pub struct MockBackend {
    options: MockOptions,
    vocab_size: usize,
    handles: Handles,
    programs: Programs,
    /// Results and when they are computed, oldest first.
    in_flight: VecDeque<(DeviceSpan, StepOutput)>,
    /// Results that were collected, for their memory.
    spare: Vec<StepOutput>,
    /// The device is busy until then.
    busy_until: Instant,
    last_span: Option<DeviceSpan>,
}

impl MockBackend {
    pub fn new(options: MockOptions) -> Self {
        Self {
            options,
            vocab_size: 1,
            handles: Handles::default(),
            programs: Programs::default(),
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            busy_until: Instant::now(),
            last_span: None,
        }
    }

    /// What was loaded and created, for those who want to look at a program.
    pub fn handles(&self) -> &Handles {
        &self.handles
    }

    fn draw(&self, input: &StepInput, output: &mut StepOutput) {
        output.samples.clear();
        output.top.clear();
        let last_id = self.vocab_size.saturating_sub(1) as TokenId;
        for row in &input.samples {
            let chosen = |token_id, rank| TokenLogprob { token_id, logprob: 0.0, rank };
            let start = output.top.len() as u32;
            let num_top = row.num_logprobs.unwrap_or(0).min(last_id + 1);
            output.top.extend((0..num_top).map(|index| chosen(index, index + 1)));
            output.samples.push(Sampled {
                chosen: chosen(row.forced.unwrap_or(TOKEN.min(last_id)), 1),
                top: start..start + num_top,
            });
        }
    }
}

impl StepExecutor for MockBackend {
    fn submit(&mut self, input: &StepInput, program: ProgramId) -> Result<(), BackendError> {
        assert!(self.in_flight.len() < MAX_IN_FLIGHT, "more steps are in flight than the device takes");
        self.programs.get(program)?;
        let mut output = self.spare.pop().unwrap_or_default();
        self.draw(input, &mut output);
        output.fetched.clear();
        output.fetched.extend(input.fetches.iter().map(|fetch| fetch.id));
        let start = self.busy_until.max(Instant::now());
        self.busy_until = start + self.options.step_time;
        self.in_flight.push_back((DeviceSpan { start, end: self.busy_until }, output));
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        let (span, result) =
            self.in_flight.pop_front().expect("a step is in flight when its result is collected");
        std::thread::sleep(span.end.saturating_duration_since(Instant::now()));
        self.last_span = Some(span);
        self.spare.push(std::mem::replace(output, result));
        Ok(())
    }

    fn last_step_span(&self) -> Option<DeviceSpan> {
        self.last_span
    }

    fn read_buffer(&mut self, _: BufferId, _: usize) -> Result<Vec<f32>, BackendError> {
        Err(BackendError::Unsupported { what: "reading a buffer: it computes nothing".to_owned() })
    }
}

impl Backend for MockBackend {
    fn device(&self) -> DeviceInfo {
        DeviceInfo {
            name: "mock".to_owned(),
            description: "mock (computes nothing)".to_owned(),
            total_bytes: MEMORY_BYTES,
            free_bytes: MEMORY_BYTES,
            block_size: 16,
            activation_bytes: 0,
            kv_cap_bytes: None,
            max_steps_in_flight: MAX_IN_FLIGHT,
            wants_large_steps: false,
            attention: AttentionTuning::default(),
            max_sample_entries: 0,
            macs_per_second: 1e15,
            swap_bytes_per_second: 1e10,
        }
    }

    fn load_weight(&mut self, parts: &[Tensor], usage: WeightUse) -> Result<WeightId, BackendError> {
        Ok(self.handles.add_weight(WeightShape::new(parts, usage)?))
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        Ok(self.handles.add_vector(values.len()))
    }

    fn create_rope(&mut self, spec: &RopeSpec) -> Result<RopeId, BackendError> {
        Ok(self.handles.add_rope(spec))
    }

    fn set_limits(&mut self, limits: &StepLimits) -> Result<(), BackendError> {
        self.vocab_size = limits.vocab_size;
        Ok(())
    }

    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, BackendError> {
        Ok(self.handles.add_buffer(BufferShape { rows, cols, is_logits: false }))
    }

    fn create_logits(&mut self, rows: usize, vocab_size: usize) -> Result<BufferId, BackendError> {
        Ok(self.handles.add_buffer(BufferShape { rows, cols: vocab_size, is_logits: true }))
    }

    fn compile(&mut self, program: &Program) -> Result<ProgramId, BackendError> {
        self.programs.compile(program, &self.handles)
    }

    fn create_kv_cache(&mut self, spec: &KvSpec, _: usize, _: usize) -> Result<(), BackendError> {
        self.programs.set_cache(spec)
    }

    fn weight_bytes(&self) -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SampleRow;

    fn limits(vocab_size: usize) -> StepLimits {
        StepLimits {
            max_tokens: 8,
            max_seqs: 8,
            max_logit_rows: 8,
            max_samples: 8,
            max_model_len: 8,
            vocab_size,
        }
    }

    #[test]
    fn tokens_are_of_the_vocabulary_and_asked_for_ones_are_kept() {
        let mut backend = MockBackend::new(MockOptions::default());
        backend.set_limits(&limits(7)).unwrap();
        let forced = SampleRow { forced: Some(3), num_logprobs: Some(2), ..SampleRow::greedy(0) };
        let input = StepInput { samples: vec![SampleRow::greedy(0), forced], ..StepInput::default() };
        let nothing = backend.compile(&Program::default()).unwrap();
        backend.submit(&input, nothing).unwrap();
        let mut output = StepOutput::default();
        backend.collect(&mut output).unwrap();
        let tokens: Vec<TokenId> = output.samples.iter().map(|sampled| sampled.chosen.token_id).collect();
        assert_eq!(tokens, [6, 3]);
        assert_eq!((output.samples[1].top.clone(), output.top.len()), (0..2, 2));
    }

    #[test]
    fn steps_take_their_time_one_after_the_other() {
        let step_time = Duration::from_millis(5);
        let mut backend = MockBackend::new(MockOptions { step_time });
        backend.set_limits(&limits(7)).unwrap();
        let started = Instant::now();
        let mut output = StepOutput::default();
        let nothing = backend.compile(&Program::default()).unwrap();
        backend.submit(&StepInput::default(), nothing).unwrap();
        backend.submit(&StepInput::default(), nothing).unwrap();
        backend.collect(&mut output).unwrap();
        backend.collect(&mut output).unwrap();
        assert!(started.elapsed() >= 2 * step_time);
        let span = backend.last_step_span().expect("a step was collected");
        assert_eq!(span.end - span.start, step_time);
    }
}
