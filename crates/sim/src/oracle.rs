//! What a request gives when nobody else is there: plain loops without blocks, queues or steps.

use std::cmp::Ordering;

use baton_core::{FinishReason, Request, TokenId};

use crate::{FakeModel, Naming, PrefixHash};

#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedSequence {
    pub token_ids: Vec<TokenId>,
    pub finish_reason: FinishReason,
    pub cumulative_logprob: f32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// By index.
    pub sequences: Vec<ExpectedSequence>,
    /// Of the prompt tokens after the first; empty where not asked.
    pub prompt_logprobs: Vec<f32>,
}

struct Oracle<'a> {
    request: &'a Request,
    model: FakeModel,
    max_output: usize,
    prompt: PrefixHash,
}

pub fn expected(request: &Request, model: FakeModel, max_model_len: usize, block_size: usize) -> Expected {
    let num_prompt = request.prompt_token_ids.len();
    let max_tokens = request.params.max_tokens.map_or(usize::MAX, |max| max as usize);
    let naming = Naming::of(request, block_size);
    let oracle = Oracle {
        request,
        model,
        max_output: max_tokens.min(max_model_len - num_prompt),
        // The public part ends within the prompt, so what is generated needs no such care.
        prompt: naming.whole(&request.prompt_token_ids),
    };
    let mut sequences = if request.params.beam.is_some() { oracle.beams() } else { oracle.continuations() };
    sequences.truncate(request.params.n as usize);
    let prompt_logprobs = if request.params.prompt_logprobs.is_some() {
        let scored = (1..num_prompt).map(|position| {
            let before = naming.whole(&request.prompt_token_ids[..position]);
            model.logprob(before, request.prompt_token_ids[position])
        });
        scored.collect()
    } else {
        Vec::new()
    };
    Expected { sequences, prompt_logprobs }
}

fn descending(one: f32, other: f32) -> Ordering {
    other.total_cmp(&one)
}

impl Oracle<'_> {
    fn is_end(&self, token_id: TokenId) -> bool {
        let params = &self.request.params;
        params.stop_token_ids.contains(&token_id)
            || (!params.ignore_eos && self.request.eos_token_ids.contains(&token_id))
    }

    fn bans(&self, num_output: usize, token_id: TokenId) -> bool {
        let params = &self.request.params;
        num_output < params.min_tokens as usize
            && (self.request.eos_token_ids.contains(&token_id) || params.stop_token_ids.contains(&token_id))
    }

    fn continuations(&self) -> Vec<ExpectedSequence> {
        let params = &self.request.params;
        let mut all: Vec<_> = (0..params.num_sequences()).map(|index| self.continuation(index)).collect();
        if params.num_sequences() > params.n {
            all.sort_by(|one, other| descending(one.cumulative_logprob, other.cumulative_logprob));
        }
        all
    }

    fn continuation(&self, index: u32) -> ExpectedSequence {
        let params = &self.request.params;
        let has_logprobs = params.logprobs.is_some() || params.best_of.is_some();
        let mut prefix = self.prompt;
        let mut token_ids = Vec::new();
        let mut cumulative_logprob = 0.0;
        loop {
            let num_output = token_ids.len();
            let bans = |token| self.bans(num_output, token);
            let token_id = self.model.sample(prefix, params.seed.unwrap_or(0), index, bans);
            if has_logprobs {
                cumulative_logprob += self.model.logprob(prefix, token_id);
            }
            token_ids.push(token_id);
            prefix = prefix.child(token_id);
            let may_end = num_output >= params.min_tokens as usize;
            let finish_reason = if may_end && self.is_end(token_id) {
                FinishReason::Stop
            } else if token_ids.len() >= self.max_output {
                FinishReason::Length
            } else {
                continue;
            };
            return ExpectedSequence { token_ids, finish_reason, cumulative_logprob };
        }
    }

    /// Beam search over whole token lists.
    fn beams(&self) -> Vec<ExpectedSequence> {
        let params = &self.request.params;
        let beam = params.beam.as_ref().expect("beam search was asked for");
        let width = params.num_sequences() as usize;
        let score = |sum: f32, len: usize| sum / (len as f32).powf(beam.length_penalty);
        let mut live: Vec<(Vec<TokenId>, f32)> = vec![(Vec::new(), 0.0)];
        let mut done: Vec<(f32, ExpectedSequence)> = Vec::new();
        for len in 1..=self.max_output {
            let mut all: Vec<(Vec<TokenId>, f32)> = Vec::new();
            for (token_ids, sum) in &live {
                let bans = |token| self.bans(len - 1, token);
                for next in self.model.candidates(self.prompt.extend(token_ids), 2 * width, bans) {
                    let longer = token_ids.iter().copied().chain([next.token_id]).collect();
                    all.push((longer, sum + next.logprob));
                }
            }
            all.sort_by(|one, other| descending(one.1, other.1));
            all.truncate(2 * width);
            live.clear();
            for (place, (token_ids, sum)) in all.into_iter().enumerate() {
                let is_end = len > params.min_tokens as usize && self.is_end(token_ids[len - 1]);
                let is_live = !is_end && live.len() < width;
                let is_last = len == self.max_output;
                if (is_end && place < width) || (is_live && is_last) {
                    let finish_reason = if is_end { FinishReason::Stop } else { FinishReason::Length };
                    let sequence = ExpectedSequence {
                        token_ids: token_ids.clone(),
                        finish_reason,
                        cumulative_logprob: sum,
                    };
                    done.push((score(sum, len), sequence));
                }
                if is_live {
                    live.push((token_ids, sum));
                }
            }
            done.sort_by(|one, other| descending(one.0, other.0));
            done.truncate(width);
            let is_decided = done.len() == width
                && (beam.early_stopping || live.is_empty() || done[width - 1].0 >= score(live[0].1, len));
            if is_decided || live.is_empty() {
                break;
            }
        }
        done.into_iter().map(|(_, sequence)| sequence).collect()
    }
}
