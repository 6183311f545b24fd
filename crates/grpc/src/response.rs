//! From the updates of a generation to `GenerateResponse`s.

use baton_core::{FinishReason, PositionLogprobs};
use baton_serve::types::common::StopReason;
use baton_serve::{Generation, Update};
use vllm_proto::candidate_token_info::TokenInfo;
use vllm_proto::finish_info::{FinishReason as ProtoFinish, StopReason as ProtoStop};
use vllm_proto::{CandidateTokenInfo, FinishInfo, GenerateResponse, PromptInfo, SequenceOutput};

use crate::request::Wanted;
use crate::structs;

/// How far the sequences of an answer are.
#[derive(Debug)]
pub struct Writer {
    wanted: Wanted,
    has_begun: bool,
    sequences: Vec<Sequence>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sequence {
    num_tokens: u32,
    has_ended: bool,
}

impl Writer {
    pub fn new(wanted: Wanted, num_sequences: usize) -> Self {
        Self { wanted, has_begun: false, sequences: vec![Sequence::default(); num_sequences] }
    }

    pub fn response(&mut self, generation: &Generation, update: Update) -> GenerateResponse {
        let sequence = &mut self.sequences[update.choice];
        sequence.num_tokens += update.token_ids.len() as u32;
        sequence.has_ended = update.finish_reason.is_some();
        let finish_info = update.finish_reason.map(|reason| FinishInfo {
            num_output_tokens: sequence.num_tokens,
            finish_reason: finish_reason(reason) as i32,
            stop_reason: stop_reason(reason, &update),
            kv_transfer_params: generation.kv_transfer_params().as_ref().map(structs::from_json),
            ec_transfer_params: None,
        });
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        let (logprobs, ranks) = chosen(&update.logprobs);
        let output = SequenceOutput {
            index: update.choice as u32,
            text: if self.wanted.text { update.text } else { String::new() },
            num_tokens: update.token_ids.len() as u32,
            token_ids: if self.wanted.token_ids { update.token_ids } else { Vec::new() },
            logprobs: if self.wanted.logprobs { logprobs } else { Vec::new() },
            ranks: if self.wanted.logprobs { ranks } else { Vec::new() },
            candidate_tokens: if self.wanted.candidates { others(&update.logprobs) } else { Vec::new() },
            finish_info,
        };
        GenerateResponse {
            prompt_info: is_first.then(|| self.prompt_info(generation)),
            outputs: Some(output),
        }
    }

    /// The ends of all sequences that were under way when the request was aborted.
    pub fn aborted(&mut self) -> Vec<GenerateResponse> {
        let open = self.sequences.iter_mut().enumerate().filter(|(_, sequence)| !sequence.has_ended);
        let end = |(index, sequence): (usize, &mut Sequence)| {
            sequence.has_ended = true;
            let finish_info = FinishInfo {
                num_output_tokens: sequence.num_tokens,
                finish_reason: ProtoFinish::Aborted as i32,
                ..FinishInfo::default()
            };
            let output = SequenceOutput {
                index: index as u32,
                finish_info: Some(finish_info),
                ..SequenceOutput::default()
            };
            GenerateResponse { prompt_info: None, outputs: Some(output) }
        };
        open.map(end).collect()
    }

    fn prompt_info(&self, generation: &Generation) -> PromptInfo {
        let part = generation.part_of(0);
        let mut info =
            PromptInfo { num_prompt_tokens: part.prompt_token_ids.len() as u32, ..PromptInfo::default() };
        if self.wanted.prompt_token_ids {
            info.token_ids.clone_from(&part.prompt_token_ids);
        }
        if self.wanted.prompt_logprobs {
            // Nothing comes before the first token; its place is kept so that all lists have a place for every token.
            let (logprobs, ranks) = chosen(&part.prompt_logprobs);
            info.logprobs = std::iter::once(0.0).chain(logprobs).collect();
            info.ranks = std::iter::once(0).chain(ranks).collect();
        }
        if self.wanted.prompt_candidates {
            let first = std::iter::once(CandidateTokenInfo::default());
            info.candidate_tokens = first.chain(others(&part.prompt_logprobs)).collect();
        }
        info
    }
}

fn chosen(positions: &[PositionLogprobs]) -> (Vec<f32>, Vec<u32>) {
    positions.iter().map(|position| (position.chosen.logprob, position.chosen.rank)).unzip()
}

/// The alternatives at each position, without the token that stands there.
fn others(positions: &[PositionLogprobs]) -> Vec<CandidateTokenInfo> {
    let others = |position: &PositionLogprobs| {
        let others = position.top.iter().filter(|token| token.token_id != position.chosen.token_id);
        let info = |token: &baton_core::TokenLogprob| TokenInfo {
            id: token.token_id,
            logprob: token.logprob,
            rank: token.rank,
        };
        CandidateTokenInfo { tokens: others.map(info).collect() }
    };
    positions.iter().map(others).collect()
}

fn finish_reason(reason: FinishReason) -> ProtoFinish {
    match reason {
        FinishReason::Stop => ProtoFinish::Stop,
        FinishReason::Length => ProtoFinish::Length,
        FinishReason::Abort | FinishReason::Error => ProtoFinish::Aborted,
    }
}

/// Where nobody asked for the stop, the model's own end was the last token.
fn stop_reason(reason: FinishReason, update: &Update) -> Option<ProtoStop> {
    match &update.stop_reason {
        Some(StopReason::Token(token)) => Some(ProtoStop::StopTokenId(*token)),
        Some(StopReason::Text(text)) => Some(ProtoStop::StopString(text.clone())),
        None if reason == FinishReason::Stop => update.token_ids.last().copied().map(ProtoStop::EosTokenId),
        None => None,
    }
}
