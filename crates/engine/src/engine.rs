//! The engine itself, driven by hand: `add_request`, `step`, `abort`, and the offline `generate`.

mod advance;
mod draft;
mod experts;
mod start;

pub use experts::ExpertsTouched;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use baton_backend::{BackendError, KvSpec, MAX_SPLIT_QUERIES, ProgramId, StepExecutor, StepOutput};
use baton_core::{
    DraftCounts, FinishReason, Request, RequestId, RequestOutput, SamplingParams, SeqId, SequenceOutput,
    TokenId, mask_words,
};
use baton_kv::{KvEvent, KvGroup};
use baton_model::{Decoder, ModelConfig, num_parameters};
use baton_sched::{Plan, PlannedSeq, SchedStats, Scheduler, StepCost};
use serde::Serialize;

use crate::handle::EngineHandle;
use crate::masks::Masks;
use crate::observe::{Observer, Phase, StepNotes};
use crate::pace::Pace;
use crate::relay::RelayStats;
use crate::runner::Runner;
use crate::speculate::{Drafter, Proposer, Speculation, SpeculationStats};
use crate::stores::TIER_WAIT;
use crate::tiers::{TierStats, Tiers};
use crate::{EngineError, MemoryPlan};

/// How long a step waits for masks of structured outputs, so that their sequences need not sit it out. Nearly all masks
/// take far less; a sequence whose mask takes longer is left out of the step, and others wait no longer than this. Other tenants wait
/// no longer than a quarter of a step that they would have alone.
const MASK_GRACE: Duration = Duration::from_millis(4);
/// The same where there is nothing else to do, after which commands are looked at again.
const MASK_WAIT: Duration = Duration::from_millis(20);

/// A model on a device with its scheduler and KV cache.
pub struct Engine {
    pub(crate) backend: Box<dyn StepExecutor>,
    decoder: Decoder,
    program: ProgramId,
    model: ModelConfig,
    pub(crate) scheduler: Scheduler,
    pub(crate) tiers: Option<Tiers>,
    /// What stored KV must be of; `None` where nothing is stored.
    pub(crate) model_fingerprint: Option<String>,
    runner: Runner,
    masks: Masks,
    speculation: Option<Speculation>,
    drafter: Option<Drafter>,
    /// Guesses that a draft model is to make for sequences that wait for a mask.
    reserved: HashMap<SeqId, usize>,
    memory: MemoryPlan,
    eos_token_ids: Arc<[TokenId]>,
    /// Submitted and not yet collected, oldest first.
    in_flight: VecDeque<InFlight>,
    max_steps_in_flight: usize,
    output: StepOutput,
    next_request_id: u64,
    num_steps: u64,
    last_failure: Option<String>,
    /// How long the device worked, where it tells.
    device_busy: Option<Duration>,
    pace: Pace,
    max_step_slowdown: f64,
    mask_grace: Duration,
    full_kv_group: usize,
    max_logit_rows: usize,
    pub(crate) notes: StepNotes,
}

struct InFlight {
    plan: Plan,
    cost: StepCost,
    /// See [`Scheduler::last_least_cost`].
    least_cost: Option<f64>,
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
    /// Disks, stores and other machines that keep KV.
    pub tiers: TierStats,
    pub speculation: SpeculationStats,
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
    pub fn memory_plan(&self) -> &MemoryPlan {
        &self.memory
    }

    pub fn model_config(&self) -> &ModelConfig {
        &self.model
    }

    pub fn num_parameters(&self) -> u64 {
        num_parameters(&self.model)
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
            self.scheduler.set_first_mask(id, Arc::new(constraint.first_mask().to_vec()));
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
            && !self.in_flight.back().is_some_and(|step| self.reads_hidden(&step.plan))
        {
            self.notes.enter(Phase::Schedule);
            outputs.extend(self.take_masks(self.mask_grace));
            self.collect_tiers(Duration::ZERO);
            let mut plan = self.scheduler.schedule();
            self.begin_tiers();
            if plan.is_empty() {
                break;
            }
            let (cost, least_cost) = (self.scheduler.last_step_cost(), self.scheduler.last_least_cost());
            let drafted = self.draft(&mut plan, &mut outputs);
            self.notes.planned(&plan);
            self.notes.enter(Phase::Launch);
            let submitted = drafted.and_then(|is_moved| {
                let input = self.runner.build(&plan);
                let input = if is_moved { self.runner.without_moves() } else { input };
                self.backend.submit(input, self.program)
            });
            self.notes.shared(plan.step, self.runner.step_relay());
            match submitted {
                Ok(()) => self.in_flight.push_back(InFlight { plan, cost, least_cost }),
                Err(error) => {
                    self.runner.take_back();
                    outputs.extend(self.fail(&plan, &error));
                }
            }
        }
        if self.in_flight.is_empty() {
            let waits_for_stores = self.tiers.as_ref().is_some_and(Tiers::has_pending_queries);
            outputs.extend(self.take_masks(if waits_for_stores { Duration::ZERO } else { MASK_WAIT }));
            self.collect_tiers(TIER_WAIT);
            return outputs;
        }
        outputs.extend(self.collect_step());
        outputs
    }

