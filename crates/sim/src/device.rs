//! A device that keeps no KV but knows whose it would be.
//!
//! Every slot of every block remembers the prefix it was written for. Before a sequence is computed, all its earlier
//! positions that it can see must hold exactly its own prefix, in every lane of every KV group; after it, the new ones do.
//! Everything wrong is a panic that names the sequence and the position.

use std::collections::{BTreeMap, BTreeSet};

use baton_core::{BlockId, Request, SeqId, TokenId};
use baton_kv::KvConfig;
use baton_sched::{
    BlockMove, Fetch, NO_BLOCK, PENDING_TOKEN, Plan, PlannedSeq, SampledToken, Scheduler, SeqResult,
    SequenceView, StepResult,
};

use crate::{FakeModel, Naming, PrefixHash, Rng};

/// What a slot holds: the KV of a lane for a prefix.
pub(crate) type Content = Option<(usize, PrefixHash)>;

/// A copy from the host tier that goes on beside the steps.
#[derive(Debug)]
struct Transfer {
    id: u64,
    /// The step that began it.
    step: u64,
    /// Device blocks and what they are going to hold.
    contents: Vec<(BlockId, Vec<Content>)>,
}

#[derive(Debug)]
pub struct FakeDevice {
    model: FakeModel,
    block_size: usize,
    /// The window of each lane's group.
    windows: Vec<Option<usize>>,
    device: Vec<Content>, // [num_device_blocks × block_size]
    host: Vec<Content>,   // [num_host_blocks × block_size]
    transfers: Vec<Transfer>,
    /// The token each sequence drew last, for tokens that are pending when the next step is planned.
    feedback: BTreeMap<SeqId, TokenId>,
}

