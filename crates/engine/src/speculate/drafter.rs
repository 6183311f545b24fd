//! A draft model: its own program on the device of the target, over the same block tables.
//!
//! The scheduler plans rows for guesses that are not made yet, so that there are blocks for them. Before such a Plan goes to the
//! device, the draft catches up with the tokens that it has not computed, then goes on from the last one, a pass per guess,
//! all sequences at once. It draws with the request's own parameters and random numbers, because a guess is right if the target
//! draws the same token. A pass is a Plan like any other, built by a runner of its own.
//!
//! Not here: which sequences draft and how far it pays (`Speculation`), and what becomes of the guesses (`engine::draft`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use baton_backend::{BackendError, ProgramId, StepExecutor, StepLimits, StepOutput};
use baton_core::TokenId;
use baton_sched::{Plan, PlannedSeq};

use super::cost::StepTimes;
use super::filled::Filled;
use crate::runner::Runner;

/// Rows of a sequence that all draw, so that a device finds a step that it has recorded: what a draft is behind as a rule.
const MAX_RECORDED_ROWS: usize = 4;

#[derive(Debug)]
pub(crate) struct Drafter {
    pub(crate) program: ProgramId,
    pub(crate) runner: Runner,
    pub(crate) filled: Filled,
    /// What a pass of so many rows takes.
    pub(crate) times: StepTimes,
    pub(crate) limits: DraftLimits,
    /// Fetches that were told of during passes.
    pub(crate) fetched: Vec<u64>,
    output: StepOutput,
}

/// What passes must keep to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftLimits {
    pub(crate) max_tokens: usize,
    pub(crate) max_logit_rows: usize,
    /// Positions that the draft knows.
    pub(crate) max_len: usize,
    pub(crate) vocab_size: usize,
    pub(crate) target_vocab_size: usize,
    /// The device records steps in which every row draws.
    pub(crate) records: bool,
    /// How many of the likeliest tokens are asked for beside the one that is drawn.
    pub(crate) num_beside: usize,
}

impl DraftLimits {
    /// Of the steps of a draft, on a device that records steps or not.
    pub(crate) fn new(limits: &StepLimits, target_vocab_size: usize, records: bool) -> Self {
        Self {
            max_tokens: limits.max_tokens,
            max_logit_rows: limits.max_logit_rows,
            max_len: limits.max_model_len,
            vocab_size: limits.vocab_size,
            target_vocab_size,
            records,
            num_beside: 0,
        }
    }
}

/// A token that the draft drew, and the probability that it gave it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Drawn {
    pub(crate) token_id: TokenId,
    pub(crate) probability: f32,
    /// The likeliest others.
    pub(crate) beside: Vec<(TokenId, f32)>,
}

impl Drafter {
    pub(crate) fn new(
        program: ProgramId,
        runner: Runner,
        filled: Filled,
        times: StepTimes,
        limits: DraftLimits,
    ) -> Self {
        let (fetched, output) = (Vec::new(), StepOutput::default());
        Self { program, runner, filled, times, limits, fetched, output }
    }

    /// What the draft has to compute before it can go on from position `end`, as a run without samples. `None`: it cannot,
    /// because blocks that it lacks are gone, or the sequence is longer than it knows.
    pub(crate) fn missing(
        &mut self,
        seq: &PlannedSeq,
        token_ids: &[TokenId],
        end: u32,
    ) -> Option<PlannedSeq> {
        let start = self.filled.len_of(&seq.block_tables, end);
        let is_known = (end as usize) <= self.limits.max_len.min(token_ids.len());
        if !is_known || !self.filled.has_blocks(&seq.block_tables, start..end) {
            return None;
        }
        let tokens = &token_ids[start as usize..end as usize];
        Some(self.run_of(seq, start, tokens))
    }

    /// A run of a sequence that draws nothing. From now on it counts as computed, for others that share its blocks too: those
    /// come later in the same pass or in another one.
    pub(crate) fn run_of(&mut self, seq: &PlannedSeq, start: u32, token_ids: &[TokenId]) -> PlannedSeq {
        self.filled.computed(&seq.block_tables, start..start + token_ids.len() as u32);
        let last = self.limits.vocab_size as TokenId - 1;
        PlannedSeq {
            start,
            // A padded token has no meaning in either model.
            token_ids: token_ids.iter().map(|token| *token.min(&last)).collect(),
            num_drafts: 0,
            branches: Vec::new(),
            num_redrawn: 0,
            samples: Vec::new(),
            mask: None,
            draft_masks: Vec::new(),
            scored: 0..0,
            next_token_id: None,
            ..seq.clone()
        }
    }

