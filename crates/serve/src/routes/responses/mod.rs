//! `/v1/responses`: the same way as a chat, told in items, and kept for later.

mod builder;
mod input;

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use baton_core::StructuredOutput;
use serde_json::Value;
use tokio::sync::Notify;

use crate::answer::Streamed;
use crate::auth::Tenant;
use crate::conversation::{self, ChatRequest};
use crate::error::ApiError;
use crate::generation::Generation;
use crate::ids;
use crate::params::{ApiFields, Show};
use crate::prepare::{ChatOptions, Conversation, with_effort};
use crate::sse;
use crate::state::App;
use crate::store::{Stored, Turns};
use crate::structured::{self, StructuredRequest};
use crate::tools::{Described, ToolChoice, ToolUse, check_type, keep_allowed, mode_of};
use crate::types::common::{Others, SamplingFields};
use crate::types::responses::{
    DeletedResponse, InputItems, ResponseFields, ResponseInput, ResponseObject, ResponseToolChoice,
    TextFormat,
};
use crate::types::tools::Function;

use super::{Received, json, receive, refuse};
use builder::ResponseBuilder;

pub async fn create(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let Received { app, in_flight, own: mut asked, fields, structured } =
        receive::<ResponseFields>(&app, request).await?;
    check_supported(&asked, &fields)?;
    let show = Show::new(&app, &fields)?;
    let mut turns = previous_turns(&app, &tenant, &asked)?;
    let missing = || ApiError::invalid_field("input", "input is missing: give a text or a list of items");
    let asked_input: ResponseInput = asked.input.take().ok_or_else(missing)?;
    input::extend(&mut turns, asked_input)?;
    let response = response_object(&app, &asked, &fields);
    let top_logprobs = shows_logprobs(&asked).then(|| asked.top_logprobs.unwrap_or(0) as usize);
    let structured_request = structured::requested(structured)?;
    let chat = chat_request(asked, fields, structured_request, &turns)?;
    let mut builder = ResponseBuilder::new(&app, tenant.clone(), response, turns);
    builder.top_logprobs = top_logprobs;
    let mut generation = conversation::start(&app, in_flight, &tenant, chat).await?;
    if builder.response.background {
        return in_background(builder, generation);
    }
    if show.stream {
        return Ok(sse::response(Streamed::new(generation, builder)));
    }
    for update in generation.collect().await? {
        builder.take(update);
    }
    builder.complete(&generation);
    Ok(json(&builder.response))
}

fn check_supported(asked: &ResponseFields, fields: &SamplingFields) -> Result<(), ApiError> {
    refuse(&[("prompt", &asked.prompt), ("conversation", &asked.conversation)])?;
    let stores = asked.store.unwrap_or(true);
    if asked.background.unwrap_or(false) {
        if !stores {
            let message = "background can only be used when `store` is true: the response could not be asked for otherwise";
            return Err(ApiError::invalid_field("background", message));
        }
        if fields.stream.unwrap_or(false) {
            let message = "background and stream cannot be had together: leave one of them out";
            return Err(ApiError::invalid_field("background", message));
        }
    }
    if fields.n.is_some_and(|n| n != 1) {
        return Err(ApiError::invalid_field("n", "a response has one answer: leave n out"));
    }
    if asked.truncation.as_ref().is_some_and(|truncation| !["disabled", "auto"].contains(&&**truncation)) {
        let message = "truncation must be \"auto\" or \"disabled\"";
        return Err(ApiError::invalid_field("truncation", message));
    }
    Ok(())
}

/// The conversation up to this request.
fn previous_turns(app: &App, tenant: &Tenant, asked: &ResponseFields) -> Result<Turns, ApiError> {
    let Some(id) = &asked.previous_response_id else { return Ok(Turns::new()) };
    let previous = app.responses.get(tenant, id, "previous_response_id")?;
    if !["completed", "incomplete"].contains(&previous.response.status) {
        let status = previous.response.status;
        let message =
            format!("previous_response_id: the response is {status}, so that nothing can follow it");
        return Err(ApiError::invalid_field("previous_response_id", message));
    }
    Ok(previous.turns.to_vec())
}

fn response_object(app: &App, asked: &ResponseFields, fields: &SamplingFields) -> ResponseObject {
    let defaults = &app.model.text.default_sampling;
    let background = asked.background.unwrap_or(false);
    ResponseObject {
        id: format!("resp_{}", ids::unique()),
        object: "response",
        created_at: ids::unix_seconds(),
        status: if background { "queued" } else { "in_progress" },
        background,
        instructions: asked.instructions.clone(),
        max_output_tokens: asked.max_output_tokens,
        model: app.model.name().to_owned(),
        parallel_tool_calls: asked.parallel_tool_calls.unwrap_or(true),
        previous_response_id: asked.previous_response_id.clone(),
        reasoning: asked.reasoning.clone().unwrap_or_default(),
        store: asked.store.unwrap_or(true),
        temperature: fields.temperature.unwrap_or(defaults.temperature),
        text: {
            let mut text = asked.text.clone().unwrap_or_default();
            text.format.get_or_insert(TextFormat::Text);
            text
        },
        tool_choice: Some(asked.tool_choice.clone().unwrap_or(ResponseToolChoice::Mode("auto".to_owned()))),
        tools: asked.tools.clone().unwrap_or_default(),
        top_p: fields.top_p.unwrap_or(defaults.top_p),
        truncation: if truncates(asked) { "auto" } else { "disabled" },
        user: fields.user.clone(),
        metadata: asked.metadata.clone().unwrap_or_default(),
        ..ResponseObject::default()
    }
}

