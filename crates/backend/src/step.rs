//! Everything that varies from step to step, in flat arrays that one upload can carry, and what comes back.

use std::ops::Range;
use std::time::Instant;

use baton_core::{TokenCount, TokenId, TokenLogprob};
use serde::{Deserialize, Serialize};

/// `AttentionItem::partial` of an item that is the only reader for its queries and writes the output itself.
pub const NO_PARTIAL: u32 = u32::MAX;

/// The input of one step. All arrays are reused from step to step; none grows past the [`crate::StepLimits`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepInput {
    /// Whole-block moves, executed in this order before anything is computed.
    pub swap_out: Vec<BlockCopy>, // device → host
    pub swap_in: Vec<BlockCopy>, // host → device
    pub copies: Vec<BlockCopy>,  // device → device
    /// Host → device, beside the step and those that follow: no row of this step reads these blocks.
    pub fetches: Vec<Fetch>,
    /// The step is only there to wait for fetches: it ends when all that were begun are done.
    pub waits_for_fetches: bool,

    pub token_ids: Vec<TokenId>, // [num_tokens]
    /// `(row, sample)`: the token of `row` is what sample number `sample` of the step before drew on the device.
    pub feedback: Vec<(u32, u32)>,
    pub positions: Vec<u32>, // [num_tokens]
    /// Rows that take given embeddings instead of those of a token: `(row, slot)`. No device has such slots yet.
    pub embedded: Vec<(u32, u32)>,
    /// Rows that an adapter's weights are added for: `(row, adapter)`. No device has adapters yet.
    pub adapted: Vec<(u32, u32)>,
    /// Where each token's K and V are written: `block * block_size + offset`, for each lane of the cache. Of a program without a
    /// cache: the row at which the token's sequence begins.
    pub slots: Vec<u32>, // [num_lanes, num_tokens]
    /// Page lists of all sequences, one after another. Attention items point into it.
    pub pages: Vec<u32>,
    /// One plan for each lane of the cache, by `Attention::plan`.
    pub attention: Vec<AttentionPlan>,

    /// Token rows whose logits are wanted.
    pub logit_rows: Vec<u32>, // [num_logit_rows]
    /// The residual stream of all rows is read after the step, not only the logits.
    pub reads_hidden: bool,
    pub samples: Vec<SampleRow>, // [num_samples]
    /// Tokens seen so far, for penalties; `SampleRow::history` points into it.
    pub history: Vec<TokenCount>,
    /// Additions to logits; `SampleRow::bias` points into it. Minus infinity bans a token.
    pub biases: Vec<(TokenId, f32)>,
    /// Bit sets of allowed tokens, 32 to a word; `SampleRow::mask` points into it.
    pub masks: Vec<u32>,
}

impl StepInput {
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// What it does, as far as one can see.
    pub fn kind(&self) -> StepKind {
        match (self.num_tokens(), self.samples.len()) {
            (0, _) => StepKind::Moves,
            (tokens, samples) if tokens == samples => StepKind::Decode,
            (_, 0) => StepKind::Prefill,
            _ => StepKind::Mixed,
        }
    }

    /// Whether rows without logits may be dropped where only logits are still to come: see [`crate::KeepLogitRows`].
    pub fn can_keep_logit_rows(&self) -> bool {
        !self.reads_hidden
            && self.logit_rows.len() < self.num_tokens()
            && self.logit_rows.is_sorted_by(|a, b| a < b)
    }

    /// What a row of `samples` points at.
    pub fn lists_of(&self, row: &SampleRow) -> RowLists<'_> {
        RowLists {
            history: &self.history[row.history.start as usize..row.history.end as usize],
            biases: &self.biases[row.bias.start as usize..row.bias.end as usize],
            mask: &self.masks[row.mask.start as usize..row.mask.end as usize],
        }
    }

    /// Empties every array but keeps its memory.
    pub fn clear(&mut self) {
        self.swap_out.clear();
        self.swap_in.clear();
        self.copies.clear();
        self.fetches.clear();
        self.waits_for_fetches = false;
        self.embedded.clear();
        self.adapted.clear();
        self.token_ids.clear();
        self.feedback.clear();
        self.positions.clear();
        self.slots.clear();
        self.pages.clear();
        self.attention.iter_mut().for_each(AttentionPlan::clear);
        self.logit_rows.clear();
        self.reads_hidden = false;
        self.samples.clear();
        self.history.clear();
        self.biases.clear();
        self.masks.clear();
    }
}

/// What a step is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Every token gives the next one.
    Decode,
    /// Tokens of prompts, none of which is at its end.
    Prefill,
    /// Some give the next token, others do not.
    Mixed,
    /// Blocks only.
    Moves,
}

impl StepKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Mixed => "mixed",
            Self::Moves => "moves",
        }
    }
}

