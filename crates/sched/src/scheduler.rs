//! `Scheduler`: its state, the way in (`add_request`), the ways out of turn (`abort`), and the views of it.
//!
//! What a step computes is decided in `schedule`, `admit` and `preempt`; what comes of it in `apply`, `beam` and
//! `select`.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use baton_core::{FinishReason, Request, RequestId, RequestOutput, SamplingParams, SeqId, TokenId};
use baton_kv::{KvCache, KvConfig, KvEvent};

use crate::claims::Claim;
use crate::cost::StepCost;
use crate::group::{Group, Place, QueueKey, num_sample_entries};
use crate::loads::StoreQuery;
use crate::order::PrefixOrder;
use crate::sequence::{Finish, Sequence, Wait};
use crate::turns::Turns;
use crate::{Drafts, PENDING_TOKEN, Policy, SchedConfig, SchedError};

/// Until the engine has measured it.
const DEFAULT_STEP_OVERHEAD: f64 = 16.0;

pub(crate) type Queue = BTreeMap<QueueKey, RequestId>;

/// A Plan that was scheduled and not yet applied.
pub(crate) struct InFlight {
    pub(crate) step: u64,
    /// Requests that the Plan swaps in or out.
    pub(crate) moved: Vec<RequestId>,
}

pub struct Scheduler {
    pub(crate) config: SchedConfig,
    pub(crate) kv: KvCache,
    pub(crate) groups: BTreeMap<RequestId, Group>,
    /// Which request a sequence belongs to.
    pub(crate) owners: BTreeMap<SeqId, RequestId>,
    pub(crate) waiting: Queue,
    pub(crate) running: Queue,
    pub(crate) swapped: Queue,
    pub(crate) in_flight: VecDeque<InFlight>,
    pub(crate) next_step: u64,
    /// Requests whose KV is on the way from the host tier, by the id of the fetch.
    pub(crate) fetches: BTreeMap<u64, RequestId>,
    pub(crate) next_fetch: u64,
    /// See [`Scheduler::take_store_queries`].
    pub(crate) store_queries: Vec<StoreQuery>,
    /// Requests whose KV is on the way to the host tier, by the id of the load.
    pub(crate) loads: BTreeMap<u64, RequestId>,
    pub(crate) order: PrefixOrder,
    pub(crate) next_seq_id: u64,
    next_arrival: u64,
    pub(crate) turns: Turns,
    /// Requests in `waiting`, by tenant.
    pub(crate) num_waiting_of: BTreeMap<u32, usize>,
    /// A waiting request that has a right to a place and finds none.
    pub(crate) claim: Option<Claim>,
    /// See [`Scheduler::set_step_overhead`].
    pub(crate) step_overhead: f64,
    /// See [`Scheduler::set_spare_share`].
    pub(crate) spare_share: f64,
    /// See [`Scheduler::pace_rests`].
    pub(crate) paces_rests: bool,
    pub(crate) last_step_cost: StepCost,
    /// Tokens whose KV the last Plan began to fetch from the host tier.
    pub(crate) last_fetch_tokens: usize,
    pub(crate) last_least_cost: Option<f64>,
    pub(crate) num_preemptions_swap: u64,
    pub(crate) num_preemptions_recompute: u64,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler")
            .field("config", &self.config)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// What the sampler may want to know of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct SequenceView<'a> {
    pub request_id: RequestId,
    /// Prompt and output so far. For a sequence still to be forked: those of the sequence it will be forked from.
    pub token_ids: &'a [TokenId],
    pub num_prompt_tokens: usize,
    /// Which of the `n` continuations; the rank of a beam.
    pub index: u32,
    pub params: &'a SamplingParams,
    /// The model's end tokens.
    pub eos_token_ids: &'a [TokenId],
    /// It has ended; other sequences of its request may go on.
    pub is_finished: bool,
    /// Tokens that Plans in flight are going to add.
    pub num_pending: usize,
    pub tenant: u32,
    pub cache_salt: Option<&'a Arc<str>>,
    /// See [`Request::prediction`].
    pub prediction: &'a [TokenId],
}

