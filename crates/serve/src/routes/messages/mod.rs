//! `/v1/messages`: the same way as a chat, in the dialect of Anthropic's API, errors included.

mod input;

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use baton_core::FinishReason;
use serde_json::{Map, Value};

use crate::answer::{Streamed, Writer};
use crate::auth::Tenant;
use crate::blocks::{Block, BlockKind, Blocks, Change};
use crate::body::JsonBody;
use crate::conversation::{self, ChatRequest};
use crate::error::ApiError;
use crate::generation::{Generation, Update};
use crate::ids;
use crate::params::ApiFields;
use crate::prepare::{self, ChatOptions, Conversation};
use crate::sse::{self, Events};
use crate::state::App;
use crate::structured::{self, StructuredRequest};
use crate::types::common::{SamplingFields, Stop, StopReason};
use crate::types::messages::{
    ContentBlock, ContentDelta, MessageDelta, MessageError, MessageErrorDetail, MessageEvent, MessageFields,
    MessageResponse, MessageUsage, TokenCount,
};
use crate::types::refused::RefusedFields;

use super::{json, parsed};

/// Where these errors are spoken.
const PATH: &str = "/v1/messages";

pub async fn create(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let in_flight = app.admit()?;
    let body = JsonBody::read_for_engine(&app, request).await?;
    let parse =
        |body: &JsonBody| -> Result<(MessageFields, SamplingFields, Option<StructuredRequest>), ApiError> {
            let asked = body.parse()?;
            body.parse::<RefusedFields>()?.check()?;
            Ok((asked, body.parse()?, structured::requested(body.parse()?)?))
        };
    let (mut asked, more, structured_request) = parsed(&app, body, parse).await?;
    let app = app.for_model(asked.model.as_deref()).await?;
    let missing = || ApiError::invalid_field("max_tokens", "max_tokens is missing");
    let max_tokens = asked.max_tokens.ok_or_else(missing)?;
    let streams = asked.stream.unwrap_or(false);
    let fields = sampling_fields(&mut asked, more)?;
    let structured = structured::one_of(output_format(&mut asked)?, structured_request)?;
    let conversation = conversation(asked)?;
    let api = ApiFields { max_tokens: Some(max_tokens), ..ApiFields::default() };
    let chat = ChatRequest {
        conversations: vec![conversation],
        fields,
        api,
        structured,
        clamps_length: true,
        prediction: None,
    };
    let mut generation = conversation::start(&app, in_flight, &tenant, chat).await?;
    let mut writer = MessageWriter {
        id: format!("msg_{}", ids::unique()),
        blocks: Blocks::default(),
        stop: MessageDelta { stop_reason: None, stop_sequence: None },
    };
    if streams {
        return Ok(sse::response(Streamed::new(generation, writer)));
    }
    for update in generation.collect().await? {
        writer.take(update);
    }
    Ok(json(&writer.whole(&generation)))
}

pub async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let body = JsonBody::read(&app, request).await?;
    let asked: MessageFields = parsed(&app, body, JsonBody::parse).await?;
    let app = app.for_model(asked.model.as_deref()).await?;
    let conversation = conversation(asked)?;
    let prompt = prepare::blocking(&app, move |app| prepare::chat_prompt(app, conversation)).await?;
    Ok(json(&TokenCount { input_tokens: prompt.token_ids.len() }))
}

/// The shape of the answer, under its newer and its older name.
fn output_format(asked: &mut MessageFields) -> Result<Option<StructuredRequest>, ApiError> {
    let config = asked.output_config.take().and_then(|config| config.format);
    let (name, format) = match (config, asked.output_format.take()) {
        (Some(format), _) => ("output_config.format", format),
        (None, Some(format)) => ("output_format", format),
        (None, None) => return Ok(None),
    };
    match (format.kind.as_str(), format.schema) {
        ("json_schema", Some(schema)) if !schema.is_null() => Ok(Some((name, structured::json(schema)))),
        ("json_schema", _) => {
            Err(ApiError::invalid_field(format!("{name}.schema"), format!("{name}.schema is missing")))
        }
        ("text", _) => Ok(None),
        (other, _) => {
            let message = format!("{name}.type must be \"json_schema\", got {other:?}");
            Err(ApiError::invalid_field(format!("{name}.type"), message))
        }
    }
}

/// The fields of Anthropic's API and what other APIs of this server know besides (`bad_words`, `min_p`, …).
fn sampling_fields(asked: &mut MessageFields, more: SamplingFields) -> Result<SamplingFields, ApiError> {
    if more.n.is_some_and(|n| n != 1) {
        return Err(ApiError::invalid_field("n", "a message has one answer: leave n out"));
    }
    if more.prompt_logprobs.is_some() {
        return Err(ApiError::unsupported("prompt_logprobs"));
    }
    let stop = asked.stop_sequences.take().map(Stop::Many);
    Ok(SamplingFields { stop: stop.or(more.stop), ..more })
}

