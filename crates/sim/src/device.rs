//! A device that keeps no KV but knows whose it would be.
//!
//! Every slot of every block remembers the prefix it was written for. Before a sequence is computed, all its earlier
//! positions must hold exactly its own prefix; after it, the new ones do. Everything wrong is a panic that names the
//! sequence and the position.

use std::collections::{BTreeMap, BTreeSet};

use baton_core::{BlockId, Request, SeqId, TokenId};
use baton_sched::{
    BlockMove, PENDING_TOKEN, Plan, PlannedSeq, SampledToken, Scheduler, SeqResult, SequenceView, StepResult,
};

use crate::{FakeModel, Naming, PrefixHash};

#[derive(Debug)]
pub struct FakeDevice {
    model: FakeModel,
    block_size: usize,
    device: Vec<Option<PrefixHash>>, // [num_device_blocks × block_size]
    host: Vec<Option<PrefixHash>>,   // [num_host_blocks × block_size]
    /// The token each sequence drew last, for tokens that are pending when the next step is planned.
    feedback: BTreeMap<SeqId, TokenId>,
}

impl FakeDevice {
    pub fn new(
        model: FakeModel,
        num_device_blocks: usize,
        num_host_blocks: usize,
        block_size: usize,
    ) -> Self {
        Self {
            model,
            block_size,
            device: vec![None; num_device_blocks * block_size],
            host: vec![None; num_host_blocks * block_size],
            feedback: BTreeMap::new(),
        }
    }

