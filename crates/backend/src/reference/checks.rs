//! The rules a step must keep, checked before it runs. What depends on an op is checked by the op.

use std::ops::Range;

use super::kv_cache::KvCache;
use crate::{BlockCopy, SampleRow, StepInput, StepLimits};

pub(super) fn check_step(input: &StepInput, limits: &StepLimits, kv: Option<&KvCache>) {
    let num_tokens = input.num_tokens();
    at_most("tokens", num_tokens, limits.max_tokens);
    at_most("logit rows", input.logit_rows.len(), limits.max_logit_rows);
    at_most("samples", input.samples.len(), limits.max_samples);
    assert_eq!(input.positions.len(), num_tokens, "every token has a position");
    assert_eq!(input.slots.len(), num_tokens, "every token has a slot");
    all_below("position", &input.positions, limits.max_model_len);
    all_below("logit row", &input.logit_rows, num_tokens);
    for (row, _) in &input.feedback {
        assert!((*row as usize) < num_tokens, "feedback into row {row} of {num_tokens}");
    }
    for sample in &input.samples {
        check_sample(sample, input);
    }
    if let Some(kv) = kv {
        check_slots(input, kv);
        check_moves("swap_out", &input.swap_out, kv.num_device_blocks(), kv.num_host_blocks());
        check_moves("swap_in", &input.swap_in, kv.num_host_blocks(), kv.num_device_blocks());
        check_moves("copies", &input.copies, kv.num_device_blocks(), kv.num_device_blocks());
    }
}

fn check_sample(sample: &SampleRow, input: &StepInput) {
    all_below("logit row of a sample", &[sample.logit_row], input.logit_rows.len());
    within("history", &sample.history, input.history.len());
    within("bias", &sample.bias, input.biases.len());
    within("mask", &sample.mask, input.masks.len());
}

fn check_slots(input: &StepInput, kv: &KvCache) {
    all_below("slot", &input.slots, kv.num_device_blocks() * kv.block_size());
    let mut slots = input.slots.clone();
    slots.sort_unstable();
    for pair in slots.windows(2) {
        assert!(pair[0] != pair[1], "two tokens of a step are written to slot {}", pair[0]);
    }
}

fn check_moves(list: &str, moves: &[BlockCopy], num_from: usize, num_to: usize) {
    for block in moves {
        assert!((block.from as usize) < num_from, "{list} reads block {} of {num_from}", block.from);
        assert!((block.to as usize) < num_to, "{list} writes block {} of {num_to}", block.to);
    }
}

fn at_most(what: &str, count: usize, limit: usize) {
    assert!(count <= limit, "a step of {count} {what}, but the limit is {limit}");
}

fn all_below(what: &str, values: &[u32], bound: usize) {
    for value in values {
        assert!((*value as usize) < bound, "{what} {value} is not below {bound}");
    }
}

fn within(what: &str, range: &Range<u32>, len: usize) {
    assert!(
        range.start <= range.end && range.end as usize <= len,
        "{what} {range:?} lies outside its {len} entries"
    );
}