/// From when to when a device worked on a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSpan {
    pub start: Instant,
    pub end: Instant,
}

/// A whole-block copy between the tiers that the list names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCopy {
    pub from: u32,
    pub to: u32,
}

/// Copies from the host tier that somebody waits for. [`StepOutput::fetched`] of this step or a later one tells when they are
/// done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    pub id: u64,
    pub copies: Vec<BlockCopy>,
}

/// The work of one lane of the cache, for all its layers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttentionPlan {
    pub items: Vec<AttentionItem>,
    /// Queries whose result is spread over several items.
    pub merges: Vec<AttentionMerge>,
    /// Partial slots to merge; `AttentionMerge::slots` points into it.
    pub merge_slots: Vec<u32>,
    /// How many partial slots the items use.
    pub num_partials: u32,
    /// The first so many items read what several sequences share. Their partial slots come before all others, so that a
    /// device may run them first and leave the merging to the items that follow.
    pub num_shared_items: u32,
}

impl AttentionPlan {
    pub fn clear(&mut self) {
        self.items.clear();
        self.merges.clear();
        self.merge_slots.clear();
        self.num_partials = 0;
        self.num_shared_items = 0;
    }

    pub fn shared_items(&self) -> &[AttentionItem] {
        &self.items[..self.num_shared_items as usize]
    }

    /// The items of single sequences.
    pub fn own_items(&self) -> &[AttentionItem] {
        &self.items[self.num_shared_items as usize..]
    }

    /// Slots before this one belong to shared items.
    pub fn num_shared_partials(&self) -> u32 {
        self.shared_items().iter().map(|item| item.partial + item.num_queries).max().unwrap_or(0)
    }
}

/// A run of consecutive query rows over a span of pages.
///
/// Key position `k` is seen by query row `q` if `k <= positions[q]` and, with a window `w`, `positions[q] - k < w`.
/// A lone decode is an item with one query; a prompt chunk one with many queries of one sequence; a long context is
/// split over several items; a shared prefix is one item with the queries of many sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttentionItem {
    pub query_start: u32,
    pub num_queries: u32,
    /// Index into `StepInput::pages` of the page that holds key position `kv_start`.
    pub pages_start: u32,
    /// Position of the first key; a multiple of the block size.
    pub kv_start: u32,
    pub kv_len: u32,
    /// First of `num_queries` partial slots this item writes, or [`NO_PARTIAL`].
    pub partial: u32,
}

/// Merge the partials of one query row into its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttentionMerge {
    pub query: u32,
    /// Range of `AttentionPlan::merge_slots`.
    pub first: u32,
    pub count: u32,
}

/// The parts of a step's arrays that belong to one row.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowLists<'a> {
    pub history: &'a [TokenCount],
    pub biases: &'a [(TokenId, f32)],
    /// Empty allows every token.
    pub mask: &'a [u32],
}

/// One token to draw, or one given token to score, from a row of logits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleRow {
    /// Index into `StepInput::logit_rows`.
    pub logit_row: u32,
    /// Do not draw: report the log-probability of this token (prompt scoring).
    pub forced: Option<TokenId>,
    /// 0 is greedy.
    pub temperature: f32,
    pub top_k: u32, // 0 is off
    pub top_p: f32, // 1 is off
    pub min_p: f32, // 0 is off
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub history: Range<u32>,
    pub bias: Range<u32>,
    /// Which tokens may be drawn, whatever biases and penalties say. Empty: all. Else one bit a token of the vocabulary,
    /// at least one of them set.
    pub mask: Range<u32>,
    /// The random number is a pure function of `(seed, counter)`, so a sequence draws the same tokens in any batch.
    pub seed: u64,
    pub counter: u64,
    /// `None`: no log-probability is needed. `Some(n)`: that of the token, and of the `n` most likely ones,
    /// from the raw logits.
    pub num_logprobs: Option<u32>,
}

impl SampleRow {
    /// The most likely token of a row, with nothing else asked for: what other rows are varied from.
    pub fn greedy(logit_row: u32) -> Self {
        Self {
            logit_row,
            forced: None,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            history: 0..0,
            bias: 0..0,
            mask: 0..0,
            seed: 0,
            counter: 0,
            num_logprobs: None,
        }
    }
}

/// What `StepInput::samples` drew, in the same order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    pub samples: Vec<Sampled>,
    /// The most likely tokens of the rows that asked for them; `Sampled::top` points into it.
    pub top: Vec<TokenLogprob>,
    /// Fetches of this step or of earlier ones that are done and were not told before.
    pub fetched: Vec<u64>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// `logprob` and `rank` are 0 where none were asked for.
    pub chosen: TokenLogprob,
    pub top: Range<u32>,
}
