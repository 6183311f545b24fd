//! `POST /v1/chat/completions` and `POST /v1/chat/completions/batch`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use baton_core::FinishReason;
use baton_text::AnswerEvent;
use serde_json::{Map, Value};

use crate::FINGERPRINT;
use crate::answer::{ResponseHeader, Streamed, Writer};
use crate::auth::Tenant;
use crate::blocks::{BlockKind, Blocks};
use crate::conversation::{self, ChatRequest};
use crate::error::ApiError;
use crate::generation::{Generation, Update};
use crate::logprobs::{self, finish_name};
use crate::params::{ApiFields, Show};
use crate::prepare::{ChatOptions, Conversation, with_effort};
use crate::sse::{self, Events};
use crate::state::App;
use crate::structured;
use crate::tools::ToolUse;
use crate::types::chat::{
    AnswerMessage, BatchChatFields, ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatFields,
    ChatFieldsOf, ChatResponse, Conversations, Messages, Prediction,
};
use crate::types::tools::{CalledFunction, FunctionDelta, ToolCall, ToolCallDelta};

use super::{Received, json, receive, refuse};

pub async fn create(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut received = receive::<ChatFields>(&app, request).await?;
    let app = Arc::clone(&received.app);
    let messages = received.own.messages.take().ok_or_else(no_messages)?;
    answer(&app, &tenant, received, vec![messages]).await
}

/// `POST /v1/chat/completions/batch`, as vLLM has it: many conversations under the same parameters, one choice each. What
/// would need more than a choice to say (streams, calls, several continuations) is refused.
pub async fn create_batch(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut received = receive::<BatchChatFields>(&app, request).await?;
    let app = Arc::clone(&received.app);
    let Conversations(conversations) = received.own.messages.take().ok_or_else(no_messages)?;
    let (chat, fields) = (&received.own, &received.fields);
    let refused = [
        ("stream", fields.stream.unwrap_or(false)),
        ("tools", chat.tools.as_ref().is_some_and(|tools| !tools.is_empty())),
        ("n", fields.n.unwrap_or(1) > 1),
        ("best_of", chat.best_of.unwrap_or(1) > 1),
        ("use_beam_search", fields.use_beam_search.unwrap_or(false)),
        ("prompt_logprobs", fields.prompt_logprobs.is_some()),
    ];
    if let Some((field, _)) = refused.iter().find(|(_, is_asked)| *is_asked) {
        let message = format!("{field} does not go with a batch of conversations: use /v1/chat/completions");
        return Err(ApiError::invalid_field(*field, message));
    }
    let limit = app.config.max_choices;
    if conversations.is_empty() || conversations.len() > limit {
        let message = format!("messages must hold 1 to {limit} conversations, got {}", conversations.len());
        return Err(ApiError::invalid_field("messages", message));
    }
    app.check_queue(conversations.len())?;
    answer(&app, &tenant, received, conversations).await
}

fn no_messages() -> ApiError {
    ApiError::invalid_field("messages", "messages is missing: give at least one message")
}

/// Answers conversations that are asked for with the same fields.
async fn answer<M: Default>(
    app: &Arc<App>,
    tenant: &Tenant,
    received: Received<ChatFieldsOf<M>>,
    conversations: Vec<Messages>,
) -> Result<Response, ApiError> {
    let Received { in_flight, own: mut chat, fields, structured, .. } = received;
    check_supported(&chat)?;
    let show = Show::new(app, &fields)?;
    let top_logprobs = top_logprobs(app, &chat)?;
    let api = ApiFields {
        max_tokens: chat.max_completion_tokens.or(fields.max_tokens),
        logprobs: top_logprobs,
        best_of: chat.best_of,
        ..ApiFields::default()
    };
    let writer = ChatWriter {
        head: ResponseHeader::new("chatcmpl", show),
        top_logprobs: top_logprobs.map(|top| top as usize),
        prompt_logprobs: fields.prompt_logprobs.is_some(),
        echoes: conversations.iter().map(|messages| echoed(&chat, &messages.0)).collect(),
    };
    let tools = ToolUse::of_chat(chat.tools.take(), chat.tool_choice.take(), chat.parallel_tool_calls)?;
    let options = ChatOptions {
        add_generation_prompt: chat.add_generation_prompt,
        continue_final_message: chat.continue_final_message,
        add_special_tokens: chat.add_special_tokens,
        documents: chat.documents,
        chat_template_kwargs: with_effort(chat.chat_template_kwargs, chat.reasoning_effort),
        skips_reasoning: false,
    };
    let conversation = |messages: Messages| Conversation {
        model: fields.model.clone(),
        messages: messages.0,
        tools: tools.clone(),
        options: options.clone(),
    };
    let conversations = conversations.into_iter().map(conversation).collect();
    let structured = structured::requested(structured)?;
    let prediction = chat.prediction.map(Prediction::into_text);
    let chat = ChatRequest { conversations, fields, api, structured, clamps_length: false, prediction };
    let mut generation = conversation::start(app, in_flight, tenant, chat).await?;
    if show.stream {
        return Ok(sse::response(Streamed::new(generation, writer)));
    }
    let updates = generation.collect().await?;
    Ok(json(&writer.whole(&generation, updates)))
}

