//! How long the items of decodes are, so that a device has work for all its parts.

use super::{PlannerOptions, SequenceQueries, SharedPrefixes, SharedSpan, own_start};

/// Parts of the longest context that are tried.
const MAX_PARTS: u32 = 64;
/// Splits are whole multiples of this many keys.
pub(super) const SPLIT_UNIT: u32 = 64;
/// What an item costs beside its keys (its start, its partial result), in keys.
pub(super) const ITEM_COST: u64 = 96;
/// What a part of a context costs a query when it is merged with the others, in keys. Further parts than these cost little.
const PART_COST: u64 = 24;
const COSTLY_PARTS: u64 = 8;
/// What an item of a shared span costs beside its keys: it has many queries to load and results to store.
const SHARED_ITEM_COST: u64 = 160;
/// How long a part's result is waited for, in keys.
const SHARED_PART_COST: u64 = 16;
/// More items than this are never made by splitting.
const MAX_SPLIT_ITEMS: u64 = 4096;
/// With so many rounds of whole contexts the last, half empty one no longer matters.
const ENOUGH_ROUNDS: usize = 4;

/// The `max_kv_per_item` with which decodes keep a device busy that works on `units` pairs of an item and a kv head at once:
/// as many rounds of equal items as they take, at the least cost. Only runs of up to `max_split_queries` queries count, and
/// of those what they do not share.
pub fn choose_split(
    seqs: &[SequenceQueries],
    shared: &SharedPrefixes,
    options: &PlannerOptions,
    num_kv_heads: usize,
    units: usize,
) -> u32 {
    let lengths = || {
        let is_split =
            |(_, seq): &(usize, &SequenceQueries)| seq.num_queries <= options.max_split_queries.max(1);
        seqs.iter().enumerate().filter(is_split).map(|(number, seq)| {
            let end = seq.first_position + seq.num_queries;
            let most =
                if options.max_queries_per_item == 0 { u32::MAX } else { options.max_queries_per_item };
            (end - own_start(seq, number, shared, options), seq.num_queries.div_ceil(most))
        })
    };
    let count: usize = lengths().map(|(_, runs)| runs as usize).sum();
    let Some(longest) =
        lengths().map(|(length, _)| length).max().filter(|_| count * num_kv_heads < ENOUGH_ROUNDS * units)
    else {
        return 0;
    };
    let cost = |items: u64, keys: u32| {
        let parts = u64::from(longest.div_ceil(keys));
        let merge = if parts > 1 { parts.min(COSTLY_PARTS) * PART_COST } else { 0 };
        (items * num_kv_heads as u64).div_ceil(units as u64) * (u64::from(keys) + ITEM_COST) + merge
    };
    let items = |keys: u32| lengths().map(|(length, runs)| u64::from(length.div_ceil(keys) * runs)).sum();
    cheapest(longest, options.block_size as u32, items, cost)
}

/// The `max_kv_per_shared_item` with which shared spans keep a device busy that works on `units` pairs of one of their items
/// and a kv head at once.
pub fn choose_shared_split(
    seqs: &[SequenceQueries],
    shared: &SharedPrefixes,
    options: &PlannerOptions,
    num_kv_heads: usize,
    units: usize,
) -> u32 {
    let max_queries = if options.max_queries_per_item == 0 { u32::MAX } else { options.max_queries_per_item };
    let Some(longest) = shared.spans().iter().map(SharedSpan::num_keys).max().filter(|_| units > 0) else {
        return 0;
    };
    let num_queries: u64 = shared.spans().iter().map(|span| u64::from(span.num_queries(seqs))).sum();
    let cost = |items: u64, keys: u32| {
        // Each part writes a result for every query, which is read again: half a key's worth, and the wait for it.
        let merge = u64::from(longest.div_ceil(keys)) * (num_queries / 2 + SHARED_PART_COST);
        (items * num_kv_heads as u64).div_ceil(units as u64) * (u64::from(keys) + SHARED_ITEM_COST) + merge
    };
    let items = |keys: u32| {
        let parts = |span: &SharedSpan| u64::from(span.num_keys().div_ceil(keys));
        let tiles = |span: &SharedSpan| u64::from(span.num_queries(seqs).div_ceil(max_queries));
        shared.spans().iter().map(|span| parts(span) * tiles(span)).sum()
    };
    cheapest(longest, options.block_size as u32, items, cost)
}

/// The length of parts, up to [`MAX_PARTS`] of the longest, that costs least. 0 is the whole.
fn cheapest(
    longest: u32,
    block_size: u32,
    items: impl Fn(u32) -> u64,
    cost: impl Fn(u64, u32) -> u64,
) -> u32 {
    let unit = SPLIT_UNIT.next_multiple_of(block_size);
    let mut best = (cost(items(longest), longest), 0);
    for parts in 2..=MAX_PARTS {
        let split = longest.div_ceil(parts).next_multiple_of(unit);
        let items = items(split);
        if split < longest && items <= MAX_SPLIT_ITEMS {
            best = best.min((cost(items, split), split));
        }
        if split == unit {
            break;
        }
    }
    best.1
}
