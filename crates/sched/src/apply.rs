//! What came out of a step: the only place where sequences move on.

use baton_core::{FinishReason, RequestId, RequestOutput, SequenceOutput};
use baton_kv::KvCache;

use crate::group::{Group, Place};
use crate::select::best_continuations;
use crate::sequence::Sequence;
use crate::{Plan, PlannedSeq, SampledToken, Scheduler, SeqResult, StepResult, Wait};

impl Scheduler {
    /// Takes the result of the oldest Plan in flight. Plans are applied in the order in which they were scheduled.
    /// A result that does not have the Plan's shape counts as a failed step.
    pub fn apply(&mut self, plan: &Plan, result: &StepResult) -> Vec<RequestOutput> {
        if result.seqs.len() != plan.seqs.len() {
            return self.fail(plan);
        }
        let oldest = self.in_flight.front().map(|record| record.step);
        assert!(
            plan.is_empty() || oldest == Some(plan.step),
            "Plans are applied in the order in which they were scheduled"
        );
        let moved = self.retire_plan(plan, Some(result));
        let mut outputs = Vec::new();
        let mut results = result.seqs.as_slice();
        for planned in plan.seqs.chunk_by(|one, next| one.request_id == next.request_id) {
            let (own, others) = results.split_at(planned.len());
            results = others;
            outputs.extend(self.apply_to_request(planned[0].request_id, planned, own));
        }
        for id in moved {
            self.give_back_finished(id);
        }
        outputs
    }

    /// A Plan in flight failed on the device: every request that it computed or moved ends with
    /// `FinishReason::Error`. The others go on. A Plan that could not be submitted fails before the one that is still
    /// being computed, so this is the one call that may come out of order.
    pub fn fail(&mut self, plan: &Plan) -> Vec<RequestOutput> {
        let mut ids = self.retire_plan(plan, None);
        ids.extend(plan.seqs.iter().map(|planned| planned.request_id));
        let mut outputs = Vec::new();
        for id in ids {
            outputs.extend(self.finish_early(id, FinishReason::Error));
            self.give_back_finished(id);
        }
        outputs
    }

    /// The Plan is no longer in flight; without a result it failed. Returns the requests whose blocks it moved.
    fn retire_plan(&mut self, plan: &Plan, result: Option<&StepResult>) -> Vec<RequestId> {
        if plan.is_empty() {
            return Vec::new();
        }
        let position = self.in_flight.iter().position(|record| record.step == plan.step);
        let record = position.and_then(|position| self.in_flight.remove(position));
        let record = record.expect("only a Plan that was scheduled can be applied, and once");
        for id in &record.moved {
            let group = self.groups.get_mut(id).expect("a request stays as long as a Plan moves it");
            group.num_moves_in_flight -= 1;
        }
        for (index, planned) in plan.seqs.iter().enumerate() {
            let group = self.groups.get_mut(&planned.request_id).expect("a request in flight stays");
            let seq = find(group, planned);
            seq.num_in_flight -= 1;
            seq.num_applied += (planned.end() - planned.start) as usize;
            seq.num_pending -= usize::from(!planned.samples.is_empty());
            seq.num_from_branch = 0;
            if planned.num_drafts > 0 {
                let drawn = result.map_or(&[][..], |result| &result.seqs[index].samples);
                // All tokens but one were guessed right; the others were computed in vain.
                let num_right = drawn.len().saturating_sub(1);
                let of_chain =
                    planned.num_right_of_chain(drawn.iter().map(|one| one.token_id)).min(num_right);
                let num_rejected = planned.num_chain_drafts() - of_chain;
                seq.num_drafts_in_flight = 0;
                seq.num_applied -= num_rejected;
                seq.num_computed -= num_rejected;
                seq.num_from_branch = num_right - of_chain;
                self.kv.truncate(seq.id, seq.num_computed);
            }
        }
        self.kv.confirm_saved(&plan.swap_out, result.is_some());
        let mut moved = record.moved;
        let failed = plan.fetches.iter().map(|fetch| fetch.id).filter(|_| result.is_none());
        let done = result.into_iter().flat_map(|result| result.fetched.iter().copied());
        for id in failed.chain(done) {
            // A device may tell twice, or of what has failed.
            let Some(request_id) = self.fetches.remove(&id) else { continue };
            let group = self.groups.get_mut(&request_id).expect("a request stays until its KV is there");
            group.fetch = None;
            for seq in group.seqs.iter_mut().filter(|seq| seq.has_table) {
                seq.set_wait(Wait::Transfer, false);
                self.kv.end_fetch(seq.id);
            }
            moved.push(request_id);
        }
        moved
    }

