//! Health checks: every worker is asked from time to time whether it is well, what it serves and how busy it is.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::header::{AUTHORIZATION, HeaderValue};
use serde::Deserialize;

use crate::config::RouterConfig;
use crate::server::App;
use crate::upstream::Question;
use crate::worker::Worker;

const MAX_BYTES: usize = 1 << 20;
/// Models change rarely.
const MODELS_EVERY: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

#[derive(Deserialize)]
struct Load {
    server_load: usize,
}

/// With the router's own key, where it has one.
pub fn own_question(config: &RouterConfig, target: &str) -> Question {
    let mut question = Question::get(target);
    if let Some(key) = &config.worker_api_key
        && let Ok(value) = HeaderValue::from_str(&format!("Bearer {key}"))
    {
        question.headers.insert(AUTHORIZATION, value);
    }
    question
}

/// Watches a worker for as long as it belongs to the fleet.
pub async fn watch(app: Arc<App>, worker: Arc<Worker>) {
    let mut failures = 0;
    let mut asked_models: Option<Instant> = None;
    while app.fleet.by_id(worker.id).is_some() {
        match check(&app, &worker).await {
            Ok(()) => {
                failures = 0;
                if worker.set_healthy(true) {
                    tracing::info!(worker = worker.url(), "worker is healthy");
                }
                worker_load(&app, &worker).await;
                if asked_models.is_none_or(|at| at.elapsed() > MODELS_EVERY)
                    && learn_models(&app, &worker).await
                {
                    asked_models = Some(Instant::now());
                }
            }
            Err(cause) => {
                failures += 1;
                if failures >= app.config.health_failures.max(1) && worker.set_healthy(false) {
                    tracing::warn!(worker = worker.url(), "worker is unhealthy: it {cause}");
                }
            }
        }
        tokio::time::sleep(app.config.health_interval).await;
    }
}

async fn check(app: &App, worker: &Worker) -> Result<(), String> {
    let question = own_question(&app.config, &app.config.health_path);
    match worker.upstream.fetch(&question, app.config.health_timeout, MAX_BYTES).await {
        Ok((parts, _)) if parts.status.is_success() => Ok(()),
        Ok((parts, _)) => Err(format!("says {}", parts.status)),
        Err(error) => Err(error.to_string()),
    }
}

/// Requests that others gave it. Servers that do not tell are taken to have none.
async fn worker_load(app: &App, worker: &Worker) {
    let question = own_question(&app.config, "/load");
    let answer = worker.upstream.fetch(&question, app.config.health_timeout, MAX_BYTES).await;
    let load = answer.ok().filter(|(parts, _)| parts.status.is_success());
    if let Some(load) = load.and_then(|(_, body)| serde_json::from_slice::<Load>(&body).ok()) {
        worker.set_reported_load(load.server_load);
    }
}

async fn learn_models(app: &App, worker: &Worker) -> bool {
    let question = own_question(&app.config, "/v1/models");
    let answer = worker.upstream.fetch(&question, app.config.health_timeout, MAX_BYTES).await;
    let models = answer.ok().filter(|(parts, _)| parts.status.is_success());
    let models = models.and_then(|(_, body)| serde_json::from_slice::<Models>(&body).ok());
    if let Some(models) = &models {
        worker.set_models(models.data.iter().map(|model| model.id.clone()).collect());
    }
    models.is_some()
}
