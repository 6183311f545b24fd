//! The clients' side: collects what each request got and compares it with what it should have got.

use std::collections::BTreeMap;

use baton_core::{FinishReason, Request, RequestOutput, TokenId};

use crate::{Expected, FakeModel, expected};

#[derive(Default)]
struct Continuation {
    token_ids: Vec<TokenId>,
    num_logprobs: usize,
    cumulative_logprob: f32,
    finish_reason: Option<FinishReason>,
    stop_token_id: Option<TokenId>,
}

/// One request as its client sees it.
pub(crate) struct Client {
    pub(crate) request: Request,
    continuations: BTreeMap<u32, Continuation>,
    prompt_logprobs: Vec<f32>,
    has_output: bool,
    pub(crate) is_finished: bool,
}

impl Client {
    pub(crate) fn new(request: Request) -> Self {
        Self {
            request,
            continuations: BTreeMap::new(),
            prompt_logprobs: Vec::new(),
            has_output: false,
            is_finished: false,
        }
    }

    pub(crate) fn take(&mut self, output: &RequestOutput) {
        let id = self.request.id;
        assert!(!self.is_finished, "request {id} gets output after its end");
        assert!(!self.has_output || output.num_cached_tokens == 0, "request {id}: cached tokens told twice");
        assert!((output.num_cached_tokens as usize) < self.request.prompt_token_ids.len());
        let is_scored = self.request.params.prompt_logprobs.is_some();
        assert!(!is_scored || output.num_cached_tokens == 0, "request {id}: scores need the whole prompt");
        self.has_output = true;
        self.prompt_logprobs.extend(output.prompt_logprobs.iter().map(|scores| scores.chosen.logprob));
        for part in &output.outputs {
            let continuation = self.continuations.entry(part.index).or_default();
            assert!(
                continuation.finish_reason.is_none(),
                "request {id}: {} goes on after its end",
                part.index
            );
            continuation.token_ids.extend(&part.token_ids);
            continuation.num_logprobs += part.logprobs.len();
            continuation.cumulative_logprob = part.cumulative_logprob;
            continuation.finish_reason = part.finish_reason;
            continuation.stop_token_id = part.stop_token_id;
        }
        self.is_finished = output.finished;
    }

    /// Compares with the request run alone. Continuations that were cut short must be beginnings of it.
    pub(crate) fn check(&self, model: FakeModel, max_model_len: usize, block_size: usize) {
        let id = self.request.id;
        let expected: Expected = expected(&self.request, model, max_model_len, block_size);
        assert!(self.is_finished, "request {id} never ended");
        assert_eq!(
            self.continuations.len(),
            expected.sequences.len(),
            "request {id}: number of continuations"
        );
        let mut ended_early = false;
        for ((index, got), expected) in self.continuations.iter().zip(&expected.sequences) {
            let reason = got.finish_reason.unwrap_or_else(|| panic!("request {id}: {index} never ended"));
            if matches!(reason, FinishReason::Abort | FinishReason::Error) {
                ended_early = true;
                assert!(
                    expected.token_ids.starts_with(&got.token_ids),
                    "request {id}, {index}: wrong tokens"
                );
                continue;
            }
            assert_eq!(got.token_ids, expected.token_ids, "request {id}, {index}: wrong tokens");
            assert_eq!(reason, expected.finish_reason, "request {id}, {index}: finish reason");
            assert_eq!(got.cumulative_logprob, expected.cumulative_logprob, "request {id}, {index}: sum");
            let stop = (reason == FinishReason::Stop).then(|| got.token_ids[got.token_ids.len() - 1]);
            assert_eq!(got.stop_token_id, stop, "request {id}, {index}: stop token");
            let num_logprobs = if self.request.params.logprobs.is_some() { got.token_ids.len() } else { 0 };
            assert_eq!(got.num_logprobs, num_logprobs, "request {id}, {index}: logprobs");
        }
        if !(ended_early && self.prompt_logprobs.is_empty()) {
            assert_eq!(self.prompt_logprobs, expected.prompt_logprobs, "request {id}: prompt logprobs");
        }
    }
}
