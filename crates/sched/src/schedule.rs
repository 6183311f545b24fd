//! What one step computes.
//!
//! Running requests come first, in the order of the queue; each takes its tokens from the step's budget and its
//! blocks from the pool, if need be at the cost of younger requests. What is left goes to swapped and waiting ones.

use std::sync::Arc;

use baton_core::{RequestId, TokenCount, TokenId};
use baton_kv::{KvCache, StorePolicy, WriteRange};

use crate::cost::StepCost;
use crate::group::Group;
use crate::scheduler::InFlight;
use crate::shares::{Shares, num_readers};
use crate::{DraftBranch, PENDING_TOKEN, Plan, PlannedBranch, PlannedSample, PlannedSeq, Scheduler};

/// See [`Scheduler::pace_rests`].
const REST_PIECES: usize = 2;

/// A Plan in the making, with what is left of the step's limits.
pub(crate) struct Step {
    pub(crate) plan: Plan,
    pub(crate) tokens_left: usize,
    rows_left: usize,
    entries_left: usize,
    /// Tokens whose KV may still be fetched from the host tier.
    pub(crate) fetch_tokens_left: usize,
    /// Tokens whose KV is fetched, which may be more than there were left: a step may have one fetch of any length.
    pub(crate) fetched_tokens: usize,
    /// Decodes of running requests that have not had their turn in this step.
    decodes_to_come: usize,
    /// Running requests decode.
    has_decodes: bool,
    /// Requests swapped in or out.
    pub(crate) moved: Vec<RequestId>,
    /// A request lacks blocks until Plans in flight are applied: nobody behind it may take any.
    pub(crate) is_short_of_blocks: bool,
    /// Requests that are left out because they are going to be preempted.
    pub(crate) draining: Vec<RequestId>,
    pub(crate) has_preempted: bool,
    /// What each tenant may have, where several have work.
    pub(crate) shares: Option<Shares>,
    cost: StepCost,
}

/// What a request wants to compute of one of its sequences.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    /// Position in `Group::seqs`.
    pub(crate) position: usize,
    pub(crate) count: usize,
    /// Of these, guesses at the end.
    pub(crate) num_drafts: usize,
    /// Of the branches of its guesses the first so many, and their tokens.
    pub(crate) num_branches: usize,
    pub(crate) num_branch_tokens: usize,
    /// Of the known tokens before the last one, those that draw too.
    pub(crate) num_redrawn: usize,
    pub(crate) has_sample: bool,
}

impl Scheduler {
    /// Plans the next step. Empty where there is nothing to do, or nothing can be done before a Plan in flight is
    /// applied. An empty Plan need not be applied.
    pub fn schedule(&mut self) -> Plan {
        let mut step = Step {
            plan: Plan { step: self.next_step, ..Plan::default() },
            tokens_left: self.config.max_num_batched_tokens,
            rows_left: self.config.max_num_logit_rows,
            entries_left: self.config.max_num_sample_entries,
            fetch_tokens_left: self.config.max_num_batched_tokens,
            fetched_tokens: 0,
            decodes_to_come: 0,
            has_decodes: false,
            moved: Vec::new(),
            is_short_of_blocks: false,
            draining: Vec::new(),
            has_preempted: false,
            shares: None,
            cost: StepCost::WEIGHTS,
        };
        if self.in_flight.len() >= self.config.max_plans_in_flight {
            return step.plan;
        }
        // First, because the device saves blocks before it brings others back: a place that is left in this step must not be
        // filled in it.
        if self.fetching_pays() || self.kv.has_stores() {
            step.plan.swap_out = self.kv.offload(self.max_offload_blocks(), self.num_spare_blocks());
        }
        self.evict_for_claim(&mut step);
        step.shares = self.share_step();
        self.plan_all(&mut step);
        if step.plan.seqs.is_empty() && step.shares.is_some() {
            // Those whose turn it was lack blocks: others may be able to go on.
            step.shares = None;
            step.is_short_of_blocks = false;
            self.plan_all(&mut step);
        }
        self.last_step_cost = step.cost;
        self.last_fetch_tokens = step.fetched_tokens;
        self.last_least_cost = step.shares.as_ref().and_then(|shares| shares.least_cost);
        step.plan.waits_for_fetches =
            step.plan.is_empty() && self.in_flight.is_empty() && !self.fetches.is_empty();
        if step.plan.is_empty() {
            return step.plan;
        }
        if self.config.relay_max_queries > 0 {
            self.order.sort(&mut step.plan.seqs, self.config.relay_max_queries);
        }
        for id in &step.moved {
            self.groups.get_mut(id).expect("a moved request is here").num_moves_in_flight += 1;
        }
        self.in_flight.push_back(InFlight { step: step.plan.step, moved: step.moved });
        self.next_step += 1;
        step.plan
    }

