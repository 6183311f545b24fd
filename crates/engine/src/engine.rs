//! The engine itself, driven by hand: `add_request`, `step`, `abort`, and the offline `generate`.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use baton_backend::{
    AttentionCut, AttentionHeads, Backend, BackendError, CutOptions, DeviceInfo, KvSpec, MAX_SPLIT_QUERIES,
    StepOutput,
};
use baton_core::{
    FinishReason, Request, RequestId, RequestOutput, SamplingParams, SequenceOutput, TokenId, mask_words,
};
use baton_kv::{KvConfig, KvEvent};
use baton_model::{Decoder, LoadProgress, ModelConfig, ModelFiles, num_parameters};
use baton_sched::{Plan, PlannedSeq, SchedConfig, SchedStats, Scheduler, StepResult};
use serde::Serialize;

use crate::handle::EngineHandle;
use crate::masks::Masks;
use crate::observe::{Observer, Phase, StepNotes};
use crate::relay::{Relay, RelayStats};
use crate::runner::{AttentionKind, Runner, step_result};
use crate::{EngineConfig, EngineError, MemoryPlan, MemoryRequest};

/// How long a step waits for masks of structured outputs, so that their sequences need not sit it out. Nearly all masks
/// take far less; a sequence whose mask takes longer is left out of the step, and others wait no longer than this.
const MASK_GRACE: Duration = Duration::from_millis(4);
/// The same where there is nothing else to do, after which commands are looked at again.
const MASK_WAIT: Duration = Duration::from_millis(20);

/// A model on a device with its scheduler and KV cache.
pub struct Engine {
    backend: Box<dyn Backend>,
    decoder: Decoder,
    model: ModelConfig,
    scheduler: Scheduler,
    /// Where sequences share what they have in common.
    relay: Option<Relay>,
    runner: Runner,
    masks: Masks,
    memory: MemoryPlan,
    eos_token_ids: Arc<[TokenId]>,
    /// Submitted and not yet collected, oldest first.
    in_flight: VecDeque<Plan>,
    max_steps_in_flight: usize,
    output: StepOutput,
    next_request_id: u64,
    num_steps: u64,
    last_failure: Option<String>,
    /// How long the device worked, where it tells.
    device_busy: Option<Duration>,
    pub(crate) notes: StepNotes,
}

