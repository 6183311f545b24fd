//! What a device says of its attention kernels. The planner reads it, and nobody else.

/// How a device likes attention to be cut into items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionTuning {
    /// Pairs of an item and a kv head that it works on at once: with fewer, contexts are split over several items. 0: they are
    /// never split.
    pub units: usize,
    /// Query heads times queries of one kv head that it likes in an item; 0: any number.
    pub rows: usize,
    /// How many of them its kernels for decodes take. Runs of a few more queries, such as guesses that are checked, are cut into such
    /// items where these read at most `decode_bytes` of keys and values together. 0: it has no such kernels.
    pub decode_rows: usize,
    pub decode_bytes: usize,
    /// How it reads what several sequences have in common.
    pub sharing: Sharing,
    /// Memory for partial results; 0: as much as a step needs.
    pub partial_bytes: usize,
}

/// When a device reads keys that several sequences have in common once for all of them, and what that costs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// Shared spans begin and end at multiples of so many keys. 0: each sequence reads its own.
    pub border: usize,
    /// Sizes of heads for which it has kernels that gain from it; empty: all.
    pub head_dims: &'static [usize],
    /// The fewest sequences that share a span.
    pub min_seqs: usize,
    /// Pairs of an item of a shared span and a kv head that it works on at once; 0: spans are never split.
    pub units: usize,
    /// Reading a key for a whole item takes as long as so many sequences reading it, each for itself.
    pub read_cost: usize,
    /// What a query costs that merges shared results with its own, and what sharing costs each layer of a step however little
    /// is shared: in bytes of keys and values that sequences read for themselves in that time. 0 bytes per query: a default.
    pub query_bytes: usize,
    pub step_bytes: usize,
}
