//! A request under way: one engine request a prompt, `n` continuations each, and their text as it comes.
//!
//! The engine speaks token ids; here each continuation gets its text stream, which also finds stop strings. Nothing
//! runs in the background: a [`Generation`] is polled by whoever writes the answer, so a client that reads slowly
//! holds up only itself, and one that goes away drops the receivers, which is how the engine hears of it.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use baton_core::{
    Constraint, DraftCounts, FinishReason, PositionLogprobs, Request, RequestId, RequestOutput,
    SamplingParams, SequenceOutput, TokenId,
};
use baton_engine::{EngineError, OutputReceiver};
use baton_text::{
    AnswerEvent, AnswerOptions, AnswerParser, OutputOptions, OutputParser, OutputStream, append_events,
};

use crate::activity::Listed;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::metrics::RequestEnd;
use crate::otlp::{self, RequestSpan, TraceParent};
use crate::params::limit_tokens;
use crate::scope;
use crate::state::{App, InFlight};
use crate::trace::Row;
use crate::types::common::{CompletionTokensDetails, KvTransferParams, StopReason, Usage};

/// What is asked of the engine.
#[derive(Debug)]
pub struct GenerationRequest {
    pub prompts: Vec<Vec<TokenId>>,
    pub params: SamplingParams,
    /// `params.structured_outputs`, compiled.
    pub constraint: Option<Arc<dyn Constraint>>,
    pub skip_special_tokens: bool,
    pub cache_salt: Option<String>,
    /// The prompt was computed elsewhere, or its answer goes on elsewhere.
    pub kv_transfer: Option<KvTransferParams>,
    pub priority: i32,
    /// How the text of each prompt's answers is taken apart; where there are none, it stays text.
    pub answer_formats: Vec<AnswerFormat>,
    /// More tokens than the model has room for are asked for by habit: give what there is room for.
    pub clamps_length: bool,
    /// What the answers are expected to be.
    pub prediction: Arc<[TokenId]>,
}

/// How to read answers.
#[derive(Clone, Debug)]
pub struct AnswerFormat {
    pub options: AnswerOptions,
    /// The end of the prompt's text, which may have opened the reasoning.
    pub prompt_end: String,
}

/// New tokens and text of one continuation.
#[derive(Debug, Default)]
pub struct Update {
    /// `prompt index × n + continuation`.
    pub choice: usize,
    /// Empty where the text is taken apart into `events`.
    pub text: String,
    pub events: Vec<AnswerEvent>,
    /// Functions called so far.
    pub num_calls: usize,
    pub token_ids: Vec<TokenId>,
    pub logprobs: Vec<PositionLogprobs>,
    /// The continuation has ended.
    pub finish_reason: Option<FinishReason>,
    pub stop_reason: Option<StopReason>,
}

#[derive(Debug)]
pub struct Generation {
    app: Arc<App>,
    parts: Vec<Part>,
    n: usize,
    /// Another process goes on with the answer.
    hands_over: bool,
    _in_flight: InFlight,
}

/// One prompt.
#[derive(Debug)]
pub struct Part {
    pub prompt_token_ids: Vec<TokenId>,
    /// Known with the first output.
    pub prompt_logprobs: Vec<PositionLogprobs>,
    /// The prompt's hidden state, where one was asked for.
    pub pooled: Vec<f32>,
    params: Arc<SamplingParams>,
    num_cached_tokens: usize,
    drafts: DraftCounts,
    choices: Vec<Choice>,
    /// The caller's span.
    trace_parent: Option<TraceParent>,
    receiver_id: Option<RequestId>,
    /// `None` once the request has ended.
    receiver: Option<OutputReceiver>,
    /// `None` once the request has ended.
    listed: Option<Listed>,
}

#[derive(Debug)]
struct Choice {
    stream: Option<OutputStream>,
    parser: Option<AnswerParser>,
    num_calls: usize,
    num_tokens: usize,
    num_reasoning_tokens: usize,
    finished: Option<FinishReason>,
}