impl Scheduler {
    pub fn new(config: SchedConfig, kv: KvConfig) -> Result<Self, SchedError> {
        config.validate(&kv)?;
        Ok(Self {
            config,
            kv: KvCache::new(kv)?,
            groups: BTreeMap::new(),
            owners: BTreeMap::new(),
            waiting: Queue::new(),
            running: Queue::new(),
            swapped: Queue::new(),
            in_flight: VecDeque::new(),
            next_step: 0,
            fetches: BTreeMap::new(),
            next_fetch: 0,
            store_queries: Vec::new(),
            loads: BTreeMap::new(),
            order: PrefixOrder::default(),
            next_seq_id: 0,
            next_arrival: 0,
            turns: Turns::default(),
            num_waiting_of: BTreeMap::new(),
            claim: None,
            step_overhead: DEFAULT_STEP_OVERHEAD,
            paces_rests: false,
            spare_share: 1.0,
            last_step_cost: StepCost::default(),
            last_fetch_tokens: 0,
            last_least_cost: None,
            num_preemptions_swap: 0,
            num_preemptions_recompute: 0,
        })
    }

    pub fn config(&self) -> &SchedConfig {
        &self.config
    }

    pub fn kv_config(&self) -> &KvConfig {
        self.kv.config()
    }

    /// Puts a request into the waiting queue, at the turn of its tenant, or says why it can never run.
    pub fn add_request(&mut self, request: Request) -> Result<(), SchedError> {
        let max_len = self.check_request(&request)?;
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        let priority = if self.config.policy == Policy::Priority { request.priority } else { 0 };
        let num_tokens = request.prompt_token_ids.len();
        let num_output = request.params.num_sequences() as usize * (max_len - num_tokens);
        let turn = self.turns.assign(request.tenant, num_tokens + num_output);
        let key = QueueKey { priority, turn, arrival };
        let id = request.id;
        // Beams are forked when they are found; the continuations of `n` are known from the start.
        let num_seqs = if request.params.beam.is_some() { 1 } else { request.params.num_sequences() };
        let mut seqs: Vec<Sequence> = (0..num_seqs).map(|index| self.new_sequence(id, index)).collect();
        seqs[0].token_ids.clone_from(&request.prompt_token_ids);
        seqs[0].has_table = true;
        let num_public_tokens = (request.num_public_tokens as usize).min(request.prompt_token_ids.len());
        self.kv.add_sequence(seqs[0].id, request.cache_salt.as_deref(), num_public_tokens);
        self.groups.insert(id, Group::new(request, key, seqs, max_len));
        self.start_waiting(id);
        Ok(())
    }

    /// Puts a request into the waiting queue.
    pub(crate) fn start_waiting(&mut self, id: RequestId) {
        let group = self.groups.get_mut(&id).expect("a request that waits is here");
        group.place = Place::Waiting;
        self.waiting.insert(group.key, id);
        *self.num_waiting_of.entry(group.request.tenant).or_default() += 1;
    }

    /// Takes a request out of the waiting queue, if it is there.
    pub(crate) fn stop_waiting(&mut self, id: RequestId) {
        let group = &self.groups[&id];
        if self.waiting.remove(&group.key).is_some() {
            let tenant = group.request.tenant;
            let count = self.num_waiting_of.get_mut(&tenant).expect("it was counted");
            *count -= 1;
            if *count == 0 {
                self.num_waiting_of.remove(&tenant);
            }
        }
    }

