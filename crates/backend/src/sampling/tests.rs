//! The sampler against a naive one that sorts everything, and against the probabilities themselves.

use baton_core::random::philox;
use proptest::prelude::*;

use super::*;
use crate::TokenCount;
use crate::testing::Random;

fn plain_row() -> SampleRow {
    SampleRow { temperature: 1.0, seed: 11, ..SampleRow::greedy(0) }
}

fn sample(logits: &[f32], row: &SampleRow) -> (Sampled, Vec<TokenLogprob>) {
    let mut top = Vec::new();
    let sampled = sample_row(logits, row, RowLists::default(), &mut SampleScratch::default(), &mut top);
    (sampled, top)
}

fn token(logits: &[f32], row: &SampleRow) -> TokenId {
    sample(logits, row).0.chosen.token_id
}

/// Sorts the whole vocabulary and walks it; shares only the fixed-point weight.
fn naive_token(logits: &[f32], row: &SampleRow) -> TokenId {
    let clean: Vec<f32> =
        logits.iter().map(|logit| if logit.is_nan() { f32::NEG_INFINITY } else { *logit }).collect();
    let mut order: Vec<usize> = (0..clean.len()).collect();
    order.sort_by(|a, b| clean[*b].partial_cmp(&clean[*a]).unwrap().then(a.cmp(b)));
    if row.temperature == 0.0 || clean[order[0]] == f32::NEG_INFINITY {
        return order[0] as TokenId;
    }
    let weights: Vec<u64> = clean.iter().map(|l| weight(*l, clean[order[0]], row.temperature)).collect();
    let best = clean[order[0]];
    order.retain(|i| likelihood(clean[*i], best, row.temperature) >= row.min_p);
    if row.top_k > 0 {
        order.truncate(row.top_k as usize);
    }
    if row.top_p < 1.0 {
        let total: u64 = order.iter().map(|i| weights[*i]).sum();
        let needed = (f64::from(row.top_p) * total as f64).ceil() as u64;
        let mut sum = 0;
        let reached = order.iter().position(|i| {
            sum += weights[*i];
            sum >= needed
        });
        order.truncate(reached.unwrap() + 1);
    }
    order.sort_unstable();
    let total: u64 = order.iter().map(|i| weights[*i]).sum();
    let target = (u128::from(philox(row.seed, row.counter)) * u128::from(total)) >> 64;
    let mut sum = 0_u128;
    let drawn = order.into_iter().find(|i| {
        sum += u128::from(weights[*i]);
        sum > target
    });
    drawn.unwrap() as TokenId
}

/// Textbook probabilities in f64.
fn probabilities(logits: &[f32], row: &SampleRow) -> Vec<f64> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap());
    let scaled = |i: usize| (f64::from(logits[i]) / f64::from(row.temperature)).exp();
    order.retain(|i| scaled(*i) >= f64::from(row.min_p) * scaled(order_first(logits)));
    if row.top_k > 0 {
        order.truncate(row.top_k as usize);
    }
    let total: f64 = order.iter().map(|i| scaled(*i)).sum();
    let mut sum = 0.0;
    let mut result = vec![0.0; logits.len()];
    for i in order {
        if sum < f64::from(row.top_p) * total {
            result[i] = scaled(i);
        }
        sum += scaled(i);
    }
    let kept: f64 = result.iter().sum();
    result.iter().map(|p| p / kept).collect()
}

fn order_first(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap()
}

/// Pearson's statistic over draws at counters 0.., and how many cells have an expectation.
fn chi_square(logits: &[f32], row: &SampleRow, draws: u64) -> (f64, usize) {
    let mut counts = vec![0_u32; logits.len()];
    for counter in 0..draws {
        counts[token(logits, &SampleRow { counter, ..row.clone() }) as usize] += 1;
    }
    let expected = probabilities(logits, row);
    let mut statistic = 0.0;
    for (count, p) in counts.iter().zip(&expected) {
        if *p == 0.0 {
            assert_eq!(*count, 0, "a token that is filtered out was drawn");
        } else {
            let expected = p * draws as f64;
            statistic += (f64::from(*count) - expected).powi(2) / expected;
        }
    }
    (statistic, expected.iter().filter(|p| **p > 0.0).count())
}

