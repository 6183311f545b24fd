//! What is done to the logits before anything is chosen: biases and bans, then penalties for tokens already seen.

use baton_core::TokenId;

use crate::{SampleRow, TokenCount};

/// True where the raw logits can be used as they are, without a copy.
pub(super) fn changes_nothing(row: &SampleRow, history: &[TokenCount], biases: &[(TokenId, f32)]) -> bool {
    let no_penalty =
        row.repetition_penalty == 1.0 && row.presence_penalty == 0.0 && row.frequency_penalty == 0.0;
    biases.is_empty() && (no_penalty || history.is_empty())
}

/// `history` names each token once.
pub(super) fn adjust(logits: &mut [f32], row: &SampleRow, history: &[TokenCount], biases: &[(TokenId, f32)]) {
    for (token_id, bias) in biases {
        if let Some(logit) = logits.get_mut(*token_id as usize) {
            *logit += bias;
        }
    }
    for seen in history {
        if let Some(logit) = logits.get_mut(seen.token_id as usize) {
            *logit = penalize(*logit, row, seen);
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