/// What is too long loses its beginning.
fn truncates(asked: &ResponseFields) -> bool {
    asked.truncation.as_deref() == Some("auto")
}

/// Log-probabilities are a part of the answer only where they are asked for.
fn shows_logprobs(asked: &ResponseFields) -> bool {
    asked
        .include
        .as_ref()
        .is_some_and(|include| include.iter().any(|part| part == "message.output_text.logprobs"))
}

fn chat_request(
    asked: ResponseFields,
    mut fields: SamplingFields,
    structured_request: Option<StructuredRequest>,
    turns: &Turns,
) -> Result<ChatRequest, ApiError> {
    let api = ApiFields {
        max_tokens: asked.max_output_tokens.or(fields.max_tokens),
        logprobs: shows_logprobs(&asked).then(|| asked.top_logprobs.unwrap_or(0)),
        ..ApiFields::default()
    };
    if truncates(&asked) {
        fields.truncate_prompt_tokens.get_or_insert(-1);
    }
    let structured = match asked.text.as_ref().and_then(|text| text.format.as_ref()) {
        None | Some(TextFormat::Text) => None,
        Some(TextFormat::JsonObject) => Some(("text.format", StructuredOutput::JsonObject)),
        Some(TextFormat::JsonSchema { schema, .. }) => {
            Some(("text.format", structured::json(Value::Object(schema.clone()))))
        }
    };
    let structured = structured::one_of(structured, structured_request)?;
    let describe = |(index, tool): (usize, crate::types::responses::ResponseTool)| {
        let path = format!("tools[{index}]");
        check_type(&path, &tool.kind)?;
        let function = Function {
            name: tool.name,
            description: tool.description,
            parameters: tool.parameters,
            strict: tool.strict,
            others: Others,
        };
        Ok(Described { path, function })
    };
    let tools = asked.tools.unwrap_or_default().into_iter().enumerate().map(describe);
    let mut tools = tools.collect::<Result<Vec<_>, ApiError>>()?;
    let choice = match asked.tool_choice {
        None => ToolChoice::Auto,
        Some(ResponseToolChoice::Mode(mode)) => mode_of(&mode)?,
        Some(ResponseToolChoice::Named { kind, name }) => {
            check_type("tool_choice", &kind)?;
            ToolChoice::Named(name)
        }
        Some(ResponseToolChoice::Allowed { mode, tools: allowed, .. }) => {
            keep_allowed(&mut tools, &allowed)?;
            mode_of(&mode)?
        }
    };
    let mut messages = Turns::with_capacity(turns.len() + 1);
    messages.extend(asked.instructions.map(|instructions| input::turn("system", instructions)));
    messages.extend(turns.iter().cloned());
    let options = ChatOptions {
        chat_template_kwargs: with_effort(
            asked.chat_template_kwargs,
            asked.reasoning.and_then(|reasoning| reasoning.effort),
        ),
        ..ChatOptions::default()
    };
    let tools = ToolUse::new(tools, choice, asked.parallel_tool_calls)?;
    let conversation = Conversation { model: fields.model.clone(), messages, tools, options };
    Ok(ChatRequest {
        conversations: vec![conversation],
        fields,
        api,
        structured,
        clamps_length: true,
        prediction: None,
    })
}

/// Answers at once; a task of its own makes the response and puts it into the store.
fn in_background(mut builder: ResponseBuilder, mut generation: Generation) -> Result<Response, ApiError> {
    let answer = json(&builder.response);
    builder.response.status = "in_progress";
    let cancel = Arc::new(Notify::new());
    let stored = Stored {
        response: Arc::new(builder.response.clone()),
        turns: Arc::default(),
        cancel: Some(Arc::clone(&cancel)),
    };
    builder.app.responses.put(&builder.tenant, stored)?;
    tokio::spawn(async move {
        let ended = tokio::select! {
            ended = generation.collect() => Some(ended),
            () = cancel.notified() => None,
        };
        if !builder.app.responses.contains(&builder.response.id) {
            // It was deleted meanwhile.
            return;
        }
        match ended {
            Some(Ok(updates)) => {
                for update in updates {
                    builder.take(update);
                }
                builder.complete(&generation);
            }
            Some(Err(error)) => builder.abandon("failed", Some(&error)),
            None => builder.abandon("cancelled", None),
        }
    });
    Ok(answer)
}

pub async fn retrieve(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    Ok(json(&*app.responses.get(&tenant, &id, "id")?.response))
}

pub async fn input_items(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let stored = app.responses.get(&tenant, &id, "id")?;
    let data = input::items(&stored.turns);
    let id_of = |item: Option<&Value>| item.and_then(|item| item["id"].as_str()).map(str::to_owned);
    let (first_id, last_id) = (id_of(data.first()), id_of(data.last()));
    Ok(json(&InputItems { object: "list", data, first_id, last_id, has_more: false }))
}

pub async fn remove(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let stored = app.responses.get(&tenant, &id, "id")?;
    app.responses.remove(&id);
    if let Some(cancel) = stored.cancel {
        cancel.notify_one();
    }
    Ok(json(&DeletedResponse { id, object: "response", deleted: true }))
}

/// Stops a response that is made in the background. One that is done already stays as it is.
pub async fn cancel(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let stored = app.responses.get(&tenant, &id, "id")?;
    if !stored.response.background {
        let message = "Cannot cancel a synchronous response: close the connection instead";
        return Err(ApiError::invalid_field("id", message));
    }
    let Some(cancel) = stored.cancel else { return Ok(json(&*stored.response)) };
    cancel.notify_one();
    // The task hears of it with its next turn; what it will say is known already.
    let response = ResponseObject { status: "cancelled", ..(*stored.response).clone() };
    Ok(json(&response))
}
