//! The routes: one table, from which the router, `/docs` and `/openapi.json` are made.

pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod graphs;
pub mod kv_events;
pub mod llamacpp;
pub mod messages;
pub mod meta;
pub mod models;
pub mod ollama;
pub mod probes;
pub mod rerank;
pub mod responses;
pub mod sagemaker;
pub mod stats;
pub mod text;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::body::JsonBody;
use crate::error::ApiError;
use crate::prepare;
use crate::state::{App, InFlight};
use crate::types::common::SamplingFields;
use crate::types::refused::RefusedFields;
use crate::types::structured::StructuredFields;
use crate::{access, auth, console, cors, origin};

/// A route, and what a person or a generator of clients wants to know of it.
pub struct Route {
    pub path: &'static str,
    pub method: &'static str,
    pub summary: &'static str,
    handler: fn() -> MethodRouter<Arc<App>>,
}

impl std::fmt::Debug for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.method, self.path)
    }
}

macro_rules! routes {
    ($($method:ident $path:literal $handler:path, $summary:literal;)*) => {
        &[$(Route {
            path: $path,
            method: stringify!($method),
            summary: $summary,
            handler: || $method($handler),
        }),*]
    };
}

pub const ROUTES: &[Route] = routes! {
    get "/v1/models" models::list, "The served models";
    get "/v1/models/{id}" models::one, "One served model";
    post "/v1/chat/completions" chat::create, "Answer a conversation, whole or as a stream of events";
    post "/v1/chat/completions/batch" chat::create_batch, "Answer many conversations at once, one choice each";
    post "/v1/chat/completions/input_tokens" llamacpp::input_tokens, "How many tokens a conversation has, as llama.cpp counts them";
    post "/v1/completions" completions::create, "Continue prompts, whole or as a stream of events";
    post "/v1/responses" responses::create, "Answer input items: whole, as a stream of events, or in the background";
    get "/v1/responses/{id}" responses::retrieve, "A stored response";
    delete "/v1/responses/{id}" responses::remove, "Forget a stored response";
    post "/v1/responses/{id}/cancel" responses::cancel, "Stop a response that is made in the background";
    post "/v1/messages" messages::create, "Answer messages in the dialect of Anthropic's API";
    post "/v1/messages/count_tokens" messages::count_tokens, "How many tokens such messages have";
    post "/v1/embeddings" embeddings::create, "The model's hidden state after each input, as a unit vector";
    post "/v1/graphs" graphs::create, "Upload a graph for the graph model: edges and a row of features for each node";
    get "/v1/graphs" graphs::list, "The graphs of this key, and the graph model";
    get "/v1/graphs/{id}" graphs::one, "One graph";
    delete "/v1/graphs/{id}" graphs::remove, "Forget a graph, and end the requests for it";
    post "/v1/graphs/{id}/embeddings" graphs::embed, "Embeddings of a graph's nodes, with full or sampled neighbourhoods";
    post "/v1/rerank" rerank::rerank, "Documents in the order of their relevance to a query";
    post "/v2/rerank" rerank::rerank, "The same, where Cohere's clients look for it";
    post "/v1/score" rerank::score, "How well texts go together, pair by pair";
    post "/tokenize" text::tokenize, "The token ids of a prompt or a conversation";
    post "/detokenize" text::detokenize, "The text of token ids";
    post "/api/chat" ollama::chat, "Answer a conversation in the dialect of Ollama's API, as lines of JSON";
    post "/api/generate" ollama::generate, "Answer or continue a prompt in the dialect of Ollama's API";
    get "/api/tags" ollama::tags, "The served models, as Ollama lists them";
    get "/api/ps" ollama::ps, "The loaded models with their contexts, as Ollama lists them";
    post "/api/show" ollama::show, "Details of a model: size, template, sampling defaults, capabilities";
    get "/api/version" ollama::version, "The server's version";
    post "/completion" llamacpp::completion, "Continue a prompt in the dialect of llama.cpp's server";
    post "/infill" llamacpp::infill, "Fill in the text between two others, with models made for it";
    post "/apply-template" llamacpp::apply_template, "The prompt that the chat template makes of messages";
    get "/props" llamacpp::props, "Sampling defaults, context, slots and chat template, as llama.cpp tells them";
    get "/slots" llamacpp::slots, "Slots for sequences, and how many are busy";
    post "/invocations" sagemaker::invocations, "Any of these requests, recognised by its fields, as SageMaker sends them";
    get "/ping" probes::health, "The same as /health, as SageMaker asks for it (open to all)";
    get "/health" probes::health, "200 while the engine works, 503 when it is stuck or gone (open to all)";
    get "/live" probes::live, "200 while the process answers (open to all)";
    get "/ready" probes::ready, "200 while requests are taken, 503 when shutting down (open to all)";
    get "/v1/responses/{id}/input_items" responses::input_items, "The input of a stored response";
    get "/get_load" probes::get_load, "The same as /load, as routers of SGLang and vLLM ask for it";
    get "/tokenizer_info" text::tokenizer_info, "The tokenizer: size, special tokens, chat template";
    get "/load" probes::load, "How many generation requests are being served";
    post "/reset_prefix_cache" meta::reset_prefix_cache, "Forget every cached prefix (with at most one API key)";
    get "/version" meta::version, "The server's version";
    get "/kv_events" kv_events::stream, "Changes of the KV cache as a stream of events (where enabled, with at most one API key)";
    get "/stats" stats::stats, "What is served, on what, and the requests of this key that are running";
    get "/metrics" meta::metrics, "Figures for Prometheus, under vLLM's names";
    get "/openapi.json" meta::openapi, "This API for machines";
    get "/docs" meta::docs, "This API for people";
};

