//! Plans of random sequences, alone and in trees of common beginnings: every key that a query sees is read exactly once.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::{Backend, DeviceInfo};

const SHARING: ShareOptions = ShareOptions {
    block_size: 64,
    window: None,
    border: 64,
    min_keys: 64,
    min_seqs: 2,
    max_queries: 8,
    queries_per_read: 0,
    read_cost: 1,
    query_cost: 24,
    step_cost: 0,
};

/// The sequences stand one after another, in rows as in pages.
fn sequences(shapes: &[(u32, u32)], block_size: u32) -> Vec<SequenceQueries> {
    let (mut query_start, mut pages_start) = (0, 0);
    let place = |(first_position, num_queries): &(u32, u32)| {
        let seq = SequenceQueries {
            query_start,
            num_queries: *num_queries,
            first_position: *first_position,
            pages_start,
        };
        query_start += num_queries;
        pages_start += (first_position + num_queries).div_ceil(block_size);
        seq
    };
    shapes.iter().map(place).collect()
}

/// How each query's keys are spread over items: for each row, the key ranges it reads, clipped to what it sees.
fn readings(
    seqs: &[SequenceQueries],
    plan: &AttentionPlan,
    window: Option<u32>,
) -> BTreeMap<u32, Vec<(u32, u32)>> {
    let mut readings: BTreeMap<u32, Vec<(u32, u32)>> = BTreeMap::new();
    for item in &plan.items {
        for query in item.query_start..item.query_start + item.num_queries {
            let seq = seqs.iter().find(|s| (s.query_start..s.query_start + s.num_queries).contains(&query));
            let seq = seq.expect("an item's queries are rows of the step");
            let position = seq.first_position + query - seq.query_start;
            let low = item.kv_start.max(first_key(position, window));
            let high = (item.kv_start + item.kv_len).min(position + 1);
            // Only of a span with a window may a query see nothing.
            assert!(low < high || window.is_some(), "an item shows query {query} nothing: {item:?}");
            if low < high {
                readings.entry(query).or_default().push((low, high));
            }
        }
    }
    readings
}

fn check_plan(seqs: &[SequenceQueries], pages: &[u32], options: &PlannerOptions, plan: &AttentionPlan) {
    let block_size = options.block_size as u32;
    let readings = readings(seqs, plan, options.window);
    for seq in seqs {
        for i in 0..seq.num_queries {
            let position = seq.first_position + i;
            let mut next = first_key(position, options.window);
            let mut ranges = readings[&(seq.query_start + i)].clone();
            ranges.sort_unstable();
            for (low, high) in &ranges {
                assert_eq!(*low, next, "a key is missing or read twice");
                next = *high;
            }
            assert_eq!(next, position + 1);
        }
    }
    let mut written = BTreeMap::new();
    let mut direct = BTreeSet::new();
    let num_shared = plan.num_shared_items as usize;
    for (number, item) in plan.items.iter().enumerate() {
        let is_shared = number < num_shared;
        let limit = if is_shared { options.max_kv_per_shared_item } else { options.max_kv_per_item };
        assert_eq!(item.partial < plan.num_shared_partials(), is_shared, "slots of shared items come first");
        assert_eq!(item.kv_start % block_size, 0);
        assert!(options.max_queries_per_item == 0 || item.num_queries <= options.max_queries_per_item);
        for i in 0..item.num_queries {
            let seq = seqs
                .iter()
                .rev()
                .find(|s| s.query_start <= item.query_start + i && s.num_queries > 0)
                .unwrap();
            let is_long = options.max_split_queries > 0 && seq.num_queries > options.max_split_queries;
            assert!(limit == 0 || is_long && !is_shared || item.kv_len <= limit);
            let num_pages = item.kv_len.div_ceil(block_size) as usize;
            let own_pages = &pages[(seq.pages_start + item.kv_start / block_size) as usize..][..num_pages];
            assert_eq!(
                &pages[item.pages_start as usize..][..num_pages],
                own_pages,
                "{item:?} reads pages of others"
            );
            if item.partial == NO_PARTIAL {
                assert!(direct.insert(item.query_start + i), "two items write a query directly");
            } else {
                assert!(written.insert(item.partial + i, item.query_start + i).is_none());
            }
        }
    }
    assert_eq!(written.len(), plan.num_partials as usize);
    for merge in &plan.merges {
        assert!(merge.count > 1 && direct.insert(merge.query), "a query is written twice");
        for slot in &plan.merge_slots[merge.first as usize..(merge.first + merge.count) as usize] {
            assert_eq!(written.remove(slot), Some(merge.query), "a partial is merged once, by its own query");
        }
    }
    assert!(written.is_empty(), "a partial is never merged");
    assert_eq!(direct.len(), seqs.iter().map(|seq| seq.num_queries as usize).sum::<usize>());
}

