//! Probes for whoever starts, restarts and routes to this server. They never wait for the engine.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};

use crate::error::ApiError;
use crate::state::App;
use crate::types::text::{Load, RouterLoad};

use super::json;

pub async fn live() -> Response {
    ().into_response()
}

pub async fn health(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    match app.failure() {
        Some(why) => Err(ApiError::unavailable(why)),
        None => Ok(().into_response()),
    }
}

pub async fn ready(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    if app.is_draining() {
        return Err(ApiError::unavailable("the server is shutting down"));
    }
    health(State(app)).await
}

pub async fn get_load(State(app): State<Arc<App>>) -> Response {
    json(&RouterLoad { load: app.num_in_flight() })
}

pub async fn load(State(app): State<Arc<App>>) -> Response {
    json(&Load { server_load: app.num_in_flight() })
}