/// Routes that clients of llama.cpp and vLLM also ask for without `/v1`.
const UNPREFIXED: [&str; 7] = [
    "/models",
    "/chat/completions",
    "/chat/completions/input_tokens",
    "/embeddings",
    "/responses",
    "/rerank",
    "/score",
];

/// The whole application.
pub fn router(app: &Arc<App>) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        router = router.route(route.path, (route.handler)());
        if let Some(short) = route.path.strip_prefix("/v1").filter(|path| UNPREFIXED.contains(path)) {
            router = router.route(short, (route.handler)());
        }
    }
    // Without the version, completions have llama.cpp's own shape.
    router = router.route("/completions", post(llamacpp::completion));
    let router = router
        .merge(console::router(app.config.console))
        .method_not_allowed_fallback(|request: Request| async move {
            ApiError::wrong_method(request.method().as_str(), request.uri().path()).into_response()
        })
        .fallback(|request: Request| async move {
            ApiError::no_such_route(request.method().as_str(), request.uri().path()).into_response()
        })
        .with_state(Arc::clone(app))
        .layer(from_fn_with_state(Arc::clone(app), auth::authenticate));
    // Outside of authentication: a browser asks for permission without a key.
    let router = match cors::layer(&app.config.allowed_origins) {
        Some(layer) => router.layer(layer),
        None => router,
    };
    let router = router.layer(from_fn_with_state(Arc::clone(app), origin::check));
    let router = router.layer(from_fn(messages::translate_errors)).layer(from_fn(ollama::translate_errors));
    let router = match app.config.root_path.as_str() {
        "" => router,
        root_path => Router::new().nest(root_path, router.clone()).merge(router),
    };
    router.layer(from_fn_with_state(Arc::clone(app), access::observe)).layer(from_fn(access::contain_panics))
}

/// Only what is open to all, for connections that there is no other place for.
pub fn probe_router(app: &Arc<App>) -> Router {
    let open = ROUTES.iter().filter(|route| auth::OPEN_ROUTES.contains(&route.path));
    let router = open.fold(Router::new(), |router, route| router.route(route.path, (route.handler)()));
    router
        .fallback(|| async { ApiError::too_many_connections().into_response() })
        .with_state(Arc::clone(app))
        .layer(from_fn(close_after))
}

/// The place is wanted by others.
async fn close_after(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// A JSON answer.
pub(crate) fn json(value: &impl Serialize) -> Response {
    let body = serde_json::to_vec(value).expect("our types serialise");
    let mut response = Body::from(body).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The same answer with another body.
pub(crate) fn with_body(response: Response, body: &impl Serialize) -> Response {
    let (parts, _) = response.into_parts();
    let (mut translated, body) = json(body).into_parts();
    translated.status = parts.status;
    for (name, value) in &parts.headers {
        if name != header::CONTENT_LENGTH {
            translated.headers.insert(name, value.clone());
        }
    }
    Response::from_parts(translated, body)
}

/// A generating request that was let in: its own fields, and those that all such APIs share.
pub(crate) struct Received<T> {
    /// That of the model that was asked for.
    pub app: Arc<App>,
    pub in_flight: InFlight,
    pub own: T,
    pub fields: SamplingFields,
    pub structured: StructuredFields,
}

/// Lets a generating request in and reads it.
pub(crate) async fn receive<T: DeserializeOwned + Send + 'static>(
    app: &Arc<App>,
    request: Request,
) -> Result<Received<T>, ApiError> {
    let in_flight = app.admit()?;
    let body = JsonBody::read_for_engine(app, request).await?;
    let parse = |body: &JsonBody| -> Result<(T, SamplingFields, StructuredFields), ApiError> {
        body.parse::<RefusedFields>()?.check()?;
        Ok((body.parse()?, body.parse()?, body.parse()?))
    };
    let (own, fields, structured) = parsed(app, body, parse).await?;
    let app = app.for_model(fields.model.as_deref()).await?;
    Ok(Received { app, in_flight, own, fields, structured })
}

/// Reads a body, a large one beside the async threads.
pub(crate) async fn parsed<T: Send + 'static>(
    app: &Arc<App>,
    body: JsonBody,
    parse: impl FnOnce(&JsonBody) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if body.is_large() { prepare::blocking(app, move |_| parse(&body)).await } else { parse(&body) }
}

/// Refuses fields that ask for what is not built.
pub(crate) fn refuse(fields: &[(&str, &Option<serde_json::Value>)]) -> Result<(), ApiError> {
    use serde_json::Value;
    let asks = |value: &Value| match value {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty() && text != "none" && text != "auto",
        Value::Array(list) => !list.is_empty(),
        _ => true,
    };
    match fields.iter().find(|(_, value)| value.as_ref().is_some_and(asks)) {
        Some((name, _)) => Err(ApiError::unsupported(name)),
        None => Ok(()),
    }
}