    /// From now on, the last block of a prompt, most of whose KV may have come from elsewhere, is computed in pieces where others
    /// decode: each token of it attends to the whole prompt, and all of them at once would make every decode wait.
    pub fn pace_rests(&mut self) {
        self.paces_rests = true;
    }

    /// Blocks that a step copies to the host tier at most. Copies keep up with what steps and fetches fill, and may catch up,
    /// as long as they take at most half of a step's time: they are made beside it, or on a CPU before it.
    fn max_offload_blocks(&self) -> usize {
        let kv = self.kv.config();
        let lanes: usize = kv.groups.iter().map(|group| group.lanes).sum();
        let most = kv.rows_for(self.config.max_num_batched_tokens);
        if kv.store == StorePolicy::WriteThrough {
            // What is stored as soon as it is computed must keep up even where there is nothing else to do.
            return most.max(4) * lanes;
        }
        let copied_in_half_a_step =
            0.5 * self.config.recompute_cost_per_token / self.config.swap_cost_per_token;
        // How long the step before took, in tokens; this one is not planned yet.
        let num_tokens = self.last_step_cost.tokens(self.step_overhead) * copied_in_half_a_step.min(2.0);
        let num_tokens = (num_tokens as usize).saturating_add(self.last_fetch_tokens);
        let fetched = kv.rows_for(self.last_fetch_tokens);
        kv.rows_for(num_tokens).clamp(4, 2 * most.max(2) + fetched) * lanes
    }

    /// So many blocks may be taken before what they hold is copied: by a few steps, or by fetches, of which a step may have one of
    /// any length. What is copied ahead is there twice, so at most half of the host tier is.
    fn num_spare_blocks(&self) -> usize {
        let (kv, max_tokens) = (self.kv.config(), self.config.max_num_batched_tokens);
        let per_step = kv.peak_blocks_of(max_tokens, max_tokens);
        let longest = kv.peak_blocks_of(self.config.max_model_len, max_tokens);
        (4 * per_step.max(longest)).min(kv.num_device_blocks / 4).min(kv.num_host_blocks / 2)
    }

    fn plan_all(&mut self, step: &mut Step) {
        self.plan_running(step);
        // Whoever made room for others must not come back in the same step: its blocks are needed.
        if !step.is_short_of_blocks && !step.has_preempted {
            self.admit(step);
        } else {
            self.make_claim();
        }
    }

    fn plan_running(&mut self, step: &mut Step) {
        let order: Vec<_> = self.running.iter().map(|(key, id)| (*key, *id)).collect();
        let decodes: Vec<usize> = order.iter().map(|(_, id)| num_decodes(&self.groups[id])).collect();
        step.decodes_to_come = decodes.iter().sum();
        step.has_decodes = step.decodes_to_come > 0;
        for ((key, id), own_decodes) in order.into_iter().zip(decodes) {
            step.decodes_to_come -= own_decodes;
            if step.draining.contains(&id) || !self.running.contains_key(&key) {
                continue;
            }
            self.share_prompt(id);
            self.trim(id);
            let mut runs = self.wanted_runs(id, step);
            let has_drafts = runs.iter().any(|run| run.num_drafts > 0);
            if has_drafts
                && self.kv.blocks_needed(&self.writes(&self.groups[&id], &runs)) > self.kv.num_free_blocks()
            {
                // Nobody makes room for guesses.
                self.drop_drafts(id);
                runs = self.wanted_runs(id, step);
            }
            if runs.is_empty() {
                continue;
            }
            if self.make_room(id, &runs, step) {
                self.plan_runs(id, &runs, step);
            } else {
                self.pass_turn(id, &runs, step);
            }
        }
    }

