//! `/api/…`: the same way as a chat, in the dialect of Ollama's API. Answers are streamed as lines of JSON unless a request
//! says otherwise; errors are one sentence.

mod input;
mod models;

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use baton_core::FinishReason;
use serde_json::{Map, Value};

use crate::answer::{Streamed, Writer};
use crate::auth::Tenant;
use crate::blocks::{BlockKind, Blocks};
use crate::body::JsonBody;
use crate::conversation::{self, ChatRequest};
use crate::error::ApiError;
use crate::generation::{Generation, GenerationRequest, Update};
use crate::ids;
use crate::params::{ApiFields, sampling_params};
use crate::prepare::{self, ChatOptions, Conversation, with_effort};
use crate::sse::{self, Events};
use crate::state::{App, InFlight};
use crate::structured;
use crate::tools::ToolUse;
use crate::types::common::SamplingFields;
use crate::types::ollama::{
    OllamaAnswer, OllamaCall, OllamaChat, OllamaEnd, OllamaError, OllamaFunction, OllamaGenerate,
    OllamaMessage, OllamaOptions,
};
use crate::types::prompt::Prompt;

pub use models::{ps, show, tags, version};

use super::json;

const PATH: &str = "/api/";

pub async fn chat(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let in_flight = app.admit()?;
    let asked: OllamaChat = JsonBody::read(&app, request).await?.parse()?;
    let (app, name) = input::model(&app, asked.model.as_deref()).await?;
    let streams = asked.stream.unwrap_or(true);
    if asked.messages.is_empty() {
        return Ok(loaded(name, Kind::Chat));
    }
    let conversation = Conversation {
        model: Some(name.clone()),
        messages: input::messages(asked.messages)?,
        tools: ToolUse::of_chat(asked.tools, None, None)?,
        options: thinking(asked.think.as_ref()),
    };
    let (format, options) = (asked.format, asked.options);
    let question = Question { name, kind: Kind::Chat, streams, format, options, started: Instant::now() };
    question.answer(&app, in_flight, &tenant, conversation).await
}

pub async fn generate(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let in_flight = app.admit()?;
    let asked: OllamaGenerate = JsonBody::read(&app, request).await?.parse()?;
    input::refuse(&asked)?;
    let (app, name) = input::model(&app, asked.model.as_deref()).await?;
    let prompt = asked.prompt.unwrap_or_default();
    let streams = asked.stream.unwrap_or(true);
    if prompt.is_empty() {
        // That is how clients have a model loaded, which it is.
        return Ok(loaded(name, Kind::Generate));
    }
    let (format, options) = (asked.format, asked.options);
    let question = Question { name, kind: Kind::Generate, streams, format, options, started: Instant::now() };
    let filled = asked.suffix.as_deref().filter(|suffix| !suffix.is_empty());
    if let Some(suffix) = filled {
        let tokens = super::llamacpp::infill_prompt(&app, prompt, suffix.to_owned(), "suffix").await?;
        return question.continue_prompt(&app, in_flight, &tenant, tokens).await;
    }
    if asked.raw.unwrap_or(false) || app.model.text.chat_template.is_none() {
        let prompt = Prompt::Text(prompt);
        let tokens =
            prepare::blocking(&app, move |app| prepare::prompt_tokens(app, prompt, true, "prompt")).await?;
        return question.continue_prompt(&app, in_flight, &tenant, tokens).await;
    }
    let message = |role: &str, content: String| {
        Map::from_iter([("role".to_owned(), role.into()), ("content".to_owned(), content.into())])
    };
    let system = asked.system.filter(|system| !system.is_empty()).map(|system| message("system", system));
    let conversation = Conversation {
        model: Some(question.name.clone()),
        messages: system.into_iter().chain([message("user", prompt)]).collect(),
        tools: ToolUse::default(),
        options: thinking(asked.think.as_ref()),
    };
    question.answer(&app, in_flight, &tenant, conversation).await
}

/// `think: false` asks a model that reasons not to, `think: "low"` how hard to.
fn thinking(think: Option<&Value>) -> ChatOptions {
    let effort = think.and_then(Value::as_str).map(str::to_owned);
    let kwargs = think.filter(|think| !think.is_null()).map(|think| {
        Map::from_iter([("enable_thinking".to_owned(), Value::Bool(*think != Value::Bool(false)))])
    });
    let kwargs = with_effort(kwargs, effort);
    ChatOptions { chat_template_kwargs: kwargs, ..ChatOptions::default() }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Chat,
    Generate,
}

/// What both routes ask for.
struct Question {
    name: String,
    kind: Kind,
    streams: bool,
    format: Option<Value>,
    options: Option<OllamaOptions>,
    started: Instant,
}

impl Question {
    fn fields(&mut self) -> (SamplingFields, ApiFields) {
        let options = self.options.take().unwrap_or_default();
        let max_tokens =
            options.num_predict.and_then(|count| u32::try_from(count).ok()).filter(|&count| count > 0);
        let fields = options.fields(Some(self.name.clone()), self.streams);
        (fields, ApiFields { max_tokens, ..ApiFields::default() })
    }

    async fn answer(
        mut self,
        app: &Arc<App>,
        in_flight: InFlight,
        tenant: &Tenant,
        conversation: Conversation,
    ) -> Result<Response, ApiError> {
        let (fields, api) = self.fields();
        let structured = input::format(self.format.take())?;
        let chat = ChatRequest {
            conversations: vec![conversation],
            fields,
            api,
            structured,
            clamps_length: true,
            prediction: None,
        };
        let generation = conversation::start(app, in_flight, tenant, chat).await?;
        self.write(generation).await
    }

