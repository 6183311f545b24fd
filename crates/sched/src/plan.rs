//! The contract between scheduler and engine: a `Plan` says what one step computes, a `StepResult` what came out.
//!
//! A Plan is immutable, self-contained and serialisable: it is also what other ranks will be sent.

use std::sync::Arc;

pub use baton_kv::BlockMove;

use baton_core::{
    BlockId, PositionLogprobs, RequestId, SamplingParams, SeqId, TokenCount, TokenId, TokenLogprob,
};
use serde::{Deserialize, Serialize};

/// Stands for a token that a step still in flight will sample for the same sequence.
/// The device takes it from its own feedback buffer.
pub const PENDING_TOKEN: TokenId = TokenId::MAX;

/// One step. The lists are executed in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    pub step: u64,
    /// Device → host: sequences that make room, and cached prefixes that would be evicted next.
    pub swap_out: Vec<BlockMove>,
    /// Host → device. May target device blocks that `swap_out` has just saved.
    pub swap_in: Vec<BlockMove>,
    /// Device → device, before any token of this step is written (copy-on-write).
    pub copies: Vec<BlockMove>,
    /// Host → device, beside this step and later ones: nobody in the step reads these blocks.
    pub fetches: Vec<Fetch>,
    /// Nothing can be computed before a fetch is done: the device waits for all of them.
    pub waits_for_fetches: bool,
    /// What is computed, decodes and prompt chunks alike.
    pub seqs: Vec<PlannedSeq>,
}

/// KV that a sequence waits for. [`StepResult::fetched`] of this step or a later one says when it is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    pub id: u64,
    pub moves: Vec<BlockMove>,
}

/// A run of tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedSeq {
    pub request_id: RequestId,
    pub seq_id: SeqId,
    /// Position of the first token; the KV of all earlier positions is in the blocks.
    pub start: u32,
    /// The tokens to compute, at positions `start..`; those of `branches` stand at the end.
    pub token_ids: Vec<TokenId>,
    /// The last so many of `token_ids` are guesses. Each is checked against what is drawn after the token before it.
    pub num_drafts: u32,
    /// The first so many of `token_ids` draw too, although what comes after them is known: so that every row of the step draws.
    pub num_redrawn: u32,
    /// Guesses beside the chain that follows the last known token, in the order of their tokens.
    pub branches: Vec<PlannedBranch>,
    /// Physical blocks of positions 0.. for each lane of each KV group, covering at least [`PlannedSeq::end`] tokens, and the
    /// rows of `branches` behind them. Rows behind a group's window are [`NO_BLOCK`](baton_kv::NO_BLOCK).
    pub block_tables: Vec<Vec<BlockId>>,
    /// Who takes a token from the logits of the last position, and of those before drafts. Empty for all but the last chunk of
    /// a prompt.
    pub samples: Vec<PlannedSample>,
    /// Which tokens the samples may draw, one bit per token of the vocabulary; all where there is none.
    pub mask: Option<Arc<Vec<u32>>>,
    /// The same after each of the guesses, where there is a mask.
    pub draft_masks: Vec<Arc<Vec<u32>>>,
    /// Positions `start + i` whose logits score the prompt token after them, for `i` in this range
    /// (`prompt_logprobs`; empty when not asked).
    pub scored: std::ops::Range<u32>,
    /// The prompt token after the run, where `scored` ends with the run.
    pub next_token_id: Option<TokenId>,
    /// Which adapter's weights are added. There are none yet.
    pub adapter: Option<u32>,
    pub params: Arc<SamplingParams>,
    /// The end tokens of the request, which `ban_end` bans.
    pub end_token_ids: Arc<[TokenId]>,
}

/// Guesses that follow each other and depart from the chain, or from an earlier branch.
///
/// Their keys and values have a block of their own, from its first slot on, which is a row of the block tables behind those of the
/// chain. So each of them sees what stands before the departure and its own branch, and nobody else sees the branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedBranch {
    /// What its first token follows: 0 the last known token, `n` the `n`-th guess.
    pub parent: u32,
    /// At most as many as a block holds.
    pub num_tokens: u32,
    /// Row of the block tables.
    pub row: u32,
}

/// One token to be drawn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedSample {
    /// The sequence that gets the token. After a prompt with n > 1 these are sequences still to be forked.
    pub seq_id: SeqId,
    /// Which of the `n` continuations.
    pub index: u32,
    /// How many output tokens the sequence has before this one: the counter of its random numbers.
    pub num_output_tokens: u32,
    /// End tokens may not be drawn (`min_tokens`).
    pub ban_end: bool,
    /// The tokens so far, where a penalty depends on them.
    pub history: Option<Arc<Vec<TokenCount>>>,
}

impl Plan {
    pub fn num_tokens(&self) -> usize {
        self.seqs.iter().map(|seq| seq.token_ids.len()).sum()
    }