    /// Executes a Plan right after it was scheduled. `request_of` gives the request of a sequence.
    pub fn execute<'a>(
        &mut self,
        plan: &Plan,
        scheduler: &Scheduler,
        request_of: impl Fn(&PlannedSeq) -> &'a Request,
    ) -> StepResult {
        self.move_blocks(plan);
        check_writers(plan, self.block_size);
        let namings: Vec<Naming> =
            plan.seqs.iter().map(|planned| Naming::of(request_of(planned), self.block_size)).collect();
        let prefixes: Vec<PrefixHash> = plan
            .seqs
            .iter()
            .zip(&namings)
            .map(|(planned, naming)| self.check_prefix(planned, naming, scheduler))
            .collect();
        let results = plan.seqs.iter().zip(&namings).zip(prefixes).map(|((planned, naming), prefix)| {
            let view = scheduler.sequence(planned.seq_id).expect("a planned sequence is known");
            self.compute(planned, naming, prefix, &view)
        });
        StepResult { seqs: results.collect() }
    }

    fn move_blocks(&mut self, plan: &Plan) {
        let size = self.block_size;
        check_moves(&plan.swap_out, "swap_out");
        check_moves(&plan.swap_in, "swap_in");
        check_moves(&plan.copies, "copies");
        for &BlockMove { from, to } in &plan.swap_out {
            self.host[to.index() * size..][..size]
                .copy_from_slice(&self.device[from.index() * size..][..size]);
        }
        for &BlockMove { from, to } in &plan.swap_in {
            self.device[to.index() * size..][..size]
                .copy_from_slice(&self.host[from.index() * size..][..size]);
        }
        // A device may copy in any order: no block is both read and written.
        let sources: BTreeSet<BlockId> = plan.copies.iter().map(|copy| copy.from).collect();
        for &BlockMove { from, to } in &plan.copies {
            assert!(!sources.contains(&to), "step {}: block {to} is copied from and to", plan.step);
            let (from, to) = (from.index() * size, to.index() * size);
            self.device.copy_within(from..from + size, to);
        }
    }

    /// All positions before `start` hold the sequence's own prefix. Returns that prefix.
    fn check_prefix(&self, planned: &PlannedSeq, naming: &Naming, scheduler: &Scheduler) -> PrefixHash {
        let view = scheduler.sequence(planned.seq_id).expect("a planned sequence is known");
        let start = planned.start as usize;
        let covered = planned.block_table.len() * self.block_size;
        assert!(
            covered >= start + planned.token_ids.len(),
            "{}: the block table is too short",
            planned.seq_id
        );
        assert!(view.token_ids.len() >= start, "{}: tokens before the run are not known", planned.seq_id);
        let mut prefix = naming.root;
        for (position, &token_id) in view.token_ids[..start].iter().enumerate() {
            prefix = naming.child(prefix, position, token_id);
            let slot = self.slot(planned, position);
            assert_eq!(
                self.device[slot],
                Some(prefix),
                "sequence {} of request {}: position {position} (block {}) holds the KV of another prefix",
                planned.seq_id,
                planned.request_id,
                planned.block_table[position / self.block_size],
            );
        }
        for (offset, &token_id) in planned.token_ids.iter().enumerate() {
            let known = view.token_ids.get(start + offset).copied().unwrap_or(PENDING_TOKEN);
            assert_eq!(token_id, known, "sequence {}: token at {}", planned.seq_id, start + offset);
        }
        prefix
    }

    fn compute(
        &mut self,
        planned: &PlannedSeq,
        naming: &Naming,
        start: PrefixHash,
        view: &SequenceView<'_>,
    ) -> SeqResult {
        let mut result = SeqResult::default();
        let mut prefix = start;
        for (offset, &token_id) in planned.token_ids.iter().enumerate() {
            let token_id = if token_id == PENDING_TOKEN { self.feedback[&planned.seq_id] } else { token_id };
            let position = planned.start as usize + offset;
            prefix = naming.child(prefix, position, token_id);
            let slot = self.slot(planned, position);
            self.device[slot] = Some(prefix);
            if planned.scored.contains(&(offset as u32)) {
                let next = view.token_ids[planned.start as usize + offset + 1];
                result.prompt_logprobs.push(self.model.position_logprobs(prefix, next));
            }
        }
        self.sample(planned, prefix, view, &mut result);
        result
    }

    fn sample(
        &mut self,
        planned: &PlannedSeq,
        prefix: PrefixHash,
        view: &SequenceView<'_>,
        result: &mut SeqResult,
    ) {
        let params = &planned.params;
        let has_pending = planned.token_ids.contains(&PENDING_TOKEN);
        assert!(!(has_pending && params.has_penalties()), "a penalty needs the tokens so far");
        for sample in &planned.samples {
            let num_tokens = planned.start as usize + planned.token_ids.len();
            assert_eq!(
                sample.num_output_tokens as usize,
                num_tokens - view.num_prompt_tokens,
                "output count"
            );
            assert_eq!(sample.ban_end, sample.num_output_tokens < params.min_tokens, "ban_end");
            let is_banned = |token: TokenId| {
                sample.ban_end
                    && (view.eos_token_ids.contains(&token) || params.stop_token_ids.contains(&token))
            };
            if params.beam.is_some() {
                let count = 2 * params.num_sequences() as usize;
                result.candidates = self.model.candidates(prefix, count, is_banned);
                continue;
            }
            let token_id = self.model.sample(prefix, params.seed.unwrap_or(0), sample.index, is_banned);
            self.feedback.insert(sample.seq_id, token_id);
            let needs_logprobs = params.logprobs.is_some() || params.best_of.is_some();
            let logprobs = needs_logprobs.then(|| self.model.position_logprobs(prefix, token_id));
            result.samples.push(SampledToken { token_id, logprobs });
        }
    }

    fn slot(&self, planned: &PlannedSeq, position: usize) -> usize {
        planned.block_table[position / self.block_size].index() * self.block_size + position % self.block_size
    }
}

/// No block is the target of two copies.
fn check_moves(moves: &[BlockMove], name: &str) {
    let mut targets = BTreeSet::new();
    for copy in moves {
        assert!(targets.insert(copy.to), "{name}: block {} is written twice", copy.to);
    }
}

/// A block that one sequence of the step writes stands in no other table of the step.
fn check_writers(plan: &Plan, block_size: usize) {
    let mut written: BTreeMap<BlockId, SeqId> = BTreeMap::new();
    for planned in &plan.seqs {
        let start = planned.start as usize;
        for index in start / block_size..(start + planned.token_ids.len()).div_ceil(block_size) {
            let before = written.insert(planned.block_table[index], planned.seq_id);
            assert!(before.is_none(), "block {} has two writers", planned.block_table[index]);
        }
    }
    for planned in &plan.seqs {
        for block in &planned.block_table {
            let writer = written.get(block).copied().unwrap_or(planned.seq_id);
            assert_eq!(writer, planned.seq_id, "block {block} is written by {writer} while it is shared");
        }
    }
}
