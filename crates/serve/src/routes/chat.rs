//! `POST /v1/chat/completions`.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;

use crate::auth::Tenant;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::generation::{Generation, Job, Update};
use crate::logprobs::{self, TokenNames, finish_name};
use crate::params::{ApiFields, Show, sampling_params};
use crate::prepare::{self, ChatOptions};
use crate::sse::{self, EventSource, Events};
use crate::state::App;
use crate::structured;
use crate::types::chat::{
    AnswerMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatFields, ChatResponse,
};
use crate::types::common::SamplingFields;
use crate::types::structured::StructuredFields;
use crate::{FINGERPRINT, ids};

use super::{check_model, json, refuse};

pub async fn create(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let in_flight = app.admit()?;
    let body = JsonBody::read(&app, request).await?;
    let mut chat: ChatFields = body.parse()?;
    let fields: SamplingFields = body.parse()?;
    let structured: StructuredFields = body.parse()?;
    drop(body);
    check_model(&app, fields.model.as_deref())?;
    check_supported(&chat)?;
    let show = Show::new(&fields)?;
    let top_logprobs = top_logprobs(&app, &chat)?;
    let api = ApiFields {
        max_tokens: chat.max_completion_tokens.or(fields.max_tokens),
        logprobs: top_logprobs,
        best_of: chat.best_of,
    };
    let mut params = sampling_params(&app, &fields, api)?;
    structured::apply(&app, structured, &mut params).await?;
    let missing = || ApiError::invalid_field("messages", "messages is missing: give at least one message");
    let messages = chat.messages.take().ok_or_else(missing)?;
    let echo = echoed(&chat, &messages);
    let options = ChatOptions {
        add_generation_prompt: chat.add_generation_prompt,
        continue_final_message: chat.continue_final_message,
        add_special_tokens: chat.add_special_tokens,
        documents: chat.documents,
        chat_template_kwargs: chat.chat_template_kwargs,
    };
    let prompt = prepare::blocking(&app, move |app| prepare::chat_tokens(app, messages, options)).await?;
    let job = Job {
        prompts: vec![prompt],
        params,
        skip_special_tokens: show.skip_special_tokens,
        cache_salt: fields.cache_salt,
        priority: fields.priority.unwrap_or(0),
    };
    let generation = Generation::start(&app, in_flight, &tenant, job).await?;
    let answer = Answer {
        id: format!("chatcmpl-{}", ids::unique()),
        created: ids::unix_seconds(),
        show,
        top_logprobs: top_logprobs.map(|top| top as usize),
        prompt_logprobs: fields.prompt_logprobs.is_some(),
        echo,
        generation,
    };
    if show.stream {
        return Ok(sse::response(ChatStream { answer, updates: Vec::new(), state: StreamState::Begin }));
    }
    answer.whole().await
}

fn check_supported(chat: &ChatFields) -> Result<(), ApiError> {
    refuse(&[
        ("tools", &chat.tools),
        ("tool_choice", &chat.tool_choice),
        ("functions", &chat.functions),
        ("function_call", &chat.function_call),
        ("audio", &chat.audio),
        ("web_search_options", &chat.web_search_options),
        ("chat_template", &chat.chat_template),
        ("mm_processor_kwargs", &chat.mm_processor_kwargs),
    ])?;
    if chat.modalities.as_ref().is_some_and(|modes| modes.iter().any(|mode| mode != "text")) {
        return Err(ApiError::unsupported("modalities"));
    }
    Ok(())
}

/// How many alternatives to report; `None` for no log-probabilities.
fn top_logprobs(app: &App, chat: &ChatFields) -> Result<Option<u32>, ApiError> {
    let limit = app.config.max_logprobs;
    if chat.top_logprobs.is_some_and(|top| top > limit) {
        let message = format!("top_logprobs must be at most {limit} (--max-logprobs)");
        return Err(ApiError::invalid_field("top_logprobs", message));
    }
    match (chat.logprobs.unwrap_or(false), chat.top_logprobs) {
        (false, Some(top)) if top > 0 => {
            Err(ApiError::invalid_field("top_logprobs", "top_logprobs needs logprobs to be true"))
        }
        (false, _) => Ok(None),
        (true, top) => Ok(Some(top.unwrap_or(0))),
    }
}

/// With `echo`, the last message of the assistant begins the answer.
fn echoed(chat: &ChatFields, messages: &[serde_json::Map<String, serde_json::Value>]) -> String {
    let last = messages.last().filter(|_| chat.echo.unwrap_or(false));
    let assistant = last.filter(|message| message.get("role").is_some_and(|role| role == "assistant"));
    let content = assistant.and_then(|message| message.get("content")).and_then(|content| content.as_str());
    content.unwrap_or_default().to_owned()
}