/// What the engine is doing, for metrics and `/stats`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EngineStats {
    pub num_steps: u64,
    pub scheduler: SchedStats,
    /// Why the last failed step failed.
    pub last_failure: Option<String>,
    /// How long the device has worked on steps so far; none where it does not tell.
    pub device_busy_s: Option<f64>,
    pub relay: RelayStats,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("memory", &self.memory)
            .field("num_steps", &self.num_steps)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Loads the model onto the device and plans its memory. After this nothing is allocated for a step.
    pub fn new(
        files: &ModelFiles,
        mut backend: Box<dyn Backend>,
        config: &EngineConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        config.validate()?;
        let model = files.config().clone();
        let max_model_len = model.resolve_max_model_len(config.max_model_len)?;
        let limits = config.step_limits(max_model_len, model.vocab_size);
        let block_size = config.block_size.unwrap_or(backend.device().block_size);
        let kv_spec = model.kv_spec(config.kv_dtype, block_size);
        backend.check_kv_spec(&kv_spec)?;
        let weights = files.weights()?;
        let device = backend.device();
        let workspace_bytes = Decoder::buffer_bytes(&model, &limits, device.activation_bytes);
        // Said at once, not after minutes of loading.
        let needed_bytes = weights.total_bytes().saturating_add(workspace_bytes);
        if needed_bytes > device.free_bytes {
            let what = "the model with its workspace".to_owned();
            return Err(
                BackendError::OutOfMemory { what, needed_bytes, free_bytes: device.free_bytes }.into()
            );
        }
        let usable_bytes = (device.free_bytes as f64 * config.gpu_memory_utilization) as u64;
        let decoder = Decoder::load(&model, &*weights, &mut *backend, &limits, progress)?;
        let steps = backend.rehearse(&decoder, &kv_spec)?;
        let device = backend.device();
        let memory = MemoryPlan::new(
            &MemoryRequest {
                device: device.description.clone(),
                total_bytes: device.total_bytes,
                usable_bytes,
                weight_bytes: backend.weight_bytes(),
                workspace_bytes: workspace_bytes.saturating_add(steps.workspace_bytes),
                graph_bytes: steps.graph_bytes,
                kv_cap_bytes: device.kv_cap_bytes,
                kv_cache_memory: config.kv_cache_memory,
                swap_space: config.swap_space.min(device.free_bytes / 8),
                max_model_len,
                max_num_seqs: config.max_num_seqs,
            },
            &kv_spec,
        )?;
        backend.create_kv_cache(&kv_spec, memory.num_device_blocks, memory.num_host_blocks)?;
        backend.warm_up(&decoder)?;

        let macs_per_token = num_parameters(&model) as f64;
        let scheduler = Scheduler::new(
            SchedConfig {
                max_num_seqs: config.max_num_seqs,
                max_num_batched_tokens: config.max_num_batched_tokens,
                max_num_logit_rows: limits.max_logit_rows,
                max_num_sample_entries: match device.max_sample_entries {
                    0 => usize::MAX,
                    limit => limit,
                },
                max_model_len,
                max_num_queued_reqs: Some(config.max_num_queued_reqs),
                max_num_queued_reqs_per_key: config.max_num_queued_reqs_per_key,
                policy: config.policy,
                preemption_mode: config.preemption_mode,
                swap_cost_per_token: memory.kv_bytes_per_token as f64 / device.swap_bytes_per_second,
                recompute_cost_per_token: macs_per_token / device.macs_per_second,
                max_plans_in_flight: device.max_steps_in_flight,
                ..SchedConfig::default()
            },
            KvConfig {
                num_device_blocks: memory.num_device_blocks,
                num_host_blocks: memory.num_host_blocks,
                block_size,
                enable_prefix_caching: config.enable_prefix_caching,
                eviction: config.eviction,
                ..KvConfig::default()
            },
        )?;
        let cut = attention_cut(&device, &model, &kv_spec, config);
        let runner = Runner::new(block_size, AttentionKind::all(&model, &kv_spec), cut, config.seed);
        let stats = EngineStats { scheduler: scheduler.stats(), ..EngineStats::default() };
        Ok(Self {
            notes: StepNotes::new(stats),
            backend,
            decoder,
            eos_token_ids: Arc::from(model.eos_token_ids.as_slice()),
            model,
            scheduler,
            relay: cut.shares().then(Relay::default),
            runner,
            masks: Masks::start().map_err(|error| EngineError::Threads { reason: error.to_string() })?,
            memory,
            in_flight: VecDeque::new(),
            max_steps_in_flight: device.max_steps_in_flight,
            output: StepOutput::default(),
            next_request_id: 0,
            num_steps: 0,
            last_failure: None,
            device_busy: None,
        })
    }

    pub fn memory_plan(&self) -> &MemoryPlan {
        &self.memory
    }

    pub fn model_config(&self) -> &ModelConfig {
        &self.model
    }

    /// An id that no other request of this engine has.
    pub fn new_request_id(&mut self) -> RequestId {
        let id = RequestId(self.next_request_id);
        self.next_request_id += 1;
        id
    }

    /// Queues a request, or says why it can never run. Nothing else is disturbed.
    pub fn add_request(&mut self, mut request: Request) -> Result<(), EngineError> {
        request.params.validate(self.model.vocab_size as u32)?;
        for &token_id in &request.prompt_token_ids {
            if token_id as usize >= self.model.vocab_size {
                return Err(EngineError::TokenOutOfVocabulary {
                    token_id,
                    vocab_size: self.model.vocab_size,
                });
            }
        }
        let constraint = request.constraint.take();
        match (request.params.is_masked(), &constraint) {
            (false, None) => {}
            (true, Some(constraint))
                if constraint.first_mask().len() == mask_words(self.model.vocab_size) =>
            {
                if request.params.structured_outputs.is_some() {
                    // The grammar alone says where the output ends.
                    let params = Arc::make_mut(&mut request.params);
                    params.ignore_eos = false;
                    params.min_tokens = 0;
                }
            }
            _ => return Err(EngineError::NotCompiled),
        }
        if !request.params.ignore_eos && request.eos_token_ids.is_empty() {
            request.eos_token_ids = Arc::clone(&self.eos_token_ids);
        }
        self.next_request_id = self.next_request_id.max(request.id.0 + 1);
        let id = request.id;
        self.scheduler.add_request(request)?;
        if let Some(constraint) = constraint {
            self.masks.add_request(id, constraint);
        }
        Ok(())
    }

    /// Ends a request. Its blocks are free once no step in flight uses them.
    pub fn abort(&mut self, id: RequestId) -> Option<RequestOutput> {
        self.scheduler.abort(id)
    }

    /// Ends one of the `n` continuations, in which a stop string was found; the others go on.
    pub fn abort_sequence(&mut self, id: RequestId, index: u32) -> Option<RequestOutput> {
        self.scheduler.abort_sequence(id, index)
    }

    pub fn has_unfinished(&self) -> bool {
        self.scheduler.has_unfinished() || !self.in_flight.is_empty()
    }

    /// Keeps the device fed, then takes in the oldest step's result. Returns what it brought.
    ///
    /// A step that fails on the device ends the requests that were in it with [`FinishReason::Error`] and no other.
    pub fn step(&mut self) -> Vec<RequestOutput> {
        let outputs = self.step_noted();
        self.notes.clear();
        outputs
    }

    /// A step whose notes are kept for the loop, which clears them.
    pub(crate) fn step_noted(&mut self) -> Vec<RequestOutput> {
        let mut outputs = Vec::new();
        // A hidden state must be read before the next step writes over it.
        while self.in_flight.len() < self.max_steps_in_flight.max(1)
            && !self.in_flight.back().is_some_and(pools)
        {
            self.notes.enter(Phase::Schedule);
            outputs.extend(self.take_masks(MASK_GRACE));
            let mut plan = self.scheduler.schedule();
            if plan.is_empty() {
                break;
            }
            if let Some(relay) = &mut self.relay {
                relay.sort(&mut plan, MAX_SPLIT_QUERIES);
            }
            self.notes.planned(&plan);
            self.notes.enter(Phase::Launch);
            let input = self.runner.build(&plan, &self.scheduler, &self.masks);
            let submitted = self.backend.submit(input, &self.decoder);
            self.notes.shared(plan.step, self.runner.step_relay());
            match submitted {
                Ok(()) => self.in_flight.push_back(plan),
                Err(error) => {
                    self.runner.take_back();
                    outputs.extend(self.fail(&plan, &error));
                }
            }
        }
        let Some(plan) = self.in_flight.pop_front() else {
            outputs.extend(self.take_masks(MASK_WAIT));
            return outputs;
        };
        self.num_steps += 1;
        self.notes.enter(Phase::Wait);
        let collected = self.backend.collect(&mut self.output);
        if let Some(span) = self.backend.last_step_span().filter(|_| collected.is_ok()) {
            *self.device_busy.get_or_insert_default() += span.end.saturating_duration_since(span.start);
            self.notes.computed(&plan, span);
        }
        self.notes.enter(Phase::Apply);
        match collected {
            Ok(()) => match self.pooled_rows(&plan) {
                Ok(pooled) => {
                    let result = step_result(&plan, &self.output);
                    outputs.extend(with_pooled(self.scheduler.apply(&plan, &result), pooled));
                    self.begin_masks(&plan, &result);
                }
                Err(error) => outputs.extend(self.fail(&plan, &error)),
            },
            Err(error) => outputs.extend(self.fail(&plan, &error)),
        }
        outputs
    }

    /// Has the masks computed that the tokens of a step ask for. Until then their sequences are held back.
    fn begin_masks(&mut self, plan: &Plan, result: &StepResult) {
        if self.masks.is_empty() {
            return;
        }
        let scheduler = &mut self.scheduler;
        let is_live =
            |scheduler: &Scheduler, id| scheduler.sequence(id).is_some_and(|sequence| !sequence.is_finished);
        self.masks.retain(|id| scheduler.contains(id), |id| is_live(scheduler, id));
        for (planned, result) in plan.seqs.iter().zip(&result.seqs) {
            for (sample, sampled) in planned.samples.iter().zip(&result.samples) {
                if is_live(scheduler, sample.seq_id)
                    && self.masks.advance(planned.request_id, sample.seq_id, sampled.token_id)
                {
                    scheduler.hold(sample.seq_id, true);
                }
            }
        }
    }

    /// Lets sequences go on whose masks are ready; ends requests that have none.
    fn take_masks(&mut self, wait: Duration) -> Vec<RequestOutput> {
        let mut outputs = Vec::new();
        for computed in self.masks.collect(wait) {
            self.scheduler.hold(computed.seq_id, false);
            let Some(reason) = computed.failure else { continue };
            self.last_failure = Some(format!("structured output: {reason}"));
            let request_id = self.scheduler.sequence(computed.seq_id).map(|sequence| sequence.request_id);
            let ended = request_id.and_then(|id| self.scheduler.fail_request(id));
            outputs.extend(ended.map(|output| RequestOutput { shape_failure: Some(reason), ..output }));
        }
        outputs
    }

    /// The hidden states that the step's requests asked for.
    fn pooled_rows(&mut self, plan: &Plan) -> Result<HashMap<RequestId, Vec<f32>>, BackendError> {
        if !pools(plan) {
            return Ok(HashMap::new());
        }
        let hidden_size = self.model.hidden_size;
        let hidden = self.backend.read_buffer(self.decoder.hidden_buffer(), plan.num_tokens())?;
        let mut pooled = HashMap::new();
        let mut end = 0;
        for seq in &plan.seqs {
            end += seq.token_ids.len();
            if is_pooled(seq) {
                let row = &hidden[(end - 1) * hidden_size..end * hidden_size];
                pooled.insert(seq.request_id, self.decoder.last_norm(row));
            }
        }
        Ok(pooled)
    }

    fn fail(&mut self, plan: &Plan, error: &BackendError) -> Vec<RequestOutput> {
        self.last_failure = Some(error.to_string());
        self.scheduler.fail(plan)
    }

    /// Completes all prompts, batching them as the scheduler sees fit. Results are in the order of the prompts.
    pub fn generate(
        &mut self,
        prompts: Vec<Vec<TokenId>>,
        params: &SamplingParams,
    ) -> Result<Vec<RequestOutput>, EngineError> {
        let mut index_of = HashMap::with_capacity(prompts.len());
        let mut completions: Vec<RequestOutput> = Vec::with_capacity(prompts.len());
        for prompt_token_ids in prompts {
            let id = self.new_request_id();
            if let Err(error) = self.add_request(Request::new(id, prompt_token_ids, params.clone())) {
                for id in index_of.into_keys() {
                    self.abort(id);
                }
                return Err(error);
            }
            index_of.insert(id, completions.len());
            completions.push(RequestOutput {
                request_id: id,
                outputs: Vec::new(),
                prompt_logprobs: Vec::new(),
                num_cached_tokens: 0,
                pooled: Vec::new(),
                finished: false,
                shape_failure: None,
            });
        }
        while self.has_unfinished() {
            for output in self.step() {
                if let Some(&index) = index_of.get(&output.request_id) {
                    completions[index].extend(output);
                }
            }
        }
        let failed = |output: &SequenceOutput| output.finish_reason == Some(FinishReason::Error);
        if completions.iter().flat_map(|completion| &completion.outputs).any(failed) {
            let cause = self.last_failure.clone().unwrap_or_default();
            return Err(BackendError::Device { cause }.into());
        }
        for completion in &mut completions {
            completion.outputs.sort_by_key(|output| output.index);
        }
        Ok(completions)
    }

    /// Computes a prefix and keeps its whole blocks for good, so that every request that begins with it finds them. Returns how
    /// many tokens are kept. For the time before the first request: outputs of others would be lost.
    pub fn pin_prefix(&mut self, token_ids: &[TokenId]) -> Result<usize, EngineError> {
        if !self.scheduler.kv_config().enable_prefix_caching {
            return Err(EngineError::PinNeedsPrefixCaching);
        }
        if self.has_unfinished() {
            return Err(EngineError::PinTooLate);
        }
        let MemoryPlan { block_size, max_model_len, kv_bytes_per_token, .. } = self.memory;
        let num_tokens = token_ids.len();
        if num_tokens >= max_model_len {
            return Err(EngineError::PinTooLong { num_tokens, max_model_len });
        }
        let num_blocks = num_tokens / block_size;
        let left = self.scheduler.num_unpinned_blocks().saturating_sub(num_blocks);
        let needed = max_model_len.div_ceil(block_size);
        if left < needed {
            let all_blocks = (self.memory.num_device_blocks - left + needed) as u64;
            let needed_bytes = all_blocks * block_size as u64 * kv_bytes_per_token;
            return Err(EngineError::PinTooLarge {
                num_tokens,
                left_tokens: left * block_size,
                max_model_len,
                needed_memory: format!("{}MiB", needed_bytes.div_ceil(1 << 20)),
            });
        }
        // One token of output, so that the whole prefix is computed.
        let params = SamplingParams { max_tokens: Some(1), ignore_eos: true, ..SamplingParams::default() };
        self.generate(vec![token_ids.to_vec()], &params)?;
        let num_pinned = self.scheduler.pin_prefix(token_ids);
        debug_assert_eq!(num_pinned, num_blocks, "what was just computed is cached");
        Ok(num_pinned * block_size)
    }

    /// What cached prefixes came and went since the last call.
    pub fn take_kv_events(&mut self) -> Vec<KvEvent> {
        self.scheduler.take_kv_events()
    }

    /// Switches relay attention from the next step on, so that one process can measure both ways. Returns whether steps share
    /// now: a device may not, and `deterministic` forbids it.
    pub fn set_relay_attention(&mut self, enabled: bool) -> bool {
        let shares = self.runner.set_sharing(enabled);
        self.relay = shares.then(|| self.relay.take().unwrap_or_default());
        shares
    }

    /// Forgets every cached prefix that is not pinned.
    pub fn reset_prefix_cache(&mut self) {
        self.scheduler.reset_prefix_cache();
    }

    pub fn stats(&self) -> EngineStats {
        EngineStats {
            num_steps: self.num_steps,
            scheduler: self.scheduler.stats(),
            relay: self.runner.relay_stats(),
            last_failure: self.last_failure.clone(),
            device_busy_s: self.device_busy.map(|busy| busy.as_secs_f64()),
        }
    }

    /// Panics if a block is leaked, shared wrongly or counted wrongly: for tests.
    pub fn check_invariants(&self) {
        self.scheduler.check_invariants();
    }

    /// Moves the engine onto its own loop thread.
    pub fn spawn(self) -> EngineHandle {
        self.spawn_observed(Box::new(()))
    }

    /// The same, with somebody who is told of every step.
    pub fn spawn_observed(self, observer: Box<dyn Observer>) -> EngineHandle {
        EngineHandle::spawn(self, observer)
    }
}

