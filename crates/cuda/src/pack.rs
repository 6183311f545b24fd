//! A step as one array of 32-bit words: a header with counts and word offsets, then all arrays, as dense as they come.
//! `common.cuh` declares the same header. Kernels find the arrays through it, so a recorded launch fits every step.

use std::ops::Range;

use baton_backend::{AttentionMerge, AttentionPlan, BackendError, SampleRow, StepInput, StepLimits};

/// Lanes that a cache may have.
pub(crate) const MAX_PLANS: usize = 16;
const PLAN_WORDS: usize = 8;
const FIXED_WORDS: usize = 16;
const HEADER_WORDS: usize = FIXED_WORDS + MAX_PLANS * PLAN_WORDS;
const SAMPLE_WORDS: usize = 20;
const NONE: u32 = u32::MAX;
/// Room for penalised tokens and biases (two words each) and for copies of blocks.
const SPARE_WORDS: usize = 2 << 20;
/// What the scheduler may put into a step of the former; the rest is for the copies.
pub(crate) const MAX_SAMPLE_ENTRIES: usize = SPARE_WORDS / 2 - (64 << 10);

/// Words that any step of these limits fits in.
pub(crate) fn capacity_words(limits: &StepLimits, max_partials: usize, lanes: usize) -> usize {
    // Each branch of guesses has a page of its own.
    let pages = limits.max_seqs.saturating_mul(limits.max_model_len.div_ceil(16) + 1) + limits.max_logit_rows;
    let items = (limits.max_tokens + max_partials) * 6;
    let merges = limits.max_tokens * 4 + 2 * max_partials;
    HEADER_WORDS
        + (2 + lanes) * limits.max_tokens
        + limits.max_logit_rows
        + limits.max_samples * SAMPLE_WORDS
        + limits.max_seqs * limits.vocab_size.div_ceil(32)
        + lanes * pages
        + lanes.max(2) * (items + merges)
        + SPARE_WORDS
}

/// Where the lists lie that tell which blocks a step touches, in words.
#[derive(Clone, Debug, Default)]
pub(crate) struct Packed {
    pub(crate) num_words: usize,
    pub(crate) slots: Range<usize>,
    pub(crate) pages: Range<usize>,
    /// Pairs.
    pub(crate) copies: Range<usize>,
}

struct Writer<'a> {
    words: &'a mut [u32],
    len: usize,
}

impl Writer<'_> {
    fn extend(&mut self, values: impl IntoIterator<Item = u32>) -> Option<u32> {
        let start = self.len;
        for value in values {
            *self.words.get_mut(self.len)? = value;
            self.len += 1;
        }
        Some(start as u32)
    }

    /// For each partial slot the number of the merge that reads it.
    fn slot_merges(&mut self, plan: &AttentionPlan) -> Option<u32> {
        let start = self.len;
        let end = start.checked_add(plan.num_partials as usize)?;
        let slot_merges = self.words.get_mut(start..end)?;
        for (number, merge) in plan.merges.iter().enumerate() {
            for slot in plan.merge_slots.get(merge.first as usize..(merge.first + merge.count) as usize)? {
                *slot_merges.get_mut(*slot as usize)? = number as u32;
            }
        }
        self.len = end;
        Some(start as u32)
    }
}

/// Items of more keys are never read by one warp alone.
const NARROW_KEYS: u32 = 384;

/// Whether a warp each is enough for the items of single sequences: they are more than `min_items`, short, and not split.
fn is_narrow(plan: &AttentionPlan, min_items: usize) -> bool {
    let first_own = plan.num_shared_partials();
    let num_own = plan.own_items().len();
    // Each of a merge's own parts has a slot for each of its queries.
    let own_slots = (plan.num_partials - first_own) as usize;
    num_own > min_items
        && own_slots <= plan.merges.len()
        && plan.own_items().iter().all(|item| item.kv_len <= NARROW_KEYS)
}

/// Writes the step to `words`. `min_items` is how many items of single sequences are enough to give each to a warp.
pub(crate) fn pack(input: &StepInput, words: &mut [u32], min_items: usize) -> Result<Packed, BackendError> {
    if input.attention.len() > MAX_PLANS {
        return Err(BackendError::Unsupported {
            what: format!("more than {MAX_PLANS} kinds of attention in one model"),
        });
    }
    try_pack(input, words, min_items).ok_or_else(|| BackendError::Unsupported {
        what:
            "a step with so many pages, penalised tokens and biases: lower --max-num-seqs or --max-model-len"
                .to_owned(),
    })
}

fn range(start: u32, len: usize) -> Range<usize> {
    start as usize..start as usize + len
}

