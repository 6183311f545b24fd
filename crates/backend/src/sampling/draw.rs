//! Which tokens may be drawn, and the draw. Nothing sorts the vocabulary: the k best are found in one pass, and the nucleus
//! and the drawn token by a quickselect that follows the weight instead of the count.

use std::cmp::Ordering;

use baton_core::TokenId;

use super::{Candidate, clean, random_bits};
use crate::SampleRow;

/// The weight of the most likely token. Sums of up to 2^24 weights fit a u64.
const ONE: f64 = (1_u64 << 40) as f64;

/// The lowest id of those with the largest logit; 0 if all are −∞.
pub(super) fn most_likely(logits: &[f32]) -> TokenId {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, raw) in logits.iter().enumerate() {
        let logit = clean(*raw);
        if logit > best.1 {
            best = (token, logit);
        }
    }
    best.0 as TokenId
}

/// `max` is the largest clean logit and finite; the temperature is above 0.
pub(super) fn draw(logits: &[f32], max: f32, row: &SampleRow, candidates: &mut Vec<Candidate>) -> TokenId {
    let top_k = row.top_k as usize;
    let has_top_k = top_k > 0 && top_k < logits.len();
    let has_top_p = row.top_p < 1.0;
    let min_weight = ((f64::from(row.min_p).clamp(0.0, 1.0) * ONE).ceil() as u64).max(1);

    if has_top_k {
        keep_best(logits, top_k, candidates);
        for candidate in &mut *candidates {
            candidate.weight = weight(candidate.logit, max, row.temperature);
        }
        candidates.retain(|candidate| candidate.weight >= min_weight);
    } else {
        candidates.clear();
        candidates.extend((0..).zip(logits).filter_map(|(token_id, raw)| {
            let logit = clean(*raw);
            let weight = weight(logit, max, row.temperature);
            (weight >= min_weight).then_some(Candidate { logit, token_id, weight })
        }));
    }
    if has_top_p {
        let needed = (f64::from(row.top_p) * total_weight(candidates) as f64).ceil() as u64;
        let kept = prefix_reaching(candidates, best_first, needed);
        candidates.truncate(kept);
    }

    let total = total_weight(candidates);
    let target = ((u128::from(random_bits(row.seed, row.counter)) * u128::from(total)) >> 64) as u64;
    let place = if has_top_k || has_top_p {
        prefix_reaching(candidates, |a, b| a.token_id.cmp(&b.token_id), target + 1) - 1
    } else {
        first_exceeding(candidates, target)
    };
    candidates[place].token_id
}

/// Fixed-point probability relative to the most likely token.
pub(super) fn weight(logit: f32, max: f32, temperature: f32) -> u64 {
    (f64::from(((logit - max) / temperature).exp()) * ONE) as u64
}

/// Leaves the `count` most likely tokens in `into`, in no order, with weights unset.
///
/// The buffer may hold twice as many; when it is full, the better half stays, and its worst is what later tokens must
/// beat. Later tokens have higher ids, so that those equal to it lose.
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

fn total_weight(candidates: &[Candidate]) -> u64 {
    candidates.iter().map(|candidate| candidate.weight).sum()
}

/// Of candidates in the order of their ids: the first whose cumulative weight exceeds `target`, which is below the total.
fn first_exceeding(candidates: &[Candidate], target: u64) -> usize {
    let mut sum = 0;
    let exceeds = |candidate: &Candidate| {
        sum += candidate.weight;
        sum > target
    };
    candidates.iter().position(exceeds).expect("the target is below the total weight")
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
