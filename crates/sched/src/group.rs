//! A request in the scheduler's hands: its sequences, its place in the queues, and what it has given out so far.

use std::ops::Range;
use std::sync::Arc;

use baton_core::{FinishReason, PositionLogprobs, Request, RequestOutput, SequenceOutput, TokenId};

use crate::beam::Hypothesis;
use crate::sequence::{Finish, Sequence, Wait};

/// The order of the queues: priority, then the tenant's turn, then arrival. Unique, since arrivals are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueKey {
    pub(crate) priority: i32,
    /// See [`crate::turns::Turns`].
    pub(crate) turn: u64,
    pub(crate) arrival: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Waiting,
    Running,
    Swapped,
    /// Ended, but a Plan in flight still writes into its blocks.
    Ended,
}

pub(crate) struct Group {
    pub(crate) request: Request,
    pub(crate) key: QueueKey,
    pub(crate) place: Place,
    /// Continuations by index, or live beams by rank. Before the fork only the first has tokens.
    pub(crate) seqs: Vec<Sequence>,
    /// The prompt is done and its sequences go separate ways. True from the start where there is just one.
    pub(crate) forked: bool,
    /// A sequence is never longer than this, prompt included.
    pub(crate) max_len: usize,
    pub(crate) hypotheses: Vec<Hypothesis>,
    /// Scores of the prompt, collected until they are handed over.
    prompt_logprobs: Vec<PositionLogprobs>,
    /// Prompt positions that have been scored; they need not be scored again after a preemption.
    pub(crate) num_scored: usize,
    /// Set at the first admission, for the first output.
    pub(crate) num_cached_tokens: Option<u32>,
    has_output: bool,
    /// Requests of other tenants that claimed a place and were let in before this one.
    pub(crate) num_overtaken: u32,
    /// It makes way for no claim before it has computed so many tokens: see `claims`.
    pub(crate) safe_below: usize,
    /// Plans in flight that swap this request in or out.
    pub(crate) num_moves_in_flight: usize,
    /// KV that is on the way from the host tier.
    pub(crate) fetch: Option<u64>,
    /// Tiers beyond the host's memory were asked for its prefix, which is done once.
    pub(crate) has_queried_stores: bool,
    /// Which tokens its sequences may draw first, where that is limited.
    pub(crate) first_mask: Option<Arc<Vec<u32>>>,
}

impl Group {
    pub(crate) fn new(request: Request, key: QueueKey, seqs: Vec<Sequence>, max_len: usize) -> Self {
        let forked = seqs.len() == 1 && request.params.beam.is_none();
        Self {
            request,
            key,
            place: Place::Waiting,
            seqs,
            forked,
            max_len,
            hypotheses: Vec::new(),
            prompt_logprobs: Vec::new(),
            num_scored: 0,
            num_cached_tokens: None,
            has_output: false,
            num_overtaken: 0,
            safe_below: 0,
            num_moves_in_flight: 0,
            fetch: None,
            has_queried_stores: false,
            first_mask: None,
        }
    }

    pub(crate) fn num_prompt_tokens(&self) -> usize {
        self.request.prompt_token_ids.len()
    }

    pub(crate) fn is_beam(&self) -> bool {
        self.request.params.beam.is_some()
    }

