//! The rules that every step keeps, whichever device runs it. Kernels index with what a step says, so it must be true.

use std::ops::Range;

use crate::{
    AttentionPlan, BackendError, BlockCopy, NO_PARTIAL, SampleRow, StepInput, StepLimits, StepNeeds,
};

/// What of a KV cache steps are checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Block tables that a sequence has.
    pub num_lanes: usize,
    pub num_device_blocks: usize,
    pub num_host_blocks: usize,
    pub block_size: usize,
}

fn wrong(cause: &str) -> Result<(), BackendError> {
    Err(BackendError::Device { cause: format!("the step is not valid: {cause}") })
}

impl StepInput {
    /// Checks every index against the limits, the cache, the program, and the number of samples that the step before drew.
    pub fn check(
        &self,
        limits: &StepLimits,
        cache: Option<CacheShape>,
        needs: &StepNeeds,
        num_previous_samples: usize,
    ) -> Result<(), BackendError> {
        let num_tokens = self.num_tokens();
        at_most("tokens", num_tokens, limits.max_tokens)?;
        at_most("rows of logits", self.logit_rows.len(), limits.max_logit_rows)?;
        at_most("samples", self.samples.len(), limits.max_samples)?;
        as_many("positions", self.positions.len(), num_tokens)?;
        as_many("slots", self.slots.len(), cache.map_or(1, |cache| cache.num_lanes) * num_tokens)?;
        if !self.embedded.is_empty() || !self.adapted.is_empty() {
            return wrong("it has embeddings or adapters, which no device has");
        }
        all_below("position", &self.positions, limits.max_model_len)?;
        all_below("a row of logits: token row", &self.logit_rows, num_tokens)?;
        for &(row, sample) in &self.feedback {
            if row as usize >= num_tokens || sample as usize >= num_previous_samples {
                return wrong(&format!(
                    "row {row} of {num_tokens} takes its token from sample {sample}, which the step before did not draw: it drew \
                     {num_previous_samples}"
                ));
            }
        }
        for sample in &self.samples {
            self.check_sample(sample, limits)?;
        }
        self.check_blocks(cache)?;
        needs.check_step(self)
    }

    fn check_sample(&self, sample: &SampleRow, limits: &StepLimits) -> Result<(), BackendError> {
        all_below("a sample's row of logits", &[sample.logit_row], self.logit_rows.len())?;
        within("a sample's history", &sample.history, self.history.len())?;
        within("a sample's biases", &sample.bias, self.biases.len())?;
        within("a sample's mask", &sample.mask, self.masks.len())?;
        match sample.forced {
            Some(token) if token as usize >= limits.vocab_size => {
                wrong(&format!("token {token} is scored, of a vocabulary of {}", limits.vocab_size))
            }
            _ => Ok(()),
        }
    }

    fn check_blocks(&self, cache: Option<CacheShape>) -> Result<(), BackendError> {
        let none = CacheShape { num_lanes: 1, num_device_blocks: 0, num_host_blocks: 0, block_size: 1 };
        let CacheShape { num_device_blocks: device, num_host_blocks: host, block_size, .. } =
            cache.unwrap_or(none);
        check_moves("swapped out", &self.swap_out, device, host)?;
        check_moves("swapped in", &self.swap_in, host, device)?;
        check_moves("copied", &self.copies, device, device)?;
        for fetch in &self.fetches {
            check_moves("fetched", &fetch.copies, host, device)?;
        }
        if cache.is_some() {
            all_below("slot", &self.slots, device.saturating_mul(block_size))?;
            #[cfg(debug_assertions)]
            check_distinct(&self.slots)?;
        }
        all_below("page", &self.pages, device)?;
        self.attention.iter().try_for_each(|plan| self.check_plan(plan, block_size))
    }

    fn check_plan(&self, plan: &AttentionPlan, block_size: usize) -> Result<(), BackendError> {
        let (num_tokens, num_pages) = (self.num_tokens(), self.pages.len());
        for item in &plan.items {
            let num_queries = item.num_queries as usize;
            if item.query_start as usize + num_queries > num_tokens {
                return wrong(&format!("an item has queries beyond the {num_tokens} rows: {item:?}"));
            }
            if !(item.kv_start as usize).is_multiple_of(block_size) {
                return wrong(&format!(
                    "kv_start is not a multiple of the block size {block_size}: {item:?}"
                ));
            }
            if item.pages_start as usize + (item.kv_len as usize).div_ceil(block_size) > num_pages {
                return wrong(&format!("an item has pages beyond the {num_pages} there are: {item:?}"));
            }
            let is_partial = item.partial != NO_PARTIAL;
            if is_partial && item.partial as usize + num_queries > plan.num_partials as usize {
                return wrong(&format!("partial slot {} of {}: {item:?}", item.partial, plan.num_partials));
            }
        }
        all_below("a partial slot that is merged", &plan.merge_slots, plan.num_partials as usize)?;
        for merge in &plan.merges {
            let end = merge.first as usize + merge.count as usize;
            if merge.query as usize >= num_tokens || end > plan.merge_slots.len() {
                return wrong(&format!("a merge lies outside its list: {merge:?}"));
            }
        }
        Ok(())
    }
}

fn at_most(what: &str, count: usize, limit: usize) -> Result<(), BackendError> {
    if count <= limit { Ok(()) } else { wrong(&format!("{count} {what}, but the limit is {limit}")) }
}

fn as_many(what: &str, count: usize, expected: usize) -> Result<(), BackendError> {
    if count == expected { Ok(()) } else { wrong(&format!("{count} {what}, expected {expected}")) }
}

fn all_below(what: &str, values: &[u32], bound: usize) -> Result<(), BackendError> {
    match values.iter().find(|value| **value as usize >= bound) {
        None => Ok(()),
        Some(value) => wrong(&format!("{what} {value} is not below {bound}")),
    }
}

fn within(what: &str, range: &Range<u32>, len: usize) -> Result<(), BackendError> {
    let is_within = range.start <= range.end && range.end as usize <= len;
    if is_within { Ok(()) } else { wrong(&format!("{what} {range:?} lies outside its {len} entries")) }
}

fn check_moves(what: &str, moves: &[BlockCopy], num_from: usize, num_to: usize) -> Result<(), BackendError> {
    let is_wrong = |copy: &&BlockCopy| copy.from as usize >= num_from || copy.to as usize >= num_to;
    match moves.iter().find(is_wrong) {
        None => Ok(()),
        Some(BlockCopy { from, to }) => {
            wrong(&format!("block {from} of {num_from} is {what} to block {to} of {num_to}"))
        }
    }
}

/// In debug builds: it takes as long as all else.
#[cfg(debug_assertions)]
fn check_distinct(slots: &[u32]) -> Result<(), BackendError> {
    let mut slots = slots.to_vec();
    slots.sort_unstable();
    match slots.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => wrong(&format!("two tokens of a step are written to slot {}", pair[0])),
    }
}
