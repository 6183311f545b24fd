//! Log-probabilities and ranks of the raw logits.

use baton_core::{TokenId, TokenLogprob};

use super::Candidate;
use super::draw::{best_first, keep_best};
use super::weight::{ONE, clean, largest, weight};

/// `ln Σ exp(logit)`; −∞ where every logit is. The sum is of fixed-point weights, so its order does not matter.
#[inline(always)]
pub(super) fn log_sum_exp(logits: &[f32]) -> f32 {
    let max = largest(logits);
    if max == f32::NEG_INFINITY {
        return max;
    }
    let sum: u64 = logits.iter().map(|logit| weight(*logit, max, 1.0)).sum();
    (f64::from(max) + (sum as f64 / ONE as f64).ln()) as f32
}

/// The log-probability of a token and its rank: 1 + how many are strictly more likely. A token beyond the vocabulary
/// cannot occur.
#[inline(always)]
pub(super) fn score(logits: &[f32], normalizer: f32, token_id: TokenId) -> TokenLogprob {
    let own = logits.get(token_id as usize).map_or(f32::NEG_INFINITY, |logit| clean(*logit));
    let better = logits.iter().filter(|logit| clean(**logit) > own).count();
    TokenLogprob { token_id, logprob: logprob(own, normalizer), rank: 1 + better as u32 }
}

/// Appends the `count` most likely tokens, best first, of equals the lowest id first.
#[inline(always)]
pub(super) fn push_most_likely(
    logits: &[f32],
    normalizer: f32,
    count: usize,
    candidates: &mut Vec<Candidate>,
    top: &mut Vec<TokenLogprob>,
) {
    keep_best(logits, count, candidates);
    candidates.sort_unstable_by(best_first);
    let mut rank = 0;
    let mut previous = f32::NAN;
    for (place, candidate) in (1..).zip(candidates.iter()) {
        if candidate.logit != previous {
            (rank, previous) = (place, candidate.logit);
        }
        let logprob = logprob(candidate.logit, normalizer);
        top.push(TokenLogprob { token_id: candidate.token_id, logprob, rank });
    }
}

fn logprob(logit: f32, normalizer: f32) -> f32 {
    if logit == f32::NEG_INFINITY { logit } else { logit - normalizer }
}
