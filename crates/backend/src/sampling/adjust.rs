//! What is done to the logits before anything is chosen: biases and bans, then penalties for tokens already seen, then
//! the mask.

use baton_core::mask_allows;

use crate::{RowLists, SampleRow, TokenCount};

/// True where the raw logits can be used as they are, without a copy.
pub(super) fn changes_nothing(row: &SampleRow, lists: &RowLists<'_>) -> bool {
    let no_penalty =
        row.repetition_penalty == 1.0 && row.presence_penalty == 0.0 && row.frequency_penalty == 0.0;
    lists.biases.is_empty() && lists.mask.is_empty() && (no_penalty || lists.history.is_empty())
}

/// `history` names each token once.
pub(super) fn adjust(logits: &mut [f32], row: &SampleRow, lists: &RowLists<'_>) {
    for (token_id, bias) in lists.biases {
        if let Some(logit) = logits.get_mut(*token_id as usize) {
            *logit += bias;
        }
    }
    for seen in lists.history {
        if let Some(logit) = logits.get_mut(seen.token_id as usize) {
            *logit = penalize(*logit, row, seen);
        }
    }
    if !lists.mask.is_empty() {
        for (token_id, logit) in (0..).zip(logits) {
            if !mask_allows(lists.mask, token_id) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

fn penalize(mut logit: f32, row: &SampleRow, seen: &TokenCount) -> f32 {
    if seen.in_prompt || seen.num_output > 0 {
        logit = if logit > 0.0 { logit / row.repetition_penalty } else { logit * row.repetition_penalty };
    }
    logit -= row.frequency_penalty * seen.num_output as f32;
    if seen.num_output > 0 {
        logit -= row.presence_penalty;
    }
    logit
}