    /// Refuses what can never run; else says how long its sequences can get.
    fn check_request(&self, request: &Request) -> Result<usize, SchedError> {
        let params = &request.params;
        // The vocabulary is the text layer's business; here every token but the pending mark is one.
        params.validate(PENDING_TOKEN)?;
        let num_tokens = request.prompt_token_ids.len();
        if num_tokens == 0 {
            return Err(SchedError::EmptyPrompt);
        }
        if let Some(position) = request.prompt_token_ids.iter().position(|&token| token == PENDING_TOKEN) {
            return Err(SchedError::InvalidToken { token_id: PENDING_TOKEN, position });
        }
        let max_model_len = self.config.max_model_len;
        if num_tokens >= max_model_len {
            return Err(SchedError::PromptTooLong { num_tokens, max_model_len });
        }
        let (num_sequences, max_num_seqs) = (params.num_sequences() as usize, self.config.max_num_seqs);
        if num_sequences > max_num_seqs {
            return Err(SchedError::TooManySequences { num_sequences, max_num_seqs });
        }
        let max_tokens = params.max_tokens.map_or(usize::MAX, |max| max as usize);
        let max_len = num_tokens.saturating_add(max_tokens).min(max_model_len);
        // The last token is sampled but never computed. All sequences share the full blocks of the prompt.
        let kv = self.kv.config();
        let shared = num_tokens / kv.block_size;
        let own = vec![kv.rows_for(max_len - 1) - shared; num_sequences];
        let needed = kv.peak_blocks(shared, &own, self.config.max_run());
        let available = self.kv.num_unpinned_blocks();
        if needed > available {
            return Err(SchedError::NeverFits { needed, available, num_sequences, max_tokens: max_len });
        }
        // After a prompt all continuations draw at once; later each is a run of its own.
        let at_once = num_sequences.saturating_mul(num_sample_entries(request, num_tokens));
        let needed = at_once.max(num_sample_entries(request, max_len));
        let limit = self.config.max_num_sample_entries;
        if needed > limit {
            return Err(SchedError::TooManyEntries { needed, limit });
        }
        if self.groups.contains_key(&request.id) {
            return Err(SchedError::DuplicateId(request.id));
        }
        if let Some(limit) = self.config.max_num_queued_reqs.filter(|&limit| self.waiting.len() >= limit) {
            return Err(SchedError::QueueFull { limit });
        }
        let num_own = self.num_waiting_of.get(&request.tenant).copied().unwrap_or(0);
        match self.config.max_num_queued_reqs_per_key {
            Some(limit) if num_own >= limit => Err(SchedError::KeyQueueFull { limit }),
            _ => Ok(max_len),
        }
    }

    pub(crate) fn new_sequence(&mut self, request_id: RequestId, index: u32) -> Sequence {
        let id = SeqId(self.next_seq_id);
        self.next_seq_id += 1;
        self.owners.insert(id, request_id);
        Sequence::new(id, index)
    }

    /// Ends a request. Its blocks are given back as soon as no Plan in flight uses them. `None` where it is not
    /// here (any more).
    pub fn abort(&mut self, id: RequestId) -> Option<RequestOutput> {
        self.finish_early(id, FinishReason::Abort)
    }

    /// Ends a request that cannot go on, with `FinishReason::Error`. `None` where it is not here (any more).
    pub fn fail_request(&mut self, id: RequestId) -> Option<RequestOutput> {
        self.finish_early(id, FinishReason::Error)
    }

    /// Leaves a sequence out of all Plans until what it waits for is there. It keeps its place and its blocks.
    pub fn wait(&mut self, id: SeqId, wait: Wait) {
        if let Some(seq) = self.sequence_mut(id) {
            seq.set_wait(wait, true);
        }
    }

    /// What a sequence waited for is there.
    pub fn resume(&mut self, id: SeqId, wait: Wait) {
        if let Some(seq) = self.sequence_mut(id) {
            seq.set_wait(wait, false);
        }
    }

