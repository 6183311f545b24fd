//! However attention is planned, and wherever its pages lie, the result is that of the naive loops.

use super::*;
use crate::{AttentionItem, AttentionMerge, BlockCopy, NO_PARTIAL};

fn kinds() -> Vec<Kind> {
    let rope = |inv_freq: &[f32], scale, style| Some(RopeSpec { inv_freq: inv_freq.to_vec(), scale, style });
    vec![
        Kind::plain(),
        Kind { window: Some(5), ..Kind::plain() },
        Kind { softcap: Some(2.0), qk_norm: true, ..Kind::plain() },
        Kind { alibi: true, rope: None, ..Kind::plain() },
        Kind { sinks: true, window: Some(5), ..Kind::plain() },
        Kind { rope: rope(&[1.0, 0.1], 1.3, RopeStyle::Half), window: Some(1), ..Kind::plain() },
        Kind { rope: rope(&[1.0, 0.1, 0.01], 0.9, RopeStyle::Interleaved), ..Kind::plain() },
        Kind { window: Some(9), softcap: Some(1.0), alibi: true, qk_norm: true, ..Kind::plain() },
    ]
}

/// Prefills, then one step with a whole prompt, the second chunk of another and a decode.
fn check_mixed_batch(kind: &Kind, split: u32, max_queries: u32) {
    let what = format!("{kind:?}, split {split}, at most {max_queries} queries");
    let mut random = Random::new(8);
    let mut bench = Bench::new(kind);
    let prompt = Seq::random(&mut random, 13, &[20, 3, 7, 11]);
    let chunked = Seq::random(&mut random, 12, &[1, 30, 2]);
    let decode = Seq::random(&mut random, 19, &[5, 4, 31, 0, 9]);

    let mut input = StepInput::default();
    let seqs = [chunked.add_to(&mut input, 0..5), decode.add_to(&mut input, 0..18)];
    bench.plan_and_run(&mut input, &seqs, split, max_queries);
    let mut expected = naive::attention(kind, &chunked.tokens[..5]).concat();
    expected.extend(naive::attention(kind, &decode.tokens[..18]).concat());
    assert_close(&bench.attended(23), &expected, &what);

    input.clear();
    let seqs = [
        decode.add_to(&mut input, 18..19),
        prompt.add_to(&mut input, 0..13),
        chunked.add_to(&mut input, 5..12),
    ];
    bench.plan_and_run(&mut input, &seqs, split, max_queries);
    let mut expected = naive::attention(kind, &decode.tokens)[18].clone();
    expected.extend(naive::attention(kind, &prompt.tokens).concat());
    expected.extend(naive::attention(kind, &chunked.tokens)[5..].concat());
    assert_close(&bench.attended(21), &expected, &what);
}

#[test]
fn every_kind_and_plan_equals_the_naive_loops() {
    for kind in kinds() {
        for (split, max_queries) in [(0, 0), (4, 0), (8, 3), (16, 1)] {
            check_mixed_batch(&kind, split, max_queries);
        }
    }
}

#[test]
fn the_cache_rounds_to_its_dtype() {
    let tokens: Vec<u32> = (0..9).collect();
    let exact = naive::attention(&Kind::plain(), &tokens).concat();
    for dtype in [KvDtype::F16, KvDtype::BF16, KvDtype::Int8, KvDtype::F8E4M3] {
        let kind = Kind { dtype, ..Kind::plain() };
        let rounded = naive::attention(&kind, &tokens).concat();
        let difference = exact.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(
            difference > 2e-4,
            "{dtype:?} must differ from f32 for this test to mean something: {difference}"
        );

        let mut bench = Bench::new(&kind);
        let mut input = StepInput::default();
        let seq = Seq { tokens: tokens.clone(), blocks: vec![2, 1, 0] }.add_to(&mut input, 0..9);
        bench.plan_and_run(&mut input, &[seq], 0, 0);
        assert_close(&bench.attended(9), &rounded, "rounded");
    }
}

/// Three sequences with two blocks in common: one item reads the prefix for all of them.
#[test]
fn a_shared_prefix_is_read_once_for_many_sequences() {
    let kind = Kind { softcap: Some(3.0), ..Kind::plain() };
    let mut random = Random::new(9);
    let mut bench = Bench::new(&kind);
    let first = Seq::random(&mut random, 13, &[6, 2, 10, 11]);
    let sharing = |random: &mut Random, len: usize, own: &[u32]| {
        let mut seq = Seq::random(random, len, &[&[6, 2], own].concat());
        seq.tokens[..8].copy_from_slice(&first.tokens[..8]);
        seq
    };
    let seqs = [first.clone(), sharing(&mut random, 9, &[12]), sharing(&mut random, 11, &[13])];

    let mut input = StepInput::default();
    let mut queries = vec![first.add_to(&mut input, 0..12)];
    queries.push(seqs[2].add_to(&mut input, 8..10));
    bench.plan_and_run(&mut input, &queries, 0, 0);

    input.clear();
    let rows: Vec<_> =
        seqs.iter().map(|seq| seq.add_to(&mut input, seq.tokens.len() - 1..seq.tokens.len())).collect();
    let mut plan = AttentionPlan { num_partials: 6, ..AttentionPlan::default() };
    let prefix =
        AttentionItem { query_start: 0, num_queries: 3, pages_start: 0, kv_start: 0, kv_len: 8, partial: 3 };
    plan.items.push(prefix);
    for (i, row) in (0..).zip(&rows) {
        plan.items.push(AttentionItem {
            query_start: i,
            num_queries: 1,
            pages_start: row.pages_start + 2,
            kv_start: 8,
            kv_len: row.first_position + 1 - 8,
            partial: i,
        });
        plan.merges.push(AttentionMerge { query: i, first: 2 * i, count: 2 });
        plan.merge_slots.extend([3 + i, i]);
    }
    input.attention = vec![plan];
    bench.run(&input);
    let expected: Vec<f32> =
        seqs.iter().flat_map(|seq| naive::attention(&kind, &seq.tokens).pop().unwrap()).collect();
    assert_close(&bench.attended(3), &expected, "shared prefix");
}

