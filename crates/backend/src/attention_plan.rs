//! Turns the sequences of a step into the attention work items of one attention kind (full, or one sliding window).
//!
//! The engine calls this once a step for each kind; the result goes into [`crate::StepInput::attention`]. Nothing here
//! looks at the pages themselves.
//!
//! Splits of long contexts lie at absolute multiples of `max_kv_per_item`, and queries are grouped so that all of an
//! item's queries see the same splits. How a query's keys are split therefore depends on its position alone, never on
//! the other sequences of the batch or on how a prompt was cut into chunks: its rounding is the same in every batch.

use crate::{AttentionItem, AttentionMerge, AttentionPlan, NO_PARTIAL};

/// The rows of one sequence in a step: consecutive positions in consecutive rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceQueries {
    /// Its first row.
    pub query_start: u32,
    pub num_queries: u32,
    /// Position of the first row.
    pub first_position: u32,
    /// Index into `StepInput::pages` of the page that holds key position 0.
    pub pages_start: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannerOptions {
    pub block_size: usize,
    /// Keys further back than this are not seen.
    pub window: Option<u32>,
    /// Contexts longer than this are split over several items; a multiple of the block size. 0 never splits.
    pub max_kv_per_item: u32,
    /// Runs of more queries than this are never split: they are work enough as they are. 0 splits all.
    pub max_split_queries: u32,
    /// Longer runs of queries become several items. 0 sets no limit.
    pub max_queries_per_item: u32,
}

/// Plans one item for each run of queries and each split of the keys they see. `out` is cleared first.
pub fn plan_attention(seqs: &[SequenceQueries], options: &PlannerOptions, out: &mut AttentionPlan) {
    check(options);
    out.clear();
    let unsplit = PlannerOptions { max_kv_per_item: 0, ..*options };
    for seq in seqs {
        let is_long = options.max_split_queries > 0 && seq.num_queries > options.max_split_queries;
        let options = if is_long { &unsplit } else { options };
        let mut first = 0;
        while first < seq.num_queries {
            let position = seq.first_position + first;
            let num_queries = run_length(position, seq.num_queries - first, options);
            let run = SequenceQueries {
                query_start: seq.query_start + first,
                num_queries,
                first_position: position,
                pages_start: seq.pages_start,
            };
            plan_run(&run, options, out);
            first += num_queries;
        }
    }
}

fn check(options: &PlannerOptions) {
    let block_size = options.block_size;
    assert!(block_size > 0, "the block size must not be 0");
    assert!(
        (options.max_kv_per_item as usize).is_multiple_of(block_size),
        "max_kv_per_item ({}) must be a multiple of the block size ({block_size})",
        options.max_kv_per_item
    );
    assert!(options.window != Some(0), "a window of 0 would hide every key");
}

/// Parts of the longest context that are tried.
const MAX_PARTS: u32 = 64;
/// Splits are whole multiples of this many keys.
const SPLIT_UNIT: u32 = 64;
/// What an item costs beside its keys (its start, its partial result), in keys.
const ITEM_COST: u64 = 96;
/// What a part of a context costs when it is merged with the others, in keys. Further parts than these cost little.
const PART_COST: u64 = 24;
const COSTLY_PARTS: u64 = 8;
/// More items than this are never made by splitting.
const MAX_SPLIT_ITEMS: u64 = 4096;
/// With so many rounds of whole contexts the last, half empty one no longer matters.
const ENOUGH_ROUNDS: usize = 4;

/// The `max_kv_per_item` with which decodes keep a device busy that works on `units` pairs of an item and a kv head at once:
/// as many rounds of equal items as they take, at the least cost. Only runs of up to `max_split_queries` queries count.
pub fn choose_split(
    seqs: &[SequenceQueries],
    options: &PlannerOptions,
    num_kv_heads: usize,
    units: usize,
) -> u32 {
    let block_size = options.block_size as u32;
    let lengths = || {
        let is_split = |seq: &&SequenceQueries| seq.num_queries <= options.max_split_queries.max(1);
        seqs.iter().filter(is_split).map(|seq| {
            let end = seq.first_position + seq.num_queries;
            end - first_key(seq.first_position, options.window) / block_size * block_size
        })
    };
    let count = lengths().count();
    let Some(longest) = lengths().max().filter(|_| count * num_kv_heads < ENOUGH_ROUNDS * units) else {
        return 0;
    };
    let cost = |items: u64, keys: u32| {
        let parts = u64::from(longest.div_ceil(keys));
        let merge = if parts > 1 { parts.min(COSTLY_PARTS) * PART_COST } else { 0 };
        (items * num_kv_heads as u64).div_ceil(units as u64) * (u64::from(keys) + ITEM_COST) + merge
    };
    let unit = SPLIT_UNIT.next_multiple_of(block_size);
    let mut best = (cost(count as u64, longest), 0);
    for parts in 2..=MAX_PARTS {
        let split = longest.div_ceil(parts).next_multiple_of(unit);
        let items: u64 = lengths().map(|length| u64::from(length.div_ceil(split))).sum();
        if split < longest && items <= MAX_SPLIT_ITEMS {
            best = best.min((cost(items, split), split));
        }
        if split == unit {
            break;
        }
    }
    best.1
}

/// How many of `remaining` queries from `position` on see the same splits, at most one item's worth.
fn run_length(position: u32, remaining: u32, options: &PlannerOptions) -> u32 {
    let mut length = remaining;
    if options.max_queries_per_item > 0 {
        length = length.min(options.max_queries_per_item);
    }
    let split = options.max_kv_per_item;
    if split == 0 {
        return length;
    }
    // A later query sees one split more when its own position enters it.
    length = length.min(split - position % split);
    // And one less when the first key of its window leaves it.
    if let Some(window) = options.window {
        let leaves = (first_key(position, options.window) / split + 1) * split + window - 1;
        length = length.min(leaves - position);
    }
    length
}