    /// Indices of the sequences that can be computed, in order.
    pub(crate) fn live(&self) -> impl Iterator<Item = usize> + '_ {
        let num_started = if self.forked { self.seqs.len() } else { 1 };
        (0..num_started).filter(|&index| self.seqs[index].finish.is_none())
    }

    /// It cannot be admitted before a tier beyond the host's memory has answered.
    pub(crate) fn waits_for_stores(&self) -> bool {
        self.seqs.iter().any(|seq| seq.waits_for(Wait::Store))
    }

    /// How many of the first tokens of its first sequence may come from a cache. One token is always computed, and prompt
    /// scores need the logits of every position not scored yet.
    pub(crate) fn num_cacheable_tokens(&self, block_size: usize) -> usize {
        let Some(leader) = self.live().next() else { return 0 };
        let needs_scores =
            self.request.params.prompt_logprobs.is_some() && self.num_scored + 1 < self.num_prompt_tokens();
        let num_tokens = self.seqs[leader].token_ids.len();
        let may_be_cached = if needs_scores { self.num_scored } else { num_tokens - 1 };
        if self.live().nth(1).is_none() {
            return may_be_cached;
        }
        // The others are going to share the prompt: its last window must be there, and not only a later one.
        may_be_cached.min(self.num_shared_rows(block_size) * block_size)
    }

    /// How many of `max_num_seqs` the request takes up.
    pub(crate) fn num_slots(&self) -> usize {
        if self.is_beam() || !self.forked {
            self.request.params.num_sequences() as usize
        } else {
            self.live().count()
        }
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        self.num_moves_in_flight > 0
            || self.fetch.is_some()
            || self.seqs.iter().any(|seq| seq.num_in_flight > 0)
    }

    /// The next token cannot be planned before the last one has been looked at by the host.
    pub(crate) fn needs_every_token(&self) -> bool {
        let params = &self.request.params;
        self.is_beam() || !self.forked || params.has_penalties() || params.is_masked()
    }

    /// Prompt positions in `start..start + count` whose logits have to score the next prompt token.
    pub(crate) fn scored(&self, start: usize, count: usize) -> Range<usize> {
        if self.request.params.prompt_logprobs.is_none() {
            return 0..0;
        }
        let from = start.max(self.num_scored);
        let to = (start + count).min(self.num_prompt_tokens() - 1);
        if from < to { from - start..to - start } else { 0..0 }
    }

    /// Entries that a token drawn after `len` tokens brings to a step: tokens under a penalty and biases.
    pub(crate) fn num_sample_entries(&self, len: usize) -> usize {
        num_sample_entries(&self.request, len)
    }

    /// True where the end tokens may not be drawn, `num_output_tokens` having been drawn.
    pub(crate) fn bans_end(&self, num_output_tokens: usize) -> bool {
        num_output_tokens < self.request.params.min_tokens as usize
    }

    pub(crate) fn is_end_token(&self, token_id: TokenId) -> bool {
        let params = &self.request.params;
        (!params.ignore_eos && self.request.eos_token_ids.contains(&token_id))
            || params.stop_token_ids.contains(&token_id)
    }

    /// Whether a sequence that now has `len` tokens, `last` being the newest, ends.
    pub(crate) fn finish_after(&self, len: usize, last: TokenId) -> Option<Finish> {
        let num_output_before = len - self.num_prompt_tokens() - 1;
        if !self.bans_end(num_output_before) && self.is_end_token(last) {
            return Some(Finish { reason: FinishReason::Stop, stop_token_id: Some(last) });
        }
        (len >= self.max_len).then_some(Finish { reason: FinishReason::Length, stop_token_id: None })
    }

    /// Rows of the prompt that all sequences share, come what may.
    pub(crate) fn num_shared_rows(&self, block_size: usize) -> usize {
        self.num_prompt_tokens() / block_size
    }

    pub(crate) fn add_prompt_logprobs(&mut self, scores: &[PositionLogprobs]) {
        self.num_scored += scores.len();
        self.prompt_logprobs.extend_from_slice(scores);
    }

    pub(crate) fn output(&mut self, outputs: Vec<SequenceOutput>, finished: bool) -> RequestOutput {
        let is_first = !std::mem::replace(&mut self.has_output, true);
        let is_scored = self.num_scored + 1 >= self.num_prompt_tokens();
        RequestOutput {
            request_id: self.request.id,
            outputs,
            prompt_logprobs: if is_scored { std::mem::take(&mut self.prompt_logprobs) } else { Vec::new() },
            num_cached_tokens: if is_first { self.num_cached_tokens.unwrap_or(0) } else { 0 },
            pooled: Vec::new(),
            drafts: baton_core::DraftCounts::default(),
            finished,
            shape_failure: None,
        }
    }

    /// The last output of a request that ends before its time.
    pub(crate) fn finish_early(&mut self, reason: FinishReason) -> RequestOutput {
        let params = self.request.params.clone();
        let ended = |index: u32, cumulative_logprob: f32| SequenceOutput {
            index,
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            cumulative_logprob,
            finish_reason: Some(reason),
            stop_token_id: None,
        };
        let outputs = if params.selects_at_end() {
            (0..params.n).map(|index| ended(index, 0.0)).collect()
        } else {
            let open = self.seqs.iter().filter(|seq| seq.finish.is_none());
            open.map(|seq| ended(seq.index, seq.cumulative_logprob)).collect()
        };
        for seq in &mut self.seqs {
            seq.finish.get_or_insert(Finish { reason, stop_token_id: None });
        }
        self.output(outputs, true)
    }
}

/// See [`Group::num_sample_entries`]. Beams are ranked without either.
pub(crate) fn num_sample_entries(request: &Request, len: usize) -> usize {
    let params = &request.params;
    if params.beam.is_some() {
        return 0;
    }
    let banned =
        if params.min_tokens > 0 { params.stop_token_ids.len() + request.eos_token_ids.len() } else { 0 };
    let penalised = if params.has_penalties() { len } else { 0 };
    penalised + params.logit_bias.len() + banned
}