#[test]
fn draws_follow_the_probabilities() {
    let mut random = Random::new(5);
    let logits: Vec<f32> = (0..40).map(|_| 1.5 * random.normal()).collect();
    let rows = [
        plain_row(),
        SampleRow { temperature: 0.6, ..plain_row() },
        SampleRow { temperature: 1.7, ..plain_row() },
        SampleRow { top_k: 7, ..plain_row() },
        SampleRow { top_p: 0.8, ..plain_row() },
        SampleRow { min_p: 0.1, ..plain_row() },
        SampleRow { temperature: 1.3, min_p: 0.02, top_k: 20, top_p: 0.9, ..plain_row() },
    ];
    for row in rows {
        let (statistic, cells) = chi_square(&logits, &row, 20_000);
        assert!(cells > 2, "the test needs something to draw from");
        // Mean `cells - 1`, variance twice that: six standard deviations.
        let freedom = (cells - 1) as f64;
        assert!(
            statistic < freedom + 6.0 * (2.0 * freedom).sqrt(),
            "{row:?}: {statistic} over {cells} cells"
        );
    }
}

fn any_logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -12.0_f32..12.0,
        4 => (-3_i8..3).prop_map(f32::from),
        1 => Just(f32::NEG_INFINITY),
        1 => Just(f32::NAN),
    ]
}

proptest! {
    #[test]
    fn equals_the_naive_sampler(
        logits in prop::collection::vec(any_logit(), 1..300),
        temperature in prop_oneof![Just(0.0_f32), 0.05_f32..3.0],
        top_k in prop_oneof![Just(0_u32), 1_u32..320],
        top_p in prop_oneof![Just(1.0_f32), 0.001_f32..1.0],
        min_p in prop_oneof![Just(0.0_f32), 0.0_f32..1.0],
        seed: u64,
        counter: u64,
    ) {
        let row = SampleRow { temperature, top_k, top_p, min_p, seed, counter, ..plain_row() };
        prop_assert_eq!(token(&logits, &row), naive_token(&logits, &row));
    }

    /// A mask is the same as logits of −∞, and nothing outside it is drawn however broken the logits are.
    #[test]
    fn nothing_outside_the_mask_is_drawn(
        logits in prop::collection::vec(any_logit(), 1..300),
        mask in prop::collection::vec(any::<u32>(), 10),
        sparse: bool,
        temperature in prop_oneof![Just(0.0_f32), 0.05_f32..3.0],
        top_k in prop_oneof![Just(0_u32), 1_u32..320],
        top_p in prop_oneof![Just(1.0_f32), 0.001_f32..1.0],
        seed: u64,
    ) {
        let mask: Vec<u32> = mask.iter().map(|word| if sparse { word & (word << 7) & (word >> 9) } else { *word }).collect();
        let allowed: Vec<u32> = (0..logits.len() as u32).filter(|&token| mask_allows(&mask, token)).collect();
        prop_assume!(!allowed.is_empty());
        // A bias cannot bring a banned token back.
        let biases: Vec<(TokenId, f32)> = (0..logits.len() as u32).map(|token| (token, 0.0)).chain([(3, 100.0)]).collect();
        let lists = RowLists { biases: &biases, mask: &mask, ..RowLists::default() };
        let row = SampleRow { temperature, top_k, top_p, seed, num_logprobs: Some(1), ..plain_row() };
        let mut top = Vec::new();
        let sampled = sample_row(&logits, &row, lists, &mut SampleScratch::default(), &mut top);
        let token_id = sampled.chosen.token_id;
        prop_assert!(allowed.contains(&token_id));
        let mut masked: Vec<f32> = logits.clone();
        if let Some(logit) = masked.get_mut(3) {
            *logit += 100.0;
        }
        for (id, logit) in masked.iter_mut().enumerate() {
            if !mask_allows(&mask, id as u32) {
                *logit = f32::NEG_INFINITY;
            }
        }
        if masked.iter().any(|logit| *logit > f32::NEG_INFINITY) {
            prop_assert_eq!(token_id, naive_token(&masked, &row));
        } else {
            prop_assert_eq!(token_id, allowed[0]);
        }
        // The log-probability is that of the raw logits.
        let plain = SampleRow { forced: Some(token_id), ..row };
        prop_assert_eq!(sampled.chosen, sample(&logits, &plain).0.chosen);
    }

    #[test]
    fn the_most_likely_tokens_are_those_of_a_sort(
        logits in prop::collection::vec(any_logit(), 1..300),
        count in 0_u32..130,
        forced in 0_u32..300,
    ) {
        let row = SampleRow { forced: Some(forced), num_logprobs: Some(count), ..plain_row() };
        let (sampled, top) = sample(&logits, &row);
        let clean: Vec<f32> = logits.iter().map(|l| if l.is_nan() { f32::NEG_INFINITY } else { *l }).collect();
        let mut order: Vec<u32> = (0..clean.len() as u32).collect();
        order.sort_by(|a, b| clean[*b as usize].partial_cmp(&clean[*a as usize]).unwrap().then(a.cmp(b)));
        order.truncate(count as usize);
        prop_assert_eq!(top.iter().map(|t| t.token_id).collect::<Vec<_>>(), order);
        prop_assert_eq!(sampled.top, 0..top.len() as u32);
        for entry in top.iter().chain([&sampled.chosen]) {
            let own = clean.get(entry.token_id as usize).copied().unwrap_or(f32::NEG_INFINITY);
            prop_assert_eq!(entry.rank as usize, 1 + clean.iter().filter(|l| **l > own).count());
        }
    }
}

