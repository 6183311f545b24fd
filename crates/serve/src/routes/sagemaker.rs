//! `POST /invocations` and `/ping`, which SageMaker asks for: the one address of a model there, as vLLM has it. The fields
//! of a request say which route it is for.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::auth::Tenant;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::state::App;

use super::{chat, completions, embeddings, parsed, rerank};

/// The fields that only one kind of request has.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Telling {
    messages: Option<IgnoredAny>,
    prompt: Option<IgnoredAny>,
    input: Option<IgnoredAny>,
    documents: Option<IgnoredAny>,
    text_1: Option<IgnoredAny>,
}

pub async fn invocations(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let (mut parts, body) = request.into_parts();
    let asked = Request::from_parts(parts.clone(), body);
    let body = JsonBody::read(&app, asked).await?;
    let telling: Telling = parsed(&app, body.clone(), JsonBody::parse).await?;
    // It is read and paid for: the route that it is for takes it from here.
    parts.extensions.insert(body);
    let request = Request::from_parts(parts, Body::empty());
    let app = State(app);
    if telling.messages.is_some() {
        chat::create(app, Extension(tenant), request).await
    } else if telling.prompt.is_some() {
        completions::create(app, Extension(tenant), request).await
    } else if telling.input.is_some() {
        embeddings::create(app, Extension(tenant), request).await
    } else if telling.documents.is_some() {
        rerank::rerank(app, Extension(tenant), request).await
    } else if telling.text_1.is_some() {
        rerank::score(app, Extension(tenant), request).await
    } else {
        let message =
            "give messages, prompt, input, documents or text_1: the fields of the route that is meant";
        Err(ApiError::invalid(message))
    }
}
