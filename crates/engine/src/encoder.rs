//! The engine of an encoder: texts wait in one queue and are computed whole, as many in a step as its tokens allow. There is no
//! scheduler and no cache: a text is done in one step, and its only output is its vector or its scores.
//!
//! It answers through the same [`EngineHandle`] as an [`crate::Engine`], so that nobody who sends requests needs to know.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Instant;

use baton_backend::{Backend, ProgramId, StepExecutor, StepInput, StepOutput};
use baton_core::{FinishReason, Request, RequestId, RequestOutput, SequenceOutput, TokenId};
use baton_model::{Encoder, LoadProgress, ModelConfig, ModelFiles, num_parameters};
use baton_sched::{QueueRoom, SchedError};

use crate::handle::{Command, EngineHandle, MAILBOX_LEN};
use crate::observe::{Observer, Phase, StepNotes};
use crate::outbox::Outbox;
use crate::{EngineConfig, EngineError, EngineStats, MemoryPlan};

/// An encoder on a device.
pub struct EncoderEngine {
    backend: Box<dyn StepExecutor>,
    encoder: Encoder,
    program: ProgramId,
    model: ModelConfig,
    memory: MemoryPlan,
    max_tokens: usize,
    max_queued: usize,
    max_queued_per_key: Option<usize>,
    input: StepInput,
    output: StepOutput,
    num_steps: u64,
    last_failure: Option<String>,
    notes: StepNotes,
}

impl std::fmt::Debug for EncoderEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EncoderEngine").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl EncoderEngine {
    /// Loads the model onto the device. A step has room for the longest text at least.
    pub fn new(
        files: &ModelFiles,
        mut backend: Box<dyn Backend>,
        config: &EngineConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        let model = files.config().clone();
        let longest = model.max_encoded_len.unwrap_or(model.max_model_len);
        let longest = match config.max_model_len {
            Some(wanted) => model.resolve_max_model_len(Some(wanted))?,
            None => longest,
        };
        let max_tokens = config.max_num_batched_tokens.max(longest);
        let weights = files.weights()?;
        let encoder = Encoder::load(&model, &*weights, &mut *backend, max_tokens, progress)?;
        let program = backend.compile(encoder.program())?;
        let device = backend.device();
        let memory = MemoryPlan::without_cache(&device, backend.weight_bytes(), longest, max_tokens);
        Ok(Self {
            notes: StepNotes::new(EngineStats::default()),
            backend,
            encoder,
            program,
            model,
            memory,
            max_tokens,
            max_queued: config.max_num_queued_reqs,
            max_queued_per_key: config.max_num_queued_reqs_per_key,
            input: StepInput::default(),
            output: StepOutput::default(),
            num_steps: 0,
            last_failure: None,
        })
    }

    pub fn memory_plan(&self) -> &MemoryPlan {
        &self.memory
    }

    pub fn model_config(&self) -> &ModelConfig {
        &self.model
    }

    pub fn num_parameters(&self) -> u64 {
        num_parameters(&self.model)
    }

    /// How long the result of a text is.
    pub fn output_size(&self) -> usize {
        self.encoder.output_size()
    }

    /// The results of these texts, in their order: for those who have no thread for it.
    pub fn encode(&mut self, texts: &[Vec<TokenId>]) -> Result<Vec<Vec<f32>>, EngineError> {
        texts.iter().try_for_each(|text| self.check(text))?;
        // Texts of like length leave no threads waiting at the end of a step.
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|&text| std::cmp::Reverse(texts[text].len()));
        let mut results = vec![Vec::new(); texts.len()];
        let mut rest = order.as_slice();
        while !rest.is_empty() {
            let count = self.fitting(rest.iter().map(|&text| texts[text].len()));
            let (now, later) = rest.split_at(count);
            let step: Vec<&[TokenId]> = now.iter().map(|&text| texts[text].as_slice()).collect();
            for (&text, result) in now.iter().zip(self.run(&step)?) {
                results[text] = result;
            }
            rest = later;
        }
        Ok(results)
    }

    /// How many of these fit a step: one at least.
    fn fitting(&self, lengths: impl Iterator<Item = usize>) -> usize {
        let mut tokens = 0;
        lengths
            .take_while(|length| {
                tokens += length;
                tokens <= self.max_tokens
            })
            .count()
            .max(1)
    }

    fn check(&self, tokens: &[TokenId]) -> Result<(), EngineError> {
        let vocab_size = self.model.vocab_size;
        if let Some(&token_id) = tokens.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(EngineError::TokenOutOfVocabulary { token_id, vocab_size });
        }
        if tokens.is_empty() || tokens.len() > self.memory.max_model_len {
            return Err(EngineError::TextLength {
                num_tokens: tokens.len(),
                max_model_len: self.memory.max_model_len,
            });
        }
        Ok(())
    }

    /// One step.
    fn run(&mut self, texts: &[&[TokenId]]) -> Result<Vec<Vec<f32>>, EngineError> {
        self.input.clear();
        for text in texts {
            self.encoder.add(text, &mut self.input);
        }
        self.backend.submit(&self.input, self.program)?;
        self.backend.collect(&mut self.output)?;
        self.num_steps += 1;
        let rows = self.backend.read_buffer(self.encoder.hidden_buffer(), self.input.num_tokens())?;
        let width = self.model.hidden_size;
        let mut first = 0;
        let pooled = texts.iter().map(|text| {
            let end = first + text.len() * width;
            let pooled = self.encoder.pool(&rows[first..end]);
            first = end;
            pooled
        });
        Ok(pooled.collect())
    }

    fn stats(&self) -> EngineStats {
        EngineStats {
            num_steps: self.num_steps,
            last_failure: self.last_failure.clone(),
            ..EngineStats::default()
        }
    }

    /// Gives the engine a thread.
    pub fn spawn_observed(self, observer: Box<dyn Observer>) -> EngineHandle {
        let (mailbox, commands) = sync_channel(MAILBOX_LEN);
        let heartbeat = Arc::clone(&self.notes.heartbeat);
        EngineHandle::start(mailbox, heartbeat, 0, move || {
            Loop { engine: self, observer, commands, waiting: VecDeque::new(), draining: false }.run();
        })
    }
}

