//! Memory that ops use for a moment: sized from the limits, the weights and the cache before *ready*.

use std::ops::Range;

use baton_backend::sampling::SampleScratch;
use baton_backend::{AttentionPlan, BackendError, NO_PARTIAL, Sampled, StepLimits};
use baton_core::TokenLogprob;

use crate::buffers::Buffer;
use crate::expert_scratch::ExpertScratch;
use crate::kernels::attention::{AttentionScratch, Chain, UNIT_ROWS};
use crate::memory::AlignedBytes;
use crate::quantize::{self, ActivationBlock, SuperPlaces};
use crate::units::Units;
use crate::weights::formats::{BLOCK, SPLIT_TOKENS};

/// A part of an attention item that one worker takes.
#[derive(Clone, Copy, Debug)]
pub struct AttentionUnit {
    pub item: u32,
    /// First query, counted from the item's first.
    pub first: u32,
    pub num_queries: u32,
}

/// One segment of the keys of a unit, where contexts are split over workers.
#[derive(Clone, Copy, Debug)]
pub struct AttentionPiece {
    pub unit: u32,
    pub segment: u32,
    /// Where the unit's pieces start.
    pub first: u32,
}

/// How the parts of queries follow each other, by slot.
#[derive(Debug, Default)]
pub struct Chains {
    /// The slot of the part before, or [`NO_PARTIAL`].
    pub before: Vec<u32>,
    pub is_last: Vec<bool>,
    /// How many parts are before it.
    depths: Vec<u32>,
}

impl Chains {
    /// The step's check has compared slots with their number.
    pub fn fill(&mut self, plan: &AttentionPlan) {
        let num_slots = plan.num_partials as usize;
        self.before.clear();
        self.before.resize(num_slots, NO_PARTIAL);
        self.is_last.clear();
        self.is_last.resize(num_slots, false);
        self.depths.clear();
        self.depths.resize(num_slots, 0);
        for merge in &plan.merges {
            let slots = &plan.merge_slots[merge.first as usize..(merge.first + merge.count) as usize];
            for (depth, pair) in slots.windows(2).enumerate() {
                self.before[pair[1] as usize] = pair[0];
                self.depths[pair[1] as usize] = depth as u32 + 1;
            }
            if let Some(&last) = slots.last() {
                self.is_last[last as usize] = true;
            }
        }
    }

    /// Parts that must be done before an item with these slots.
    pub fn depth(&self, slot: u32, num_queries: u32) -> u32 {
        if slot == NO_PARTIAL {
            return 0;
        }
        self.depths[slot as usize..][..num_queries as usize].iter().copied().max().unwrap_or(0)
    }
}

/// One worker's memory for sampling.
#[derive(Debug, Default)]
pub struct Sampler {
    pub scratch: SampleScratch,
    pub top: Vec<TokenLogprob>,
}

/// What one sample drew, and which worker holds its most likely tokens.
#[derive(Clone, Debug)]
pub struct Draw {
    pub sampled: Sampled,
    pub worker: usize,
}

#[derive(Debug)]
pub struct Scratch {
    /// Quantised activations.
    blocks: AlignedBytes,
    /// Those of a single token, a row for each worker.
    private_blocks: AlignedBytes, // [threads, cols / 32]
    /// The same for k-quants in super-blocks, and those of a single token.
    supers: AlignedBytes,
    private_supers: AlignedBytes, // [threads, cols]
    /// Activations for float weights, `[rows, cols]`.
    pub floats: Buffer,
    /// One normalised row per worker.
    pub rows: Buffer, // [threads, cols]
    /// The same in the order of a weight's columns.
    pub ordered: Buffer, // [threads, cols]
    /// Keys and values before they go into their slots.
    pub kv: Buffer, // [tokens, 2 * kv heads * head_dim]
    pub attention: Buffer, // [threads, AttentionScratch]
    /// States of queries between their parts.
    pub parts: Buffer,
    pub chains: Chains,
    /// Units of attention that are done before a barrier each, and who takes which.
    pub phases: Vec<(Range<usize>, Units)>,
    pub units: Vec<AttentionUnit>,
    pub pieces: Vec<AttentionPiece>,
    pub states: Buffer,
    pub experts: ExpertScratch,
    pub samplers: Vec<Sampler>,
    pub draws: Vec<Option<Draw>>,
    /// Columns of the widest weight, of any kind, of the float ones and of those with super-blocks.
    max_cols: usize,
    max_float_cols: usize,
    max_super_cols: usize,
    max_rows: usize,
}

impl Scratch {
    pub fn new(num_threads: usize) -> Result<Self, BackendError> {
        let empty = || Buffer::new(0, 0, "scratch");
        Ok(Self {
            blocks: AlignedBytes::zeroed(0, "scratch")?,
            private_blocks: AlignedBytes::zeroed(0, "scratch")?,
            supers: AlignedBytes::zeroed(0, "scratch")?,
            private_supers: AlignedBytes::zeroed(0, "scratch")?,
            floats: empty()?,
            rows: empty()?,
            ordered: empty()?,
            kv: empty()?,
            attention: empty()?,
            parts: empty()?,
            chains: Chains::default(),
            phases: Vec::new(),
            units: Vec::new(),
            pieces: Vec::new(),
            states: empty()?,
            experts: ExpertScratch::new()?,
            samplers: (0..num_threads).map(|_| Sampler::default()).collect(),
            draws: Vec::new(),
            max_cols: 0,
            max_float_cols: 0,
            max_super_cols: 0,
            max_rows: 0,
        })
    }