proptest! {
    #[test]
    fn every_visible_key_is_read_exactly_once(
        shapes in prop::collection::vec((0_u32..200, 0_u32..60), 0..6),
        block_size in prop_oneof![Just(1_u32), Just(4), Just(16)],
        split_blocks in 0_u32..6,
        window in prop_oneof![Just(None), (1_u32..90).prop_map(Some)],
        max_queries_per_item in 0_u32..20,
        max_split_queries in 0_u32..30,
    ) {
        let seqs = sequences(&shapes, block_size);
        let max_kv_per_item = split_blocks * block_size;
        let options = PlannerOptions { block_size: block_size as usize, window, max_kv_per_item, max_kv_per_shared_item: 0, max_split_queries, max_queries_per_item };
        let mut plan = AttentionPlan { num_partials: 9, ..AttentionPlan::default() };
        plan_attention(&seqs, &options, &mut plan);
        let num_pages = shapes.iter().map(|(first, queries)| (first + queries).div_ceil(block_size)).sum();
            check_plan(&seqs, &(0..num_pages).collect::<Vec<_>>(), &options, &plan);
    }

    /// A query's splits are the same whether its prompt came in one chunk or in two, alone or after another sequence.
    #[test]
    fn splits_depend_on_the_position_alone(
        first_position in 0_u32..100,
        num_queries in 2_u32..80,
        cut in 1_u32..79,
        window in prop_oneof![Just(None), (1_u32..90).prop_map(Some)],
    ) {
        let cut = cut.min(num_queries - 1);
        let options = PlannerOptions { block_size: 4, window, max_kv_per_item: 16, max_kv_per_shared_item: 0, max_split_queries: 0, max_queries_per_item: 0 };
        let whole = sequences(&[(first_position, num_queries)], 4);
        let parts = sequences(&[(7, 5), (first_position, cut), (first_position + cut, num_queries - cut)], 4);
        let (mut whole_plan, mut parts_plan) = (AttentionPlan::default(), AttentionPlan::default());
        plan_attention(&whole, &options, &mut whole_plan);
        plan_attention(&parts, &options, &mut parts_plan);
        let whole_readings = readings(&whole, &whole_plan, window);
        let parts_readings = readings(&parts, &parts_plan, window);
        for query in 0..num_queries {
            prop_assert_eq!(&whole_readings[&query], &parts_readings[&(query + 5)]);
        }
    }
}

#[test]
fn a_long_decode_is_split_and_merged() {
    let seqs = [SequenceQueries { query_start: 3, num_queries: 1, first_position: 40, pages_start: 10 }];
    let options = PlannerOptions {
        block_size: 8,
        window: None,
        max_kv_per_item: 16,
        max_kv_per_shared_item: 0,
        max_split_queries: 0,
        max_queries_per_item: 0,
    };
    let mut plan = AttentionPlan::default();
    plan_attention(&seqs, &options, &mut plan);
    let item = |pages_start, kv_start, kv_len, partial| AttentionItem {
        query_start: 3,
        num_queries: 1,
        pages_start,
        kv_start,
        kv_len,
        partial,
    };
    assert_eq!(plan.items, [item(10, 0, 16, 0), item(12, 16, 16, 1), item(14, 32, 9, 2)]);
    assert_eq!(plan.merges, [AttentionMerge { query: 3, first: 0, count: 3 }]);
    assert_eq!((plan.merge_slots, plan.num_partials), (vec![0, 1, 2], 3));
}

#[test]
fn few_long_contexts_are_split_and_many_are_not() {
    let options = PlannerOptions {
        block_size: 16,
        window: None,
        max_kv_per_item: 0,
        max_kv_per_shared_item: 0,
        max_split_queries: 1,
        max_queries_per_item: 0,
    };
    let split = |batch: usize, context: u32, window| {
        let seqs = sequences(&vec![(context - 1, 1); batch], 16);
        choose_split(&seqs, &SharedPrefixes::default(), &PlannerOptions { window, ..options }, 8, 264)
    };
    // One round of 33 items with 8 heads each is all that 264 places take; merging costs more than a few short parts save.
    assert_eq!([384, 640].map(|context| split(1, context, None)), [0, 128]);
    assert_eq!(split(1, 131_072, None), 4032);
    assert_eq!(split(8, 16_384, None), 4096);
    // A few keys more make four longer parts, not a fifth.
    assert_eq!(split(8, 16_448, None), 4160);
    assert_eq!([32, 64, 256].map(|batch| split(batch, 640, None)), [0; 3]);
    // Only what a window shows is split.
    assert_eq!([1000, 200].map(|window| split(8, 16_384, Some(window))), [256, 0]);
    // Prompts are no reason to split, and a device that wants no splits gets none.
    assert_eq!(choose_split(&sequences(&[(0, 4096)], 16), &SharedPrefixes::default(), &options, 8, 264), 0);
    assert_eq!(choose_split(&sequences(&[(4096, 1)], 16), &SharedPrefixes::default(), &options, 8, 0), 0);
}

