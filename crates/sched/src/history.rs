//! How often each token occurs in a sequence, for penalties.
//!
//! Counts are kept from step to step: planning a token only looks at those that are new. The prompt is counted once per
//! request, whatever its number of continuations. Tokens are never taken back from a sequence, so preemption and
//! recomputation change nothing here.

use std::sync::Arc;

use baton_core::{TokenCount, TokenId};

/// The counts of one sequence. Plans share them; they are copied only while a Plan still holds them.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    /// Ascending by token.
    counts: Arc<Vec<TokenCount>>,
    /// The first so many tokens are counted.
    num_counted: usize,
}

impl History {
    /// The counts of a sequence as it is now.
    pub(crate) fn counts(&mut self, token_ids: &[TokenId], num_prompt_tokens: usize) -> Arc<Vec<TokenCount>> {
        if self.num_counted < num_prompt_tokens {
            self.counts = Arc::new(count_prompt(&token_ids[..num_prompt_tokens]));
            self.num_counted = num_prompt_tokens;
        }
        if self.num_counted < token_ids.len() {
            let counts = Arc::make_mut(&mut self.counts);
            token_ids[self.num_counted..].iter().for_each(|&token_id| add_output(counts, token_id));
            self.num_counted = token_ids.len();
        }
        Arc::clone(&self.counts)
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
        let prompt = [5, 3, 5, 9];
        let mut histories = [History::default(), History::default()];
        let mut outputs = [Vec::new(), Vec::new()];
        for step in 0..40_u32 {
            for (number, (history, output)) in histories.iter_mut().zip(&mut outputs).enumerate() {
                let tokens = [&prompt[..], output].concat();
                let got = history.counts(&tokens, prompt.len());
                assert_eq!(*got, counted(&prompt, output), "sequence {number} at step {step}");
                // Now and then a sequence sits a step out and comes back with several tokens.
                let num_new = if step % 7 == 3 { 3 } else { 1 };
                output.extend((0..num_new).map(|new| (step * 5 + new + number as u32) % 11));
            }
        }
    }

    #[test]
    fn a_fork_counts_on_its_own() {
        let mut parent = History::default();
        let tokens = [1, 2, 3];
        let kept = parent.counts(&tokens, 2);
        let mut child = parent.clone();
        assert_eq!(*child.counts(&[1, 2, 3, 9], 2), counted(&[1, 2], &[3, 9]));
        assert_eq!(*parent.counts(&[1, 2, 3, 3], 2), counted(&[1, 2], &[3, 3]));
        assert_eq!(*kept, counted(&[1, 2], &[3]));
    }
}