    async fn continue_prompt(
        mut self,
        app: &Arc<App>,
        in_flight: InFlight,
        tenant: &Tenant,
        tokens: Vec<baton_core::TokenId>,
    ) -> Result<Response, ApiError> {
        let (fields, api) = self.fields();
        let mut params = sampling_params(app, &fields, api)?;
        let constraint = structured::apply(app, input::format(self.format.take())?, &mut params).await?;
        let generation_request = GenerationRequest {
            prompts: vec![tokens],
            params,
            constraint,
            skip_special_tokens: true,
            cache_salt: None,
            kv_transfer: None,
            priority: 0,
            answer_formats: Vec::new(),
            clamps_length: true,
            prediction: Arc::from([]),
        };
        let generation = Generation::start(app, in_flight, tenant, generation_request).await?;
        self.write(generation).await
    }

    async fn write(self, mut generation: Generation) -> Result<Response, ApiError> {
        let mut writer = OllamaWriter { started: self.started, ..OllamaWriter::new(self.name, self.kind) };
        if self.streams {
            return Ok(sse::lines(Streamed::new(generation, writer)));
        }
        let (updates, first) = generation.collect_timed().await?;
        writer.first = first;
        let whole = updates.into_iter().next().map(|update| writer.take(update)).unwrap_or_default();
        let end = writer.end_of(&generation);
        Ok(json(&writer.line(whole, Some(end))))
    }
}

/// The answer to a request that asks for nothing.
fn loaded(name: String, kind: Kind) -> Response {
    let writer = OllamaWriter::new(name, kind);
    let end = OllamaEnd { done_reason: "load", ..OllamaEnd::default() };
    json(&writer.line(Piece::default(), Some(end)))
}

/// What an update brings.
#[derive(Debug, Default)]
struct Piece {
    text: String,
    thinking: String,
    calls: Vec<OllamaCall>,
}

#[derive(Debug)]
struct OllamaWriter {
    name: String,
    kind: Kind,
    blocks: Blocks,
    /// Blocks that were closed and told.
    num_told: usize,
    started: Instant,
    first: Option<Instant>,
    finish: Option<FinishReason>,
}

impl OllamaWriter {
    fn new(name: String, kind: Kind) -> Self {
        let (blocks, started) = (Blocks::default(), Instant::now());
        Self { name, kind, blocks, num_told: 0, started, first: None, finish: None }
    }

    fn take(&mut self, update: Update) -> Piece {
        self.first.get_or_insert_with(Instant::now);
        let mut piece = Piece { text: update.text, ..Piece::default() };
        let mut changes = Vec::new();
        for event in update.events {
            match &event {
                baton_text::AnswerEvent::Content(text) => piece.text.push_str(text),
                baton_text::AnswerEvent::Reasoning(text) => piece.thinking.push_str(text),
                _ => {}
            }
            self.blocks.push(event, &mut changes);
        }
        if update.finish_reason.is_some() {
            self.finish = update.finish_reason;
            self.blocks.close(&mut changes);
        }
        let closed = self.blocks.num_closed();
        for block in &self.blocks.list[self.num_told..closed] {
            if let BlockKind::Call { name, .. } = &block.kind {
                let arguments =
                    serde_json::from_str(&block.text).unwrap_or_else(|_| block.text.clone().into());
                piece.calls.push(OllamaCall { function: OllamaFunction { name: name.clone(), arguments } });
            }
        }
        self.num_told = closed;
        piece
    }

    fn line(&self, piece: Piece, end: Option<OllamaEnd>) -> OllamaAnswer {
        let is_chat = self.kind == Kind::Chat;
        let Piece { text: content, thinking, calls: tool_calls } = piece;
        let message = OllamaMessage {
            role: "assistant",
            content: content.clone(),
            thinking: thinking.clone(),
            tool_calls,
        };
        OllamaAnswer {
            model: self.name.clone(),
            created_at: ids::now_text(),
            message: is_chat.then_some(message),
            response: (!is_chat).then_some(content),
            thinking: (!is_chat && !thinking.is_empty()).then_some(thinking),
            done: end.is_some(),
            end,
        }
    }

    fn end_of(&self, generation: &Generation) -> OllamaEnd {
        let nanos = |duration: std::time::Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let (usage, first) = (generation.usage(), self.first.unwrap_or_else(Instant::now));
        OllamaEnd {
            done_reason: if self.finish == Some(FinishReason::Length) { "length" } else { "stop" },
            total_duration: nanos(self.started.elapsed()),
            load_duration: 0,
            prompt_eval_count: usage.prompt_tokens,
            prompt_eval_duration: nanos(first.duration_since(self.started)),
            eval_count: usage.completion_tokens,
            eval_duration: nanos(first.elapsed()),
        }
    }
}

impl Writer for OllamaWriter {
    fn begin(&mut self, _: &Generation, _: &mut Events) {}

    fn update(&mut self, _: &Generation, update: Update, out: &mut Events) {
        let piece = self.take(update);
        if !(piece.text.is_empty() && piece.thinking.is_empty() && piece.calls.is_empty()) {
            out.push_line(&self.line(piece, None));
        }
    }

    fn end(&mut self, generation: &Generation, out: &mut Events) {
        let end = self.end_of(generation);
        out.push_line(&self.line(Piece::default(), Some(end)));
    }

    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        out.push_line(&OllamaError { error: error.body().error.message });
    }

    fn ends_with_done(&self) -> bool {
        false
    }
}

/// Around all routes: whatever went wrong on these is said in their own words.
pub async fn translate_errors(request: Request, next: Next) -> Response {
    let is_ours = request.uri().path().starts_with(PATH);
    let response = next.run(request).await;
    let Some(error) = response.extensions().get::<ApiError>().filter(|_| is_ours) else { return response };
    let body = OllamaError { error: error.body().error.message };
    super::with_body(response, &body)
}
