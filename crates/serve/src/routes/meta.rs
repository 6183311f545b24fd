//! What the server says of itself: version, metrics, the API for machines and for people.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::console;
use crate::error::ApiError;
use crate::metrics::ServerFigures;
use crate::openapi;
use crate::state::App;
use crate::types::text::Version;

use super::json;

pub async fn version() -> Response {
    json(&Version { version: env!("CARGO_PKG_VERSION") })
}

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let stats = app.model.engine.heartbeat().stats();
    let lost = app.config.num_lost_log_lines.as_ref();
    let models = app.models.as_ref().map(|models| {
        let counts = models.counts();
        (models.loaded().len() + 1, counts.loads, counts.unloads)
    });
    let figures = ServerFigures {
        models,
        num_in_flight: app.num_in_flight(),
        uptime_s: app.started.elapsed().as_secs_f64(),
        num_lost_log_lines: lost.map_or(0, |lost| lost.load(Ordering::Relaxed)),
    };
    let graphs = app.graphs.as_ref().map(|graphs| graphs.serving.service.stats());
    let page = app.model.metrics.render(&stats, graphs.as_ref(), figures);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}

/// As vLLM has it, for benchmarks. One key must not cost others what they have computed.
pub async fn reset_prefix_cache(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    if app.config.api_keys.len() > 1 {
        return Err(ApiError::shared_by_keys("the prefix cache"));
    }
    app.model.engine.reset_prefix_cache()?;
    Ok(().into_response())
}

pub async fn openapi() -> Response {
    json(openapi::document())
}

pub async fn docs() -> Response {
    console::docs(StatusCode::OK)
}