    /// Room for the step's own arrays.
    pub fn set_limits(&mut self, limits: &StepLimits) -> Result<(), BackendError> {
        self.max_rows = limits.max_tokens.max(limits.max_logit_rows);
        self.units.reserve(limits.max_tokens.min(1 << 20));
        self.draws.reserve(limits.max_samples.min(1 << 20));
        for sampler in &mut self.samplers {
            sampler.scratch = SampleScratch::with_vocab_size(limits.vocab_size.min(1 << 24));
        }
        self.resize()
    }

    /// Room for the activations of a weight.
    pub fn add_weight(
        &mut self,
        cols: usize,
        has_floats: bool,
        has_supers: bool,
    ) -> Result<(), BackendError> {
        self.max_cols = self.max_cols.max(cols);
        if has_floats {
            self.max_float_cols = self.max_float_cols.max(cols);
        }
        if has_supers {
            self.max_super_cols = self.max_super_cols.max(cols);
        }
        self.resize()
    }

    fn resize(&mut self) -> Result<(), BackendError> {
        let what = "scratch for activations";
        let too_large = || BackendError::Unsupported { what: format!("{what}: it is too large") };
        let blocks = quantize::num_blocks(self.max_rows, self.max_cols.div_ceil(BLOCK));
        let bytes = blocks.and_then(|n| n.checked_mul(size_of::<ActivationBlock>())).ok_or_else(too_large)?;
        if bytes > self.blocks.len() {
            self.blocks = AlignedBytes::zeroed(bytes, what)?;
        }
        // Whole tiles, where rows are split.
        let rows = self.max_rows.checked_next_multiple_of(SPLIT_TOKENS);
        let floats = rows.and_then(|rows| rows.checked_mul(self.max_float_cols)).ok_or_else(too_large)?;
        self.floats.reserve(floats, what)?;
        let supers = rows.and_then(|rows| SuperPlaces::bytes(rows, self.max_super_cols));
        let supers = supers.ok_or_else(too_large)?;
        if supers > self.supers.len() {
            self.supers = AlignedBytes::zeroed(supers, what)?;
        }
        let supers = SuperPlaces::bytes(self.samplers.len(), self.max_super_cols).ok_or_else(too_large)?;
        if supers > self.private_supers.len() {
            self.private_supers = AlignedBytes::zeroed(supers, what)?;
        }
        if self.max_cols > self.rows.matrix().cols {
            let cols = self.max_cols.next_multiple_of(BLOCK);
            self.rows = Buffer::new(self.samplers.len(), cols, what)?;
            self.ordered = Buffer::new(self.samplers.len(), cols, what)?;
            let blocks = self.samplers.len().checked_mul(cols / BLOCK);
            let bytes = blocks.and_then(|n| n.checked_mul(size_of::<ActivationBlock>()));
            self.private_blocks = AlignedBytes::zeroed(bytes.ok_or_else(too_large)?, what)?;
        }
        Ok(())
    }

    pub fn blocks(&self) -> *mut ActivationBlock {
        self.blocks.as_mut_ptr().cast()
    }

    /// The blocks of a single token, as many for each worker as [`Self::rows`] has columns for.
    pub fn private_blocks(&self) -> *mut ActivationBlock {
        self.private_blocks.as_mut_ptr().cast()
    }

    pub fn supers(&self) -> *mut u8 {
        self.supers.as_mut_ptr()
    }

    /// The super-blocks of a single token for a worker.
    pub fn private_supers(&self, worker: usize) -> *mut u8 {
        debug_assert!(worker < self.samplers.len());
        // SAFETY: there is room for a row of the widest weight for each worker.
        unsafe {
            self.private_supers.as_mut_ptr().add(self.private_supers.len() / self.samplers.len() * worker)
        }
    }

    /// Room for attention units of `group` heads; grows only for a group larger than any before.
    pub fn reserve_attention(&mut self, group: usize, value_dim: usize) -> Result<(), BackendError> {
        let floats = AttentionScratch::floats(UNIT_ROWS.max(group), value_dim).next_multiple_of(16);
        if floats > self.attention.matrix().cols {
            self.attention = Buffer::new(self.samplers.len(), floats, "scratch for attention")?;
        }
        Ok(())
    }

    /// Room for what rows have after each of `count` segments; grows with the longest context that is split.
    pub fn reserve_states(&mut self, count: usize, floats: usize) -> Result<(), BackendError> {
        let what = "states of segments of attention";
        let too_large = || BackendError::Unsupported { what: format!("that many {what}") };
        self.states.reserve(count.checked_mul(floats).ok_or_else(too_large)?, what)
    }

    /// Room for the states of queries between their parts.
    pub fn reserve_parts(
        &mut self,
        num_partials: usize,
        num_heads: usize,
        value_dim: usize,
    ) -> Result<(), BackendError> {
        let what = "partial results of attention";
        let too_large = || BackendError::Unsupported { what: format!("that many {what}") };
        let rows = num_partials.checked_mul(num_heads).ok_or_else(too_large)?;
        self.parts.reserve(rows.checked_mul(Chain::floats(value_dim)).ok_or_else(too_large)?, what)
    }
}