fn attention_cut(
    device: &DeviceInfo,
    model: &ModelConfig,
    kv_spec: &KvSpec,
    config: &EngineConfig,
) -> AttentionCut {
    let heads = AttentionHeads {
        num_heads: model.num_heads,
        num_kv_heads: model.num_kv_heads,
        head_dim: model.head_dim,
        token_bytes: kv_spec.bytes_per_token() / kv_spec.layers.len().max(1),
    };
    let (relays, is_fixed) = (config.relays(), config.deterministic);
    AttentionCut::new(device, &heads, &CutOptions { block_size: kv_spec.block_size, relays, is_fixed })
}

/// The step computes the last token of a prompt whose hidden state is wanted.
fn is_pooled(seq: &PlannedSeq) -> bool {
    seq.params.pooling && seq.samples.iter().any(|sample| sample.num_output_tokens == 0)
}

pub(crate) fn pools(plan: &Plan) -> bool {
    plan.seqs.iter().any(is_pooled)
}

fn with_pooled(
    mut outputs: Vec<RequestOutput>,
    mut pooled: HashMap<RequestId, Vec<f32>>,
) -> Vec<RequestOutput> {
    for output in &mut outputs {
        output.pooled = pooled.remove(&output.request_id).unwrap_or_default();
    }
    outputs
}