/// A split that shows a query nothing contributes nothing.
#[test]
fn an_empty_partial_is_neutral() {
    let kind = Kind::plain();
    let mut bench = Bench::new(&kind);
    let seq = Seq::random(&mut Random::new(4), 8, &[1, 2]);
    let mut input = StepInput::default();
    seq.add_to(&mut input, 0..8);
    let item = |kv_start: u32, partial| AttentionItem {
        query_start: 0,
        num_queries: 8,
        pages_start: kv_start / 4,
        kv_start,
        kv_len: 4,
        partial,
    };
    let merges = (0..8).map(|query| AttentionMerge { query, first: 2 * query, count: 2 }).collect();
    // The split that the first four queries do not see comes first in their merges.
    let merge_slots = (0..8).flat_map(|query| [query + 8, query]).collect();
    input.attention = vec![AttentionPlan {
        items: vec![item(4, 8), item(0, 0)],
        merges,
        merge_slots,
        num_partials: 16,
        num_shared_items: 0,
    }];
    bench.run(&input);
    assert_close(&bench.attended(8), &naive::attention(&kind, &seq.tokens).concat(), "empty partial");
}

/// Out to the host, back to other blocks, and copied once more; the old blocks are overwritten in between.
#[test]
fn blocks_move_between_tiers() {
    let kind = Kind::plain();
    let mut random = Random::new(3);
    let mut bench = Bench::new(&kind);
    let moved = |from, to| BlockCopy { from, to };
    let mut seq = Seq::random(&mut random, 10, &[0, 1, 2]);
    let other = Seq::random(&mut random, 12, &[0, 1, 2]);

    let mut input = StepInput::default();
    let rows = seq.add_to(&mut input, 0..8);
    bench.plan_and_run(&mut input, &[rows], 0, 0);

    input.clear();
    input.swap_out = vec![moved(0, 9), moved(1, 8)];
    let rows = other.add_to(&mut input, 0..12);
    bench.plan_and_run(&mut input, &[rows], 0, 0);

    input.clear();
    // The order of the lists: block 5 is saved before it is overwritten, filled before it is copied.
    input.swap_out = vec![moved(0, 0)];
    input.swap_in = vec![moved(9, 0), moved(8, 5)];
    input.copies = vec![moved(5, 6), moved(6, 7)];
    seq.blocks = vec![0, 7, 12];
    let rows = seq.add_to(&mut input, 8..10);
    bench.plan_and_run(&mut input, &[rows], 0, 0);
    assert_close(&bench.attended(2), &naive::attention(&kind, &seq.tokens)[8..].concat(), "swapped in");

    input.clear();
    input.swap_in = vec![moved(0, 20)];
    let mut other = Seq { blocks: vec![20, 1, 2, 21], ..other };
    other.tokens.push(1);
    let rows = other.add_to(&mut input, 12..13);
    bench.plan_and_run(&mut input, &[rows], 0, 0);
    assert_close(&bench.attended(1), &naive::attention(&kind, &other.tokens)[12], "the other sequence");
}

#[test]
fn a_sampled_token_is_fed_back_on_the_device() {
    let kind = Kind::plain();
    let prompt = Seq::random(&mut Random::new(6), 7, &[3, 4]);
    let mut bench = Bench::new(&kind);
    let mut input = StepInput::default();
    let rows = prompt.add_to(&mut input, 0..6);
    input.logit_rows = vec![5];
    input.samples = vec![SampleRow::greedy(0)];
    let drawn = bench.plan_and_run(&mut input, &[rows], 0, 0).samples[0].chosen.token_id;

    let mut known = prompt.clone();
    known.tokens[6] = drawn;
    input.clear();
    let rows = prompt.add_to(&mut input, 6..7);
    input.token_ids[0] = u32::MAX;
    input.feedback = vec![(0, 0)];
    bench.plan_and_run(&mut input, &[rows], 0, 0);
    assert_close(&bench.attended(1), &naive::attention(&kind, &known.tokens)[6], "feedback");
    assert_eq!(input.attention[0].items[0].partial, NO_PARTIAL);
}
