//! What Ollama's clients ask of a server: which models it has, and what they are.

use std::fmt::Write;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value};

use crate::AvailableModel;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::ids;
use crate::state::App;
use crate::types::ollama::{OllamaDetails, OllamaInfo, OllamaModel, OllamaModels, OllamaShow};
use crate::types::text::Version;

use super::super::json;
use super::input;

fn details(app: &App) -> OllamaDetails {
    let facts = &app.model.facts;
    OllamaDetails {
        parent_model: String::new(),
        format: facts.format.clone(),
        family: facts.architecture.clone(),
        families: vec![facts.architecture.clone()],
        parameter_size: count(facts.num_parameters),
        quantization_level: facts.dtype.clone(),
    }
}

/// `134.5M`, `8.0B`.
fn count(number: u64) -> String {
    let (value, unit) = if number >= 1_000_000_000 { (1e9, "B") } else { (1e6, "M") };
    format!("{:.1}{unit}", number as f64 / value)
}

fn models(app: &App, running: bool) -> Vec<OllamaModel> {
    let facts = &app.model.facts;
    let model = |name: &String| OllamaModel {
        name: name.clone(),
        model: name.clone(),
        modified_at: ids::time_text(app.model.created),
        size: facts.weight_bytes,
        digest: String::new(),
        details: details(app),
        // A model stays for as long as the server does: some day far away.
        expires_at: running.then(|| "2318-01-01T00:00:00Z".to_owned()),
        size_vram: running.then_some(if facts.on_gpu { facts.weight_bytes } else { 0 }),
        context_length: running.then_some(app.model.max_model_len),
    };
    app.model.names.iter().map(model).collect()
}

/// A model that is not loaded: its files are all that is known.
fn unloaded(app: &App, known: AvailableModel) -> OllamaModel {
    OllamaModel {
        model: known.name.clone(),
        name: known.name,
        modified_at: ids::time_text(app.model.created),
        size: known.bytes,
        digest: String::new(),
        details: OllamaDetails::default(),
        expires_at: None,
        size_vram: None,
        context_length: None,
    }
}

pub async fn tags(State(app): State<Arc<App>>) -> Response {
    let mut all = models(&app, false);
    if let Some(more) = &app.models {
        let loaded = more.loaded();
        for known in more.more.source.list() {
            match loaded.iter().find(|app| app.model.is_named(&known.name)) {
                Some(app) => all.extend(models(app, false)),
                None => all.push(unloaded(&app, known)),
            }
        }
    }
    json(&OllamaModels { models: all })
}

pub async fn ps(State(app): State<Arc<App>>) -> Response {
    let mut running = models(&app, true);
    if let Some(more) = &app.models {
        running.extend(more.loaded().iter().flat_map(|app| models(app, true)));
    }
    json(&OllamaModels { models: running })
}

pub async fn version() -> Response {
    json(&Version { version: env!("CARGO_PKG_VERSION") })
}

pub async fn show(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let asked: OllamaShow = JsonBody::read(&app, request).await?.parse()?;
    let (app, name) = input::model(&app, asked.model.or(asked.name).as_deref()).await?;
    let facts = &app.model.facts;
    let sampling = &app.model.text.default_sampling;
    let mut parameters = String::new();
    for (name, value) in [
        ("temperature", sampling.temperature.to_string()),
        ("top_p", sampling.top_p.to_string()),
        ("top_k", sampling.top_k.to_string()),
        ("repeat_penalty", sampling.repetition_penalty.to_string()),
    ] {
        let _ = writeln!(parameters, "{name:<30} {value}");
    }
    let tokenizer = app.model.text.tokenizer.as_ref();
    let template = tokenizer.and_then(|tokenizer| tokenizer.chat_template()).unwrap_or_default().to_owned();
    let abilities = app.chat_format.abilities;
    let mut capabilities = vec!["completion"];
    capabilities.extend(abilities.tools.then_some("tools"));
    capabilities.extend(app.chat_format.reasoning.is_some().then_some("thinking"));
    let arch = &facts.architecture;
    let model_info: Map<String, Value> = Map::from_iter([
        ("general.architecture".to_owned(), arch.clone().into()),
        ("general.parameter_count".to_owned(), facts.num_parameters.into()),
        (format!("{arch}.context_length"), app.model.max_model_len.into()),
        (format!("{arch}.embedding_length"), app.model.hidden_size.into()),
    ]);
    Ok(json(&OllamaInfo {
        modelfile: format!("FROM {name}\n"),
        parameters,
        template,
        details: details(&app),
        model_info,
        capabilities,
    }))
}

#[cfg(test)]
mod tests {
    #[test]
    fn counts_are_short() {
        assert_eq!(super::count(134_515_008), "134.5M");
        assert_eq!(super::count(8_030_261_248), "8.0B");
    }
}