#[test]
#[should_panic(expected = "max_kv_per_item (20) must be a multiple of the block size (16)")]
fn splits_lie_between_blocks() {
    let options = PlannerOptions {
        block_size: 16,
        window: None,
        max_kv_per_item: 20,
        max_kv_per_shared_item: 0,
        max_split_queries: 0,
        max_queries_per_item: 0,
    };
    plan_attention(&[], &options, &mut AttentionPlan::default());
}

/// Sequences by the forks of a tree that they take: a fork adds some pages, which all that took the same way have in common.
/// They stand in the order of their pages.
fn tree(ways: &[(Vec<u32>, u32, u32)], block_size: u32) -> (Vec<SequenceQueries>, Vec<u32>) {
    let mut known: BTreeMap<Vec<u32>, Vec<u32>> = BTreeMap::new();
    let mut next_page = 0;
    let mut new_pages = |count: u32| {
        next_page += count;
        (next_page - count..next_page).collect::<Vec<_>>()
    };
    let mut tables: Vec<(Vec<u32>, u32, u32)> = Vec::new();
    for (way, own, num_queries) in ways {
        let mut table = Vec::new();
        for depth in 1..=way.len() {
            let fork =
                known.entry(way[..depth].to_vec()).or_insert_with(|| new_pages(1 + way[depth - 1] * 3));
            table.extend_from_slice(fork);
        }
        let first_position = table.len() as u32 * block_size + own;
        let missing = (first_position + num_queries).div_ceil(block_size) - table.len() as u32;
        table.extend(new_pages(missing));
        tables.push((table, first_position, *num_queries));
    }
    tables.sort();
    let (mut seqs, mut pages) = (Vec::new(), Vec::new());
    let mut query_start = 0;
    for (table, first_position, num_queries) in tables {
        seqs.push(SequenceQueries {
            query_start,
            num_queries,
            first_position,
            pages_start: pages.len() as u32,
        });
        query_start += num_queries;
        pages.extend(table);
    }
    (seqs, pages)
}

proptest! {
    #[test]
    fn a_tree_of_prefixes_is_read_exactly_once_by_each(
        ways in prop::collection::vec((prop::collection::vec(0_u32..3, 0..5), 0_u32..20, 1_u32..4), 0..12),
        block_size in prop_oneof![Just(4_u32), Just(16)],
        split_blocks in 0_u32..6,
        shared_blocks in prop_oneof![Just(0_u32), 1_u32..6, Just(16)],
        border_blocks in 1_u32..3,
        min_keys in prop_oneof![Just(0_u32), Just(40)],
        window in prop_oneof![Just(None), (1_u32..200).prop_map(Some)],
        max_queries_per_item in 0_u32..6,
        max_queries in 0_u32..4,
    ) {
        let (seqs, pages) = tree(&ways, block_size);
        let sharing = ShareOptions { block_size: block_size as usize, window, border: border_blocks * block_size, min_keys, min_seqs: 2, max_queries, queries_per_read: 0, read_cost: 1, query_cost: 24, step_cost: 0 };
        let mut shared = SharedPrefixes::default();
        shared.find(&seqs, &pages, &sharing);
        let options = PlannerOptions { block_size: block_size as usize, window, max_kv_per_item: split_blocks * block_size, max_kv_per_shared_item: shared_blocks * block_size, max_split_queries: 0, max_queries_per_item };
        let mut plan = AttentionPlan::default();
        plan_relay(&seqs, &[], &shared, &options, &mut plan);
        check_plan(&seqs, &pages, &options, &plan);
        if max_queries == 0 {
            let mut alone = AttentionPlan::default();
            plan_attention(&seqs, &options, &mut alone);
            prop_assert_eq!(plan, alone);
        }
    }
}

fn full(block_size: usize) -> PlannerOptions {
    PlannerOptions {
        block_size,
        window: None,
        max_kv_per_item: 0,
        max_kv_per_shared_item: 0,
        max_split_queries: 8,
        max_queries_per_item: 0,
    }
}

