//! Which tokens may be drawn, and the draw. Nothing sorts the vocabulary: the k best are found in one pass, and the nucleus
//! and the drawn token by a quickselect that follows the weight instead of the count.

use std::cmp::Ordering;

use baton_core::TokenId;

use super::weight::{clean, fixed_point, largest, likelihood};
use baton_core::random::philox;

use super::Candidate;
use crate::SampleRow;

/// The lowest id of those with the largest logit, and that logit; 0 and −∞ if all are −∞.
#[inline(always)]
pub(super) fn most_likely(logits: &[f32]) -> (TokenId, f32) {
    // One pass over all of them, without branches in it; the search is then a short one.
    const SPAN: usize = 1024;
    let (mut start, mut max) = (0, f32::NEG_INFINITY);
    for (number, span) in logits.chunks(SPAN).enumerate() {
        let highest = largest(span);
        if highest > max {
            (start, max) = (number * SPAN, highest);
        }
    }
    let first = logits[start..].iter().position(|logit| clean(*logit) == max);
    (start as TokenId + first.expect("the largest logit is one of them") as TokenId, max)
}

/// `max` is the largest clean logit and finite; the temperature is above 0.
#[inline(always)]
pub(super) fn draw(logits: &[f32], max: f32, row: &SampleRow, candidates: &mut Vec<Candidate>) -> TokenId {
    let top_k = row.top_k as usize;
    let has_top_k = top_k > 0 && top_k < logits.len();
    let has_top_p = row.top_p < 1.0;
    // Never above 1, or not even the most likely token would be left.
    let min_p = row.min_p.min(1.0);
    let weight_of = |logit: f32| {
        let likelihood = likelihood(logit, max, row.temperature);
        fixed_point(if likelihood >= min_p { likelihood } else { 0.0 })
    };
    let random = philox(row.seed, row.counter);

    let total: u64 = if has_top_k {
        keep_best(logits, top_k, candidates);
        for candidate in &mut *candidates {
            candidate.weight = weight_of(candidate.logit);
        }
        total_weight(candidates)
    } else {
        logits.iter().map(|logit| weight_of(*logit)).sum()
    };
    if !has_top_k && !has_top_p {
        return first_exceeding(logits, weight_of, scale_down(random, total));
    }
    if has_top_p {
        let needed = (f64::from(row.top_p) * total as f64).ceil() as u64;
        if !has_top_k {
            // All that are lighter than this weigh less than what the nucleus leaves out, so that none is in it.
            let lightest = total.saturating_sub(needed) / logits.len() as u64;
            collect(logits, weight_of, lightest.max(1), candidates);
        }
        let kept = prefix_reaching(candidates, best_first, needed);
        candidates.truncate(kept);
    }
    let target = scale_down(random, total_weight(candidates));
    let reached = prefix_reaching(candidates, |a, b| a.token_id.cmp(&b.token_id), target + 1);
    candidates[reached - 1].token_id
}

/// Leaves the `count` most likely tokens in `into`, in no order, with weights unset.
///
/// The buffer may hold twice as many; when it is full, the better half stays, and its worst is what later tokens must
/// beat. Later tokens have higher ids, so that those equal to it lose.
#[inline(always)]
pub(super) fn keep_best(logits: &[f32], count: usize, into: &mut Vec<Candidate>) {
    into.clear();
    if count == 0 {
        return;
    }
    let room = (2 * count).max(64);
    let mut to_beat = None;
    for (token_id, raw) in (0..).zip(logits) {
        let logit = clean(*raw);
        if to_beat.is_none_or(|worst| logit > worst) {
            into.push(Candidate { logit, token_id, weight: 0 });
            if into.len() == room {
                let (_, worst, _) = into.select_nth_unstable_by(count - 1, best_first);
                to_beat = Some(worst.logit);
                into.truncate(count);
            }
        }
    }
    if into.len() > count {
        into.select_nth_unstable_by(count - 1, best_first);
        into.truncate(count);
    }
}

/// Descending logit; of equals the lowest id first.
pub(super) fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token_id.cmp(&b.token_id))
}

/// All tokens of at least this weight.
#[inline(always)]
fn collect(logits: &[f32], weight_of: impl Fn(f32) -> u64, lightest: u64, into: &mut Vec<Candidate>) {
    // Chunks without one are passed over, which vectors can find out.
    const CHUNK: usize = 64;
    into.clear();
    let mut weights = [0; CHUNK];
    for (number, chunk) in logits.chunks(CHUNK).enumerate() {
        for (weight, logit) in weights.iter_mut().zip(chunk) {
            *weight = weight_of(*logit);
        }
        let weights = &weights[..chunk.len()];
        if weights.iter().fold(0, |most, weight| most.max(*weight)) < lightest {
            continue;
        }
        for (i, (&weight, logit)) in weights.iter().zip(chunk).enumerate() {
            if weight >= lightest {
                let token_id = (number * CHUNK + i) as TokenId;
                into.push(Candidate { logit: clean(*logit), token_id, weight });
            }
        }
    }
}

/// `random / 2^64 · total`, rounded down.
fn scale_down(random: u64, total: u64) -> u64 {
    ((u128::from(random) * u128::from(total)) >> 64) as u64
}

#[inline(always)]
fn total_weight(candidates: &[Candidate]) -> u64 {
    candidates.iter().map(|candidate| candidate.weight).sum()
}

/// The first token whose cumulative weight exceeds `target`, which is below the total.
#[inline(always)]
fn first_exceeding(logits: &[f32], weight_of: impl Fn(f32) -> u64, target: u64) -> TokenId {
    // Whole chunks are passed over by their sums, which vectors can add.
    const CHUNK: usize = 256;
    let mut sum = 0;
    for (chunk_number, chunk) in logits.chunks(CHUNK).enumerate() {
        let chunk_sum: u64 = chunk.iter().map(|logit| weight_of(*logit)).sum();
        if sum + chunk_sum <= target {
            sum += chunk_sum;
            continue;
        }
        for (i, logit) in chunk.iter().enumerate() {
            sum += weight_of(*logit);
            if sum > target {
                return (chunk_number * CHUNK + i) as TokenId;
            }
        }
    }
    unreachable!("the target is below the total weight");
}

/// Moves the shortest prefix (in `order`) whose weights add up to at least `needed` to the front and returns its length,
/// at least 1. `needed` is at most the total.
fn prefix_reaching(
    candidates: &mut [Candidate],
    order: impl Fn(&Candidate, &Candidate) -> Ordering,
    needed: u64,
) -> usize {
    // The first `low` do not reach it, the first `high` do.
    let (mut low, mut high) = (0, candidates.len());
    let mut below = 0;
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        candidates[low..high].select_nth_unstable_by(middle - low, &order);
        let left = total_weight(&candidates[low..middle]);
        if below + left >= needed {
            high = middle;
        } else {
            below += left;
            low = middle;
        }
    }
    low + 1
}
