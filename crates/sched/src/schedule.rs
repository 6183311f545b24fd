//! What one step computes.
//!
//! Running requests come first, in the order of the queue; each takes its tokens from the step's budget and its
//! blocks from the pool, if need be at the cost of younger requests. What is left goes to swapped and waiting ones.

use std::sync::Arc;

use baton_core::RequestId;
use baton_kv::{KvCache, WriteRange};

use crate::group::Group;
use crate::scheduler::InFlight;
use crate::{PENDING_TOKEN, Plan, PlannedSample, PlannedSeq, SchedConfig, Scheduler};

/// A Plan in the making, with what is left of the step's limits.
pub(crate) struct Step {
    pub(crate) plan: Plan,
    pub(crate) tokens_left: usize,
    rows_left: usize,
    entries_left: usize,
    /// Decodes of running requests that have not had their turn in this step.
    decodes_to_come: usize,
    /// Requests swapped in or out.
    pub(crate) moved: Vec<RequestId>,
    /// A request lacks blocks until Plans in flight are applied: nobody behind it may take any.
    pub(crate) is_short_of_blocks: bool,
    /// Requests that are left out because they are going to be preempted.
    draining: Vec<RequestId>,
    pub(crate) has_preempted: bool,
}

/// What a request wants to compute of one of its sequences.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    /// Position in `Group::seqs`.
    pub(crate) position: usize,
    pub(crate) count: usize,
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
            decodes_to_come: 0,
            moved: Vec::new(),
            is_short_of_blocks: false,
            draining: Vec::new(),
            has_preempted: false,
        };
        if self.in_flight.len() >= self.config.max_plans_in_flight {
            return step.plan;
        }
        self.plan_running(&mut step);
        // Whoever made room for others must not come back in the same step: its blocks are needed.
        if !step.is_short_of_blocks && !step.has_preempted {
            self.admit(&mut step);
        }
        if step.plan.is_empty() {
            return step.plan;
        }
        for id in &step.moved {
            self.groups.get_mut(id).expect("a moved request is here").num_moves_in_flight += 1;
        }
        self.in_flight.push_back(InFlight { step: step.plan.step, moved: step.moved });
        self.next_step += 1;
        step.plan
    }

    fn plan_running(&mut self, step: &mut Step) {
        let order: Vec<_> = self.running.iter().map(|(key, id)| (*key, *id)).collect();
        let decodes: Vec<usize> = order.iter().map(|(_, id)| num_decodes(&self.groups[id])).collect();
        step.decodes_to_come = decodes.iter().sum();
        for ((key, id), own_decodes) in order.into_iter().zip(decodes) {
            step.decodes_to_come -= own_decodes;
            if step.draining.contains(&id) || !self.running.contains_key(&key) {
                continue;
            }
            self.share_prompt(id);
            let runs = wanted_runs(&self.groups[&id], &self.config, self.kv.config().block_size, step);
            if !runs.is_empty() && self.make_room(id, &runs, step) {
                self.plan_runs(id, &runs, step);
            }
        }
    }

    /// True where the blocks for `runs` are free, after preempting younger requests where that was needed.
    fn make_room(&mut self, id: RequestId, runs: &[Run], step: &mut Step) -> bool {
        loop {
            let group = &self.groups[&id];
            let needed = self.kv.blocks_needed(&writes(group, runs));
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

    /// After a recomputation, sequences of a forked request take the prompt from the first one.
    pub(crate) fn share_prompt(&mut self, id: RequestId) {
        let block_size = self.kv.config().block_size;
        let group = self.groups.get_mut(&id).expect("a running request is here");
        let num_blocks = group.num_shared_blocks(block_size);
        let live: Vec<usize> = group.live().collect();
        let Some((&leader, others)) = live.split_first() else { return };
        if num_blocks == 0 || others.is_empty() || group.seqs[leader].num_applied < num_blocks * block_size {
            return;
        }
        for &position in others {
            if group.seqs[position].num_computed > 0 {
                continue;
            }
            self.kv.fork_prefix(group.seqs[leader].id, group.seqs[position].id, num_blocks);
            group.seqs[position].num_computed = num_blocks * block_size;
            group.seqs[position].num_applied = num_blocks * block_size;
        }
    }

    /// Plans what a request wants of a step as far as the limits allow. The blocks must be free.
    pub(crate) fn plan_runs(&mut self, id: RequestId, runs: &[Run], step: &mut Step) {
        let group = self.groups.get_mut(&id).expect("a running request is here");
        for run in runs {
            let planned = plan_run(group, run, &mut self.kv, &mut step.plan);
            step.tokens_left -= run.count;
            step.rows_left -= planned.num_logit_rows();
            step.entries_left -= num_entries(group, run.position, planned.samples.len());
            step.plan.seqs.push(planned);
        }
    }

    pub(crate) fn wanted_runs(&self, id: RequestId, step: &Step) -> Vec<Run> {
        wanted_runs(&self.groups[&id], &self.config, self.kv.config().block_size, step)
    }
}

/// The ranges that `runs` write.
pub(crate) fn writes(group: &Group, runs: &[Run]) -> Vec<WriteRange> {
    let write = |run: &Run| {
        let seq = &group.seqs[run.position];
        WriteRange { seq_id: seq.id, start: seq.num_computed, end: seq.num_computed + run.count }
    };
    runs.iter().map(write).collect()
}

/// Tokens that a request takes each step to keep all its sequences going.
fn num_decodes(group: &Group) -> usize {
    group.live().filter(|&position| group.seqs[position].num_remaining() == 1).count()
}

/// What a request would compute now, within what is left of the step.
fn wanted_runs(group: &Group, config: &SchedConfig, block_size: usize, step: &Step) -> Vec<Run> {
    let live: Vec<usize> = group.live().collect();
    let mut limits = Limits {
        tokens_left: step.tokens_left,
        rows_left: step.rows_left,
        entries_left: step.entries_left,
        // Prompts leave the decodes behind them at least half of the step.
        tokens_kept: step.decodes_to_come.min(config.max_num_batched_tokens / 2),
        rows_kept: step.decodes_to_come.min(config.max_num_logit_rows / 2),
    };
    let is_decoding = live.iter().all(|&position| group.seqs[position].num_remaining() == 1);
    // Beams are compared with each other: all of them take the step, or none.
    let beams_in_step = group.is_beam() && group.forked;
    if beams_in_step && is_decoding && limits.tokens_left.min(limits.rows_left) < live.len() {
        return Vec::new();
    }
    let mut runs = Vec::new();
    for (rank, &position) in live.iter().enumerate() {
        let seq = &group.seqs[position];
        let must_wait_for_token =
            seq.num_pending > 0 && (group.needs_every_token() || seq.num_tokens_coming() >= group.max_len);
        let must_wait_for_prompt =
            rank > 0 && seq.num_computed == 0 && group.num_shared_blocks(block_size) > 0;
        if must_wait_for_token || must_wait_for_prompt || seq.is_held {
            continue;
        }
        let keep_last = beams_in_step && !is_decoding;
        let available = seq.num_remaining() - usize::from(keep_last);
        if let Some(run) = limits.cut(group, position, available, config.long_prefill_token_threshold) {
            runs.push(run);
        }
    }
    runs
}

struct Limits {
    tokens_left: usize,
    rows_left: usize,
    entries_left: usize,
    tokens_kept: usize,
    rows_kept: usize,
}

impl Limits {
    /// The longest run of at most `available` tokens, and takes it off the limits.
    fn cut(&mut self, group: &Group, position: usize, available: usize, threshold: usize) -> Option<Run> {
        let seq = &group.seqs[position];
        let remaining = seq.num_remaining();
        let (mut count, rows_left) = if remaining == 1 {
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
        let num_entries = num_entries(group, position, num_drawn);
        if count == remaining && num_entries > self.entries_left {
            // The last token is left for a step that has room for what its samples bring.
            count -= 1;
        }
        if count == 0 {
            return None;
        }
        if count == remaining {
            self.entries_left -= num_entries;
        }
        self.tokens_left -= count;
        self.rows_left -= num_rows(count);
        Some(Run { position, count, has_sample: count == remaining })
    }
}

/// Entries that the samples of a run bring to its step.
fn num_entries(group: &Group, position: usize, num_samples: usize) -> usize {
    num_samples * group.num_sample_entries(group.seqs[position].token_ids.len())
}

/// Takes the blocks for one run, marks it as being computed and writes it down.
fn plan_run(group: &mut Group, run: &Run, kv: &mut KvCache, plan: &mut Plan) -> PlannedSeq {
    let (start, end) = {
        let seq = &group.seqs[run.position];
        (seq.num_computed, seq.num_computed + run.count)
    };
    let seq_id = group.seqs[run.position].id;
    kv.reserve(WriteRange { seq_id, start, end }, &mut plan.copies)
        .expect("make_room has checked the free blocks");
    let scored = group.scored(start, run.count);
    let samples = if run.has_sample { planned_samples(group, run.position) } else { Vec::new() };
    let seq = &mut group.seqs[run.position];
    let token_ids =
        (start..end).map(|position| seq.token_ids.get(position).copied().unwrap_or(PENDING_TOKEN)).collect();
    seq.num_computed = end;
    seq.num_in_flight += 1;
    seq.num_pending += usize::from(run.has_sample);
    PlannedSeq {
        request_id: group.request.id,
        seq_id,
        start: start as u32,
        token_ids,
        block_table: kv.block_table(seq_id).to_vec(),
        samples,
        scored: scored.start as u32..scored.end as u32,
        params: group.request.params.clone(),
        end_token_ids: Arc::clone(&group.request.eos_token_ids),
    }
}

/// Who draws from the logits at the end of this sequence: itself, or after a prompt all that are to be forked.
fn planned_samples(group: &Group, position: usize) -> Vec<PlannedSample> {
    let num_output_tokens = group.seqs[position].num_tokens_coming() - group.num_prompt_tokens();
    let drawing = if group.forked { &group.seqs[position..=position] } else { &group.seqs[..] };
    let sample = |seq: &crate::sequence::Sequence| PlannedSample {
        seq_id: seq.id,
        index: seq.index,
        num_output_tokens: num_output_tokens as u32,
        ban_end: group.bans_end(num_output_tokens),
    };
    drawing.iter().map(sample).collect()
}