impl Generation {
    /// Hands all prompts to the engine and waits until it has taken them.
    pub async fn start(
        app: &Arc<App>,
        in_flight: InFlight,
        tenant: &Tenant,
        asked: GenerationRequest,
    ) -> Result<Self, ApiError> {
        let n = asked.params.n as usize;
        let limit = app.config.max_choices;
        let num_choices = asked.prompts.len().saturating_mul(asked.params.num_sequences() as usize);
        if num_choices > limit {
            let message =
                format!("the request asks for {num_choices} continuations, at most {limit} are allowed");
            return Err(ApiError::invalid_field("n", message));
        }
        let salt = tenant.cache_salt(asked.cache_salt.as_deref());
        let mut parts = Vec::with_capacity(asked.prompts.len());
        for (number, prompt_token_ids) in asked.prompts.into_iter().enumerate() {
            let mut params = asked.params.clone();
            limit_tokens(app, &mut params, prompt_token_ids.len(), asked.clamps_length)?;
            let params = Arc::new(params);
            let ends = &app.model.text.eos_token_ids;
            let request = Request {
                id: app.model.engine.new_request_id(),
                prompt_token_ids: prompt_token_ids.clone(),
                params: Arc::clone(&params),
                // A grammar always ends, so that its end tokens are never ignored.
                eos_token_ids: if params.ignore_eos && params.structured_outputs.is_none() {
                    Arc::from([])
                } else {
                    Arc::clone(ends)
                },
                priority: asked.priority,
                tenant: tenant.id().0,
                cache_salt: salt.clone(),
                num_public_tokens: app.public.count(&prompt_token_ids),
                kv_remote: asked.kv_transfer.as_ref().and_then(KvTransferParams::remote),
                constraint: asked.constraint.clone(),
                prediction: Arc::clone(&asked.prediction),
            };
            let answer_format = asked.answer_formats.get(number);
            let choices =
                (0..n).map(|_| Choice::new(app, &request, asked.skip_special_tokens, answer_format));
            let choices = choices.collect::<Result<_, _>>()?;
            let receiver = app.model.engine.submit(request)?;
            let lengths = (params.max_tokens, params.n);
            let listed = app.activity.list(tenant.id(), &receiver, prompt_token_ids.len(), lengths);
            parts.push(Part {
                choices,
                prompt_token_ids,
                prompt_logprobs: Vec::new(),
                pooled: Vec::new(),
                params,
                num_cached_tokens: 0,
                drafts: DraftCounts::default(),
                trace_parent: otlp::current_parent(),
                receiver_id: Some(receiver.request_id()),
                receiver: Some(receiver),
                listed: Some(listed),
            });
        }
        for receiver in parts.iter_mut().filter_map(|part| part.receiver.as_mut()) {
            poll_fn(|cx| receiver.poll_accepted(cx)).await?;
        }
        // The request is tokens now; what it was read from is gone.
        scope::release();
        let hands_over = asked.kv_transfer.as_ref().is_some_and(KvTransferParams::wants_decode_elsewhere);
        Ok(Self { app: Arc::clone(app), parts, n, hands_over, _in_flight: in_flight })
    }

    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Where the process that goes on finds the prompt's KV, in vLLM's words.
    pub fn kv_transfer_params(&self) -> Option<serde_json::Value> {
        let address = self.app.config.kv_transfer.filter(|_| self.hands_over)?;
        let id = self.parts.first().and_then(|part| part.receiver_id).map_or(0, |id| id.0);
        Some(serde_json::json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_engine_id": address.to_string(),
            "remote_request_id": id.to_string(),
            "remote_block_ids": [],
            "remote_host": address.ip().to_string(),
            "remote_port": address.port(),
            "tp_size": 1,
        }))
    }

    pub fn num_choices(&self) -> usize {
        self.parts.len() * self.n
    }

    /// Which prompt a choice continues.
    pub fn prompt_of(&self, choice: usize) -> usize {
        choice / self.n
    }

    /// The prompt of a choice.
    pub fn part_of(&self, choice: usize) -> &Part {
        &self.parts[self.prompt_of(choice)]
    }

    pub fn usage(&self) -> Usage {
        let prompt_tokens = self.parts.iter().map(|part| part.prompt_token_ids.len()).sum();
        let cached = self.parts.iter().map(|part| part.num_cached_tokens).sum();
        let choices = || self.parts.iter().flat_map(|part| &part.choices);
        let usage = Usage::new(prompt_tokens, choices().map(|choice| choice.num_tokens).sum(), cached);
        let reasoning_tokens = choices().map(|choice| choice.num_reasoning_tokens).sum();
        let mut drafts = DraftCounts::default();
        self.parts.iter().for_each(|part| drafts.add(part.drafts));
        let speculates = drafts != DraftCounts::default();
        let details = CompletionTokensDetails {
            reasoning_tokens,
            accepted_prediction_tokens: speculates.then_some(drafts.num_accepted as usize),
            rejected_prediction_tokens: speculates.then_some(drafts.num_rejected as usize),
        };
        Usage { completion_tokens_details: (speculates || reasoning_tokens > 0).then_some(details), ..usage }
    }

    /// Appends what is new. False when everything has ended.
    pub fn poll_updates(
        &mut self,
        cx: &mut Context<'_>,
        updates: &mut Vec<Update>,
    ) -> Poll<Result<bool, ApiError>> {
        let first_new = updates.len();
        let mut open = false;
        for (index, part) in self.parts.iter_mut().enumerate() {
            if let Err(error) = part.advance(cx, &self.app, index * self.n, updates) {
                part.end(&self.app, Some(FinishReason::Error));
                return Poll::Ready(Err(error));
            }
            open |= part.receiver.is_some();
        }
        if updates.len() > first_new {
            return Poll::Ready(Ok(true));
        }
        if open { Poll::Pending } else { Poll::Ready(Ok(false)) }
    }

    /// Everything at once: one update a choice, in order.
    pub async fn collect(&mut self) -> Result<Vec<Update>, ApiError> {
        self.collect_timed().await.map(|(choices, _)| choices)
    }

    /// The same, and when the first token came.
    pub async fn collect_timed(&mut self) -> Result<(Vec<Update>, Option<Instant>), ApiError> {
        let mut first = None;
        let mut choices: Vec<Update> =
            (0..self.num_choices()).map(|choice| Update { choice, ..Update::default() }).collect();
        let mut updates = Vec::new();
        while poll_fn(|cx| self.poll_updates(cx, &mut updates)).await? {
            first.get_or_insert_with(Instant::now);
            for update in updates.drain(..) {
                choices[update.choice].extend(update);
            }
        }
        Ok((choices, first))
    }
}