    /// Takes in the oldest step in flight.
    fn collect_step(&mut self) -> Vec<RequestOutput> {
        let Some(InFlight { plan, cost, least_cost }) = self.in_flight.pop_front() else { return Vec::new() };
        self.num_steps += 1;
        self.notes.enter(Phase::Wait);
        let collected = self.backend.collect(&mut self.output);
        self.take_fetched();
        if let Some(span) = self.backend.last_step_span().filter(|_| collected.is_ok()) {
            let time = span.end.saturating_duration_since(span.start);
            *self.device_busy.get_or_insert_default() += time;
            // A step that only moves blocks says nothing about computing.
            if plan.num_tokens() > 0 {
                self.learn_pace(cost, least_cost, time);
            }
            if let Some(speculation) = &mut self.speculation {
                speculation.took(&plan, time);
            }
            self.notes.computed(&plan, span);
            self.time_prefill(&plan, time);
        }
        self.notes.enter(Phase::Apply);
        match collected.and_then(|()| self.hidden_rows(&plan)) {
            Ok(hidden) => {
                let pooled = self.pooled_rows(&plan, &hidden);
                let outputs = with_pooled(self.apply(&plan, &hidden), pooled);
                self.begin_tiers();
                outputs
            }
            Err(error) => self.fail(&plan, &error),
        }
    }

    /// Takes a step's time into account for how tenants share the next ones.
    fn learn_pace(&mut self, cost: StepCost, least_cost: Option<f64>, time: Duration) {
        if let Some(overhead) = self.pace.took(cost, time) {
            self.scheduler.set_step_overhead(overhead);
        }
        self.mask_grace = MASK_GRACE;
        if let Some(least) = least_cost {
            self.scheduler.set_spare_share(self.pace.shared(least, self.max_step_slowdown, time));
            let alone = self.pace.time_of(least).unwrap_or(MASK_GRACE);
            self.mask_grace = MASK_GRACE.min(alone / 4);
        }
    }

    /// Whether a request or the proposer is to be told hidden states of the step.
    fn reads_hidden(&self, plan: &Plan) -> bool {
        pools(plan) || self.speculation.as_ref().is_some_and(|speculation| speculation.wants_hidden(plan))
    }

    /// The hidden states of all rows of the step, where they are of use.
    fn hidden_rows(&mut self, plan: &Plan) -> Result<Vec<f32>, BackendError> {
        if !self.reads_hidden(plan) {
            return Ok(Vec::new());
        }
        self.backend.read_buffer(self.decoder.hidden_buffer(), plan.num_tokens())
    }

    /// Those that the step's requests asked for.
    fn pooled_rows(&self, plan: &Plan, hidden: &[f32]) -> HashMap<RequestId, Vec<f32>> {
        let mut pooled = HashMap::new();
        if !pools(plan) {
            return pooled;
        }
        let hidden_size = self.model.hidden_size;
        let mut end = 0;
        for seq in &plan.seqs {
            end += seq.token_ids.len();
            if is_pooled(seq) {
                let row = &hidden[(end - 1) * hidden_size..end * hidden_size];
                pooled.insert(seq.request_id, self.decoder.last_norm(row));
            }
        }
        pooled
    }

    /// Has somebody else's proposer make the guesses, up to `num_tokens` for a sequence. For the time before the first request.
    pub fn set_proposer(&mut self, proposer: Box<dyn Proposer>, num_tokens: usize) {
        self.runner.reads_hidden = proposer.wants_hidden();
        self.speculation = Some(Speculation::given(proposer, num_tokens, self.max_logit_rows));
        self.drafter = None;
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
                drafts: DraftCounts::default(),
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

    /// The KV group whose layers see a whole prompt: the one that events are about.
    pub fn full_kv_group(&self) -> usize {
        self.full_kv_group
    }

    /// What cached prefixes came and went since the last call.
    pub fn take_kv_events(&mut self) -> Vec<KvEvent> {
        self.scheduler.take_kv_events()
    }

    /// Switches relay attention from the next step on, so that one process can measure both ways. Returns whether steps share
    /// now: a device may not, and `deterministic` forbids it.
    pub fn set_relay_attention(&mut self, enabled: bool) -> bool {
        let shares = self.runner.set_sharing(enabled);
        self.scheduler.set_relay_max_queries(if shares { MAX_SPLIT_QUERIES as usize } else { 0 });
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
            tiers: self.tiers.as_ref().map(Tiers::stats).unwrap_or_default(),
            last_failure: self.last_failure.clone(),
            device_busy_s: self.device_busy.map(|busy| busy.as_secs_f64()),
            speculation: self.speculation.as_ref().map_or_else(Default::default, |one| one.stats.clone()),
        }
    }

    /// Lets other threads see the figures of now.
    pub(crate) fn publish(&self) {
        self.notes.heartbeat.publish(self.stats(), self.scheduler.queue_room());
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

/// The groups as the scheduler sees them: how far back they reach, and how many blocks the same tokens take.
pub(crate) fn kv_groups(spec: &KvSpec) -> Vec<KvGroup> {
    let group = |group: &baton_backend::KvGroupSpec| KvGroup {
        window: group.window.map(|window| window as usize + spec.num_kept_behind as usize),
        lanes: group.lanes.len(),
    };
    spec.groups.iter().map(group).collect()
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
