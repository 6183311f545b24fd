//! The checks of a step before anything is computed: kernels index with what the step says, so it must be true.

use baton_backend::{AttentionPlan, BackendError, BlockCopy, NO_PARTIAL, StepInput, StepLimits};

use crate::kv::KvCache;

fn require(ok: bool, cause: &str) -> Result<(), BackendError> {
    if ok { Ok(()) } else { Err(BackendError::Device { cause: format!("the step is not valid: {cause}") }) }
}

/// Checks every index of `input` against the limits, the cache and the samples of the step before.
pub fn check_step(
    input: &StepInput,
    limits: &StepLimits,
    kv: Option<&KvCache>,
    num_previous_samples: usize,
) -> Result<(), BackendError> {
    let num_tokens = input.num_tokens();
    require(num_tokens <= limits.max_tokens, "more tokens than --max-num-batched-tokens")?;
    require(input.positions.len() == num_tokens, "positions and tokens differ in number")?;
    require(input.slots.len() == num_tokens, "slots and tokens differ in number")?;
    require(input.logit_rows.len() <= limits.max_logit_rows, "too many rows of logits")?;
    require(input.samples.len() <= limits.max_samples, "too many samples")?;
    let in_tokens = |row: u32| (row as usize) < num_tokens;
    require(input.logit_rows.iter().all(|&row| in_tokens(row)), "a row of logits is no token row")?;
    require(
        input
            .feedback
            .iter()
            .all(|&(row, sample)| in_tokens(row) && (sample as usize) < num_previous_samples),
        "a token is taken from a sample that the step before did not draw",
    )?;
    let (num_device, num_host, block_size) =
        kv.map_or((0, 0, 1), |kv| (kv.num_device_blocks, kv.num_host_blocks, kv.block_size));
    let moves = |list: &[BlockCopy], from: usize, to: usize| {
        list.iter().all(|copy| (copy.from as usize) < from && (copy.to as usize) < to)
    };
    require(
        moves(&input.swap_out, num_device, num_host)
            && moves(&input.swap_in, num_host, num_device)
            && moves(&input.copies, num_device, num_device),
        "a block that does not exist is moved",
    )?;
    if kv.is_some() {
        require(
            input.slots.iter().all(|&slot| (slot as usize) < num_device * block_size),
            "a slot lies outside the cache",
        )?;
    }
    require(input.pages.iter().all(|&page| (page as usize) < num_device), "a page lies outside the cache")?;
    for plan in &input.attention {
        check_plan(plan, input, block_size)?;
    }
    check_samples(input, limits)
}

fn check_plan(plan: &AttentionPlan, input: &StepInput, block_size: usize) -> Result<(), BackendError> {
    let num_tokens = input.num_tokens();
    for item in &plan.items {
        let end = item.query_start as usize + item.num_queries as usize;
        require(end <= num_tokens, "an attention item has queries that are no tokens")?;
        require(
            (item.kv_start as usize).is_multiple_of(block_size),
            "an attention item does not start at a block",
        )?;
        let pages = item.pages_start as usize + (item.kv_len as usize).div_ceil(block_size);
        require(pages <= input.pages.len(), "an attention item has more keys than pages")?;
        require(
            item.partial == NO_PARTIAL
                || item.partial as usize + item.num_queries as usize <= plan.num_partials as usize,
            "an attention item writes a partial that does not exist",
        )?;
    }
    require(
        plan.merge_slots.iter().all(|&slot| slot < plan.num_partials),
        "a partial that does not exist is merged",
    )?;
    for merge in &plan.merges {
        require(
            (merge.query as usize) < num_tokens
                && merge.first as usize + merge.count as usize <= plan.merge_slots.len(),
            "a merge lies outside its list",
        )?;
    }
    Ok(())
}

fn check_samples(input: &StepInput, limits: &StepLimits) -> Result<(), BackendError> {
    for sample in &input.samples {
        require(
            (sample.logit_row as usize) < input.logit_rows.len(),
            "a sample is drawn from a row of logits that does not exist",
        )?;
        let inside =
            |range: &std::ops::Range<u32>, len: usize| range.start <= range.end && range.end as usize <= len;
        require(inside(&sample.history, input.history.len()), "a sample's history lies outside its list")?;
        require(inside(&sample.bias, input.biases.len()), "a sample's biases lie outside their list")?;
        require(inside(&sample.mask, input.masks.len()), "a sample's mask lies outside its list")?;
        require(
            sample.forced.is_none_or(|token| (token as usize) < limits.vocab_size),
            "a token outside the vocabulary is scored",
        )?;
    }
    Ok(())
}