#[test]
fn the_same_seed_and_counter_draw_the_same_token_in_any_scratch() {
    let mut random = Random::new(1);
    let logits = random.normals(500);
    let mut scratch = SampleScratch::with_vocab_size(500);
    let mut drawn = Vec::new();
    for counter in 0..64 {
        let row = SampleRow { counter, top_p: 0.95, ..plain_row() };
        let again =
            sample_row(&logits, &row, RowLists::default(), &mut scratch, &mut Vec::new()).chosen.token_id;
        assert_eq!(again, token(&logits, &row));
        drawn.push(again);
    }
    let other_seed: Vec<_> = (0..64)
        .map(|counter| token(&logits, &SampleRow { seed: 12, counter, top_p: 0.95, ..plain_row() }))
        .collect();
    assert_ne!(drawn, other_seed);
}

#[test]
fn scratch_is_not_outgrown() {
    let logits = Random::new(2).normals(1000);
    let mut scratch = SampleScratch::with_vocab_size(1000);
    let capacity = (scratch.adjusted.capacity(), scratch.candidates.capacity());
    let lists = RowLists { biases: &[(1, 1.0)], ..RowLists::default() };
    for top_k in [0, 1, 600, 999] {
        let row = SampleRow { top_k, num_logprobs: Some(128), ..plain_row() };
        sample_row(&logits, &row, lists, &mut scratch, &mut Vec::new());
    }
    assert_eq!((scratch.adjusted.capacity(), scratch.candidates.capacity()), capacity);
}

#[test]
fn greedy_takes_the_lowest_id_of_equals() {
    let row = SampleRow { temperature: 0.0, ..plain_row() };
    assert_eq!(token(&[-1.0, 2.0, 0.0, 2.0], &row), 1);
    assert_eq!(token(&[-0.0, 0.0], &row), 0);
    assert_eq!(token(&[f32::NAN, -5.0, f32::NAN], &row), 1);
    assert_eq!(token(&[0.0, f32::INFINITY, f32::NAN], &row), 1);
    for highest in [[0, 1], [1023, 1024], [1024, 4999], [4998, 4999]] {
        let mut logits = vec![-3.0; 5000];
        for id in highest {
            logits[id] = 7.0;
        }
        assert_eq!(token(&logits, &row), highest[0] as TokenId);
    }
}

#[test]
fn broken_rows_do_not_panic() {
    for temperature in [0.0, 1e-30, 1.0, f32::INFINITY, f32::NAN] {
        for (top_k, top_p, min_p) in [(0, 1.0, 0.0), (1, 0.0, 1.0), (2, 0.5, 0.3), (9, 0.0, 0.0)] {
            let row = SampleRow { temperature, top_k, top_p, min_p, num_logprobs: Some(2), ..plain_row() };
            let (all_banned, top) = sample(&[f32::NEG_INFINITY, f32::NAN, f32::NEG_INFINITY], &row);
            assert_eq!(all_banned.chosen.token_id, 0);
            assert_eq!((all_banned.chosen.logprob, all_banned.chosen.rank), (f32::NEG_INFINITY, 1));
            assert_eq!(top.len(), 2);
            let (infinite, _) = sample(&[0.0, f32::INFINITY, f32::NAN], &row);
            assert_eq!((infinite.chosen.token_id, infinite.chosen.logprob), (1, 0.0));
        }
    }
}

