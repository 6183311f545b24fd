//! Turns the sequences of a step into the attention work items of one attention kind (full, or one sliding window).
//!
//! The engine calls this once a step for each kind; the result goes into [`crate::StepInput::attention`].
//!
//! Relay attention is no more than items with the queries of many sequences: what sequences have in common
//! ([`SharedPrefixes`]) is read by such items, the rest by items of their own, and each query's partial results are merged.
//!
//! Splits of long contexts lie at absolute multiples of `max_kv_per_item`, and queries are grouped so that all of an
//! item's queries see the same splits. How a query's keys are split therefore depends on its position alone, never on
//! the other sequences of the batch or on how a prompt was cut into chunks: its rounding is the same in every batch.

mod cut;
mod shared;
mod split;
mod tuning;

use std::ops::Range;

pub use cut::{AttentionCut, AttentionHeads, CutOptions, MAX_SPLIT_QUERIES};
pub use shared::{ShareOptions, SharedPrefixes};
pub use split::{choose_shared_split, choose_split};
pub use tuning::{AttentionTuning, Sharing};

use crate::{AttentionItem, AttentionMerge, AttentionPlan, NO_PARTIAL};
use shared::SharedSpan;

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

/// Rows that go on beside others: the queries of a branch of guesses.
///
/// They see the pages of their sequence up to their first position. What they see from there on, themselves included, is in pages of
/// branches, whose first slots hold it. These count as the page of the first position: no key is placed after where it stands, and
/// none by a block's worth of positions before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BranchQueries {
    /// Number of its queries among those of the sequences. Their first position is that up to which the pages are seen.
    pub seq: usize,
    /// Pages of branches that this one departs from, as indices into `StepInput::pages`, and how many of their tokens are seen.
    pub before: Vec<(u32, u32)>,
    /// Index of the page that its own rows are written to.
    pub page: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannerOptions {
    pub block_size: usize,
    /// Keys further back than this are not seen.
    pub window: Option<u32>,
    /// Contexts longer than this are split over several items; a multiple of the block size. 0 never splits.
    pub max_kv_per_item: u32,
    /// The same for what several sequences share.
    pub max_kv_per_shared_item: u32,
    /// Runs of more queries than this are never split: they are work enough as they are. 0 splits all.
    pub max_split_queries: u32,
    /// Longer runs of queries become several items. 0 sets no limit.
    pub max_queries_per_item: u32,
}

/// Plans one item for each run of queries and each split of the keys they see. `out` is cleared first.
pub fn plan_attention(seqs: &[SequenceQueries], options: &PlannerOptions, out: &mut AttentionPlan) {
    plan_relay(seqs, &[], &SharedPrefixes::default(), options, out);
}

/// The same, but what was found to be shared is planned once for all that share it. Those of `seqs` that are branches are named in
/// `branches`, in the same order.
pub fn plan_relay(
    seqs: &[SequenceQueries],
    branches: &[BranchQueries],
    shared: &SharedPrefixes,
    options: &PlannerOptions,
    out: &mut AttentionPlan,
) {
    check(options);
    out.clear();
    let spans: Vec<PlannedSpan> =
        shared.spans().iter().map(|span| plan_span(span, seqs, options, out)).collect();
    out.num_shared_items = out.items.len() as u32;
    let unsplit = PlannerOptions { max_kv_per_item: 0, ..*options };
    let mut spans = spans.iter().peekable();
    let mut branches = branches.iter().peekable();
    // Those that the sequence at hand reads, the outer ones first.
    let mut around: Vec<&PlannedSpan> = Vec::new();
    for (number, seq) in seqs.iter().enumerate() {
        while around.pop_if(|span| span.seqs.end <= number).is_some() {}
        while let Some(span) = spans.next_if(|span| span.seqs.start == number) {
            around.push(span);
        }
        if let Some(branch) = branches.next_if(|branch| branch.seq == number) {
            plan_branch(seq, branch, own_start(seq, number, shared, options), &around, options, out);
            continue;
        }
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
            plan_run(&run, own_start(&run, number, shared, options), &around, options, out);
            first += num_queries;
        }
    }
}

/// The partial slots of a span that sequences share.
struct PlannedSpan {
    seqs: Range<usize>,
    query_start: u32,
    num_queries: u32,
    first_partial: u32,
    num_splits: u32,
}

impl PlannedSpan {
    fn slots_of(&self, query: u32) -> impl Iterator<Item = u32> {
        let first = self.first_partial + query - self.query_start;
        (0..self.num_splits).map(move |number| first + number * self.num_queries)
    }
}

fn plan_span(
    span: &SharedSpan,
    seqs: &[SequenceQueries],
    options: &PlannerOptions,
    out: &mut AttentionPlan,
) -> PlannedSpan {
    let SequenceQueries { query_start, pages_start, .. } = seqs[span.seqs.start];
    let num_queries = span.num_queries(seqs);
    let most = if options.max_queries_per_item == 0 { num_queries } else { options.max_queries_per_item };
    let first_partial = out.num_partials;
    let part = span_part(span.num_keys(), options.max_kv_per_shared_item, options.block_size as u32);
    let mut num_splits = 0;
    for kv_start in (span.kv_start..span.kv_end).step_by(part as usize) {
        for first in (0..num_queries).step_by(most as usize) {
            out.items.push(AttentionItem {
                query_start: query_start + first,
                num_queries: most.min(num_queries - first),
                pages_start: pages_start + kv_start / options.block_size as u32,
                kv_start,
                kv_len: part.min(span.kv_end - kv_start),
                partial: out.num_partials + first,
            });
        }
        out.num_partials += num_queries;
        num_splits += 1;
    }
    PlannedSpan { seqs: span.seqs.clone(), query_start, num_queries, first_partial, num_splits }
}