fn conversation(mut asked: MessageFields) -> Result<Conversation, ApiError> {
    let messages = input::turns(&mut asked)?;
    let tools = input::tools(asked.tools, asked.tool_choice)?;
    let kwargs = asked.thinking.map(|thinking| {
        Map::from_iter([("enable_thinking".to_owned(), Value::Bool(thinking.kind != "disabled"))])
    });
    // An answer that was begun is gone on with.
    let is_begun = messages.last().is_some_and(|last| {
        let text = last.get("content").and_then(Value::as_str).unwrap_or_default();
        last.get("role").is_some_and(|role| role == "assistant")
            && !last.contains_key("tool_calls")
            && !text.trim().is_empty()
    });
    let options = ChatOptions {
        chat_template_kwargs: kwargs,
        continue_final_message: is_begun.then_some(true),
        ..ChatOptions::default()
    };
    Ok(Conversation { model: asked.model, messages, tools, options })
}

#[derive(Debug)]
struct MessageWriter {
    id: String,
    blocks: Blocks,
    stop: MessageDelta,
}

impl MessageWriter {
    fn take(&mut self, update: Update) -> Vec<Change> {
        let mut changes = Vec::new();
        for event in update.events {
            self.blocks.push(event, &mut changes);
        }
        if let Some(reason) = update.finish_reason {
            self.blocks.close(&mut changes);
            let (name, sequence) = match (reason, update.stop_reason) {
                (FinishReason::Length, _) => ("max_tokens", None),
                (_, Some(StopReason::Text(text))) => ("stop_sequence", Some(text)),
                _ if update.num_calls > 0 => ("tool_use", None),
                _ => ("end_turn", None),
            };
            self.stop = MessageDelta { stop_reason: Some(name), stop_sequence: sequence };
        }
        changes
    }

    fn whole(&self, generation: &Generation) -> MessageResponse {
        MessageResponse {
            id: self.id.clone(),
            kind: "message",
            role: "assistant",
            model: generation.app().model.name().to_owned(),
            content: self.blocks.list.iter().map(content_block).collect(),
            stop_reason: self.stop.stop_reason,
            stop_sequence: self.stop.stop_sequence.clone(),
            usage: usage(generation),
        }
    }
}

/// Cached tokens are counted apart in this dialect.
fn usage(generation: &Generation) -> MessageUsage {
    let usage = generation.usage();
    let cached = usage.prompt_tokens_details.cached_tokens;
    MessageUsage {
        input_tokens: usage.prompt_tokens.saturating_sub(cached),
        cache_creation_input_tokens: 0,
        cache_read_input_tokens: cached,
        output_tokens: usage.completion_tokens,
    }
}

/// A whole block. Arguments that are no object cannot be told as such: the reader gets to see them.
fn content_block(block: &Block) -> ContentBlock {
    let text = block.text.clone();
    match &block.kind {
        BlockKind::Text => ContentBlock::Text { text },
        BlockKind::Reasoning => ContentBlock::Thinking { thinking: text, signature: String::new() },
        BlockKind::Call { id, name } => match serde_json::from_str(&text) {
            Ok(input) => ContentBlock::ToolUse { id: id.clone(), name: name.clone(), input },
            Err(_) => ContentBlock::Text { text: format!("{name}: {text}") },
        },
    }
}

impl Writer for MessageWriter {
    fn begin(&mut self, generation: &Generation, out: &mut Events) {
        out.push_named("message_start", &MessageEvent::MessageStart { message: self.whole(generation) });
        out.push_named("ping", &MessageEvent::Ping);
    }

    fn update(&mut self, _: &Generation, update: Update, out: &mut Events) {
        for change in self.take(update) {
            match change {
                Change::Opened(index) => {
                    let kind = self.blocks.list[index].kind.clone();
                    let content_block = match kind {
                        BlockKind::Call { id, name } => ContentBlock::ToolUse { id, name, input: Map::new() },
                        kind => content_block(&Block { kind, text: String::new() }),
                    };
                    let event = MessageEvent::ContentBlockStart { index, content_block };
                    out.push_named("content_block_start", &event);
                }
                Change::Extended(index, text) => {
                    let delta = match self.blocks.list[index].kind {
                        BlockKind::Text => ContentDelta::TextDelta { text },
                        BlockKind::Reasoning => ContentDelta::ThinkingDelta { thinking: text },
                        BlockKind::Call { .. } => ContentDelta::InputJsonDelta { partial_json: text },
                    };
                    out.push_named("content_block_delta", &MessageEvent::ContentBlockDelta { index, delta });
                }
                Change::Closed(index) => {
                    out.push_named("content_block_stop", &MessageEvent::ContentBlockStop { index });
                }
            }
        }
    }

    fn end(&mut self, generation: &Generation, out: &mut Events) {
        let event = MessageEvent::MessageDelta { delta: self.stop.clone(), usage: usage(generation) };
        out.push_named("message_delta", &event);
        out.push_named("message_stop", &MessageEvent::MessageStop);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        out.push_named("error", &MessageEvent::Error { error: detail(error) });
    }

    fn ends_with_done(&self) -> bool {
        false
    }
}

/// An error in Anthropic's words.
fn detail(error: &ApiError) -> MessageErrorDetail {
    let kind = match error.status.as_u16() {
        401 => "authentication_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    MessageErrorDetail { kind, message: error.body().error.message }
}

/// Around all routes: whatever went wrong on these, from the key to a missing field, is said in their own words.
pub async fn translate_errors(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let is_ours = path == PATH || path.strip_prefix(PATH).is_some_and(|rest| rest.starts_with('/'));
    let response = next.run(request).await;
    let Some(error) = response.extensions().get::<ApiError>().filter(|_| is_ours) else { return response };
    let body = MessageError { kind: "error", error: detail(error), request_id: None };
    super::with_body(response, &body)
}