#[test]
fn a_tree_of_two_levels_has_an_item_for_each_node() {
    // Six decodes have 7 pages in common, three of them 4 more, the other three 1 more.
    let ways: Vec<_> =
        [[2, 1], [2, 1], [2, 1], [2, 0], [2, 0], [2, 0]].map(|way| (way.to_vec(), 5, 1)).into();
    let (seqs, pages) = tree(&ways, 64);
    let options = SHARING;
    let mut shared = SharedPrefixes::default();
    shared.find(&seqs, &pages, &options);
    let mut plan = AttentionPlan::default();
    plan_relay(&seqs, &[], &shared, &full(64), &mut plan);
    let items: Vec<_> = plan
        .items
        .iter()
        .map(|item| (item.query_start, item.num_queries, item.kv_start, item.kv_len))
        .collect();
    // The one page that the last three have in common is not worth a node: 2 x 64 keys saved for three partials and an item.
    assert_eq!(
        items,
        [
            (0, 6, 0, 448),
            (0, 3, 448, 256),
            (0, 1, 704, 6),
            (1, 1, 704, 6),
            (2, 1, 704, 6),
            (3, 1, 448, 70),
            (4, 1, 448, 70),
            (5, 1, 448, 70),
        ]
    );
    assert_eq!(plan.merges.iter().map(|merge| merge.count).collect::<Vec<_>>(), [3, 3, 3, 2, 2, 2]);
    assert_eq!(shared.keys(&seqs), (448 + 256, 6 * 448 + 3 * 256));
}

#[test]
fn what_a_window_hides_is_not_shared() {
    let ways: Vec<_> = (0..4).map(|_| (vec![2, 2], 5, 1)).collect();
    let (seqs, pages) = tree(&ways, 64);
    let keys = |window| {
        let options = ShareOptions { window, ..SHARING };
        let mut shared = SharedPrefixes::default();
        shared.find(&seqs, &pages, &options);
        shared.keys(&seqs)
    };
    assert_eq!(keys(None), (896, 4 * 896));
    assert_eq!(keys(Some(300)), (896 - 576, 4 * (896 - 576)));
    assert_eq!(keys(Some(20)), (0, 0));
    let mut shared = SharedPrefixes::default();
    let few = ShareOptions { min_seqs: 5, ..SHARING };
    shared.find(&seqs, &pages, &few);
    assert_eq!(shared.keys(&seqs), (0, 0), "there are four");
}

#[test]
fn shared_spans_are_split_into_one_round_of_a_device() {
    let parts = |num_seqs: usize, keys: u32, num_kv_heads: usize, group: u32| {
        let ways: Vec<_> = (0..num_seqs).map(|_| (vec![(keys / 64 - 1) / 3], 5, 1)).collect();
        let (seqs, pages) = tree(&ways, 64);
        let sharing = ShareOptions { queries_per_read: 128 / group, ..SHARING };
        let mut shared = SharedPrefixes::default();
        shared.find(&seqs, &pages, &sharing);
        let options = PlannerOptions { max_queries_per_item: 128 / group, ..full(64) };
        choose_shared_split(&seqs, &shared, &options, num_kv_heads, 132)
    };
    // 256 x 4 rows are 8 tiles of 128: with 8 heads two parts each keep 128 of 132 busy.
    assert_eq!(parts(256, 4096, 8, 4), 2048);
    assert_eq!(parts(64, 8192, 8, 4), 1024);
    assert_eq!(parts(32, 32_768, 8, 4), 2048);
    assert_eq!(parts(16, 4096, 8, 4), 320);
    assert_eq!(parts(64, 8192, 32, 1), 2048);
}

#[test]
fn too_little_is_not_shared() {
    let ways: Vec<_> = (0..8).map(|_| (vec![1, 1], 5, 1)).collect();
    let (seqs, pages) = tree(&ways, 64);
    let keys = |step_cost, queries_per_read| {
        let options = ShareOptions { queries_per_read, step_cost, ..SHARING };
        let mut shared = SharedPrefixes::default();
        shared.find(&seqs, &pages, &options);
        let mut plan = AttentionPlan::default();
        plan_relay(&seqs, &[], &shared, &full(64), &mut plan);
        check_plan(&seqs, &pages, &full(64), &plan);
        shared.keys(&seqs).0
    };
    // 512 keys are read once instead of eight times, for eight partial results and an item.
    let saved = 512 * 7 - (8 * 24 + 96);
    assert_eq!([saved - 1, saved].map(|cost| keys(cost, 0)), [512, 0]);
    // Read twice, it saves less; read by each, nothing.
    assert_eq!([4, 1].map(|queries| keys(saved - 512, queries)), [0, 0]);
    assert_eq!(keys(saved - 513, 4), 512);
}