impl Drop for Generation {
    /// Whoever did not wait for the end went away.
    fn drop(&mut self) {
        for part in &mut self.parts {
            part.end(&self.app, Some(FinishReason::Abort));
        }
    }
}

impl Update {
    fn extend(&mut self, later: Self) {
        self.text.push_str(&later.text);
        append_events(&mut self.events, later.events);
        self.num_calls = later.num_calls;
        self.token_ids.extend(later.token_ids);
        self.logprobs.extend(later.logprobs);
        self.finish_reason = later.finish_reason;
        self.stop_reason = later.stop_reason;
    }
}

impl Part {
    /// Takes in all that the engine has for this prompt.
    fn advance(
        &mut self,
        cx: &mut Context<'_>,
        app: &App,
        first_choice: usize,
        updates: &mut Vec<Update>,
    ) -> Result<(), ApiError> {
        while let Some(receiver) = &mut self.receiver {
            let Poll::Ready(received) = receiver.poll_recv(cx) else { break };
            let output = received.unwrap_or(Err(EngineError::Stopped))?;
            let (started, num_before) = (app.model.trace.as_ref().map(|_| Instant::now()), updates.len());
            self.take(app, output, first_choice, updates)?;
            if let (Some(trace), Some(started)) = (&app.model.trace, started) {
                let num_tokens = updates[num_before..].iter().map(|update| update.token_ids.len()).sum();
                trace.span(Row::Text, "detokenise", started, Instant::now(), 0, num_tokens);
            }
            if self.choices.iter().all(|choice| choice.finished.is_some()) {
                self.end(app, None);
            }
        }
        Ok(())
    }

    fn take(
        &mut self,
        app: &App,
        output: RequestOutput,
        first_choice: usize,
        updates: &mut Vec<Update>,
    ) -> Result<(), ApiError> {
        self.prompt_logprobs.extend(output.prompt_logprobs);
        if !output.pooled.is_empty() {
            self.pooled = output.pooled;
        }
        self.num_cached_tokens = self.num_cached_tokens.max(output.num_cached_tokens as usize);
        self.drafts.add(output.drafts);
        for sequence in output.outputs {
            let index = sequence.index as usize;
            let Some(choice) = self.choices.get_mut(index).filter(|choice| choice.finished.is_none()) else {
                continue;
            };
            if let Some(reason) = &output.shape_failure {
                let message = format!("the output cannot be given the wanted shape any further: {reason}");
                return Err(ApiError::too_complex(message));
            }
            if sequence.finish_reason == Some(FinishReason::Error) {
                let cause = app.model.engine.heartbeat().stats().last_failure;
                return Err(ApiError::internal(&cause.unwrap_or_else(|| "a step failed".to_owned())));
            }
            let engine_goes_on = sequence.finish_reason.is_none();
            let update = choice.take(sequence, &self.params)?;
            // A stop string is found here, not by the engine, which would go on to the request's end.
            if engine_goes_on
                && update.finish_reason.is_some()
                && self.params.n > 1
                && let Some(receiver) = &self.receiver
            {
                app.model.engine.abort_sequence(receiver.request_id(), index as u32)?;
            }
            updates.push(Update { choice: first_choice + index, ..update });
        }
        if let Some(listed) = &self.listed {
            let num_tokens = self.choices.iter().map(|choice| choice.num_tokens).sum();
            listed.note(self.num_cached_tokens, num_tokens);
        }
        Ok(())
    }

