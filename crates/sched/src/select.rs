//! Choosing among finished continuations, for requests whose output is only known at the end (`best_of`, beams).

use baton_core::SequenceOutput;

use crate::beam::Hypothesis;
use crate::group::Group;

/// The `n` continuations with the highest cumulative log-probability, best first.
pub(crate) fn best_continuations(group: &mut Group) -> Vec<SequenceOutput> {
    let num_prompt_tokens = group.num_prompt_tokens();
    let n = group.request.params.n as usize;
    let mut order: Vec<usize> = (0..group.seqs.len()).collect();
    // The sort is stable: of equals the first continuation comes first.
    order.sort_by(|&one, &other| {
        group.seqs[other].cumulative_logprob.total_cmp(&group.seqs[one].cumulative_logprob)
    });
    let pick = |(rank, position): (usize, usize)| {
        let seq = &mut group.seqs[position];
        SequenceOutput {
            index: rank as u32,
            token_ids: seq.token_ids[num_prompt_tokens..].to_vec(),
            logprobs: std::mem::take(&mut seq.logprobs),
            cumulative_logprob: seq.cumulative_logprob,
            finish_reason: seq.finish.map(|finish| finish.reason),
            stop_token_id: seq.finish.and_then(|finish| finish.stop_token_id),
        }
    };
    order.into_iter().take(n).enumerate().map(pick).collect()
}

/// The `n` best finished beams, best first.
pub(crate) fn best_hypotheses(group: &mut Group) -> Vec<SequenceOutput> {
    let n = group.request.params.n as usize;
    let hypotheses = std::mem::take(&mut group.hypotheses);
    let pick = |(rank, hypothesis): (usize, Hypothesis)| SequenceOutput {
        index: rank as u32,
        token_ids: hypothesis.token_ids,
        logprobs: hypothesis.logprobs,
        cumulative_logprob: hypothesis.cumulative_logprob,
        finish_reason: Some(hypothesis.finish.reason),
        stop_token_id: hypothesis.finish.stop_token_id,
    };
    hypotheses.into_iter().take(n).enumerate().map(pick).collect()
}
