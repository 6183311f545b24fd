//! One run: clients come and go, the scheduler plans, the device executes, and everything is checked on the way.

use std::collections::{BTreeMap, VecDeque};

use baton_core::{RequestId, RequestOutput, SeqId};
use baton_kv::StorePolicy;
use baton_sched::{Plan, Policy, SchedStats, Scheduler, StepResult, Wait};

use crate::client::Client;
use crate::guesses::{Guesses, some_branches};
use crate::store::FakeStore;
use crate::{FakeDevice, Naming, Rng, Scenario, random_request, random_scenario};

/// Rounds in which the oldest request may go without a place in a Plan. With two Plans in flight a request that
/// needs each of its tokens waits every other round, and a victim has to drain before it can be preempted.
const MAX_ROUNDS_WITHOUT_OLDEST: usize = 6;
/// All books are checked every so many rounds.
const ROUNDS_BETWEEN_CHECKS: usize = 16;

/// What a run did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Plans applied.
    pub num_steps: usize,
    pub num_requests: usize,
    pub num_refused: usize,
    pub num_aborted: usize,
    pub num_failed_steps: usize,
    /// Of those, Plans that could not be submitted while an older one was being computed.
    pub num_failed_submits: usize,
    pub num_copies: usize,
    pub num_swapped_blocks: usize,
    pub num_planned_ahead: usize,
    pub num_fetches: usize,
    pub num_drafts: usize,
    pub num_accepted_drafts: usize,
    /// Of those, guesses of branches.
    pub num_from_branches: usize,
    /// Places for guesses that were given back unused.
    pub num_dropped_drafts: usize,
    pub num_waits: usize,
    /// Blocks of planned sequences that were given back behind a window.
    pub num_behind_windows: usize,
    /// Rows that went to the tier beyond the host's memory, came from there, and were promised but did not come.
    pub num_saved_rows: usize,
    pub num_loaded_rows: usize,
    pub num_lost_rows: usize,
    pub stats: SchedStats,
    /// blake3 over all Plans and outputs; `None` unless asked for.
    pub trace: Option<String>,
}

struct Run {
    scenario: Scenario,
    rng: Rng,
    scheduler: Scheduler,
    device: FakeDevice,
    store: FakeStore,
    /// Requests that have not ended, in the order of arrival.
    clients: BTreeMap<RequestId, Client>,
    in_flight: VecDeque<(Plan, StepResult)>,
    /// Sequences that wait for a mask or an encoder.
    waiting: Vec<(SeqId, Wait)>,
    oldest: Option<RequestId>,
    rounds_without_oldest: usize,
    report: Report,
    trace: Option<blake3::Hasher>,
}

/// Runs the scenario of a seed for at least `num_steps` steps, then until every request has ended.
pub fn simulate(seed: u64, num_steps: usize, with_trace: bool) -> Report {
    let mut rng = Rng::new(seed);
    let scenario = random_scenario(&mut rng);
    simulate_scenario(scenario, rng, num_steps, with_trace)
}

/// Like `simulate`, with a scenario of one's own.
pub fn simulate_scenario(scenario: Scenario, rng: Rng, num_steps: usize, with_trace: bool) -> Report {
    let kv = &scenario.kv;
    let scheduler = Scheduler::new(scenario.sched.clone(), kv.clone()).expect("a scenario is valid");
    let device = FakeDevice::new(scenario.model, kv);
    let mut run = Run {
        scenario,
        rng,
        scheduler,
        device,
        store: FakeStore::default(),
        clients: BTreeMap::new(),
        in_flight: VecDeque::new(),
        waiting: Vec::new(),
        oldest: None,
        rounds_without_oldest: 0,
        report: Report::default(),
        trace: with_trace.then(blake3::Hasher::new),
    };
    let mut round = 0;
    while run.report.num_steps < num_steps || run.scheduler.has_unfinished() || run.store.is_busy() {
        if run.report.num_steps < num_steps {
            run.arrivals();
            run.mishaps();
        }
        run.resume_some(300);
        run.store.work(&mut run.scheduler, &mut run.device, &mut run.rng, 300);
        run.round();
        round += 1;
        if round % ROUNDS_BETWEEN_CHECKS == 0 {
            run.scheduler.check_invariants();
        }
    }
    run.finish()
}

