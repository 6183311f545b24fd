//! One token from one row of logits, on the host: what the reference and the CPU backend sample with, and the definition
//! that any device's own sampler must agree with.
//!
//! The order of things is vLLM's:
//! 1. log-probabilities and ranks, where asked for, come from the raw logits;
//! 2. biases and bans are added, then the repetition, frequency and presence penalties are applied, then tokens outside
//!    the mask are banned;
//! 3. a temperature of 0 takes the most likely token (the lowest id of equals) and is done;
//! 4. temperature, then `min_p`, `top_k`, `top_p`, then the draw.
//!
//! Probabilities are kept as fixed-point weights: `exp((logit − max) / temperature) · 2^40`, rounded ([`weight`]), with
//! an exponential that gives the same bits everywhere. Integer sums do not depend on the order of addition, so threads
//! or a GPU may add them as they like and still draw the same token.
//! Kept tokens stand in the order of their ids; the token drawn is the first whose cumulative weight exceeds
//! `(random · total) >> 64`, where `random` is a pure function of `(seed, counter)` ([`baton_core::random::philox`]). A token less
//! likely than exp(−28) of the best one has weight 0 and is never drawn.
//!
//! Broken logits never panic: NaN counts as −∞ and +∞ as the largest finite number. If nothing at all is left (every
//! logit is −∞), the token is the first that the mask allows, without a mask 0.
//!
//! All that goes over the vocabulary is inlined into [`sample_row`], so that a caller that is compiled for wide vectors has
//! it compiled for them. Nothing is fused, so that the bits are the same.
//!
//! Not here: which rows are sampled, and on which thread. Rows share nothing, so a backend may sample them in parallel
//! and gather the results in order with [`push_sampled`].

mod adjust;
mod draw;
mod logprobs;
#[cfg(test)]
mod tests;
mod weight;

use baton_core::{TokenId, TokenLogprob, mask_allows};

use crate::{RowLists, SampleRow, Sampled, StepOutput};

pub use weight::{ONE as WEIGHT_ONE, likelihood, weight};

/// What sampling a row needs besides the row. One per thread; grows to the vocabulary once.
#[derive(Debug, Default)]
pub struct SampleScratch {
    /// The logits after biases and penalties.
    adjusted: Vec<f32>, // [vocab]
    candidates: Vec<Candidate>, // [<= vocab]
}

impl SampleScratch {
    /// Large enough for any row of this vocabulary, so that a step allocates nothing.
    pub fn with_vocab_size(vocab_size: usize) -> Self {
        Self { adjusted: Vec::with_capacity(vocab_size), candidates: Vec::with_capacity(vocab_size) }
    }
}

/// A token that may still be drawn, or that is among the most likely ones.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    token_id: TokenId,
    /// Fixed-point probability, not normalised.
    weight: u64,
}

/// Draws or scores one token from the raw `logits` of one row, `[vocab]`.
///
/// `lists` are the parts of the step's arrays that `row` points at; ids beyond the vocabulary are passed over. The most likely tokens are appended to `top`, and `Sampled::top` is their range in it. A forced token is
/// always scored; for a drawn one `num_logprobs` says whether.
#[inline(always)]
pub fn sample_row(
    logits: &[f32],
    row: &SampleRow,
    lists: RowLists<'_>,
    scratch: &mut SampleScratch,
    top: &mut Vec<TokenLogprob>,
) -> Sampled {
    assert!(!logits.is_empty(), "a row of logits is empty");
    let token_id = row.forced.unwrap_or_else(|| choose(logits, row, &lists, scratch));
    let top_start = top.len() as u32;
    let mut chosen = TokenLogprob { token_id, logprob: 0.0, rank: 0 };
    if row.num_logprobs.is_some() || row.forced.is_some() {
        let normalizer = logprobs::log_sum_exp(logits);
        chosen = logprobs::score(logits, normalizer, token_id);
        let count = row.num_logprobs.unwrap_or(0) as usize;
        logprobs::push_most_likely(logits, normalizer, count, &mut scratch.candidates, top);
    }
    Sampled { chosen, top: top_start..top.len() as u32 }
}

/// Appends what [`sample_row`] gave, with `tops` being the list it appended to.
pub fn push_sampled(output: &mut StepOutput, sampled: &Sampled, tops: &[TokenLogprob]) {
    let start = output.top.len() as u32;
    output.top.extend_from_slice(&tops[sampled.top.start as usize..sampled.top.end as usize]);
    output.samples.push(Sampled { chosen: sampled.chosen, top: start..output.top.len() as u32 });
}

#[inline(always)]
fn choose(logits: &[f32], row: &SampleRow, lists: &RowLists<'_>, scratch: &mut SampleScratch) -> TokenId {
    let SampleScratch { adjusted, candidates } = scratch;
    let logits = if adjust::changes_nothing(row, lists) {
        logits
    } else {
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        adjust::adjust(adjusted, row, lists);
        adjusted
    };
    let (best, max) = draw::most_likely(logits);
    // Written so that a temperature of NaN is greedy as well.
    let is_random = row.temperature > 0.0;
    if max == f32::NEG_INFINITY && !lists.mask.is_empty() {
        return first_allowed(lists.mask, logits.len());
    }
    if !is_random || max == f32::NEG_INFINITY {
        return best;
    }
    draw::draw(logits, max, row, candidates)
}

/// The lowest token of the vocabulary that a mask allows; 0 where it allows none.
fn first_allowed(mask: &[u32], vocab_size: usize) -> TokenId {
    (0..vocab_size as TokenId).find(|&token_id| mask_allows(mask, token_id)).unwrap_or(0)
}