    /// True where the blocks for `runs` are free, after preempting younger requests where that was needed.
    fn make_room(&mut self, id: RequestId, runs: &[Run], step: &mut Step) -> bool {
        loop {
            let group = &self.groups[&id];
            let needed = self.kv.blocks_needed(&self.writes(group, runs));
            if needed == 0 || (needed <= self.kv.num_free_blocks() && !step.is_short_of_blocks) {
                return true;
            }
            let key = group.key;
            let youngest = self.running.last_key_value().map(|(key, id)| (*key, *id));
            let victim = youngest.filter(|(other, _)| *other > key && !step.is_short_of_blocks);
            match victim {
                Some((_, victim)) if !self.groups[&victim].is_in_flight() => self.preempt(victim, step),
                Some((_, victim)) => {
                    // It is left out of this step, so that it can be preempted when its Plan has been applied.
                    step.draining.push(victim);
                    step.is_short_of_blocks = true;
                    return false;
                }
                // The youngest keeps what it has and waits for the others to end: cheaper than starting over.
                None => {
                    step.is_short_of_blocks = true;
                    return false;
                }
            }
        }
    }

    fn drop_drafts(&mut self, id: RequestId) {
        let group = self.groups.get_mut(&id).expect("a running request is here");
        group.seqs.iter_mut().for_each(|seq| seq.drafts.clear());
    }

    /// Whoever lacks blocks lets others of its tenant have the next step, so that they end and give theirs back.
    fn pass_turn(&mut self, id: RequestId, runs: &[Run], step: &Step) {
        let group = self.groups.get_mut(&id).expect("a running request is here");
        for run in runs {
            group.seqs[run.position].last_step = step.plan.step;
        }
    }

    /// After a recomputation, sequences of a forked request take the prompt from the first one.
    pub(crate) fn share_prompt(&mut self, id: RequestId) {
        let block_size = self.kv.config().block_size;
        let group = self.groups.get_mut(&id).expect("a running request is here");
        let num_rows = group.num_shared_rows(block_size);
        let live: Vec<usize> = group.live().collect();
        let Some((&leader, others)) = live.split_first() else { return };
        if num_rows == 0 || others.is_empty() || group.seqs[leader].num_applied < num_rows * block_size {
            return;
        }
        if group.fetch.is_some() {
            return;
        }
        for &position in others {
            if group.seqs[position].num_computed > 0 {
                continue;
            }
            self.kv.fork_prefix(group.seqs[leader].id, group.seqs[position].id, num_rows);
            group.seqs[position].num_computed = num_rows * block_size;
            group.seqs[position].num_applied = num_rows * block_size;
        }
    }

    /// Gives back what no token to come reads. Tokens of Plans in flight may still be taken back, so these do not count.
    fn trim(&mut self, id: RequestId) {
        let group = &self.groups[&id];
        for position in group.live() {
            let seq = &group.seqs[position];
            if seq.has_table {
                self.kv.trim(seq.id, seq.num_applied);
            }
        }
    }

    /// Sequences that the next step decodes, if nothing keeps it from that.
    pub fn num_decodes(&self) -> usize {
        self.running.values().map(|id| num_decodes(&self.groups[id])).sum()
    }

    /// Plans what a request wants of a step as far as the limits allow. The blocks must be free.
    pub(crate) fn plan_runs(&mut self, id: RequestId, runs: &[Run], step: &mut Step) {
        let num_readers = num_readers(&self.groups[&id], runs.len());
        for run in runs {
            step.cost += self.cost_of_run(&self.groups[&id], run.position, run.count, num_readers);
        }
        let group = self.groups.get_mut(&id).expect("a running request is here");
        for run in runs {
            let planned = plan_run(group, run, &mut self.kv, &mut step.plan);
            step.tokens_left -= run.count + run.num_branch_tokens;
            step.rows_left -= planned.num_logit_rows();
            let num_drafts = run.num_drafts + run.num_branch_tokens;
            step.entries_left -= num_entries(group, run.position, planned.samples.len(), num_drafts);
            step.plan.seqs.push(planned);
        }
    }