    /// Lets go of the engine's request, which aborts it where it still runs, and counts it.
    fn end(&mut self, app: &App, reason: Option<FinishReason>) {
        let Some(receiver) = self.receiver.take() else { return };
        self.listed = None;
        let reason = reason.or(self.choices.first().and_then(|choice| choice.finished));
        let lengths = || self.choices.iter().map(|choice| choice.num_tokens);
        let end = RequestEnd {
            reason: reason.unwrap_or(FinishReason::Abort),
            times: receiver.times(),
            num_prompt_tokens: self.prompt_token_ids.len(),
            num_cached_tokens: self.num_cached_tokens,
            num_generation_tokens: lengths().sum(),
            max_generation_tokens: lengths().max().unwrap_or(0),
            n: self.params.n,
            max_tokens: self.params.max_tokens,
        };
        app.model.metrics.request_ended(&end);
        let parent = self.trace_parent.take();
        if let Some(spans) = &app.spans
            && parent.as_ref().is_none_or(|parent| parent.sampled)
        {
            let (request_id, params) = (receiver.request_id().to_string(), Arc::clone(&self.params));
            spans.push(RequestSpan { parent, request_id, params, end, ended: Instant::now() });
        }
        tracing::debug!(
            request = %receiver.request_id(),
            ?reason,
            prompt_tokens = self.prompt_token_ids.len(),
            output_tokens = lengths().sum::<usize>(),
            cached_tokens = self.num_cached_tokens,
            "request ended"
        );
    }
}

impl Choice {
    fn new(
        app: &App,
        request: &Request,
        skip_special_tokens: bool,
        answer_format: Option<&AnswerFormat>,
    ) -> Result<Self, ApiError> {
        let tokenizer = app.model.text.tokenizer.as_ref();
        // Marks that are special tokens must be seen to be understood.
        let is_special = |mark: &&str| {
            tokenizer.is_some_and(|tokenizer| {
                tokenizer.token_to_id(mark).is_some_and(|id| tokenizer.is_special(id))
            })
        };
        let needs_special =
            answer_format.is_some_and(|answer_format| answer_format.options.marks().iter().any(is_special));
        let options = OutputOptions::from_params(&request.params, skip_special_tokens && !needs_special);
        let stream = tokenizer
            .map(|tokenizer| OutputStream::new(Arc::clone(tokenizer), &request.prompt_token_ids, options));
        let parser = answer_format
            .map(|answer_format| AnswerParser::new(answer_format.options.clone(), &answer_format.prompt_end));
        Ok(Self {
            stream: stream.transpose()?,
            parser,
            num_calls: 0,
            num_tokens: 0,
            num_reasoning_tokens: 0,
            finished: None,
        })
    }

    fn take(&mut self, sequence: SequenceOutput, params: &SamplingParams) -> Result<Update, ApiError> {
        // The token that ended the sequence belongs to the output, but not to the text.
        let shown = sequence.token_ids.len() - usize::from(sequence.stop_token_id.is_some());
        let mut text = String::new();
        let mut stopped = None;
        if let Some(stream) = &mut self.stream {
            let delta = stream.push(&sequence.token_ids[..shown])?;
            (text, stopped) = (delta.text, delta.stopped);
            if stopped.is_none() && sequence.finish_reason.is_some() {
                let last = stream.finish()?;
                text.push_str(&last.text);
                stopped = last.stopped;
            }
        }
        let asked = sequence.stop_token_id.filter(|token| params.stop_token_ids.contains(token));
        let mut update = Update {
            text,
            token_ids: sequence.token_ids,
            logprobs: sequence.logprobs,
            finish_reason: sequence.finish_reason,
            // The model's own end is no reason that anyone asked for.
            stop_reason: asked.map(StopReason::Token),
            ..Update::default()
        };
        if let Some(stop) = stopped {
            // Tokens after the one that completed the stop string do not belong to the output.
            let kept = stop.num_tokens.saturating_sub(self.num_tokens);
            update.token_ids.truncate(kept);
            update.logprobs.truncate(kept);
            update.finish_reason = Some(FinishReason::Stop);
            update.stop_reason = Some(StopReason::Text(stop.stop));
        }
        self.num_tokens += update.token_ids.len();
        self.finished = update.finish_reason;
        self.read(&mut update);
        Ok(update)
    }

    /// Takes the new text apart.
    fn read(&mut self, update: &mut Update) {
        let Some(parser) = &mut self.parser else { return };
        if parser.is_reasoning() {
            self.num_reasoning_tokens += update.token_ids.len();
        }
        parser.push(&std::mem::take(&mut update.text), &mut update.events);
        if update.finish_reason.is_some() {
            parser.finish(&mut update.events);
        }
        let begins = |event: &&AnswerEvent| matches!(event, AnswerEvent::CallBegin { .. });
        self.num_calls += update.events.iter().filter(begins).count();
        update.num_calls = self.num_calls;
    }
}