#[test]
fn ties_at_the_threshold_leave_exactly_k() {
    let row = SampleRow { top_k: 2, ..plain_row() };
    let drawn: Vec<_> = (0..200)
        .map(|counter| token(&[0.0, 1.0, 1.0, 1.0, 1.0], &SampleRow { counter, ..row.clone() }))
        .collect();
    assert!(drawn.contains(&1) && drawn.contains(&2));
    assert!(drawn.iter().all(|token| *token == 1 || *token == 2));
}

#[test]
fn top_p_keeps_at_least_one() {
    for counter in 0..50 {
        let row = SampleRow { top_p: 0.0, counter, ..plain_row() };
        assert_eq!(token(&[0.0, 3.0, 2.9], &row), 1);
    }
}

#[test]
fn biases_then_penalties_in_vllms_order() {
    let history = [
        TokenCount { token_id: 0, in_prompt: true, num_output: 0 },
        TokenCount { token_id: 1, in_prompt: false, num_output: 2 },
        TokenCount { token_id: 2, in_prompt: false, num_output: 1 },
        TokenCount { token_id: 99, in_prompt: true, num_output: 1 },
    ];
    let row =
        SampleRow { repetition_penalty: 2.0, presence_penalty: 0.25, frequency_penalty: 0.5, ..plain_row() };
    let mut logits = [3.0, 4.0, -1.0, 1.0, 5.0];
    let biases = [(0, 1.0), (4, f32::NEG_INFINITY), (98, 1.0)];
    let lists = RowLists { history: &history, biases: &biases, mask: &[] };
    adjust::adjust(&mut logits, &row, &lists);
    assert_eq!(logits, [2.0, 4.0 / 2.0 - 1.0 - 0.25, -2.0 - 0.5 - 0.25, 1.0, f32::NEG_INFINITY]);

    let greedy = SampleRow { temperature: 0.0, ..row };
    let lists = RowLists { history: &history, biases: &[(4, f32::NEG_INFINITY)], mask: &[] };
    let mut top = Vec::new();
    let raw = [1.0, 4.0, -1.0, 1.0, 5.0];
    let scored = SampleRow { num_logprobs: Some(1), ..greedy };
    let sampled = sample_row(&raw, &scored, lists, &mut SampleScratch::default(), &mut top);
    // Token 3 wins after the ban of 4 and the penalty on 1; its log-probability is still that of the raw logits.
    assert_eq!((sampled.chosen.token_id, sampled.chosen.rank), (3, 3));
    assert_eq!(top[0].token_id, 4);
    let sum: f64 = raw.iter().map(|l| f64::from(*l).exp()).sum();
    assert!((f64::from(sampled.chosen.logprob) - (1.0 - sum.ln())).abs() < 1e-6);
    assert!((f64::from(top[0].logprob) - (5.0 - sum.ln())).abs() < 1e-6);
}

#[test]
fn results_of_threads_gather_in_order() {
    let logits = [0.0, 1.0, 2.0];
    let mut output = StepOutput::default();
    for count in [2, 0, 1] {
        let row = SampleRow { temperature: 0.0, num_logprobs: Some(count), ..plain_row() };
        let (sampled, top) = sample(&logits, &row);
        push_sampled(&mut output, &sampled, &top);
    }
    let ranges: Vec<_> = output.samples.iter().map(|sampled| sampled.top.clone()).collect();
    assert_eq!(ranges, [0..2, 2..2, 2..3]);
    assert_eq!(output.top.iter().map(|top| top.token_id).collect::<Vec<_>>(), [2, 1, 2]);
    let silent = sample(&logits, &SampleRow { temperature: 0.0, ..plain_row() }).0;
    assert_eq!(silent.chosen, TokenLogprob { token_id: 2, logprob: 0.0, rank: 0 });
}