impl Run {
    fn arrivals(&mut self) {
        // Either a trickle or a burst. A full queue refuses what is too much of it.
        let burst = self.rng.per_mille(20);
        for _ in 0..self.scenario.load {
            let is_wanted = burst || self.rng.per_mille(400) || self.clients.is_empty();
            if self.clients.len() >= self.scenario.load || !is_wanted {
                break;
            }
            let id = RequestId(self.report.num_requests as u64);
            let request = random_request(&mut self.rng, &self.scenario, id);
            self.report.num_requests += 1;
            match self.scheduler.add_request(request.clone()) {
                Ok(()) => drop(self.clients.insert(id, Client::new(request))),
                Err(_) => self.report.num_refused += 1,
            }
        }
    }

    fn mishaps(&mut self) {
        if self.rng.per_mille(self.scenario.aborts) && !self.clients.is_empty() {
            let index = self.rng.between(0, self.clients.len() - 1);
            let id = *self.clients.keys().nth(index).expect("the index is in range");
            let output = if self.rng.per_mille(500) {
                self.scheduler.abort(id)
            } else {
                let index = self.rng.between(0, 3) as u32;
                self.scheduler.abort_sequence(id, index)
            };
            self.report.num_aborted += usize::from(output.is_some());
            self.deliver(output.as_slice());
        }
        if self.rng.per_mille(self.scenario.cache_resets) {
            self.scheduler.reset_prefix_cache();
        }
        if self.rng.per_mille(100) {
            self.scheduler.take_kv_events();
        }
        if self.rng.per_mille(50) {
            self.scheduler.set_step_overhead(self.rng.between(0, 64) as f64);
            // The engine never goes below a fifth.
            self.scheduler.set_spare_share(self.rng.between(1, 5) as f64 / 5.0);
        }
    }

    /// What some sequences waited for is there.
    fn resume_some(&mut self, per_mille: u64) {
        let mut still = Vec::new();
        for (seq_id, wait) in std::mem::take(&mut self.waiting) {
            if self.rng.per_mille(per_mille) {
                self.scheduler.resume(seq_id, wait);
            } else {
                still.push((seq_id, wait));
            }
        }
        self.waiting = still;
    }

    /// After a token was drawn: guesses of what follows, right ones and wrong ones, or something to wait for.
    fn propose(&mut self, seq_id: SeqId) {
        let Some(view) = self.scheduler.sequence(seq_id).filter(|view| !view.is_finished) else { return };
        if self.rng.per_mille(self.scenario.drafts) {
            let request = &self.clients[&view.request_id].request;
            let block_size = self.scenario.kv.block_size;
            let guesses = Guesses {
                prefix: Naming::of(request, block_size).whole(view.token_ids),
                model: &self.scenario.model,
                seed: request.params.seed.unwrap_or(0),
                index: view.index,
                block_size,
            };
            let drafts = guesses.make(&mut self.rng);
            self.scheduler.set_drafts(seq_id, drafts);
        }
        if self.rng.per_mille(self.scenario.waits) {
            let wait = *self.rng.pick(&[Wait::Mask, Wait::Encoder]);
            self.scheduler.wait(seq_id, wait);
            self.waiting.push((seq_id, wait));
            self.report.num_waits += 1;
        }
    }

    /// Plans a step if one may be planned, and applies one if none could be or the device is behind.
    fn round(&mut self) {
        let oldest = self.clients.keys().next().copied();
        let plan = self.scheduler.schedule();
        self.store.work(&mut self.scheduler, &mut self.device, &mut self.rng, 0);
        self.check_limits(&plan);
        self.check_starvation(oldest, &plan);
        let is_empty = plan.is_empty();
        if is_empty && self.in_flight.is_empty() {
            assert!(
                !self.waiting.is_empty()
                    || self.store.has_pending_queries()
                    || !self.scheduler.has_unfinished(),
                "nothing is planned and nothing in flight, but requests are unfinished: {:?}",
                self.scheduler
            );
            self.resume_some(1000);
            return;
        }
        if !is_empty && self.rng.per_mille(self.scenario.failures) {
            // The device refuses it; what is in flight goes on.
            self.report.num_failed_steps += 1;
            self.report.num_failed_submits += usize::from(!self.in_flight.is_empty());
            let outputs = self.scheduler.fail(&plan);
            self.scheduler.check_invariants();
            self.deliver(&outputs);
            return;
        }
        if !is_empty {
            self.launch(plan);
        }
        let is_full = self.in_flight.len() >= self.scenario.sched.max_plans_in_flight;
        if is_empty || is_full || self.rng.per_mille(300) {
            self.retire_plan();
        }
    }