    /// What a request would compute now, within what is left of the step.
    pub(crate) fn wanted_runs(&self, id: RequestId, step: &Step) -> Vec<Run> {
        let (group, config, block_size) = (&self.groups[&id], &self.config, self.kv.config().block_size);
        let live: Vec<usize> = group.live().collect();
        let mut limits = Limits {
            tokens_left: step.tokens_left,
            rows_left: step.rows_left,
            entries_left: step.entries_left,
            // Prompts leave the decodes behind them at least half of the step.
            tokens_kept: step.decodes_to_come.min(config.max_num_batched_tokens / 2),
            rows_kept: step.decodes_to_come.min(config.max_num_logit_rows / 2),
            allowed: usize::MAX,
            redraws: config.redraws,
        };
        let allowed = |position: usize| {
            step.shares.as_ref().map_or(usize::MAX, |shares| shares.allowed(self, group, position))
        };
        let is_decoding = live.iter().all(|&position| group.seqs[position].is_decoding());
        // Beams are compared with each other: all of them take the step, or none.
        let beams_in_step = group.is_beam() && group.forked;
        let has_room = || {
            limits.tokens_left.min(limits.rows_left) >= live.len()
                && live.iter().all(|&position| allowed(position) > 0)
        };
        if beams_in_step && is_decoding && !has_room() {
            return Vec::new();
        }
        if beams_in_step && live.iter().any(|&position| group.seqs[position].is_waiting()) {
            return Vec::new();
        }
        let mut runs = Vec::new();
        for (rank, &position) in live.iter().enumerate() {
            if !can_run(group, position, rank, block_size) {
                continue;
            }
            let keep_last = beams_in_step && !is_decoding;
            let seq = &group.seqs[position];
            let num_remaining = seq.num_remaining();
            let is_rest = self.paces_rests && step.has_decodes && num_remaining <= block_size;
            let piece =
                if is_rest && !seq.is_decoding() { block_size.div_ceil(REST_PIECES) } else { usize::MAX };
            limits.allowed = allowed(position);
            let available = (num_remaining - usize::from(keep_last)).min(limits.allowed).min(piece);
            if let Some(run) = limits.cut(group, position, available, config.long_prefill_token_threshold) {
                runs.push(run);
            }
        }
        runs
    }

    /// The ranges that `runs` write.
    pub(crate) fn writes(&self, group: &Group, runs: &[Run]) -> Vec<WriteRange> {
        runs.iter().map(|run| write_of(group, run, &self.kv)).collect()
    }
}

/// What a run writes: its tokens, and a row of blocks for each branch behind them.
fn write_of(group: &Group, run: &Run, kv: &KvCache) -> WriteRange {
    let seq = &group.seqs[run.position];
    let (start, end) = (seq.num_computed, seq.num_computed + run.count);
    let with_branches = (kv.config().rows_for(end) + run.num_branches) * kv.config().block_size;
    WriteRange { seq_id: seq.id, start, end: if run.num_branches > 0 { with_branches } else { end } }
}

/// Tokens that a request takes each step to keep all its sequences going.
fn num_decodes(group: &Group) -> usize {
    group.live().filter(|&position| group.seqs[position].is_decoding()).count()
}

/// False for a sequence that has to wait for a token in flight, for the prompt that it shares, for its drafts, or for something else.
/// `rank` is its place among the live ones.
pub(crate) fn can_run(group: &Group, position: usize, rank: usize, block_size: usize) -> bool {
    let seq = &group.seqs[position];
    let must_wait_for_token = seq.num_pending > 0
        && (group.needs_every_token() || seq.awaits_tokens || seq.num_tokens_coming() >= group.max_len);
    let must_wait_for_prompt = rank > 0 && seq.num_computed == 0 && group.num_shared_rows(block_size) > 0;
    let must_wait_for_drafts = seq.num_drafts_in_flight > 0;
    !must_wait_for_token && !must_wait_for_prompt && !must_wait_for_drafts && !seq.is_waiting()
}

struct Limits {
    tokens_left: usize,
    rows_left: usize,
    entries_left: usize,
    tokens_kept: usize,
    rows_kept: usize,
    /// What the sequence's tenant may have.
    allowed: usize,
    redraws: bool,
}