    /// Which tokens all sequences of a request may draw first. They wait for a mask after each token they draw.
    pub fn set_first_mask(&mut self, id: RequestId, mask: Arc<Vec<u32>>) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.first_mask = Some(mask);
        }
    }

    /// The mask that a sequence waited for.
    pub fn set_mask(&mut self, id: SeqId, mask: Arc<Vec<u32>>) {
        if let Some(seq) = self.sequence_mut(id) {
            seq.mask = Some(mask);
            seq.set_wait(Wait::Mask, false);
        }
    }

    /// Guesses of what a running sequence draws next, to be checked by the next Plan. They replace earlier ones.
    pub fn set_drafts(&mut self, id: SeqId, drafts: impl Into<Drafts>) {
        let group = self.owners.get(&id).and_then(|owner| self.groups.get_mut(owner));
        let Some(group) = group.filter(|group| group.place == Place::Running) else { return };
        if let Some(seq) = group.seqs.iter_mut().find(|seq| seq.id == id) {
            seq.drafts = drafts.into();
        }
    }

    /// Whether a sequence is left out of Plans until all its tokens are known, so that guesses can be made from them.
    pub fn set_awaits_tokens(&mut self, id: SeqId, awaits: bool) {
        if let Some(seq) = self.sequence_mut(id) {
            seq.awaits_tokens = awaits;
        }
    }

    pub(crate) fn sequence_mut(&mut self, id: SeqId) -> Option<&mut Sequence> {
        let group = self.groups.get_mut(self.owners.get(&id)?)?;
        group.seqs.iter_mut().find(|seq| seq.id == id)
    }

    /// Whether decodes that begin alike stand side by side in Plans, from the next one on.
    pub fn set_relay_max_queries(&mut self, max_queries: usize) {
        self.config.relay_max_queries = max_queries;
    }

    /// True until the request has ended.
    pub fn contains(&self, id: RequestId) -> bool {
        self.groups.get(&id).is_some_and(|group| group.place != Place::Ended)
    }

    /// Ends one of the `n` continuations (a stop string was found in it); the others go on. `None` where there is
    /// nothing to end: unknown, ended already, or not started yet.
    pub fn abort_sequence(&mut self, id: RequestId, index: u32) -> Option<RequestOutput> {
        let group = self.groups.get_mut(&id).filter(|group| group.place != Place::Ended)?;
        if !group.forked || group.request.params.selects_at_end() {
            return None;
        }
        let position = group.live().find(|&position| group.seqs[position].index == index)?;
        if group.live().count() == 1 {
            return self.abort(id);
        }
        let seq = &mut group.seqs[position];
        seq.finish = Some(Finish { reason: FinishReason::Abort, stop_token_id: None });
        let output = baton_core::SequenceOutput {
            index,
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            cumulative_logprob: seq.cumulative_logprob,
            finish_reason: Some(FinishReason::Abort),
            stop_token_id: None,
        };
        let output = group.output(vec![output], false);
        self.give_back_finished(id);
        Some(output)
    }

    /// Ends a request before its time, whatever queue it is in.
    pub(crate) fn finish_early(&mut self, id: RequestId, reason: FinishReason) -> Option<RequestOutput> {
        let group = self.groups.get_mut(&id).filter(|group| group.place != Place::Ended)?;
        let output = group.finish_early(reason);
        self.end(id);
        Some(output)
    }

    /// Takes an ended request out of its queue and gives back what no Plan in flight uses.
    pub(crate) fn end(&mut self, id: RequestId) {
        let group = &self.groups[&id];
        match group.place {
            Place::Waiting => self.stop_waiting(id),
            Place::Running => drop(self.running.remove(&group.key)),
            Place::Swapped => drop(self.swapped.remove(&group.key)),
            Place::Ended => return,
        }
        let group = self.groups.get_mut(&id).expect("only a request that is here can end");
        group.place = Place::Ended;
        self.give_back_finished(id);
    }

    /// Gives back the blocks of finished sequences that are in no Plan in flight; forgets the request after the last.
    pub(crate) fn give_back_finished(&mut self, id: RequestId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if group.num_moves_in_flight > 0 || group.fetch.is_some() {
            return;
        }
        for seq in &mut group.seqs {
            if seq.finish.is_some() && seq.num_in_flight == 0 && seq.has_table {
                self.kv.remove_sequence(seq.id);
                seq.has_table = false;
            }
        }
        if group.place == Place::Ended && !group.is_in_flight() {
            let group = self.groups.remove(&id).expect("it was just here");
            for seq in &group.seqs {
                debug_assert!(!seq.has_table, "an ended request has only finished sequences");
                self.owners.remove(&seq.id);
            }
        }
    }

    /// True until every request has ended and every Plan was applied.
    pub fn has_unfinished(&self) -> bool {
        !self.groups.is_empty() || !self.in_flight.is_empty()
    }

    pub fn sequence(&self, id: SeqId) -> Option<SequenceView<'_>> {
        let group = self.groups.get(self.owners.get(&id)?)?;
        let seq = group.seqs.iter().find(|seq| seq.id == id)?;
        let token_ids = if seq.token_ids.is_empty() { &group.seqs[0].token_ids } else { &seq.token_ids };
        Some(SequenceView {
            request_id: group.request.id,
            token_ids,
            num_prompt_tokens: group.num_prompt_tokens(),
            index: seq.index,
            params: &group.request.params,
            eos_token_ids: &group.request.eos_token_ids,
            is_finished: seq.finish.is_some(),
            num_pending: seq.num_pending,
            tenant: group.request.tenant,
            cache_salt: group.request.cache_salt.as_ref(),
            prediction: &group.request.prediction,
        })
    }

    /// What has happened to the prefix cache since the last call.
    pub fn take_kv_events(&mut self) -> Vec<KvEvent> {
        self.kv.take_events()
    }

    /// Keeps the cached blocks of a prefix for good; see [`KvCache::pin_prefix`]. Requests that share nothing have so many blocks
    /// less.
    pub fn pin_prefix(&mut self, token_ids: &[TokenId]) -> usize {
        let id = SeqId(self.next_seq_id);
        self.next_seq_id += 1;
        self.kv.pin_prefix(id, token_ids)
    }

    /// Device blocks that are not pinned.
    pub fn num_unpinned_blocks(&self) -> usize {
        self.kv.num_unpinned_blocks()
    }

    /// Forgets every cached prefix that is not pinned (say, because the weights changed).
    pub fn reset_prefix_cache(&mut self) {
        self.kv.reset_prefix_cache();
    }

    /// Panics with what is wrong where the books do not balance. For tests and the simulator.
    pub fn check_invariants(&self) {
        self.kv.check_invariants();
        for (place, queue) in [
            (Place::Waiting, &self.waiting),
            (Place::Running, &self.running),
            (Place::Swapped, &self.swapped),
        ] {
            let in_place = self.groups.values().filter(|group| group.place == place).count();
            assert_eq!(
                in_place,
                queue.len(),
                "requests marked {place:?} and the length of that queue differ"
            );
            for (key, id) in queue {
                let group =
                    self.groups.get(id).unwrap_or_else(|| panic!("request {id} is queued but not here"));
                assert_eq!((group.place, group.key), (place, *key), "request {id} stands in the wrong queue");
            }
        }
        let num_waiting: usize = self.num_waiting_of.values().sum();
        assert_eq!(num_waiting, self.waiting.len(), "the tenants' counts of waiting requests");
        let running_slots: usize = self.running.values().map(|id| self.groups[id].num_slots()).sum();
        assert!(running_slots <= self.config.max_num_seqs, "{running_slots} sequences run");
        for (id, group) in &self.groups {
            for seq in &group.seqs {
                assert_eq!(
                    seq.has_table,
                    self.kv.contains(seq.id),
                    "request {id}: table of sequence {}",
                    seq.id
                );
                assert_eq!(self.owners.get(&seq.id), Some(id), "the owner of sequence {}", seq.id);
                assert!(seq.num_applied <= seq.num_computed, "sequence {}", seq.id);
                assert!(
                    seq.num_in_flight <= self.in_flight.len(),
                    "sequence {} is in too many plans",
                    seq.id
                );
                if seq.has_table && group.place == Place::Waiting {
                    assert_eq!(self.kv.num_rows(seq.id), 0, "request {id} waits and holds blocks");
                }
            }
            assert!(group.place != Place::Ended || group.is_in_flight(), "request {id} has ended but stays");
        }
        for (fetch, id) in &self.fetches {
            assert_eq!(self.groups[id].fetch, Some(*fetch), "request {id} waits for another fetch");
        }
        let num_fetches = self.groups.values().filter(|group| group.fetch.is_some()).count();
        assert_eq!(num_fetches, self.fetches.len(), "requests that wait for KV");
        let num_seqs: usize = self.groups.values().map(|group| group.seqs.len()).sum();
        assert_eq!(num_seqs, self.owners.len(), "owners of sequences that are gone");
    }
}
