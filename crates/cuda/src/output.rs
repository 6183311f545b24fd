//! What the sampling kernels left in pinned memory, as the [`StepOutput`] of the host: the most likely tokens come in no
//! order and are sorted here.

use baton_backend::{Sampled, StepOutput};
use baton_core::TokenLogprob;

/// Words of a sample's result: token, log-probability, rank, number of top tokens, normaliser. As in `sample.cu`.
pub(crate) const RESULT_WORDS: usize = 5;
/// The most top tokens a sample may have: beams ask for twice their number.
pub(crate) const MAX_TOP: usize = 512;

/// `tops` is `[samples, MAX_TOP]` pairs of token and logit.
pub(crate) fn unpack(num_samples: usize, results: &[u32], tops: &[u32], output: &mut StepOutput) {
    output.samples.clear();
    output.top.clear();
    let mut candidates: Vec<(u32, f32)> = Vec::new();
    for (sample, result) in results.chunks_exact(RESULT_WORDS).take(num_samples).enumerate() {
        let start = output.top.len() as u32;
        let count = (result[3] as usize).min(MAX_TOP);
        if count > 0 {
            let pairs = &tops[2 * sample * MAX_TOP..2 * (sample * MAX_TOP + count)];
            candidates.clear();
            candidates.extend(pairs.chunks_exact(2).map(|pair| (pair[0], f32::from_bits(pair[1]))));
            candidates.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            push_top(&candidates, f32::from_bits(result[4]), &mut output.top);
        }
        let chosen =
            TokenLogprob { token_id: result[0], logprob: f32::from_bits(result[1]), rank: result[2] };
        output.samples.push(Sampled { chosen, top: start..output.top.len() as u32 });
    }
}

/// Equal logits have equal ranks.
fn push_top(candidates: &[(u32, f32)], normalizer: f32, top: &mut Vec<TokenLogprob>) {
    let (mut rank, mut previous) = (0, f32::NAN);
    for (place, &(token_id, logit)) in (1..).zip(candidates) {
        if logit != previous {
            (rank, previous) = (place, logit);
        }
        let logprob = if logit == f32::NEG_INFINITY { logit } else { logit - normalizer };
        top.push(TokenLogprob { token_id, logprob, rank });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn top_tokens_are_sorted_and_equals_share_a_rank() {
        let mut tops = vec![0; 2 * 2 * MAX_TOP];
        let pairs = [(9, 1.0_f32), (4, 2.0), (2, 2.0)];
        for (i, (token, logit)) in pairs.into_iter().enumerate() {
            tops[2 * (MAX_TOP + i)] = token;
            tops[2 * (MAX_TOP + i) + 1] = logit.to_bits();
        }
        let results = [1, 0, 0, 0, 0, 4, (-0.5_f32).to_bits(), 1, 3, 2.5_f32.to_bits()];
        let mut output = StepOutput::default();
        unpack(2, &results, &tops, &mut output);
        let top: Vec<_> =
            output.top.iter().map(|token| (token.token_id, token.logprob, token.rank)).collect();
        assert_eq!(top, [(2, -0.5, 1), (4, -0.5, 1), (9, -1.5, 3)]);
        assert_eq!(output.samples[0].top, 0..0);
        assert_eq!(output.samples[1].top, 0..3);
    }
}