impl Limits {
    /// The longest run of at most `available` tokens, and takes it off the limits.
    fn cut(&mut self, group: &Group, position: usize, available: usize, threshold: usize) -> Option<Run> {
        let seq = &group.seqs[position];
        let remaining = seq.num_remaining();
        let (mut count, rows_left) = if seq.is_decoding() {
            (available.min(self.tokens_left), self.rows_left)
        } else {
            let threshold = if threshold == 0 { usize::MAX } else { threshold };
            let tokens = self.tokens_left.saturating_sub(self.tokens_kept);
            (available.min(tokens).min(threshold), self.rows_left.saturating_sub(self.rows_kept))
        };
        let num_rows = |count: usize| {
            group.scored(seq.num_computed, count).len() + usize::from(count > 0 && count == remaining)
        };
        while num_rows(count) > rows_left {
            count -= num_rows(count) - rows_left;
        }
        let num_drawn = if group.forked { 1 } else { group.seqs.len() };
        let plain_entries = num_entries(group, position, num_drawn, 0);
        if count == remaining && plain_entries > self.entries_left {
            // The last token is left for a step that has room for what its samples bring.
            count -= 1;
        }
        if count == 0 {
            return None;
        }
        self.tokens_left -= count;
        self.rows_left -= num_rows(count);
        let has_sample = count == remaining;
        let checks = has_sample && seq.is_decoding();
        let num_drafts = if checks { self.num_drafts(group, position, count) } else { 0 };
        let (num_branches, num_branch_tokens) = match num_drafts {
            0 => (0, 0),
            _ => self.num_branches(group, position, count, num_drafts),
        };
        let num_checked = num_drafts + num_branch_tokens;
        if has_sample {
            self.entries_left -= num_entries(group, position, num_drawn, num_checked);
        }
        self.tokens_left -= num_checked;
        self.rows_left -= num_checked;
        // Where there are rows of logits for them, and nothing is scored besides.
        let num_redrawn = if checks && self.redraws && group.scored(seq.num_computed, count).is_empty() {
            (remaining - 1).min(self.rows_left.saturating_sub(self.rows_kept))
        } else {
            0
        };
        self.rows_left -= num_redrawn;
        let count = count + num_drafts;
        Some(Run { position, count, num_drafts, num_branches, num_branch_tokens, num_redrawn, has_sample })
    }

    /// How many guesses of a sequence a step can check: it must not be longer than it may get, and all others have their
    /// token first. `num_known` tokens of the run come before them.
    fn num_drafts(&self, group: &Group, position: usize, num_known: usize) -> usize {
        let seq = &group.seqs[position];
        if seq.drafts.is_empty() || seq.num_pending > 0 || group.is_beam() || !group.forked {
            return 0;
        }
        let most = group.max_len.saturating_sub(seq.token_ids.len() + 1);
        let tokens = self.tokens_left.saturating_sub(self.tokens_kept);
        let rows = self.rows_left.saturating_sub(self.rows_kept);
        let known = seq.drafts.len(group.request.params.is_masked());
        let mut count = known.min(most).min(tokens).min(rows).min(self.allowed.saturating_sub(num_known));
        while count > 0 && num_entries(group, position, 1, count) > self.entries_left {
            count -= 1;
        }
        count
    }

    /// How many branches of a sequence's guesses a step can check beside a chain of `num_drafts`, and their tokens.
    fn num_branches(
        &self,
        group: &Group,
        position: usize,
        num_known: usize,
        num_drafts: usize,
    ) -> (usize, usize) {
        let drafts = &group.seqs[position].drafts;
        let most = group.max_len.saturating_sub(group.seqs[position].token_ids.len() + 1);
        // Branches may depart from what a chain that is cut has lost.
        if num_drafts < drafts.token_ids.len() || group.request.params.is_masked() {
            return (0, 0);
        }
        let tokens = self.tokens_left.saturating_sub(self.tokens_kept);
        let rows = self.rows_left.saturating_sub(self.rows_kept);
        let allowed = self.allowed.saturating_sub(num_known);
        let most_tokens = tokens.min(rows).min(allowed).min(most).saturating_sub(num_drafts);
        let (mut num_branches, mut num_tokens) = (0, 0);
        for branch in &drafts.branches {
            let with_it = num_tokens + branch.token_ids.len();
            let entries = num_entries(group, position, 1, num_drafts + with_it);
            if with_it > most_tokens || entries > self.entries_left {
                break;
            }
            (num_branches, num_tokens) = (num_branches + 1, with_it);
        }
        (num_branches, num_tokens)
    }
}