    fn apply_to_request(
        &mut self,
        id: RequestId,
        planned: &[PlannedSeq],
        results: &[SeqResult],
    ) -> Option<RequestOutput> {
        let group = self.groups.get_mut(&id).expect("a request in flight stays");
        if group.place == Place::Ended {
            self.give_back_finished(id);
            return None;
        }
        if !planned.iter().zip(results).all(|(planned, result)| has_shape(group, planned, result)) {
            return self.finish_early(id, FinishReason::Error);
        }
        for (planned, result) in planned.iter().zip(results) {
            group.add_prompt_logprobs(&result.prompt_logprobs);
            let seq = find(group, planned);
            if seq.finish.is_none() {
                self.kv.commit(seq.id, &seq.token_ids, seq.num_applied);
            }
        }
        if planned.iter().all(|planned| planned.samples.is_empty()) {
            self.give_back_finished(id);
            return None;
        }
        if group.is_beam() {
            return self.apply_beams(id, results);
        }
        let outputs = take_samples(group, &mut self.kv, planned, results);
        let is_done = group.live().next().is_none();
        let output = match (group.request.params.selects_at_end(), is_done) {
            (true, false) => None,
            (true, true) => {
                let best = best_continuations(group);
                Some(group.output(best, true))
            }
            (false, _) if outputs.is_empty() => None,
            (false, _) => Some(group.output(outputs, is_done)),
        };
        if is_done {
            self.end(id);
        } else {
            self.give_back_finished(id);
        }
        output
    }
}

fn find<'a>(group: &'a mut Group, planned: &PlannedSeq) -> &'a mut Sequence {
    group.seqs.iter_mut().find(|seq| seq.id == planned.seq_id).expect("a sequence in flight stays")
}

fn has_shape(group: &Group, planned: &PlannedSeq, result: &SeqResult) -> bool {
    let has_tokens = if group.is_beam() {
        planned.samples.is_empty() || !result.candidates.is_empty()
    } else if planned.num_drafts > 0 {
        (1..=planned.num_drafts as usize + 1).contains(&result.samples.len())
    } else {
        result.samples.len() == planned.samples.len()
    };
    has_tokens && result.prompt_logprobs.len() == planned.scored.len()
}

/// Appends the sampled tokens to their sequences, forking them after a prompt.
fn take_samples(
    group: &mut Group,
    kv: &mut KvCache,
    planned: &[PlannedSeq],
    results: &[SeqResult],
) -> Vec<SequenceOutput> {
    let mut outputs = Vec::new();
    for (planned, result) in planned.iter().zip(results) {
        if planned.samples.is_empty() {
            continue;
        }
        if !group.forked {
            fork_continuations(group, kv);
        }
        // With drafts one sequence draws several tokens, else each draws one.
        let per_sample = if planned.num_drafts > 0 { result.samples.len() } else { 1 };
        for (sample, sampled) in planned.samples.iter().zip(result.samples.chunks(per_sample)) {
            let position = group.seqs.iter().position(|seq| seq.id == sample.seq_id);
            let position = position.expect("a sequence in flight stays");
            // What was planned ahead for a sequence that has ended meanwhile is of no use.
            if group.seqs[position].finish.is_none() {
                outputs.push(take_samples_of(group, position, sampled));
            }
        }
    }
    outputs
}

fn fork_continuations(group: &mut Group, kv: &mut KvCache) {
    group.forked = true;
    let (first, others) = group.seqs.split_first_mut().expect("a request has a sequence");
    for other in others {
        kv.fork(first.id, other.id);
        *other = first.fork(other.id, other.index);
    }
}

/// Appends tokens to a sequence, up to the one that ends it.
fn take_samples_of(group: &mut Group, position: usize, sampled: &[SampledToken]) -> SequenceOutput {
    let wants_logprobs = group.request.params.logprobs.is_some();
    let keeps_logprobs = group.request.params.selects_at_end();
    let mut logprobs = Vec::new();
    let mut token_ids = Vec::with_capacity(sampled.len());
    let mut finish = None;
    for sampled in sampled {
        finish = group.finish_after(group.seqs[position].token_ids.len() + 1, sampled.token_id);
        group.seqs[position].push(sampled);
        token_ids.push(sampled.token_id);
        if wants_logprobs {
            logprobs.extend(sampled.logprobs.iter().cloned());
        }
        if finish.is_some() {
            break;
        }
    }
    let seq = &mut group.seqs[position];
    seq.finish = finish;
    if keeps_logprobs {
        seq.logprobs.append(&mut logprobs);
    }
    SequenceOutput {
        index: seq.index,
        token_ids,
        logprobs,
        cumulative_logprob: seq.cumulative_logprob,
        finish_reason: finish.map(|finish| finish.reason),
        stop_token_id: finish.and_then(|finish| finish.stop_token_id),
    }
}
