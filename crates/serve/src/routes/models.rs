//! `GET /v1/models`: the models that are loaded, and those that would be if a request named them.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;

use crate::error::ApiError;
use crate::state::App;
use crate::types::text::{DefaultSampling, ModelCard, ModelList};

use super::json;

fn default_sampling(app: &App) -> DefaultSampling {
    let params = &app.model.text.default_sampling;
    DefaultSampling {
        temperature: params.temperature,
        top_p: params.top_p,
        top_k: params.top_k,
        min_p: params.min_p,
        repetition_penalty: params.repetition_penalty,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        source: app.model.text.sampling_source.clone(),
    }
}

fn card(app: &App, id: &str) -> ModelCard {
    ModelCard {
        id: id.to_owned(),
        object: "model",
        created: app.model.created,
        owned_by: "baton",
        root: app.model.name().to_owned(),
        parent: None,
        loaded: true,
        max_model_len: Some(app.model.max_model_len),
        default_sampling_params: Some(default_sampling(app)),
    }
}

/// Of a model that is not loaded, only its name is known.
fn unloaded(app: &App, id: String) -> ModelCard {
    ModelCard {
        root: id.clone(),
        id,
        object: "model",
        created: app.model.created,
        owned_by: "baton",
        parent: None,
        loaded: false,
        max_model_len: None,
        default_sampling_params: None,
    }
}

fn cards(app: &App) -> Vec<ModelCard> {
    let mut cards: Vec<ModelCard> = app.model.names.iter().map(|name| card(app, name)).collect();
    if let Some(models) = &app.models {
        let loaded = models.loaded();
        for known in models.more.source.list() {
            let found = loaded.iter().find(|app| app.model.is_named(&known.name));
            cards.push(match found {
                Some(app) => card(app, &known.name),
                None => unloaded(app, known.name),
            });
        }
    }
    cards
}

pub async fn list(State(app): State<Arc<App>>) -> Response {
    json(&ModelList { object: "list", data: cards(&app) })
}

pub async fn one(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let found = cards(&app).into_iter().find(|card| card.id == id);
    found.map(|card| json(&card)).ok_or_else(|| ApiError::no_such_model(&id, app.model.name()))
}