    fn launch(&mut self, mut plan: Plan) {
        self.drop_some_drafts(&mut plan);
        let clients = &self.clients;
        let request_of = |planned: &baton_sched::PlannedSeq| &clients[&planned.request_id].request;
        let result = self.device.execute(&plan, &self.scheduler, request_of);
        self.report.num_copies += plan.copies.len();
        self.report.num_fetches += plan.fetches.len();
        for (planned, result) in plan.seqs.iter().zip(&result.seqs) {
            if planned.num_drafts > 0 {
                self.report.num_drafts += planned.num_drafts as usize;
                self.report.num_accepted_drafts += result.samples.len() - 1;
                let drawn = result.samples.iter().map(|sample| sample.token_id);
                let of_chain = planned.num_right_of_chain(drawn).min(result.samples.len() - 1);
                self.report.num_from_branches += result.samples.len() - 1 - of_chain;
            }
        }
        let blocks = plan.seqs.iter().flat_map(|planned| planned.block_tables.iter().flatten());
        self.report.num_behind_windows += blocks.filter(|block| **block == baton_sched::NO_BLOCK).count();
        self.report.num_swapped_blocks += plan.swap_out.len() + plan.swap_in.len();
        let is_ahead =
            |planned: &&baton_sched::PlannedSeq| planned.token_ids.contains(&baton_sched::PENDING_TOKEN);
        self.report.num_planned_ahead += plan.seqs.iter().filter(is_ahead).count();
        if let Some(trace) = &mut self.trace {
            trace.update(&serde_json::to_vec(&plan).expect("a Plan can be serialised"));
        }
        self.in_flight.push_back((plan, result));
    }

    /// A draft model may come up with fewer guesses than there are places for.
    fn drop_some_drafts(&mut self, plan: &mut Plan) {
        for planned in plan.seqs.iter_mut().filter(|planned| planned.num_drafts > 0) {
            if self.rng.per_mille(300) {
                let count = self.rng.between(0, planned.num_chain_drafts());
                let before = planned.num_drafts;
                let branches = some_branches(planned, count, &mut self.rng);
                self.scheduler.keep_drafts(planned, count, &branches);
                self.report.num_dropped_drafts += before.saturating_sub(planned.num_drafts) as usize;
            }
        }
    }

    fn retire_plan(&mut self) {
        let Some((plan, mut result)) = self.in_flight.pop_front() else { return };
        self.report.num_steps += 1;
        let outputs = if self.rng.per_mille(self.scenario.failures) {
            self.report.num_failed_steps += 1;
            self.device.fail_transfers(plan.step);
            self.scheduler.fail(&plan)
        } else {
            result.fetched = self.device.finish_transfers(plan.waits_for_fetches, &mut self.rng);
            self.scheduler.apply(&plan, &result)
        };
        if let Some(trace) = &mut self.trace {
            trace.update(&serde_json::to_vec(&outputs).expect("outputs can be serialised"));
        }
        self.deliver(&outputs);
        for sample in plan.seqs.iter().flat_map(|planned| &planned.samples) {
            self.propose(sample.seq_id);
        }
    }

    fn deliver(&mut self, outputs: &[RequestOutput]) {
        for output in outputs {
            let client = self
                .clients
                .get_mut(&output.request_id)
                .expect("only requests that have not ended get output");
            client.take(output);
            if output.finished {
                let client = self.clients.remove(&output.request_id).expect("it was just here");
                client.check(
                    self.scenario.model,
                    self.scenario.sched.max_model_len,
                    self.scenario.kv.block_size,
                );
            }
        }
    }

