//! Around every request: a request id, a line in the log, a count, and a fence for panics.

use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::console;
use crate::error::ApiError;
use crate::ids;
use crate::otlp;
use crate::state::App;

const REQUEST_ID: &str = "x-request-id";
const MAX_REQUEST_ID: usize = 128;

/// Logs and counts. For a stream, this is when its answer begins.
pub async fn observe(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let handler = request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str).to_owned();
    let given = request.headers().get(REQUEST_ID).filter(|id| id.len() <= MAX_REQUEST_ID).cloned();
    let request_id =
        given.unwrap_or_else(|| HeaderValue::from_str(&ids::unique()).expect("digits are a header"));
    let mut response = match &app.spans {
        Some(_) => {
            let headers = request.headers().clone();
            otlp::in_context(&headers, next.run(request)).await
        }
        None => next.run(request).await,
    };
    let (status, elapsed) = (response.status(), started.elapsed());
    // Only methods that HTTP names are counted by name: clients choose the word.
    let method_name = match method.as_str() {
        name @ ("GET" | "POST" | "HEAD" | "OPTIONS" | "PUT" | "DELETE" | "PATCH") => name,
        _ => "other",
    };
    app.model.metrics.http_answered(&handler, method_name, status.as_u16(), elapsed);
    let id = request_id.to_str().unwrap_or_default();
    let ms = (elapsed.as_secs_f64() * 1e6).round() / 1e3;
    let routine = ["/health", "/live", "/ready", "/ping", "/metrics", "/stats"].contains(&&*path)
        || console::is_file(&path, true);
    if routine && (status.is_success() || status == StatusCode::NOT_MODIFIED) {
        tracing::debug!(%method, path, status = status.as_u16(), ms, id, "request");
    } else {
        tracing::info!(%method, path, status = status.as_u16(), ms, id, "request");
    }
    response.headers_mut().insert(REQUEST_ID, request_id);
    response
}

/// One request's panic is that request's 500.
pub async fn contain_panics(request: Request, next: Next) -> Response {
    let mut running = pin!(next.run(request));
    std::future::poll_fn(|cx| {
        match std::panic::catch_unwind(AssertUnwindSafe(|| running.as_mut().poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(response)) => Poll::Ready(response),
            Err(_) => Poll::Ready(ApiError::internal(&"a handler panicked").into_response()),
        }
    })
    .await
}
