//! `GET /stats`: what the console's live view shows besides the figures of `/metrics`.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;

use crate::activity::Active;
use crate::auth::Tenant;
use crate::state::App;
use crate::types::stats::{KvCache, RequestState, RunningRequest, SamplingDefaults, Stats};

use super::json;

/// A page that is read every second must not grow with the load.
const MAX_LISTED: usize = 100;

pub async fn stats(State(app): State<Arc<App>>, Extension(tenant): Extension<Tenant>) -> Response {
    let now = Instant::now();
    let all = app.activity.all();
    let num_all = all.len();
    let own: Vec<_> = all.into_iter().filter(|active| active.tenant == tenant.id()).collect();
    let memory = &app.model.memory;
    let sampling = &app.model.text.default_sampling;
    json(&Stats {
        version: env!("CARGO_PKG_VERSION"),
        uptime_s: app.started.elapsed().as_secs_f64(),
        model: app.model.name().to_owned(),
        max_model_len: app.model.max_model_len,
        sampling_defaults: SamplingDefaults {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
        },
        device: memory.device.clone(),
        max_num_seqs: memory.max_num_seqs,
        kv_cache: KvCache {
            block_size: memory.block_size,
            num_blocks: memory.num_device_blocks,
            num_tokens: memory.kv_tokens(),
            bytes: memory.kv_bytes,
        },
        num_requests: own.len(),
        num_other_requests: num_all - own.len(),
        requests: own.iter().take(MAX_LISTED).map(|active| row(active, now)).collect(),
    })
}

fn row(active: &Active, now: Instant) -> RunningRequest {
    let times = active.times();
    let seconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
    RunningRequest {
        id: active.id.to_string(),
        state: match (times.started, times.first_token) {
            (_, Some(_)) => RequestState::Decode,
            (Some(_), None) => RequestState::Prefill,
            (None, None) => RequestState::Waiting,
        },
        num_prompt_tokens: active.num_prompt_tokens,
        num_cached_tokens: active.num_cached_tokens(),
        num_output_tokens: active.num_output_tokens(),
        max_tokens: active.max_tokens,
        n: active.n,
        age_s: seconds(times.submitted, now),
        time_to_first_token_s: times.first_token.map(|first| seconds(times.submitted, first)),
    }
}
