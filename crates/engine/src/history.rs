//! How often each token occurs in a sequence, for penalties.
//!
//! Counts are kept from step to step: a step only looks at the tokens that are new. The prompt is counted once a
//! request, whatever its number of continuations. Tokens are never taken back from a sequence that has penalties, so
//! preemption and recomputation change nothing here.

use std::collections::HashMap;

use baton_backend::TokenCount;
use baton_core::{RequestId, SeqId, TokenId};
use baton_sched::SequenceView;

/// The counts of all requests that have penalties.
#[derive(Debug, Default)]
pub(crate) struct Histories {
    requests: HashMap<RequestId, RequestHistory>,
}

#[derive(Debug)]
struct RequestHistory {
    /// Ascending by token.
    prompt: Vec<TokenCount>,
    seqs: HashMap<SeqId, SequenceHistory>,
}

#[derive(Debug)]
struct SequenceHistory {
    /// Prompt and output, ascending by token.
    counts: Vec<TokenCount>,
    num_output_tokens: usize,
}

impl Histories {
    /// The counts of a sequence as it is now.
    pub(crate) fn counts(&mut self, seq_id: SeqId, view: &SequenceView<'_>) -> &[TokenCount] {
        let (prompt, output) = view.token_ids.split_at(view.num_prompt_tokens);
        let request = self
            .requests
            .entry(view.request_id)
            .or_insert_with(|| RequestHistory { prompt: count_prompt(prompt), seqs: HashMap::new() });
        if output.is_empty() {
            return &request.prompt;
        }
        let prompt = &request.prompt;
        let seq = request
            .seqs
            .entry(seq_id)
            .or_insert_with(|| SequenceHistory { counts: prompt.clone(), num_output_tokens: 0 });
        for &token_id in &output[seq.num_output_tokens..] {
            add_output(&mut seq.counts, token_id);
        }
        seq.num_output_tokens = output.len();
        &seq.counts
    }

    /// Forgets requests that have ended.
    pub(crate) fn retain(&mut self, is_here: impl Fn(RequestId) -> bool) {
        self.requests.retain(|&id, _| is_here(id));
    }
}

fn count_prompt(prompt: &[TokenId]) -> Vec<TokenCount> {
    let mut tokens = prompt.to_vec();
    tokens.sort_unstable();
    tokens.dedup();
    tokens.into_iter().map(|token_id| TokenCount { token_id, in_prompt: true, num_output: 0 }).collect()
}

fn add_output(counts: &mut Vec<TokenCount>, token_id: TokenId) {
    match counts.binary_search_by_key(&token_id, |count| count.token_id) {
        Ok(position) => counts[position].num_output += 1,
        Err(position) => {
            counts.insert(position, TokenCount { token_id, in_prompt: false, num_output: 1 });
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_core::SamplingParams;

    use super::*;

    /// All over again, from the tokens alone.
    fn counted(prompt: &[TokenId], output: &[TokenId]) -> Vec<TokenCount> {
        let mut tokens: Vec<TokenId> = prompt.iter().chain(output).copied().collect();
        tokens.sort_unstable();
        tokens.dedup();
        let count = |token_id| TokenCount {
            token_id,
            in_prompt: prompt.contains(&token_id),
            num_output: output.iter().filter(|&&token| token == token_id).count() as u32,
        };
        tokens.into_iter().map(count).collect()
    }

    #[test]
    fn counts_are_those_of_the_tokens_so_far() {
        let params = SamplingParams::default();
        fn view<'a>(token_ids: &'a [TokenId], params: &'a SamplingParams) -> SequenceView<'a> {
            SequenceView {
                request_id: RequestId(1),
                token_ids,
                num_prompt_tokens: 4,
                index: 0,
                params,
                eos_token_ids: &[],
                is_finished: false,
            }
        }
        let prompt = [5, 3, 5, 9];
        let mut histories = Histories::default();
        let mut outputs = [Vec::new(), Vec::new()];
        for step in 0..40_u32 {
            for (number, output) in outputs.iter_mut().enumerate() {
                let tokens = [&prompt[..], output].concat();
                let got = histories.counts(SeqId(number as u64), &view(&tokens, &params));
                assert_eq!(got, counted(&prompt, output), "sequence {number} at step {step}");
                // Now and then a sequence sits a step out and comes back with several tokens.
                let num_new = if step % 7 == 3 { 3 } else { 1 };
                output.extend((0..num_new).map(|new| (step * 5 + new + number as u32) % 11));
            }
        }
        histories.retain(|_| false);
        assert!(histories.requests.is_empty());
    }
}