    /// Lets the last token of a run draw, as sequence `seq` would after so many guesses.
    pub(crate) fn draw(
        &self,
        run: &mut PlannedSeq,
        seq: &PlannedSeq,
        num_guesses: u32,
        mask: Option<&Arc<Vec<u32>>>,
    ) {
        run.samples.clone_from(&seq.samples);
        for sample in &mut run.samples {
            sample.num_output_tokens += num_guesses;
        }
        let is_alike = self.limits.vocab_size == self.limits.target_vocab_size;
        run.mask = mask.filter(|_| is_alike).cloned();
        let params = &seq.params;
        if !is_alike && (params.has_penalties() || !params.logit_bias.is_empty()) {
            // Lists of tokens are the target's, and some may be past the end of the draft's vocabulary.
            let mut params = (**params).clone();
            params.repetition_penalty = 1.0;
            params.presence_penalty = 0.0;
            params.frequency_penalty = 0.0;
            params.logit_bias.clear();
            run.params = Arc::new(params);
            run.samples.iter_mut().for_each(|sample| sample.history = None);
        }
    }

    /// Moves the blocks of a Plan before the draft reads them.
    pub(crate) fn make_moves(
        &mut self,
        backend: &mut dyn StepExecutor,
        moves: &Plan,
    ) -> Result<(), BackendError> {
        backend.submit(self.runner.build(moves), self.program)?;
        backend.collect(&mut self.output)?;
        self.fetched.append(&mut self.output.fetched);
        Ok(())
    }

    /// Runs passes until all runs are computed. Returns what those with samples drew, in their order, and the device's time.
    pub(crate) fn compute(
        &mut self,
        backend: &mut dyn StepExecutor,
        runs: Vec<PlannedSeq>,
    ) -> Result<(Vec<Drawn>, Duration), BackendError> {
        let mut left: VecDeque<PlannedSeq> =
            runs.into_iter().filter(|run| !run.token_ids.is_empty()).collect();
        let (mut drawn, mut time) = (Vec::new(), Duration::ZERO);
        while !left.is_empty() {
            let plan = Plan { seqs: self.next_pass(&mut left), ..Plan::default() };
            let num_top = if self.limits.num_beside == 0 { 0 } else { self.limits.num_beside + 1 };
            backend.submit(self.runner.build_draft(&plan, num_top as u32), self.program)?;
            backend.collect(&mut self.output)?;
            self.fetched.append(&mut self.output.fetched);
            if let Some(span) = backend.last_step_span() {
                let taken = span.end.saturating_duration_since(span.start);
                time += taken;
                if plan.seqs.iter().all(|run| run.token_ids.len() == 1 + run.num_drafts as usize) {
                    self.times.took(plan.num_tokens(), taken);
                }
            }
            let mut first = 0;
            for run in plan.seqs.iter().filter(|run| !run.samples.is_empty()) {
                // Those of rows before the last were drawn for the shape of the step only.
                first += run.num_drafts as usize + 1;
                let sampled = &self.output.samples[first - 1];
                let token_id = sampled.chosen.token_id;
                let top = &self.output.top[sampled.top.start as usize..sampled.top.end as usize];
                let others = top.iter().filter(|other| other.token_id != token_id);
                let beside = others.take(self.limits.num_beside);
                drawn.push(Drawn {
                    token_id,
                    probability: sampled.chosen.logprob.exp(),
                    beside: beside.map(|other| (other.token_id, other.logprob.exp())).collect(),
                });
            }
        }
        Ok((drawn, time))
    }

    /// Takes as much as a pass can hold off the front.
    fn next_pass(&self, left: &mut VecDeque<PlannedSeq>) -> Vec<PlannedSeq> {
        let DraftLimits { max_tokens, max_logit_rows, records, .. } = self.limits;
        let (mut pass, mut tokens_left, mut rows_left) = (Vec::new(), max_tokens, max_logit_rows);
        while tokens_left > 0 && rows_left > 0 {
            let Some(mut run) = left.pop_front() else { break };
            let len = run.token_ids.len();
            if len > tokens_left {
                let rest = run.token_ids.split_off(tokens_left);
                let start = run.start + run.token_ids.len() as u32;
                left.push_front(PlannedSeq { start, token_ids: rest, ..run.clone() });
                run.samples.clear();
                run.mask = None;
            }
            tokens_left -= run.token_ids.len();
            if !run.samples.is_empty() {
                let earlier = len as u32 - 1;
                let drawn = run.samples.iter().map(|sample| sample.num_output_tokens).min().unwrap_or(0);
                if records && len <= MAX_RECORDED_ROWS.min(rows_left) && drawn >= earlier {
                    run.num_drafts = earlier;
                    run.draft_masks = run.mask.iter().cloned().cycle().take(earlier as usize).collect();
                    run.samples.iter_mut().for_each(|sample| sample.num_output_tokens -= earlier);
                }
                rows_left -= 1 + run.num_drafts as usize;
            }
            pass.push(run);
        }
        pass
    }
}
