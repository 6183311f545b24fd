//! Beam search, as transformers defines it.
//!
//! Each step, every live beam brings its most likely next tokens. All of them are ranked together by cumulative
//! log-probability. An end token among the first `width` makes a finished hypothesis, scored with the length
//! penalty; the best `width` others are the beams of the next step. It is over when the length limit is reached,
//! when no live beam can beat the worst of `width` hypotheses, or (`early_stopping`) when there are `width` of them.

use std::cmp::Ordering;

use baton_core::{FinishReason, PositionLogprobs, RequestId, RequestOutput, TokenId, TokenLogprob};

use crate::group::Group;
use crate::select::best_hypotheses;
use crate::sequence::{Finish, Sequence};
use crate::{Scheduler, SeqResult};

/// A finished beam.
#[derive(Clone, Debug)]
pub(crate) struct Hypothesis {
    /// Output tokens, the end token included.
    pub(crate) token_ids: Vec<TokenId>,
    pub(crate) logprobs: Vec<PositionLogprobs>,
    pub(crate) cumulative_logprob: f32,
    pub(crate) score: f32,
    pub(crate) finish: Finish,
}

/// A beam with one more token.
#[derive(Clone, Copy)]
struct Candidate {
    /// Position of the beam in `Group::seqs`.
    parent: usize,
    token: TokenLogprob,
    cumulative_logprob: f32,
}

impl Scheduler {
    /// All live beams were in the step; `results` are parallel to them.
    pub(crate) fn apply_beams(&mut self, id: RequestId, results: &[SeqResult]) -> Option<RequestOutput> {
        let group = self.groups.get_mut(&id).expect("a request in flight stays");
        debug_assert_eq!(group.seqs.len(), results.len(), "all beams take a step, or none");
        let width = group.request.params.num_sequences() as usize;
        let ranked = rank(group, results, width);
        let num_output_tokens = group.seqs[0].token_ids.len() - group.num_prompt_tokens();
        let may_end = !group.bans_end(num_output_tokens);
        let is_last = group.seqs[0].token_ids.len() + 1 >= group.max_len;
        let mut next: Vec<Candidate> = Vec::with_capacity(width);
        for (place, candidate) in ranked.into_iter().enumerate() {
            let token_id = candidate.token.token_id;
            if may_end && group.is_end_token(token_id) {
                if place < width {
                    let finish = Finish { reason: FinishReason::Stop, stop_token_id: Some(token_id) };
                    add_hypothesis(group, &candidate, &results[candidate.parent], finish, width);
                }
            } else if next.len() < width {
                next.push(candidate);
                // In the order of their ranks, as those that end: of equal scores the better rank wins.
                if is_last {
                    let finish = Finish { reason: FinishReason::Length, stop_token_id: None };
                    add_hypothesis(group, &candidate, &results[candidate.parent], finish, width);
                }
            }
        }
        if is_last {
            next.clear();
        }
        if next.is_empty() || is_decided(group, &next, num_output_tokens + 1, width) {
            let finish = Finish { reason: FinishReason::Length, stop_token_id: None };
            for seq in &mut group.seqs {
                seq.finish = Some(finish);
            }
            let best = best_hypotheses(group);
            let output = group.output(best, true);
            self.end(id);
            return Some(output);
        }
        self.continue_beams(id, &next, results);
        None
    }

    /// The beams of the next step. The first child of a beam goes on in its place, further ones are forked.
    fn continue_beams(&mut self, id: RequestId, next: &[Candidate], results: &[SeqResult]) {
        let group = &self.groups[&id];
        let parents: Vec<Sequence> = group.seqs.clone();
        let num_top = group.request.params.logprobs;
        let mut is_continued = vec![false; parents.len()];
        let mut beams = Vec::with_capacity(next.len());
        for (index, candidate) in next.iter().enumerate() {
            let parent = &parents[candidate.parent];
            let mut beam = if std::mem::replace(&mut is_continued[candidate.parent], true) {
                let child = self.new_sequence(id, index as u32);
                self.kv.fork(parent.id, child.id);
                parent.fork(child.id, index as u32)
            } else {
                parent.clone()
            };
            beam.index = index as u32;
            beam.token_ids.push(candidate.token.token_id);
            beam.cumulative_logprob = candidate.cumulative_logprob;
            beam.logprobs.extend(position_logprobs(candidate, &results[candidate.parent], num_top));
            beams.push(beam);
        }
        for (parent, is_continued) in parents.iter().zip(is_continued) {
            if !is_continued {
                self.kv.remove_sequence(parent.id);
                self.owners.remove(&parent.id);
            }
        }
        let group = self.groups.get_mut(&id).expect("a request in flight stays");
        group.forked = true;
        group.seqs = beams;
    }
}

/// The `2 × width` best continuations of all beams, best first.
fn rank(group: &Group, results: &[SeqResult], width: usize) -> Vec<Candidate> {
    let mut ranked = Vec::new();
    for (parent, result) in results.iter().enumerate() {
        for token in &result.candidates {
            let sum = group.seqs[parent].cumulative_logprob + token.logprob;
            let cumulative_logprob = if sum.is_nan() { f32::NEG_INFINITY } else { sum };
            ranked.push(Candidate { parent, token: *token, cumulative_logprob });
        }
    }
    // The sort is stable: of equals the better beam comes first, then the more likely token.
    ranked.sort_by(|one, other| descending(one.cumulative_logprob, other.cumulative_logprob));
    ranked.truncate(2 * width);
    ranked
}

fn descending(one: f32, other: f32) -> Ordering {
    other.total_cmp(&one)
}

fn score(group: &Group, cumulative_logprob: f32, num_output_tokens: usize) -> f32 {
    let penalty = group.request.params.beam.as_ref().map_or(1.0, |beam| beam.length_penalty);
    cumulative_logprob / (num_output_tokens as f32).powf(penalty)
}

fn add_hypothesis(
    group: &mut Group,
    candidate: &Candidate,
    result: &SeqResult,
    finish: Finish,
    width: usize,
) {
    let parent = &group.seqs[candidate.parent];
    let mut token_ids = parent.token_ids[group.num_prompt_tokens()..].to_vec();
    token_ids.push(candidate.token.token_id);
    let mut logprobs = parent.logprobs.clone();
    logprobs.extend(position_logprobs(candidate, result, group.request.params.logprobs));
    let score = score(group, candidate.cumulative_logprob, token_ids.len());
    let cumulative_logprob = candidate.cumulative_logprob;
    group.hypotheses.push(Hypothesis { token_ids, logprobs, cumulative_logprob, score, finish });
    group.hypotheses.sort_by(|one, other| descending(one.score, other.score));
    group.hypotheses.truncate(width);
}

/// True where the hypotheses cannot get better. `next` is ranked and not empty.
fn is_decided(group: &Group, next: &[Candidate], num_output_tokens: usize, width: usize) -> bool {
    let Some(worst) = group.hypotheses.get(width - 1) else { return false };
    let early_stopping = group.request.params.beam.as_ref().is_some_and(|beam| beam.early_stopping);
    early_stopping || worst.score >= score(group, next[0].cumulative_logprob, num_output_tokens)
}

/// `logprobs` of a beam's token. As many alternatives as were candidates; the engine ranks no more.
fn position_logprobs(
    candidate: &Candidate,
    result: &SeqResult,
    num_top: Option<u32>,
) -> Option<PositionLogprobs> {
    let top = result.candidates.iter().take(num_top? as usize).copied().collect();
    Some(PositionLogprobs { chosen: candidate.token, top })
}
