//! `GET /v1/models`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;

use crate::error::ApiError;
use crate::state::App;
use crate::types::text::{ModelCard, ModelList};

use super::{check_model, json};

fn card(app: &App, id: &str) -> ModelCard {
    ModelCard {
        id: id.to_owned(),
        object: "model",
        created: app.model.created,
        owned_by: "baton",
        root: app.model.name().to_owned(),
        parent: None,
        max_model_len: app.model.max_model_len,
    }
}

pub async fn list(State(app): State<Arc<App>>) -> Response {
    let data = app.model.names.iter().map(|name| card(&app, name)).collect();
    json(&ModelList { object: "list", data })
}

pub async fn one(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    check_model(&app, Some(&id))?;
    Ok(json(&card(&app, &id)))
}