/// A branch of two rows that departs after position 37 from a sequence of 40 tokens, and one that departs from its first row.
#[test]
fn branches_see_what_they_depart_from_and_themselves() {
    let query = |query_start, num_queries, first_position| SequenceQueries {
        query_start,
        num_queries,
        first_position,
        pages_start: 0,
    };
    let seqs = [query(0, 5, 35), query(5, 2, 37), query(7, 1, 37)];
    let branches = [
        BranchQueries { seq: 1, before: Vec::new(), page: 10 },
        BranchQueries { seq: 2, before: vec![(10, 1)], page: 11 },
    ];
    let options = PlannerOptions {
        block_size: 16,
        window: None,
        max_kv_per_item: 16,
        max_kv_per_shared_item: 0,
        max_split_queries: 8,
        max_queries_per_item: 0,
    };
    let mut plan = AttentionPlan::default();
    plan_relay(&seqs, &branches, &SharedPrefixes::default(), &options, &mut plan);
    // Of each row of a branch: the page and the number of keys of each item that is merged.
    let read = |row: u32| -> Vec<(u32, u32)> {
        let merge = plan.merges.iter().find(|merge| merge.query == row).expect("rows of branches are merged");
        let slots = &plan.merge_slots[merge.first as usize..][..merge.count as usize];
        let item_of = |slot: u32| {
            let wrote =
                |item: &&AttentionItem| (item.partial..item.partial + item.num_queries).contains(&slot);
            let item = plan.items.iter().find(wrote).expect("an item writes each slot");
            assert_eq!(item.query_start + slot - item.partial, row);
            assert!(item.kv_start <= 37 && item.kv_start.is_multiple_of(16));
            (item.pages_start, item.kv_len)
        };
        slots.iter().map(|&slot| item_of(slot)).collect()
    };
    let context = [(0, 16), (1, 16), (2, 5)];
    assert_eq!(read(5), [&context[..], &[(10, 1)]].concat());
    assert_eq!(read(6), [&context[..], &[(10, 2)]].concat());
    assert_eq!(read(7), [&context[..], &[(10, 1), (11, 1)]].concat());
    let written: u32 = plan.items.iter().map(|item| item.num_queries).sum();
    assert_eq!(written, plan.num_partials, "every slot is written once");
}

/// Guesses that are checked are cut into items that kernels for decodes take, unless they read much or share something.
#[test]
fn checked_guesses_are_read_as_decodes_are() {
    let heads = AttentionHeads { num_heads: 32, num_kv_heads: 8, head_dim: 128, token_bytes: 4096 };
    let options = CutOptions { block_size: 64, relays: true, is_fixed: false };
    let sharing = Sharing { border: 64, min_seqs: 2, ..Sharing::default() };
    let tuning = AttentionTuning {
        units: 264,
        rows: 128,
        decode_rows: 16,
        decode_bytes: 64 << 20,
        sharing,
        partial_bytes: 0,
    };
    let device = DeviceInfo { attention: tuning, ..crate::ReferenceBackend::new().device() };
    let queries = |shapes: &[(u32, u32)], options: CutOptions| {
        let seqs = sequences(shapes, 64);
        let pages: Vec<u32> =
            (0..seqs.iter().map(|seq| (seq.first_position + seq.num_queries).div_ceil(64)).sum()).collect();
        let (mut shared, mut plan) = (SharedPrefixes::default(), AttentionPlan::default());
        AttentionCut::new(&device, &heads, &options).plan(&seqs, &[], &pages, None, &mut shared, &mut plan);
        let limit = PlannerOptions { max_kv_per_item: 0, max_queries_per_item: 0, ..full(64) };
        check_plan(&seqs, &pages, &limit, &plan);
        plan.items.iter().map(|item| item.num_queries).collect::<BTreeSet<_>>()
    };
    assert_eq!(queries(&[(1000, 5), (1000, 5)], options), BTreeSet::from([1, 4]));
    assert_eq!(queries(&[(1000, 8), (1000, 1)], options), BTreeSet::from([1, 4]));
    // A chunk of a prompt beside them, contexts of 64 MiB read twice, tokens that must not depend on others.
    assert_eq!(queries(&[(1000, 5), (0, 60)], options), BTreeSet::from([5, 28, 32]));
    assert_eq!(queries(&[(8187, 5)], options), BTreeSet::from([1, 4]));
    assert_eq!(queries(&[(8200, 5)], options), BTreeSet::from([5]));
    assert_eq!(queries(&[(1000, 5)], CutOptions { is_fixed: true, ..options }), BTreeSet::from([5]));
}
