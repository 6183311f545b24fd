//! The routes: one table, from which the router, `/docs` and `/openapi.json` are made.

pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod messages;
pub mod meta;
pub mod models;
pub mod probes;
pub mod responses;
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
    post "/v1/completions" completions::create, "Continue prompts, whole or as a stream of events";
    post "/v1/responses" responses::create, "Answer input items, whole, as a stream of events or in the background";
    get "/v1/responses/{id}" responses::retrieve, "A stored response";
    delete "/v1/responses/{id}" responses::remove, "Forget a stored response";
    post "/v1/responses/{id}/cancel" responses::cancel, "Stop a response that is made in the background";
    post "/v1/messages" messages::create, "Answer messages in the dialect of Anthropic's API";
    post "/v1/messages/count_tokens" messages::count_tokens, "How many tokens such messages have";
    post "/v1/embeddings" embeddings::create, "The model's hidden state after each input, as a unit vector";
    post "/tokenize" text::tokenize, "The token ids of a prompt or a conversation";
    post "/detokenize" text::detokenize, "The text of token ids";
    get "/health" probes::health, "200 while the engine works, 503 when it is stuck or gone (open to all)";
    get "/live" probes::live, "200 while the process answers (open to all)";
    get "/ready" probes::ready, "200 while requests are taken, 503 when shutting down (open to all)";
    get "/v1/responses/{id}/input_items" responses::input_items, "The input of a stored response";
    get "/get_load" probes::get_load, "The same as /load, as routers of SGLang and vLLM ask for it";
    get "/tokenizer_info" text::tokenizer_info, "What the tokenizer is: size, special tokens, chat template";
    get "/load" probes::load, "How many generation requests are being served";
    get "/version" meta::version, "The server's version";
    get "/metrics" meta::metrics, "Figures for Prometheus, under vLLM's names";
    get "/openapi.json" meta::openapi, "This API for machines";
    get "/docs" meta::docs, "This API for people";
};

/// The whole application.
pub fn router(app: &Arc<App>) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        router = router.route(route.path, (route.handler)());
    }
    if app.config.console {
        router = router.merge(console::router());
    }
    let router = router
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
    let router = router.layer(from_fn(messages::translate_errors));
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

/// A generating request that was let in: its own fields, and those that all such APIs share.
pub(crate) struct Received<T> {
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
    let body = JsonBody::read(app, request).await?;
    let is_large = body.is_large();
    let parse = move || -> Result<(T, SamplingFields, StructuredFields), ApiError> {
        body.parse::<RefusedFields>()?.check()?;
        Ok((body.parse()?, body.parse()?, body.parse()?))
    };
    let (own, fields, structured) =
        if is_large { prepare::blocking(app, move |_| parse()).await? } else { parse()? };
    check_model(app, fields.model.as_deref())?;
    Ok(Received { in_flight, own, fields, structured })
}

/// Refuses a request for a model that is not served here.
pub(crate) fn check_model(app: &App, asked: Option<&str>) -> Result<(), ApiError> {
    match asked {
        // An empty name is no name.
        Some(name) if !name.is_empty() && !app.model.is_named(name) => {
            Err(ApiError::no_such_model(name, app.model.name()))
        }
        _ => Ok(()),
    }
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