fn try_pack(input: &StepInput, words: &mut [u32], min_items: usize) -> Option<Packed> {
    let mut writer = Writer { words, len: HEADER_WORDS };
    let token_ids = writer.extend(input.token_ids.iter().copied())?;
    for &(row, sample) in &input.feedback {
        // The top bit marks a number of a sample; vocabularies are far smaller.
        *writer.words.get_mut((token_ids + row) as usize)? = sample | 1 << 31;
    }
    let positions = writer.extend(input.positions.iter().copied())?;
    let slots = writer.extend(input.slots.iter().copied())?;
    let pages = writer.extend(input.pages.iter().copied())?;
    let logit_rows = writer.extend(input.logit_rows.iter().copied())?;
    let samples = writer.extend(input.samples.iter().flat_map(sample_words))?;
    let history = writer.extend(
        input
            .history
            .iter()
            .flat_map(|seen| [seen.token_id, seen.num_output | u32::from(seen.in_prompt) << 31]),
    )?;
    let biases =
        writer.extend(input.biases.iter().flat_map(|(token_id, bias)| [*token_id, bias.to_bits()]))?;
    let copies = writer.extend(input.copies.iter().flat_map(|copy| [copy.from, copy.to]))?;
    for (number, plan) in input.attention.iter().enumerate() {
        let items = writer.extend(plan.items.iter().flat_map(|item| {
            [item.query_start, item.num_queries, item.pages_start, item.kv_start, item.kv_len, item.partial]
        }))?;
        // Shared items are done before the others, which merge: how many of those a merge waits for.
        let first_own = plan.num_shared_partials();
        let num_own = |merge: &AttentionMerge| {
            let slots = plan.merge_slots.get(merge.first as usize..(merge.first + merge.count) as usize)?;
            Some(slots.iter().filter(|&&slot| slot >= first_own).count() as u32)
        };
        let merges = writer.len as u32;
        for merge in &plan.merges {
            writer.extend([merge.query, merge.first, merge.count, num_own(merge)?])?;
        }
        let merge_slots = writer.extend(plan.merge_slots.iter().copied())?;
        let slot_merges = writer.slot_merges(plan)?;
        let header = FIXED_WORDS + number * PLAN_WORDS;
        writer.words[header..header + PLAN_WORDS].copy_from_slice(&[
            plan.items.len() as u32,
            items,
            plan.merges.len() as u32,
            merges,
            merge_slots,
            slot_merges,
            plan.num_shared_items,
            u32::from(is_narrow(plan, min_items)),
        ]);
    }
    let masks = writer.extend(input.masks.iter().copied())?;
    let counts = [input.num_tokens() as u32, input.logit_rows.len() as u32, input.samples.len() as u32];
    let offsets = [token_ids, positions, slots, pages, logit_rows, samples, history, biases, copies, masks];
    writer.words[..3].copy_from_slice(&counts);
    writer.words[3..13].copy_from_slice(&offsets);
    Some(Packed {
        num_words: writer.len,
        slots: range(slots, input.slots.len()),
        pages: range(pages, input.pages.len()),
        copies: range(copies, 2 * input.copies.len()),
    })
}

fn sample_words(row: &SampleRow) -> [u32; SAMPLE_WORDS] {
    [
        row.logit_row,
        row.forced.unwrap_or(NONE),
        row.temperature.to_bits(),
        row.top_k,
        row.top_p.to_bits(),
        row.min_p.to_bits(),
        row.repetition_penalty.to_bits(),
        row.presence_penalty.to_bits(),
        row.frequency_penalty.to_bits(),
        row.history.start,
        row.history.end,
        row.bias.start,
        row.bias.end,
        row.num_logprobs.unwrap_or(NONE),
        row.seed as u32,
        (row.seed >> 32) as u32,
        row.counter as u32,
        (row.counter >> 32) as u32,
        row.mask.start,
        row.mask.end,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feedback_marks_its_row_and_a_short_buffer_is_refused() {
        let input = StepInput {
            token_ids: vec![7, 0, 9],
            feedback: vec![(1, 4)],
            positions: vec![0, 1, 2],
            slots: vec![5, 6, 7],
            pages: vec![3],
            ..StepInput::default()
        };
        let mut words = vec![0; HEADER_WORDS + 10];
        let packed = pack(&input, &mut words, 0).unwrap();
        assert_eq!(packed.num_words, HEADER_WORDS + 10);
        assert_eq!(words[HEADER_WORDS..], [7, 4 | 1 << 31, 9, 0, 1, 2, 5, 6, 7, 3]);
        assert_eq!(words[..5], [3, 0, 0, HEADER_WORDS as u32, HEADER_WORDS as u32 + 3]);
        assert!(pack(&input, &mut words[..HEADER_WORDS + 9], 0).is_err());
    }
}
