//! What follows a step: its sequences move on, and what their next one needs is made ready.

use std::collections::HashMap;
use std::time::Duration;

use baton_core::{RequestOutput, SeqId, TokenId};
use baton_sched::{DraftBranch, Drafts, Plan, Scheduler, StepResult, Wait};

use super::Engine;
use super::draft::places;
use crate::runner::step_result;
use crate::speculate::Speculation;

impl Engine {
    /// Moves the sequences of a step on, and gets ready what their next one needs: guesses and masks. `hidden` has the hidden states
    /// of its rows, where they were read.
    pub(super) fn apply(&mut self, plan: &Plan, hidden: &[f32]) -> Vec<RequestOutput> {
        let mut drafts = HashMap::new();
        if let Some(speculation) = &mut self.speculation {
            speculation.force(plan, &mut self.output);
        }
        let result = step_result(plan, &self.output);
        let mut outputs = self.scheduler.apply(plan, &result);
        if let Some(speculation) = &mut self.speculation {
            speculation.learn(plan, &result, &mut outputs);
            if speculation.wants_hidden(plan) {
                let decoder = &self.decoder;
                speculation.take_hidden(plan, &result, hidden, |row| decoder.last_norm(row));
            }
            let draft_times = self.drafter.as_ref().map(|drafter| &drafter.times);
            drafts = speculation.propose(plan, &mut self.scheduler, draft_times);
        }
        self.begin_masks(plan, &result, &mut drafts);
        let num_branches = self.speculation.as_ref().map_or(0, Speculation::max_branches);
        for (seq_id, token_ids) in drafts {
            let beside = if token_ids.is_empty() { 0 } else { num_branches };
            let place = DraftBranch { parent: 0, token_ids: vec![0] };
            let branches = vec![place; beside];
            self.scheduler.set_drafts(seq_id, Drafts { token_ids, branches, ..Drafts::default() });
        }
        outputs
    }

    /// Has the masks computed that the tokens of a step ask for. Until then their sequences are held back. Guesses of such
    /// sequences go along, and come back as far as the masks allow them.
    fn begin_masks(&mut self, plan: &Plan, result: &StepResult, drafts: &mut HashMap<SeqId, Vec<TokenId>>) {
        if self.masks.is_empty() {
            return;
        }
        let scheduler = &mut self.scheduler;
        let is_live =
            |scheduler: &Scheduler, id| scheduler.sequence(id).is_some_and(|sequence| !sequence.is_finished);
        self.masks.retain(|id| scheduler.contains(id), |id| is_live(scheduler, id));
        self.reserved.retain(|&id, _| is_live(scheduler, id));
        for (planned, result) in plan.seqs.iter().zip(&result.seqs) {
            let per_sample = if planned.num_drafts > 0 { result.samples.len() } else { 1 };
            for (sample, sampled) in planned.samples.iter().zip(result.samples.chunks(per_sample.max(1))) {
                if !planned.params.is_masked() || !is_live(scheduler, sample.seq_id) {
                    continue;
                }
                let tokens = sampled.iter().map(|sampled| sampled.token_id).collect();
                let mut guesses = drafts.remove(&sample.seq_id).unwrap_or_default();
                if self.drafter.is_some() {
                    // They are made under the mask.
                    self.reserved.insert(sample.seq_id, guesses.len());
                    guesses.clear();
                }
                if self.masks.advance(planned.request_id, sample.seq_id, tokens, guesses) {
                    scheduler.wait(sample.seq_id, Wait::Mask);
                }
            }
        }
    }

    /// Lets sequences go on whose masks are ready; ends requests that have none.
    pub(super) fn take_masks(&mut self, wait: Duration) -> Vec<RequestOutput> {
        let mut outputs = Vec::new();
        for computed in self.masks.collect(wait) {
            let reason = match computed.mask {
                Ok(mask) => {
                    self.scheduler.set_mask(computed.seq_id, mask);
                    let reserved = self.reserved.remove(&computed.seq_id).map(places);
                    self.scheduler.set_drafts(computed.seq_id, reserved.unwrap_or(computed.drafts));
                    continue;
                }
                Err(reason) => reason,
            };
            self.last_failure = Some(format!("structured output: {reason}"));
            let request_id = self.scheduler.sequence(computed.seq_id).map(|sequence| sequence.request_id);
            let ended = request_id.and_then(|id| self.scheduler.fail_request(id));
            outputs.extend(ended.map(|output| RequestOutput { shape_failure: Some(reason), ..output }));
        }
        outputs
    }
}