fn check_supported<M: Default>(chat: &ChatFieldsOf<M>) -> Result<(), ApiError> {
    refuse(&[
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
fn top_logprobs<M: Default>(app: &App, chat: &ChatFieldsOf<M>) -> Result<Option<u32>, ApiError> {
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
fn echoed<M: Default>(chat: &ChatFieldsOf<M>, messages: &[Map<String, Value>]) -> String {
    let last = messages.last().filter(|_| chat.echo.unwrap_or(false));
    let assistant = last.filter(|message| message.get("role").is_some_and(|role| role == "assistant"));
    let content = assistant.and_then(|message| message.get("content")).and_then(|content| content.as_str());
    content.unwrap_or_default().to_owned()
}

/// How an answer is to look.
#[derive(Debug)]
struct ChatWriter {
    head: ResponseHeader,
    top_logprobs: Option<usize>,
    prompt_logprobs: bool,
    /// What the answer to each conversation begins with.
    echoes: Vec<String>,
}

/// Whoever called functions has not ended, but waits for their results.
fn reason(update: &Update) -> Option<&'static str> {
    match update.finish_reason? {
        FinishReason::Stop if update.num_calls > 0 => Some("tool_calls"),
        reason => Some(finish_name(reason)),
    }
}

impl ChatWriter {
    fn echo_of(&self, choice: usize, generation: &Generation) -> &str {
        &self.echoes[generation.prompt_of(choice)]
    }

    fn whole(&self, generation: &Generation, updates: Vec<Update>) -> ChatResponse {
        let names = self.head.names(generation);
        let show = self.head.show;
        let choices = updates.into_iter().map(|update| ChatChoice {
            index: update.choice,
            logprobs: self.top_logprobs.map(|top| logprobs::chat(&update.logprobs, top, names)),
            finish_reason: reason(&update),
            message: message(self.echo_of(update.choice, generation), update.events),
            stop_reason: update.stop_reason,
            token_ids: show.token_ids.then_some(update.token_ids),
        });
        let part = generation.part_of(0);
        let is_batch = self.echoes.len() > 1;
        ChatResponse {
            choices: choices.collect(),
            id: self.head.id.clone(),
            object: "chat.completion",
            created: self.head.created,
            model: names.model.name().to_owned(),
            usage: generation.usage(),
            system_fingerprint: FINGERPRINT,
            prompt_logprobs: self.prompt_logprobs.then(|| logprobs::prompt(&part.prompt_logprobs, names)),
            // There is one place for it.
            prompt_token_ids: (show.token_ids && !is_batch).then(|| part.prompt_token_ids.clone()),
            kv_transfer_params: generation.kv_transfer_params(),
        }
    }

    fn push_chunk(
        &self,
        generation: &Generation,
        choices: Vec<ChatChunkChoice<'_>>,
        is_first: bool,
        is_last: bool,
        out: &mut Events,
    ) {
        let part = generation.part_of(0);
        out.push(&ChatChunk {
            id: &self.head.id,
            object: "chat.completion.chunk",
            created: self.head.created,
            model: generation.app().model.name(),
            choices,
            usage: self.head.chunk_usage(generation, is_last),
            system_fingerprint: FINGERPRINT,
            prompt_token_ids: (is_first && self.head.show.token_ids).then_some(&*part.prompt_token_ids),
        });
    }
}

fn message(echo: &str, events: Vec<AnswerEvent>) -> AnswerMessage {
    let blocks = Blocks::of(events);
    let reasoning = blocks.text_of(&BlockKind::Reasoning);
    let content = format!("{}{}", echo, blocks.text_of(&BlockKind::Text).unwrap_or_default());
    let call = |block: crate::blocks::Block| match block.kind {
        BlockKind::Call { id, name } => {
            Some(ToolCall { id, kind: "function", function: CalledFunction { name, arguments: block.text } })
        }
        BlockKind::Reasoning | BlockKind::Text => None,
    };
    let tool_calls: Vec<ToolCall> = blocks.list.into_iter().filter_map(call).collect();
    AnswerMessage {
        role: "assistant".to_owned(),
        content: (tool_calls.is_empty() || !content.is_empty()).then_some(content),
        refusal: None,
        reasoning: reasoning.clone(),
        reasoning_content: reasoning,
        tool_calls,
    }
}

/// The piece of a message that an event is; the end of a call is said by what follows it.
fn delta(event: &AnswerEvent) -> Option<ChatDelta<'_>> {
    let call = |index, id: Option<&String>, name: Option<&String>, arguments: &str| ToolCallDelta {
        index,
        kind: id.is_some().then_some("function"),
        id: id.cloned(),
        function: FunctionDelta { name: name.cloned(), arguments: arguments.to_owned() },
    };
    let delta = match event {
        AnswerEvent::Content(text) => ChatDelta { content: Some(text), ..ChatDelta::default() },
        AnswerEvent::Reasoning(text) => {
            ChatDelta { reasoning: Some(text), reasoning_content: Some(text), ..ChatDelta::default() }
        }
        AnswerEvent::CallBegin { index, id, name } => ChatDelta {
            tool_calls: Some(vec![call(*index, Some(id), Some(name), "")]),
            ..ChatDelta::default()
        },
        AnswerEvent::Arguments { index, text } => {
            ChatDelta { tool_calls: Some(vec![call(*index, None, None, text)]), ..ChatDelta::default() }
        }
        AnswerEvent::CallEnd { .. } => return None,
    };
    Some(delta)
}

impl Writer for ChatWriter {
    fn begin(&mut self, generation: &Generation, out: &mut Events) {
        for index in 0..generation.num_choices() {
            let echo = self.echo_of(index, generation);
            let delta = ChatDelta { role: Some("assistant"), content: Some(echo), ..ChatDelta::default() };
            let choice = ChatChunkChoice { index, delta, ..ChatChunkChoice::default() };
            self.push_chunk(generation, vec![choice], index == 0, false, out);
        }
    }

    /// One chunk a piece. What belongs to all of them goes into the first, the end into the last.
    fn update(&mut self, generation: &Generation, update: Update, out: &mut Events) {
        let mut deltas: Vec<ChatDelta<'_>> = update.events.iter().filter_map(delta).collect();
        let shows_tokens = self.top_logprobs.is_some() || self.head.show.token_ids;
        let ends = update.finish_reason.is_some();
        if deltas.is_empty() && (ends || (shows_tokens && !update.token_ids.is_empty())) {
            deltas.push(ChatDelta { content: (!ends).then_some(""), ..ChatDelta::default() });
        }
        let names = self.head.names(generation);
        let logprobs = self.top_logprobs.map(|top| logprobs::chat(&update.logprobs, top, names));
        let mut logprobs = logprobs.filter(|logprobs| !logprobs.content.is_empty());
        let (finish_reason, num_deltas) = (reason(&update), deltas.len());
        let mut token_ids = self.head.show.token_ids.then_some(update.token_ids);
        for (number, delta) in deltas.into_iter().enumerate() {
            let is_last = number + 1 == num_deltas;
            let choice = ChatChunkChoice {
                index: update.choice,
                delta,
                logprobs: logprobs.take(),
                finish_reason: finish_reason.filter(|_| is_last),
                stop_reason: update.stop_reason.clone().filter(|_| is_last),
                token_ids: token_ids.take(),
            };
            self.push_chunk(generation, vec![choice], false, false, out);
        }
    }

    fn end(&mut self, generation: &Generation, out: &mut Events) {
        if self.head.show.include_usage {
            self.push_chunk(generation, Vec::new(), false, true, out);
        }
    }
}