struct Waiting {
    request: Request,
    outbox: Outbox,
}

struct Loop {
    engine: EncoderEngine,
    observer: Box<dyn Observer>,
    commands: Receiver<Command>,
    waiting: VecDeque<Waiting>,
    draining: bool,
}

impl Loop {
    fn run(mut self) {
        while self.take_commands() {
            self.waiting.retain(|waiting| !waiting.outbox.is_closed());
            self.step();
            let num_steps = self.engine.num_steps;
            self.publish();
            self.engine.notes.finish(num_steps, &mut *self.observer);
        }
    }

    fn publish(&self) {
        let room = |taken: usize, limit: usize| limit.saturating_sub(taken);
        let all = room(self.waiting.len(), self.engine.max_queued);
        let per_key = self.engine.max_queued_per_key.unwrap_or(usize::MAX);
        let mut by_tenant: Vec<(u32, usize)> = Vec::new();
        for waiting in &self.waiting {
            match by_tenant.iter_mut().find(|(tenant, _)| *tenant == waiting.request.tenant) {
                Some((_, taken)) => *taken += 1,
                None => by_tenant.push((waiting.request.tenant, 1)),
            }
        }
        let by_tenant = by_tenant.into_iter().map(|(tenant, taken)| (tenant, room(taken, per_key).min(all)));
        let queue_room = QueueRoom::new(per_key.min(all), by_tenant.collect());
        self.engine.notes.heartbeat.publish(self.engine.stats(), queue_room);
    }

