//! Drives the engine by hand for the commands: requests in, text out as it comes, and the whole answers at the end.
//!
//! The engine speaks token ids; here each continuation gets its text stream, which also finds stop strings. One that
//! meets its stop string is aborted, because the engine does not know.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use baton_core::{
    FinishReason, PositionLogprobs, Request, RequestId, RequestOutput, SamplingParams, SequenceOutput,
    TokenId,
};
use baton_engine::Engine;
use baton_text::OutputStream;

use crate::session::TextModel;

/// What ended a continuation before its length did.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Token(TokenId),
    Text(String),
}

/// One continuation of a prompt.
#[derive(Debug)]
pub struct Continuation {
    pub token_ids: Vec<TokenId>,
    pub text: String,
    pub logprobs: Vec<PositionLogprobs>,
    pub cumulative_logprob: f32,
    pub finish_reason: Option<FinishReason>,
    pub stop_reason: Option<StopReason>,
    /// Absent where the model has no tokenizer.
    stream: Option<OutputStream>,
}

/// All that came of a request.
#[derive(Debug)]
pub struct Answer {
    pub prompt_token_ids: Vec<TokenId>,
    pub continuations: Vec<Continuation>,
    pub prompt_logprobs: Vec<PositionLogprobs>,
    pub num_cached_tokens: u32,
    pub timing: Timing,
    pub request_id: RequestId,
    params: Arc<SamplingParams>,
}

/// From the moment the request was handed over.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timing {
    pub first_token: Option<Duration>,
    pub last_token: Duration,
}

impl Answer {
    pub fn num_completion_tokens(&self) -> usize {
        self.continuations.iter().map(|continuation| continuation.token_ids.len()).sum()
    }
}

/// Runs the requests together until all have ended or `interrupted` is set. `on_text` gets each new piece of text with
/// the indices of its request and continuation.
pub fn run(
    engine: &mut Engine,
    text: &TextModel,
    requests: Vec<Request>,
    skip_special_tokens: bool,
    interrupted: &AtomicBool,
    on_text: &mut dyn FnMut(usize, usize, &str) -> Result<()>,
) -> Result<Vec<Answer>> {
    let started = Instant::now();
    let mut answers = Vec::with_capacity(requests.len());
    let mut index_of = HashMap::with_capacity(requests.len());
    for request in requests {
        let continuations =
            (0..request.params.n).map(|_| Continuation::new(text, &request, skip_special_tokens));
        let continuations = continuations.collect::<Result<_>>()?;
        index_of.insert(request.id, answers.len());
        answers.push(Answer {
            prompt_token_ids: request.prompt_token_ids.clone(),
            continuations,
            prompt_logprobs: Vec::new(),
            num_cached_tokens: 0,
            timing: Timing::default(),
            request_id: request.id,
            params: Arc::clone(&request.params),
        });
        let request = text.with_end_tokens(request);
        if let Err(error) = engine.add_request(request) {
            abort_all(engine, &answers);
            return Err(error.into());
        }
    }
    while engine.has_unfinished() {
        if interrupted.load(Ordering::Relaxed) {
            abort_all(engine, &answers);
            break;
        }
        for output in engine.step() {
            let Some(&index) = index_of.get(&output.request_id) else { continue };
            let answer = &mut answers[index];
            let taken = take(answer, output, started.elapsed(), &mut |continuation, piece| {
                on_text(index, continuation, piece)
            });
            if let Err(error) = taken {
                abort_all(engine, &answers);
                return Err(error);
            }
            for (index, continuation) in answer.continuations.iter().enumerate() {
                if continuation.finish_reason.is_some() {
                    // Where the engine has finished it too, there is nothing left to abort.
                    engine.abort_sequence(answer.request_id, index as u32);
                }
            }
        }
    }
    for continuation in answers.iter_mut().flat_map(|answer| &mut answer.continuations) {
        match continuation.finish_reason {
            None => continuation.finish_reason = Some(FinishReason::Abort),
            Some(FinishReason::Error) => {
                let cause = engine.stats().last_failure.unwrap_or_else(|| "no cause was given".to_owned());
                bail!("a step failed: {cause}");
            }
            Some(_) => {}
        }
    }
    Ok(answers)
}

fn abort_all(engine: &mut Engine, answers: &[Answer]) {
    for answer in answers {
        engine.abort(answer.request_id);
    }
    // Steps in flight still hold blocks of the aborted requests; let them come home.
    while engine.has_unfinished() {
        engine.step();
    }
}

/// Adds what a step brought to the answer.
fn take(
    answer: &mut Answer,
    output: RequestOutput,
    elapsed: Duration,
    on_text: &mut dyn FnMut(usize, &str) -> Result<()>,
) -> Result<()> {
    answer.prompt_logprobs.extend(output.prompt_logprobs);
    answer.num_cached_tokens = answer.num_cached_tokens.max(output.num_cached_tokens);
    for sequence in output.outputs {
        let index = sequence.index as usize;
        let Some(continuation) = answer.continuations.get_mut(index) else { continue };
        if continuation.finish_reason.is_some() {
            continue;
        }
        if !sequence.token_ids.is_empty() {
            answer.timing.first_token.get_or_insert(elapsed);
            answer.timing.last_token = elapsed;
        }
        let piece = continuation.take(sequence, &answer.params.stop_token_ids)?;
        if !piece.is_empty() {
            on_text(index, &piece)?;
        }
    }
    Ok(())
}

impl Continuation {
    fn new(text: &TextModel, request: &Request, skip_special_tokens: bool) -> Result<Self> {
        Ok(Self {
            token_ids: Vec::new(),
            text: String::new(),
            logprobs: Vec::new(),
            cumulative_logprob: 0.0,
            finish_reason: None,
            stop_reason: None,
            stream: text.output_stream(request, skip_special_tokens)?,
        })
    }

    /// Adds new tokens and gives the new text.
    fn take(&mut self, sequence: SequenceOutput, stop_token_ids: &[TokenId]) -> Result<String> {
        // The token that ended the sequence belongs to the output, but not to the text.
        let shown = sequence.token_ids.len() - usize::from(sequence.stop_token_id.is_some());
        let mut piece = String::new();
        let mut stopped = None;
        if let Some(stream) = &mut self.stream {
            let delta = stream.push(&sequence.token_ids[..shown])?;
            piece = delta.text;
            stopped = delta.stopped;
            if stopped.is_none() && sequence.finish_reason.is_some() {
                let last = stream.finish()?;
                piece.push_str(&last.text);
                stopped = last.stopped;
            }
        }
        self.token_ids.extend(sequence.token_ids);
        self.logprobs.extend(sequence.logprobs);
        self.cumulative_logprob = sequence.cumulative_logprob;
        self.finish_reason = sequence.finish_reason;
        // The model's own end is no reason that anyone asked for.
        let asked = sequence.stop_token_id.filter(|token| stop_token_ids.contains(token));
        self.stop_reason = asked.map(StopReason::Token);
        if let Some(stop) = stopped {
            if stop.num_tokens < self.logprobs.len() {
                self.logprobs.truncate(stop.num_tokens);
                self.cumulative_logprob = self.logprobs.iter().map(|position| position.chosen.logprob).sum();
            }
            self.token_ids.truncate(stop.num_tokens);
            self.finish_reason = Some(FinishReason::Stop);
            self.stop_reason = Some(StopReason::Text(stop.stop));
        }
        self.text.push_str(&piece);
        Ok(piece)
    }
}
