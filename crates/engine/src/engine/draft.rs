//! Guesses of a draft model, made between a Plan and its step.

use std::sync::Arc;

use baton_backend::BackendError;
use baton_core::{RequestOutput, SeqId, TokenId, mask_allows};
use baton_sched::{DraftBranch, Drafts, PENDING_TOKEN, Plan, PlannedSeq};

use super::{Engine, MASK_GRACE};
use crate::masks::Branch;
use crate::speculate::{Beside, Drafter, Drawn, Speculation};

impl Chain {
    /// That all of them are right.
    fn chance(&self) -> f64 {
        self.chances.last().copied().unwrap_or(1.0)
    }
}

/// The guesses of one sequence so far.
struct Chain {
    /// Its place in the Plan.
    index: usize,
    seq_id: SeqId,
    drafts: Vec<TokenId>,
    /// That each of them and those before it are right.
    chances: Vec<f64>,
    /// Guesses beside them.
    beside: Vec<Beside>,
    /// What may follow each of them, where the output is masked.
    masks: Vec<Arc<Vec<u32>>>,
    branch: Option<Branch>,
    is_open: bool,
}

impl Engine {
    /// Fills the places for guesses of a Plan, or cuts them off, and lets the draft follow prompts. Draft passes take the device,
    /// so that steps in flight are collected first: `outputs` gets what they bring. True where the Plan's blocks have been
    /// moved.
    pub(super) fn draft(
        &mut self,
        plan: &mut Plan,
        outputs: &mut Vec<RequestOutput>,
    ) -> Result<bool, BackendError> {
        let Some(drafter) = &mut self.drafter else { return Ok(false) };
        drafter.filled.moved(plan, self.tiers.is_none());
        plan.seqs.iter().for_each(|seq| drafter.filled.overwritten(seq));
        let (runs, mut chains) = self.first_runs(plan);
        if runs.is_empty() {
            self.keep(plan, &chains);
            return Ok(false);
        }
        while !self.in_flight.is_empty() {
            outputs.extend(self.collect_step());
        }
        self.resolve_pending(plan);
        let mut drafter = self.drafter.take().expect("it was there above");
        let drafted = self.draft_with(&mut drafter, plan, runs, &mut chains);
        if drafted.is_err() {
            drafter.filled.forget();
        }
        self.drafter = Some(drafter);
        self.keep(plan, &chains);
        drafted
    }

    /// What the draft lacks of the sequences that it drafts for, and of prompts that are being computed; the former draw their
    /// first guesses.
    fn first_runs(&mut self, plan: &Plan) -> (Vec<PlannedSeq>, Vec<Chain>) {
        let (Some(drafter), Some(speculation)) = (&mut self.drafter, &mut self.speculation) else {
            return (Vec::new(), Vec::new());
        };
        let (mut runs, mut chains) = (Vec::new(), Vec::new());
        for (index, seq) in plan.seqs.iter().enumerate() {
            let drafts = seq.num_drafts > 0;
            let is_prompt = seq.samples.is_empty() || seq.token_ids.len() > 1;
            if !(drafts || (is_prompt && Speculation::speculates(seq))) {
                continue;
            }
            let Some(view) = self.scheduler.sequence(seq.seq_id) else { continue };
            // One chunk behind the target, so that nobody waits longer for a first token.
            let end = match (drafts, drafter.filled.has_windows()) {
                (true, _) => after_known(seq),
                (false, true) => seq.start + seq.token_ids.len() as u32,
                (false, false) => seq.start,
            };
            let mut run = drafter.missing(seq, view.token_ids, end);
            if drafts {
                speculation.begin_draft(seq.seq_id);
                let branch = seq.mask.as_ref().and_then(|_| self.masks.branch(seq.seq_id));
                let can_follow = seq.mask.is_none() || branch.is_some();
                if let Some(run) = run.as_mut().filter(|_| can_follow) {
                    drafter.draw(run, seq, 0, seq.mask.as_ref());
                }
                chains.push(Chain {
                    index,
                    seq_id: seq.seq_id,
                    drafts: Vec::new(),
                    chances: Vec::new(),
                    beside: Vec::new(),
                    masks: Vec::new(),
                    branch,
                    is_open: run.is_some() && can_follow,
                });
            }
            runs.extend(run.filter(|run| !run.token_ids.is_empty()));
        }
        (runs, chains)
    }

    /// Tokens that the device would have taken from the step before are known by now.
    fn resolve_pending(&self, plan: &mut Plan) {
        for seq in &mut plan.seqs {
            let view = self.scheduler.sequence(seq.seq_id);
            for (offset, token_id) in seq.token_ids.iter_mut().enumerate() {
                if *token_id == PENDING_TOKEN {
                    let position = seq.start as usize + offset;
                    // What comes of a sequence that has ended is thrown away.
                    *token_id =
                        view.as_ref().and_then(|view| view.token_ids.get(position)).copied().unwrap_or(0);
                }
            }
        }
    }