    /// Sleeps only while there is nothing to do. False when the loop should end.
    fn take_commands(&mut self) -> bool {
        self.engine.notes.clear();
        if self.waiting.is_empty() {
            if self.draining {
                return false;
            }
            self.engine.notes.enter(Phase::Idle);
            self.publish();
            let Ok(command) = self.commands.recv() else { return false };
            self.engine.notes.enter(Phase::Commands);
            self.handle(command);
        } else {
            self.engine.notes.enter(Phase::Commands);
        }
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.handle(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => {
                    self.draining = true;
                    return true;
                }
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Add(_, outbox) if self.draining => drop(outbox.push(Err(EngineError::Stopped))),
            Command::Add(request, mut outbox) => match self.admit(&request) {
                Ok(()) => {
                    outbox.accept();
                    self.waiting.push_back(Waiting { request, outbox });
                }
                Err(error) => drop(outbox.push(Err(error))),
            },
            Command::Abort(id) | Command::AbortSequence(id, _) => self.abort(id),
            Command::Stats(reply) => drop(reply.send(self.engine.stats())),
            Command::Pin(_, reply) => drop(reply.send(Err(EngineError::PinNeedsPrefixCaching))),
            Command::ResetPrefixCache => {}
            Command::Drain => self.draining = true,
        }
    }

    fn admit(&self, request: &Request) -> Result<(), EngineError> {
        if !request.params.pooling {
            return Err(EngineError::NoGeneration);
        }
        self.engine.check(&request.prompt_token_ids)?;
        let of_key = self.waiting.iter().filter(|waiting| waiting.request.tenant == request.tenant).count();
        if self.waiting.len() >= self.engine.max_queued
            || self.engine.max_queued_per_key.is_some_and(|limit| of_key >= limit)
        {
            return Err(SchedError::QueueFull { limit: self.engine.max_queued }.into());
        }
        Ok(())
    }

    fn abort(&mut self, id: RequestId) {
        let Some(place) = self.waiting.iter().position(|waiting| waiting.request.id == id) else { return };
        let waiting = self.waiting.remove(place).expect("it was found there");
        waiting.outbox.push(Ok(ended(id, Vec::new(), FinishReason::Abort)));
    }

    /// Computes the first texts that fit a step.
    fn step(&mut self) {
        let lengths = self.waiting.iter().map(|waiting| waiting.request.prompt_token_ids.len());
        let count = if self.waiting.is_empty() { 0 } else { self.engine.fitting(lengths) };
        if count == 0 {
            return;
        }
        let mut now: Vec<Waiting> = self.waiting.drain(..count).collect();
        let begin = Instant::now();
        for waiting in &mut now {
            waiting.outbox.start(begin);
        }
        self.engine.notes.enter(Phase::Wait);
        let texts: Vec<&[TokenId]> =
            now.iter().map(|waiting| waiting.request.prompt_token_ids.as_slice()).collect();
        let result = self.engine.run(&texts);
        self.engine.notes.enter(Phase::Deliver);
        self.publish();
        let at = Instant::now();
        match result {
            Ok(pooled) => {
                for (waiting, pooled) in now.into_iter().zip(pooled) {
                    let output = ended(waiting.request.id, pooled, FinishReason::Stop);
                    waiting.outbox.deliver(output, at, &mut *self.observer);
                }
            }
            Err(error) => {
                self.engine.last_failure = Some(error.to_string());
                self.publish();
                for waiting in now {
                    let output = ended(waiting.request.id, Vec::new(), FinishReason::Error);
                    waiting.outbox.push(Ok(output));
                }
            }
        }
    }
}

/// The only output of a request.
fn ended(request_id: RequestId, pooled: Vec<f32>, reason: FinishReason) -> RequestOutput {
    let sequence = SequenceOutput {
        index: 0,
        token_ids: Vec::new(),
        logprobs: Vec::new(),
        cumulative_logprob: 0.0,
        finish_reason: Some(reason),
        stop_token_id: None,
    };
    RequestOutput {
        request_id,
        outputs: vec![sequence],
        prompt_logprobs: Vec::new(),
        num_cached_tokens: 0,
        pooled,
        drafts: baton_core::DraftCounts::default(),
        finished: true,
        shape_failure: None,
    }
}