/// How many keys each part of a shared span has: parts of at most `most` keys, as equal as whole blocks allow.
fn span_part(num_keys: u32, most: u32, block_size: u32) -> u32 {
    let parts = if most == 0 { 1 } else { num_keys.div_ceil(most) };
    let unit = if most == 0 { block_size } else { greatest_unit(most, block_size) };
    num_keys.div_ceil(parts.max(1)).next_multiple_of(unit)
}

/// Parts end where a split may end, if the limit itself does.
fn greatest_unit(most: u32, block_size: u32) -> u32 {
    let unit = split::SPLIT_UNIT.next_multiple_of(block_size);
    if most.is_multiple_of(unit) { unit } else { block_size }
}

/// Cuts keys at the multiples of `max_kv_per_item`.
fn splits(start: u32, end: u32, options: &PlannerOptions) -> impl Iterator<Item = (u32, u32)> + Clone {
    let split = if options.max_kv_per_item == 0 { u32::MAX } else { options.max_kv_per_item };
    (start / split..=(end - 1) / split)
        .map(move |number| (start.max(number * split), end.min((number + 1).saturating_mul(split))))
}

fn check(options: &PlannerOptions) {
    let block_size = options.block_size;
    assert!(block_size > 0, "the block size must not be 0");
    for (name, limit) in [
        ("max_kv_per_item", options.max_kv_per_item),
        ("max_kv_per_shared_item", options.max_kv_per_shared_item),
    ] {
        assert!(
            (limit as usize).is_multiple_of(block_size),
            "{name} ({limit}) must be a multiple of the block size ({block_size})"
        );
    }
    assert!(options.window != Some(0), "a window of 0 would hide every key");
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

/// The first key that a run reads by items of its own.
fn own_start(run: &SequenceQueries, number: usize, shared: &SharedPrefixes, options: &PlannerOptions) -> u32 {
    let block_size = options.block_size as u32;
    let seen = first_key(run.first_position, options.window) / block_size * block_size;
    seen.max(shared.own_start(number))
}

/// Plans queries that all see the same splits, from the key `start` on.
fn plan_run(
    run: &SequenceQueries,
    start: u32,
    around: &[&PlannedSpan],
    options: &PlannerOptions,
    out: &mut AttentionPlan,
) {
    let splits = splits(start, run.first_position + run.num_queries, options);
    let first_partial = out.num_partials;
    let num_splits = splits.clone().count() as u32;
    let num_parts = num_splits + around.iter().map(|span| span.num_splits).sum::<u32>();
    for (number, (kv_start, kv_end)) in (0..).zip(splits) {
        let partial = if num_parts == 1 { NO_PARTIAL } else { first_partial + number * run.num_queries };
        out.items.push(AttentionItem {
            query_start: run.query_start,
            num_queries: run.num_queries,
            pages_start: run.pages_start + kv_start / options.block_size as u32,
            kv_start,
            kv_len: kv_end - kv_start,
            partial,
        });
    }
    if num_parts == 1 {
        return;
    }
    out.num_partials += num_splits * run.num_queries;
    for query in 0..run.num_queries {
        let first = out.merge_slots.len() as u32;
        let row = run.query_start + query;
        out.merge_slots.extend(around.iter().flat_map(|span| span.slots_of(row)));
        out.merge_slots
            .extend((0..num_splits).map(|number| first_partial + number * run.num_queries + query));
        out.merges.push(AttentionMerge { query: row, first, count: num_parts });
    }
}

/// Plans the rows of a branch: what they see of their sequence together, what is in the pages of branches each for itself, because
/// there a place is no position.
fn plan_branch(
    run: &SequenceQueries,
    branch: &BranchQueries,
    start: u32,
    around: &[&PlannedSpan],
    options: &PlannerOptions,
    out: &mut AttentionPlan,
) {
    let block_size = options.block_size as u32;
    let has_own = start < run.first_position;
    let splits = has_own.then(|| splits(start, run.first_position, options)).into_iter().flatten();
    let first_partial = out.num_partials;
    let mut num_splits = 0;
    for (kv_start, kv_end) in splits {
        out.items.push(AttentionItem {
            query_start: run.query_start,
            num_queries: run.num_queries,
            pages_start: run.pages_start + kv_start / block_size,
            kv_start,
            kv_len: kv_end - kv_start,
            partial: out.num_partials,
        });
        out.num_partials += run.num_queries;
        num_splits += 1;
    }
    for query in 0..run.num_queries {
        let row = run.query_start + query;
        let first = out.merge_slots.len() as u32;
        out.merge_slots.extend(around.iter().flat_map(|span| span.slots_of(row)));
        out.merge_slots.extend((0..num_splits).map(|split| first_partial + split * run.num_queries + query));
        for &(page, kv_len) in branch.before.iter().chain([&(branch.page, query + 1)]) {
            out.merge_slots.push(out.num_partials);
            out.items.push(AttentionItem {
                query_start: row,
                num_queries: 1,
                pages_start: page,
                kv_start: run.first_position / block_size * block_size,
                kv_len,
                partial: out.num_partials,
            });
            out.num_partials += 1;
        }
        let count = out.merge_slots.len() as u32 - first;
        out.merges.push(AttentionMerge { query: row, first, count });
    }
}

#[cfg(test)]
mod tests;