    fn draft_with(
        &mut self,
        drafter: &mut Drafter,
        plan: &Plan,
        mut runs: Vec<PlannedSeq>,
        chains: &mut [Chain],
    ) -> Result<bool, BackendError> {
        let moves = Plan {
            swap_out: plan.swap_out.clone(),
            swap_in: plan.swap_in.clone(),
            copies: plan.copies.clone(),
            fetches: plan.fetches.clone(),
            ..Plan::default()
        };
        let has_moves = !moves.is_empty();
        if has_moves {
            drafter.make_moves(&mut *self.backend, &moves)?;
        }
        while !runs.is_empty() {
            let (drawn, time) = drafter.compute(&mut *self.backend, runs)?;
            *self.device_busy.get_or_insert_default() += time;
            let open: Vec<&mut Chain> = chains.iter_mut().filter(|chain| chain.is_open).collect();
            self.take_drawn(drafter, plan, open, &drawn);
            runs = Vec::new();
            for chain in chains.iter().filter(|chain| chain.is_open) {
                let (seq, count) = (&plan.seqs[chain.index], chain.drafts.len() as u32);
                let last = &chain.drafts[chain.drafts.len() - 1..];
                let mut run = drafter.run_of(seq, after_known(seq) + count - 1, last);
                drafter.draw(&mut run, seq, count, chain.masks.last());
                runs.push(run);
            }
        }
        Ok(has_moves)
    }

    /// Adds what a pass drew to the chains that it went on with, and closes those for which another one would not pay.
    fn take_drawn(&mut self, drafter: &Drafter, plan: &Plan, mut open: Vec<&mut Chain>, drawn: &[Drawn]) {
        let Some(speculation) = &mut self.speculation else { return };
        let pass_seconds = drafter.times.seconds(open.len()) / open.len().max(1) as f64;
        let mut branches = Vec::new();
        for (chain, drawn) in open.iter_mut().zip(drawn) {
            let seq = &plan.seqs[chain.index];
            let mask = chain.masks.last().or(seq.mask.as_ref());
            let is_allowed = mask.is_none_or(|mask| mask_allows(mask, drawn.token_id));
            chain.is_open = false;
            if !is_allowed || drawn.token_id as usize >= drafter.limits.target_vocab_size {
                continue;
            }
            if !seq.branches.is_empty() {
                let parent = (chain.drafts.len(), chain.chance());
                chain.beside.extend(speculation.beside(
                    parent,
                    &drawn.beside,
                    drafter.limits.target_vocab_size,
                ));
            }
            let chance = chain.chance() * speculation.drafted(chain.seq_id, drawn.probability);
            if !speculation.pays_to_check(chance) {
                continue;
            }
            chain.chances.push(chance);
            chain.drafts.push(drawn.token_id);
            if let Some(branch) = chain.branch.take() {
                branches.push((chain.seq_id, branch, drawn.token_id));
            }
            let count = chain.drafts.len();
            let is_end = seq.end_token_ids.contains(&drawn.token_id)
                || seq.params.stop_token_ids.contains(&drawn.token_id);
            chain.is_open = !is_end
                && count < seq.num_chain_drafts()
                && after_known(seq) as usize + count <= drafter.limits.max_len
                && speculation.pays_to_draft(chance, pass_seconds);
        }
        if branches.is_empty() {
            return;
        }
        let mut followed = self.masks.follow(branches, MASK_GRACE);
        for chain in open.into_iter().filter(|chain| plan.seqs[chain.index].mask.is_some()) {
            if let Some(place) = followed.iter().position(|(id, ..)| *id == chain.seq_id) {
                let (_, branch, mask) = followed.swap_remove(place);
                chain.branch = Some(branch);
                chain.masks.push(mask);
            } else {
                // A guess is checked only with what may follow it.
                chain.drafts.truncate(chain.masks.len());
                chain.is_open = false;
            }
        }
    }

    /// Puts the guesses in their places and gives back those that are not used.
    fn keep(&mut self, plan: &mut Plan, chains: &[Chain]) {
        for chain in chains {
            let seq = &mut plan.seqs[chain.index];
            let first = (after_known(seq) - seq.start) as usize;
            seq.token_ids[first..].iter_mut().zip(&chain.drafts).for_each(|(place, draft)| *place = *draft);
            seq.draft_masks.clone_from(&chain.masks);
            let (mut count, mut branches) = (chain.drafts.len(), Vec::new());
            if let Some(speculation) = self.speculation.as_mut().filter(|_| !seq.branches.is_empty()) {
                let beside;
                (count, beside) =
                    speculation.choose_tree(chain.seq_id, &chain.chances, &chain.beside, seq.branches.len());
                let branch = |one: Beside| DraftBranch { parent: one.parent, token_ids: vec![one.token_id] };
                branches = beside.into_iter().map(branch).collect();
            }
            self.scheduler.keep_drafts(seq, count, &branches);
        }
    }

    /// Fetches that were done during draft passes are told of with the step that follows.
    pub(super) fn take_fetched(&mut self) {
        if let Some(drafter) = &mut self.drafter {
            self.output.fetched.append(&mut drafter.fetched);
        }
    }
}

/// The position after the last known token of a run.
fn after_known(seq: &PlannedSeq) -> u32 {
    seq.end() - seq.num_chain_drafts() as u32
}

/// Where a draft model is to make the guesses of a masked sequence: places without tokens.
pub(super) fn places(count: usize) -> Drafts {
    Drafts { token_ids: vec![0; count], masks: vec![Arc::default(); count], ..Drafts::default() }
}