/// An answer under way, and how it is to look.
struct Answer {
    id: String,
    created: u64,
    show: Show,
    top_logprobs: Option<usize>,
    prompt_logprobs: bool,
    echo: String,
    generation: Generation,
}

impl Answer {
    fn names(&self) -> TokenNames<'_> {
        TokenNames { model: &self.generation.app().model, as_ids: self.show.tokens_as_ids }
    }

    async fn whole(mut self) -> Result<Response, ApiError> {
        let updates = self.generation.collect().await?;
        let names = self.names();
        let choices = updates.into_iter().map(|update| ChatChoice {
            index: update.choice,
            logprobs: self.top_logprobs.map(|top| logprobs::chat(&update.logprobs, top, names)),
            message: AnswerMessage {
                role: "assistant".to_owned(),
                content: format!("{}{}", self.echo, update.text),
                refusal: None,
            },
            finish_reason: update.finish_reason.map(finish_name),
            stop_reason: update.stop_reason,
            token_ids: self.show.token_ids.then_some(update.token_ids),
        });
        let part = self.generation.part_of(0);
        Ok(json(&ChatResponse {
            choices: choices.collect(),
            id: self.id.clone(),
            object: "chat.completion",
            created: self.created,
            model: names.model.name().to_owned(),
            usage: self.generation.usage(),
            system_fingerprint: FINGERPRINT,
            prompt_logprobs: self.prompt_logprobs.then(|| logprobs::prompt(&part.prompt_logprobs, names)),
            prompt_token_ids: self.show.token_ids.then(|| part.prompt_token_ids.clone()),
        }))
    }

    fn push_chunk(&self, choices: Vec<ChatChunkChoice<'_>>, is_first: bool, is_last: bool, out: &mut Events) {
        let usage = match (self.show.include_usage, is_last || self.show.continuous_usage) {
            (false, _) => None,
            (true, false) => Some(None),
            (true, true) => Some(Some(self.generation.usage())),
        };
        let part = self.generation.part_of(0);
        out.push(&ChatChunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: self.generation.app().model.name(),
            choices,
            usage,
            system_fingerprint: FINGERPRINT,
            prompt_token_ids: (is_first && self.show.token_ids).then_some(&*part.prompt_token_ids),
        });
    }

    fn push_update(&self, update: Update, out: &mut Events) {
        let shows_tokens = self.top_logprobs.is_some() || self.show.token_ids;
        let new_tokens = shows_tokens && !update.token_ids.is_empty();
        if !new_tokens && update.text.is_empty() && update.finish_reason.is_none() {
            return;
        }
        let logprobs = self.top_logprobs.map(|top| logprobs::chat(&update.logprobs, top, self.names()));
        let has_content = !update.text.is_empty() || update.finish_reason.is_none();
        let choice = ChatChunkChoice {
            index: update.choice,
            delta: ChatDelta { role: None, content: has_content.then_some(&*update.text) },
            logprobs: logprobs.filter(|logprobs| !logprobs.content.is_empty()),
            finish_reason: update.finish_reason.map(finish_name),
            stop_reason: update.stop_reason,
            token_ids: self.show.token_ids.then_some(update.token_ids),
        };
        self.push_chunk(vec![choice], false, false, out);
    }

    fn push_beginning(&self, out: &mut Events) {
        for index in 0..self.generation.num_choices() {
            let delta = ChatDelta { role: Some("assistant"), content: Some(&self.echo) };
            let choice = ChatChunkChoice {
                index,
                delta,
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
            };
            self.push_chunk(vec![choice], index == 0, false, out);
        }
    }
}

enum StreamState {
    Begin,
    Running,
}

struct ChatStream {
    answer: Answer,
    updates: Vec<Update>,
    state: StreamState,
}

impl EventSource for ChatStream {
    fn poll_events(&mut self, cx: &mut Context<'_>, out: &mut Events) -> Poll<Result<bool, ApiError>> {
        if matches!(self.state, StreamState::Begin) {
            self.state = StreamState::Running;
            self.answer.push_beginning(out);
            return Poll::Ready(Ok(true));
        }
        let more = ready!(self.answer.generation.poll_updates(cx, &mut self.updates))?;
        for update in self.updates.drain(..) {
            self.answer.push_update(update, out);
        }
        if !more && self.answer.show.include_usage {
            self.answer.push_chunk(Vec::new(), false, true, out);
        }
        Poll::Ready(Ok(more))
    }
}