impl FakeDevice {
    pub fn new(model: FakeModel, kv: &KvConfig) -> Self {
        let lanes = |group: &baton_kv::KvGroup| std::iter::repeat_n(group.window, group.lanes);
        Self {
            model,
            block_size: kv.block_size,
            windows: kv.groups.iter().flat_map(lanes).collect(),
            device: vec![None; kv.num_device_blocks * kv.block_size],
            host: vec![None; kv.num_host_blocks * kv.block_size],
            transfers: Vec::new(),
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
        plan.fetches.iter().for_each(|fetch| self.begin_transfer(fetch, plan.step));
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
        StepResult { seqs: results.collect(), fetched: Vec::new() }
    }

    /// What a block of the host tier holds.
    pub(crate) fn host_block(&self, block: BlockId) -> &[Content] {
        &self.host[block.index() * self.block_size..][..self.block_size]
    }

    pub(crate) fn host_block_mut(&mut self, block: BlockId) -> &mut [Content] {
        &mut self.host[block.index() * self.block_size..][..self.block_size]
    }

    /// Until it is done, nobody can use what the blocks hold.
    fn begin_transfer(&mut self, fetch: &Fetch, step: u64) {
        let size = self.block_size;
        let mut contents = Vec::new();
        for &BlockMove { from, to } in &fetch.moves {
            contents.push((to, self.host[from.index() * size..][..size].to_vec()));
            self.device[to.index() * size..][..size].fill(None);
        }
        self.transfers.push(Transfer { id: fetch.id, step, contents });
    }

    /// The transfers that are done by now: all of them where the step waits for them, else as chance has it.
    pub fn finish_transfers(&mut self, waits: bool, rng: &mut Rng) -> Vec<u64> {
        let size = self.block_size;
        let mut done = Vec::new();
        let mut going_on = Vec::new();
        for transfer in std::mem::take(&mut self.transfers) {
            if !waits && rng.per_mille(400) {
                going_on.push(transfer);
                continue;
            }
            for (block, content) in &transfer.contents {
                let slots = &mut self.device[block.index() * size..][..size];
                assert!(slots.iter().all(Option::is_none), "block {block} was written before its KV came");
                slots.copy_from_slice(content);
            }
            done.push(transfer.id);
        }
        self.transfers = going_on;
        done
    }

    /// A step failed: what it began to fetch is given up.
    pub fn fail_transfers(&mut self, step: u64) {
        self.transfers.retain(|transfer| transfer.step != step);
    }

    pub fn has_transfers(&self) -> bool {
        !self.transfers.is_empty()
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
        assert_eq!(planned.block_tables.len(), self.windows.len(), "{}: lanes", planned.seq_id);
        for blocks in &planned.block_tables {
            let covered = blocks.len() * self.block_size;
            let seq_id = planned.seq_id;
            assert!(covered >= planned.end() as usize, "{seq_id}: a block table is too short");
            for branch in &planned.branches {
                let row = branch.row as usize;
                assert!(row < blocks.len(), "{seq_id}: a branch has no block");
                assert!(
                    row * self.block_size >= planned.end() as usize,
                    "{seq_id}: a branch lies in the run"
                );
                assert!(
                    branch.num_tokens as usize <= self.block_size,
                    "{seq_id}: a branch exceeds its block"
                );
            }
        }
        assert!(view.token_ids.len() >= start, "{}: tokens before the run are not known", planned.seq_id);
        let mut prefix = naming.root;
        for (position, &token_id) in view.token_ids[..start].iter().enumerate() {
            prefix = naming.child(prefix, position, token_id);
            for (lane, window) in self.windows.iter().enumerate() {
                if window.is_some_and(|window| position + window <= start) {
                    continue;
                }
                let slot = self.slot(planned, lane, position);
                assert_eq!(
                    self.device[slot],
                    Some((lane, prefix)),
                    "sequence {} of request {}: position {position} (lane {lane}, block {}) holds the KV of another prefix",
                    planned.seq_id,
                    planned.request_id,
                    planned.block_tables[lane][position / self.block_size],
                );
            }
        }
        let num_known = planned.token_ids.len() - planned.num_drafts as usize;
        for (offset, &token_id) in planned.token_ids[..num_known].iter().enumerate() {
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
        // The prefixes after the last known token and after each draft, and how many drafts are before.
        let mut ends = Vec::new();
        let num_run = (planned.end() - planned.start) as usize;
        let first_end = num_run - planned.num_chain_drafts() - 1;
        for (offset, &token_id) in planned.token_ids[..num_run].iter().enumerate() {
            let token_id = if token_id == PENDING_TOKEN { self.feedback[&planned.seq_id] } else { token_id };
            let position = planned.start as usize + offset;
            prefix = naming.child(prefix, position, token_id);
            for lane in 0..self.windows.len() {
                let slot = self.slot(planned, lane, position);
                self.device[slot] = Some((lane, prefix));
            }
            if planned.scored.contains(&(offset as u32)) {
                let next = planned.token_ids.get(offset + 1).copied().or(planned.next_token_id);
                let next = next.expect("a scored position has a token after it");
                assert_eq!(next, view.token_ids[position + 1], "the token that is scored");
                result.prompt_logprobs.push(self.model.position_logprobs(prefix, next));
            }
            if offset >= first_end {
                ends.push((prefix, offset - first_end));
            }
        }
        self.compute_branches(planned, naming, &mut ends);
        let mut number = Some(0);
        while let Some(at) = number {
            let (prefix, num_accepted) = ends[at];
            self.sample(planned, prefix, num_accepted, view, &mut result);
            let drawn = (planned.num_drafts > 0).then(|| self.feedback[&planned.seq_id]);
            number = drawn.and_then(|token_id| planned.child(at, token_id));
        }
        result
    }

    /// Each branch goes on from the prefix of its parent, in a block of its own.
    fn compute_branches(
        &mut self,
        planned: &PlannedSeq,
        naming: &Naming,
        ends: &mut Vec<(PrefixHash, usize)>,
    ) {
        let first_draft = planned.end() as usize - planned.num_chain_drafts();
        for (first, branch) in planned.numbered_branches() {
            let (mut prefix, mut depth) = ends[branch.parent as usize];
            for place in 0..branch.num_tokens as usize {
                prefix = naming.child(prefix, first_draft + depth, planned.drafts()[first - 1 + place]);
                depth += 1;
                for lane in 0..self.windows.len() {
                    let block = planned.block_tables[lane][branch.row as usize];
                    self.device[block.index() * self.block_size + place] = Some((lane, prefix));
                }
                ends.push((prefix, depth));
            }
        }
    }

    fn sample(
        &mut self,
        planned: &PlannedSeq,
        prefix: PrefixHash,
        num_accepted: usize,
        view: &SequenceView<'_>,
        result: &mut SeqResult,
    ) {
        let params = &planned.params;
        let has_pending = planned.token_ids.contains(&PENDING_TOKEN);
        assert!(!(has_pending && params.has_penalties()), "a penalty needs the tokens so far");
        for sample in &planned.samples {
            let num_tokens = planned.end() as usize - planned.num_chain_drafts();
            assert_eq!(
                sample.num_output_tokens as usize,
                num_tokens - view.num_prompt_tokens,
                "output count"
            );
            assert_eq!(sample.ban_end, sample.num_output_tokens < params.min_tokens, "ban_end");
            let ban_end = sample.num_output_tokens + (num_accepted as u32) < params.min_tokens;
            let is_banned = |token: TokenId| {
                ban_end && (view.eos_token_ids.contains(&token) || params.stop_token_ids.contains(&token))
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

    fn slot(&self, planned: &PlannedSeq, lane: usize, position: usize) -> usize {
        let block = planned.block_tables[lane][position / self.block_size];
        block.index() * self.block_size + position % self.block_size
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
        for blocks in &planned.block_tables {
            let of_branches = planned.branches.iter().map(|branch| branch.row as usize);
            for index in
                (start / block_size..(planned.end() as usize).div_ceil(block_size)).chain(of_branches)
            {
                let before = written.insert(blocks[index], planned.seq_id);
                assert!(before.is_none(), "block {} has two writers", blocks[index]);
            }
        }
    }
    let fetched = plan.fetches.iter().flat_map(|fetch| &fetch.moves).map(|fetched| fetched.to);
    let fetched: BTreeSet<BlockId> = fetched.collect();
    for planned in &plan.seqs {
        for block in planned.block_tables.iter().flatten().filter(|block| **block != NO_BLOCK) {
            assert!(!fetched.contains(block), "block {block} is used while its KV is on the way");
            let writer = written.get(block).copied().unwrap_or(planned.seq_id);
            assert_eq!(writer, planned.seq_id, "block {block} is written by {writer} while it is shared");
        }
    }
}