    fn check_limits(&self, plan: &Plan) {
        let config = &self.scenario.sched;
        assert!(plan.num_tokens() <= config.max_num_batched_tokens, "step {}: too many tokens", plan.step);
        assert!(plan.seqs.len() <= config.max_num_seqs, "step {}: too many sequences", plan.step);
        let num_rows: usize = plan.seqs.iter().map(baton_sched::PlannedSeq::num_logit_rows).sum();
        assert!(num_rows <= config.max_num_logit_rows, "step {}: too many rows of logits", plan.step);
        let num_entries: usize = plan.seqs.iter().map(|planned| self.num_sample_entries(planned)).sum();
        let limit = config.max_num_sample_entries;
        assert!(num_entries <= limit, "step {}: {num_entries} entries of samples", plan.step);
        let mut plans = plan.seqs.iter().map(|planned| planned.seq_id).collect::<Vec<_>>();
        plans.sort_unstable();
        assert!(plans.windows(2).all(|pair| pair[0] != pair[1]), "step {}: a sequence twice", plan.step);
    }

    /// Penalised tokens and biases that the samples of a run bring.
    fn num_sample_entries(&self, planned: &baton_sched::PlannedSeq) -> usize {
        let view = self.scheduler.sequence(planned.seq_id).expect("a planned sequence is known");
        if view.params.beam.is_some() {
            return 0;
        }
        let penalised = |len: usize| if view.params.has_penalties() { len } else { 0 };
        let of_row = |known: usize| penalised(view.token_ids.len() + known) + view.params.logit_bias.len();
        planned.samples.len() * (0..=planned.num_drafts as usize).map(of_row).sum::<usize>()
    }

    /// Under fcfs nobody keeps the oldest request waiting, unless it is the turn of another tenant.
    fn check_starvation(&mut self, oldest: Option<RequestId>, plan: &Plan) {
        let is_planned = |id: RequestId| plan.seqs.iter().any(|planned| planned.request_id == id);
        // Whoever asks a store is passed by others, whose end it may then have to wait for.
        let is_in_order = self.scenario.sched.policy == Policy::Fcfs
            && self.scenario.tenants == 1
            && self.scenario.kv.store == StorePolicy::Off;
        let waits = !self.waiting.is_empty()
            || self.store.has_pending_queries()
            || self.device.has_transfers()
            || !plan.fetches.is_empty();
        let is_kept_waiting = is_in_order && !waits && oldest.is_some_and(|id| !is_planned(id));
        if !is_kept_waiting || oldest != self.oldest {
            self.rounds_without_oldest = 0;
        }
        self.oldest = oldest;
        self.rounds_without_oldest += usize::from(is_kept_waiting);
        let rounds = self.rounds_without_oldest;
        assert!(
            rounds <= MAX_ROUNDS_WITHOUT_OLDEST,
            "step {}: the oldest request {oldest:?} waits {rounds} rounds: {:?}",
            plan.step,
            self.scheduler
        );
    }

    fn finish(mut self) -> Report {
        while self.store.is_busy() || self.scheduler.has_unsaved_rows() || self.scheduler.has_unfinished() {
            self.store.work(&mut self.scheduler, &mut self.device, &mut self.rng, 1000);
            self.round();
        }
        self.store.work(&mut self.scheduler, &mut self.device, &mut self.rng, 1000);
        self.scheduler.check_invariants();
        assert!(self.clients.is_empty(), "{} requests never ended", self.clients.len());
        self.report.num_saved_rows = self.store.num_saved_rows;
        self.report.num_loaded_rows = self.store.num_loaded_rows;
        self.report.num_lost_rows = self.store.num_lost_rows;
        let stats = self.scheduler.stats();
        let used = (stats.kv.num_device_blocks_used, stats.kv.num_host_blocks_used);
        assert_eq!(used, (0, 0), "blocks are still held after every request has ended");
        self.report.stats = stats;
        self.report.trace = self.trace.map(|trace| trace.finalize().to_hex().to_string());
        self.report
    }
}
