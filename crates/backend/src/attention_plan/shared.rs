//! What sequences of a step have in common: spans of pages that are to be read once for all of them.
//!
//! The sequences stand in the order of their pages, so that those with a common beginning are neighbours. How many keys each
//! has in common with the next is then all there is to know of the tree of their beginnings.

use std::ops::Range;

use super::split::ITEM_COST;
use super::{SequenceQueries, first_key};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareOptions {
    pub block_size: usize,
    /// Keys further back than this are not seen.
    pub window: Option<u32>,
    /// Spans begin and end at multiples of this; itself a multiple of the block size. 0 shares nothing.
    pub border: u32,
    /// The shortest span.
    pub min_keys: u32,
    /// The fewest sequences that share one.
    pub min_seqs: usize,
    /// Runs of more queries share nothing: each of their items has queries enough.
    pub max_queries: u32,
    /// A span is read once for so many queries. 0: once for all.
    pub queries_per_read: u32,
    /// Such a read takes as long as so many sequences reading for themselves.
    pub read_cost: u64,
    /// What a query costs that merges shared results with its own, and sharing a step however little is shared: in keys that
    /// one sequence reads.
    pub query_cost: u64,
    pub step_cost: u64,
}

/// Keys that neighbouring sequences have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedSpan {
    pub(super) seqs: Range<usize>,
    pub(super) kv_start: u32,
    pub(super) kv_end: u32,
}

impl SharedSpan {
    pub(super) fn num_keys(&self) -> u32 {
        self.kv_end - self.kv_start
    }

    /// Of all its sequences, whose rows are consecutive.
    pub(super) fn num_queries(&self, seqs: &[SequenceQueries]) -> u32 {
        let last = &seqs[self.seqs.end - 1];
        last.query_start + last.num_queries - seqs[self.seqs.start].query_start
    }
}

/// The spans of a step that are worth an item of their own. Those of nobody, unless they are looked for.
#[derive(Clone, Debug, Default)]
pub struct SharedPrefixes {
    /// In the order of their first sequence, outer ones first.
    spans: Vec<SharedSpan>,
    /// Of each sequence, the first key that is in no span.
    own_starts: Vec<u32>,
    /// Keys that each sequence has in common with the next.
    common: Vec<u32>,
    /// Reads of keys that the spans save, less what their partial results cost.
    saved: u64,
}

impl SharedPrefixes {
    /// Looks for what is worth sharing. `pages` are those that the sequences point into.
    pub fn find(&mut self, seqs: &[SequenceQueries], pages: &[u32], options: &ShareOptions) {
        self.spans.clear();
        self.own_starts.clear();
        self.common.clear();
        self.saved = 0;
        if options.border == 0 || seqs.is_empty() {
            return;
        }
        assert!(
            (options.border as usize).is_multiple_of(options.block_size),
            "the border ({}) must be a multiple of the block size ({})",
            options.border,
            options.block_size
        );
        self.own_starts.resize(seqs.len(), 0);
        self.common.extend(seqs.windows(2).map(|pair| common_keys(&pair[0], &pair[1], pages, options)));
        self.descend(seqs, 0..seqs.len(), 0, options);
        if self.saved <= options.step_cost {
            self.spans.clear();
            self.own_starts.fill(0);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    pub(super) fn spans(&self) -> &[SharedSpan] {
        &self.spans
    }

    pub(super) fn own_start(&self, seq: usize) -> u32 {
        self.own_starts.get(seq).copied().unwrap_or(0)
    }

    /// Keys that are read by items of several sequences, and how often they would be read by each alone.
    pub fn keys(&self, seqs: &[SequenceQueries]) -> (u64, u64) {
        let keys = |span: &SharedSpan| u64::from(span.num_keys());
        self.spans.iter().fold((0, 0), |(once, alone), span| {
            (once + keys(span), alone + keys(span) * u64::from(span.num_queries(seqs)))
        })
    }

    /// The tree from one node down: `range` has the keys before `from` behind it.
    fn descend(&mut self, seqs: &[SequenceQueries], range: Range<usize>, from: u32, options: &ShareOptions) {
        if range.len() == 1 {
            self.own_starts[range.start] = from;
            return;
        }
        let common = self.common[range.start..range.end - 1].iter().copied().min().unwrap_or(0);
        let found = (common > from).then(|| worth(&seqs[range.clone()], from, common, options)).flatten();
        // Keys that are not worth a span of their own go down to the children.
        let from = if found.is_some() { common } else { from };
        if let Some((kv_start, saved)) = found {
            self.spans.push(SharedSpan { seqs: range.clone(), kv_start, kv_end: common });
            self.saved += saved;
        }
        let mut start = range.start;
        for end in range.start + 1..=range.end {
            if end == range.end || self.common[end - 1] == common {
                self.descend(seqs, start..end, from, options);
                start = end;
            }
        }
    }
}

/// Keys of whole borders that two neighbours have in common, before the first query of either.
fn common_keys(a: &SequenceQueries, b: &SequenceQueries, pages: &[u32], options: &ShareOptions) -> u32 {
    let most = |seq: &SequenceQueries| seq.num_queries > options.max_queries || seq.num_queries == 0;
    if most(a) || most(b) || a.query_start + a.num_queries != b.query_start {
        return 0;
    }
    let block_size = options.block_size as u32;
    let num_pages = a.first_position.min(b.first_position) / block_size;
    let pages_of = |seq: &SequenceQueries| &pages[seq.pages_start as usize..][..num_pages as usize];
    let common = pages_of(a).iter().zip(pages_of(b)).take_while(|(a, b)| a == b).count() as u32;
    common * block_size / options.border * options.border
}

/// Where a span for these sequences begins and how many reads of a key it saves, if that is more than it costs.
fn worth(seqs: &[SequenceQueries], from: u32, common: u32, options: &ShareOptions) -> Option<(u32, u64)> {
    let first_seen = |seq: &SequenceQueries| first_key(seq.first_position, options.window);
    let first = seqs.iter().map(first_seen).min()?;
    let start = from.max(first / options.border * options.border);
    let queries = seqs.iter().filter(|seq| first_seen(seq) < common).map(|seq| u64::from(seq.num_queries));
    let (num_seqs, num_queries) =
        queries.fold((0_u64, 0), |(seqs, queries), more| (seqs + 1, queries + more));
    let keys = common.checked_sub(start).filter(|&keys| keys >= options.min_keys.max(1))?;
    let reads = match options.queries_per_read {
        0 => 1,
        queries => num_queries.div_ceil(u64::from(queries)),
    };
    let saved = u64::from(keys) * num_seqs.saturating_sub(options.read_cost * reads);
    let cost = num_queries * options.query_cost + ITEM_COST;
    (num_seqs >= options.min_seqs as u64 && saved > cost).then(|| (start, saved - cost))
}