/// The first key that the query at `position` sees.
pub fn first_key(position: u32, window: Option<u32>) -> u32 {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// Plans queries that all see the same splits.
fn plan_run(run: &SequenceQueries, options: &PlannerOptions, out: &mut AttentionPlan) {
    let block_size = options.block_size as u32;
    let end = run.first_position + run.num_queries;
    let start = first_key(run.first_position, options.window) / block_size * block_size;
    let split = if options.max_kv_per_item == 0 { u32::MAX } else { options.max_kv_per_item };
    let num_splits = (end - 1) / split - start / split + 1;

    let first_partial = out.num_partials;
    let mut kv_start = start;
    for number in 0..num_splits {
        let kv_end = end.min((start / split + number + 1).saturating_mul(split));
        let partial = if num_splits == 1 { NO_PARTIAL } else { first_partial + number * run.num_queries };
        out.items.push(AttentionItem {
            query_start: run.query_start,
            num_queries: run.num_queries,
            pages_start: run.pages_start + kv_start / block_size,
            kv_start,
            kv_len: kv_end - kv_start,
            partial,
        });
        kv_start = kv_end;
    }
    if num_splits == 1 {
        return;
    }
    out.num_partials += num_splits * run.num_queries;
    for query in 0..run.num_queries {
        let first = out.merge_slots.len() as u32;
        out.merge_slots
            .extend((0..num_splits).map(|number| first_partial + number * run.num_queries + query));
        out.merges.push(AttentionMerge { query: run.query_start + query, first, count: num_splits });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

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
                let seq =
                    seqs.iter().find(|s| (s.query_start..s.query_start + s.num_queries).contains(&query));
                let seq = seq.expect("an item's queries are rows of the step");
                let position = seq.first_position + query - seq.query_start;
                let low = item.kv_start.max(first_key(position, window));
                let high = (item.kv_start + item.kv_len).min(position + 1);
                assert!(low < high, "an item shows query {query} nothing: {item:?}");
                readings.entry(query).or_default().push((low, high));
            }
        }
        readings
    }

    fn check_plan(seqs: &[SequenceQueries], options: &PlannerOptions, plan: &AttentionPlan) {
        let block_size = options.block_size as u32;
        let readings = readings(seqs, plan, options.window);
        for seq in seqs {
            for i in 0..seq.num_queries {
                let position = seq.first_position + i;
                let mut next = first_key(position, options.window);
                for (low, high) in &readings[&(seq.query_start + i)] {
                    assert_eq!(*low, next, "a key is missing or read twice");
                    next = *high;
                }
                assert_eq!(next, position + 1);
            }
        }
        let mut written = BTreeMap::new();
        let mut direct = BTreeSet::new();
        for item in &plan.items {
            let seq =
                seqs.iter().rev().find(|s| s.query_start <= item.query_start && s.num_queries > 0).unwrap();
            assert_eq!(item.kv_start % block_size, 0);
            assert_eq!(item.pages_start, seq.pages_start + item.kv_start / block_size);
            let is_long = options.max_split_queries > 0 && seq.num_queries > options.max_split_queries;
            assert!(options.max_kv_per_item == 0 || is_long || item.kv_len <= options.max_kv_per_item);
            assert!(options.max_queries_per_item == 0 || item.num_queries <= options.max_queries_per_item);
            for i in 0..item.num_queries {
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
                assert_eq!(
                    written.remove(slot),
                    Some(merge.query),
                    "a partial is merged once, by its own query"
                );
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
            let options = PlannerOptions { block_size: block_size as usize, window, max_kv_per_item, max_split_queries, max_queries_per_item };
            let mut plan = AttentionPlan { num_partials: 9, ..AttentionPlan::default() };
            plan_attention(&seqs, &options, &mut plan);
            check_plan(&seqs, &options, &plan);
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
            let options = PlannerOptions { block_size: 4, window, max_kv_per_item: 16, max_split_queries: 0, max_queries_per_item: 0 };
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
            max_split_queries: 1,
            max_queries_per_item: 0,
        };
        let split = |batch: usize, context: u32, window| {
            let seqs = sequences(&vec![(context - 1, 1); batch], 16);
            choose_split(&seqs, &PlannerOptions { window, ..options }, 8, 264)
        };
        // One round of 33 items with 8 heads each is all that 264 places take; fewer parts are merged sooner.
        assert_eq!(split(1, 384, None), 128);
        assert_eq!(split(1, 131_072, None), 4032);
        assert_eq!(split(8, 16_384, None), 4096);
        // A few keys more make four longer parts, not a fifth.
        assert_eq!(split(8, 16_448, None), 4160);
        assert_eq!([32, 64, 256].map(|batch| split(batch, 640, None)), [0; 3]);
        // Only what a window shows is split.
        assert_eq!([200, 40].map(|window| split(8, 16_384, Some(window))), [64, 0]);
        // Prompts are no reason to split, and a device that wants no splits gets none.
        assert_eq!(choose_split(&sequences(&[(0, 4096)], 16), &options, 8, 264), 0);
        assert_eq!(choose_split(&sequences(&[(4096, 1)], 16), &options, 8, 0), 0);
    }

    #[test]
    #[should_panic(expected = "max_kv_per_item (20) must be a multiple of the block size (16)")]
    fn splits_lie_between_blocks() {
        let options = PlannerOptions {
            block_size: 16,
            window: None,
            max_kv_per_item: 20,
            max_split_queries: 0,
            max_queries_per_item: 0,
        };
        plan_attention(&[], &options, &mut AttentionPlan::default());
    }
}