    /// True where nothing is left to compute or move.
    pub fn is_empty(&self) -> bool {
        self.seqs.is_empty()
            && self.swap_out.is_empty()
            && self.swap_in.is_empty()
            && self.copies.is_empty()
            && self.fetches.is_empty()
            && !self.waits_for_fetches
    }
}

impl PlannedSeq {
    /// The position after the run, without its branches.
    pub fn end(&self) -> u32 {
        self.start + (self.token_ids.len() - self.num_branch_tokens()) as u32
    }

    pub fn num_branch_tokens(&self) -> usize {
        self.branches.iter().map(|branch| branch.num_tokens as usize).sum()
    }

    /// Guesses in a row after the last known token.
    pub fn num_chain_drafts(&self) -> usize {
        self.num_drafts as usize - self.num_branch_tokens()
    }

    /// The guesses, those of the chain first.
    pub fn drafts(&self) -> &[TokenId] {
        &self.token_ids[self.token_ids.len() - self.num_drafts as usize..]
    }

    /// Each branch, and the number of its first guess: guesses count from 1.
    pub fn numbered_branches(&self) -> impl Iterator<Item = (usize, &PlannedBranch)> {
        self.branches.iter().scan(self.num_chain_drafts() + 1, |next, branch| {
            let first = *next;
            *next += branch.num_tokens as usize;
            Some((first, branch))
        })
    }

    /// The number of the guess that `token_id` is, drawn after guess number `parent` (0 is the last known token), if it is one.
    pub fn child(&self, parent: usize, token_id: TokenId) -> Option<usize> {
        let is_guess = |number: usize| self.drafts()[number - 1] == token_id;
        let num_chain = self.num_chain_drafts();
        let next = if parent < num_chain {
            Some(parent + 1)
        } else {
            let within = |&(first, branch): &(usize, &PlannedBranch)| {
                (first..first + branch.num_tokens as usize - 1).contains(&parent)
            };
            self.numbered_branches().find(within).map(|_| parent + 1)
        };
        let departing = self.numbered_branches().filter(|(_, branch)| branch.parent as usize == parent);
        next.into_iter().chain(departing.map(|(first, _)| first)).find(|&number| is_guess(number))
    }

    /// The guesses before guess number `number`, and itself, by their numbers: the nearest to the last known token first.
    pub fn path(&self, number: usize) -> Vec<usize> {
        let mut path = Vec::new();
        let mut at = number;
        while at > self.num_chain_drafts() {
            let (first, branch) = self
                .numbered_branches()
                .find(|(first, branch)| at < first + branch.num_tokens as usize)
                .expect("a guess behind the chain is of a branch");
            path.extend((first..=at).rev());
            at = branch.parent as usize;
        }
        path.extend((1..=at).rev());
        path.reverse();
        path
    }

    /// The numbers of the guesses that were right, where these tokens were drawn one after the other.
    pub fn right_guesses(&self, drawn: impl IntoIterator<Item = TokenId>) -> Vec<usize> {
        let mut right = Vec::new();
        for token_id in drawn {
            let Some(number) = self.child(right.last().copied().unwrap_or(0), token_id) else { break };
            right.push(number);
        }
        right
    }

    /// How many guesses of the chain were right, where these tokens were drawn.
    pub fn num_right_of_chain(&self, drawn: impl IntoIterator<Item = TokenId>) -> usize {
        let chain = &self.drafts()[..self.num_chain_drafts()];
        chain.iter().zip(drawn).take_while(|(guess, drawn)| *guess == drawn).count()
    }

    /// How many rows of logits this run needs.
    pub fn num_logit_rows(&self) -> usize {
        // The last position may be both scored and sampled from; `scored` never includes it then, because the
        // token after the last prompt token is not a prompt token.
        let num_drawn =
            if self.samples.is_empty() { 0 } else { 1 + (self.num_redrawn + self.num_drafts) as usize };
        self.scored.len() + num_drawn
    }
}

/// What a step sampled, parallel to `Plan::seqs`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    pub seqs: Vec<SeqResult>,
    /// Fetches of this step or of earlier ones that are done.
    pub fetched: Vec<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SeqResult {
    /// Parallel to `PlannedSeq::samples`; empty for beam search. With drafts: those that were accepted and the token after
    /// them, of the one sequence that draws.
    pub samples: Vec<SampledToken>,
    /// Beam search: the `2 × width` most likely next tokens, best first.
    pub candidates: Vec<TokenLogprob>,
    /// Parallel to `PlannedSeq::scored`.
    pub prompt_logprobs: Vec<PositionLogprobs>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    pub token_id: TokenId,
    /// Present when the request needs log-probabilities (`logprobs`, `best_of`).
    pub logprobs: Option<PositionLogprobs>,
}