/// Entries that the samples of a run bring to its step: those after the last known token, and after each guess.
fn num_entries(group: &Group, position: usize, num_samples: usize, num_drafts: usize) -> usize {
    let len = group.seqs[position].token_ids.len();
    num_samples * (0..=num_drafts).map(|known| group.num_sample_entries(len + known)).sum::<usize>()
}

/// Takes the blocks for one run, marks it as being computed and writes it down.
fn plan_run(group: &mut Group, run: &Run, kv: &mut KvCache, plan: &mut Plan) -> PlannedSeq {
    let write = write_of(group, run, kv);
    let (seq_id, start, end) = (write.seq_id, write.start, write.start + run.count);
    let first_row = kv.config().rows_for(end) as u32;
    kv.reserve(write, &mut plan.copies).expect("make_room has checked the free blocks");
    let scored = group.scored(start, run.count);
    let mask = group.seqs[run.position].mask.clone().or_else(|| group.first_mask.clone());
    let samples = if run.has_sample { planned_samples(group, run.position) } else { Vec::new() };
    let seq = &mut group.seqs[run.position];
    let known = seq.token_ids.iter().skip(start).copied();
    let drafts = std::mem::take(&mut seq.drafts);
    let branches = &drafts.branches[..run.num_branches];
    let token_ids: Vec<TokenId> = if run.num_drafts > 0 {
        let beside = branches.iter().flat_map(|branch| &branch.token_ids);
        known.chain(drafts.token_ids.iter().take(run.num_drafts).chain(beside).copied()).collect()
    } else {
        known.chain(std::iter::repeat(PENDING_TOKEN)).take(run.count).collect()
    };
    let next_token_id = seq.token_ids.get(end).copied().filter(|_| scored.end == run.count);
    seq.num_computed = end;
    seq.num_drafts_in_flight = run.num_drafts + run.num_branch_tokens;
    seq.last_step = plan.step;
    seq.num_in_flight += 1;
    seq.num_pending += usize::from(run.has_sample);
    PlannedSeq {
        request_id: group.request.id,
        seq_id,
        start: start as u32,
        token_ids,
        num_drafts: (run.num_drafts + run.num_branch_tokens) as u32,
        num_redrawn: run.num_redrawn as u32,
        branches: (first_row..).zip(branches).map(|(row, branch)| planned_branch(branch, row)).collect(),
        block_tables: kv.block_tables(seq_id),
        draft_masks: drafts.masks.into_iter().take(run.num_drafts).collect(),
        mask: if samples.is_empty() { None } else { mask },
        samples,
        scored: scored.start as u32..scored.end as u32,
        next_token_id,
        adapter: None,
        params: group.request.params.clone(),
        end_token_ids: Arc::clone(&group.request.eos_token_ids),
    }
}

fn planned_branch(branch: &DraftBranch, row: u32) -> PlannedBranch {
    PlannedBranch { parent: branch.parent as u32, num_tokens: branch.token_ids.len() as u32, row }
}

/// Who draws from the logits at the end of this sequence: itself, or after a prompt all that are to be forked.
fn planned_samples(group: &mut Group, position: usize) -> Vec<PlannedSample> {
    let num_prompt_tokens = group.num_prompt_tokens();
    let has_history = group.request.params.has_penalties() && !group.is_beam();
    let history: Option<Arc<Vec<TokenCount>>> = has_history.then(|| {
        let seq = &mut group.seqs[position];
        seq.history.counts(&seq.token_ids, num_prompt_tokens)
    });
    let num_output_tokens = group.seqs[position].num_tokens_coming() - group.num_prompt_tokens();
    let drawing = if group.forked { &group.seqs[position..=position] } else { &group.seqs[..] };
    let sample = |seq: &crate::sequence::Sequence| PlannedSample {
        seq_id: seq.id,
        index: seq.index,
        num_output_tokens: num_output_tokens as u32,
        ban_end: group.bans_end(num_output_tokens),
        history: history.clone(),
    };
    drawing.iter().map(sample).collect()
}
