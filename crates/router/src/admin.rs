//! The router's own pages: probes, metrics, the workers as JSON, and a page that shows who holds what.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_SECURITY_POLICY, HeaderValue};
use hyper::{Method, Request, StatusCode};
use serde_json::{Value, json};

use crate::error::{Refusal, Reply, json_reply, whole};
use crate::index::PrefixIndex;
use crate::server::App;
use crate::worker::Worker;

const PAGE: &str = include_str!("page.html");
/// Prompts of a worker that the page shows.
const NUM_LARGEST: usize = 12;

/// `None` for what is passed on to workers.
pub fn handle(app: &Arc<App>, request: &Request<Incoming>) -> Option<Reply> {
    let path = request.uri().path();
    let is_get = matches!(*request.method(), Method::GET | Method::HEAD);
    match path {
        "/live" if is_get => Some(json_reply(StatusCode::OK, &json!({"status": "ok"}))),
        "/health" | "/ready" if is_get => Some(health(app)),
        // The page itself carries no data: it asks for the key.
        "/" | "/router" if is_get => Some(page()),
        "/metrics" | "/workers" | "/workers/drain" | "/workers/undrain" if !may(app, request) => {
            Some(Refusal::Unauthorized.reply())
        }
        "/metrics" if is_get => {
            let text = app.metrics.render(&app.fleet, &app.index());
            Some(whole(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", text))
        }
        "/workers" if is_get => Some(json_reply(StatusCode::OK, &describe(app))),
        "/workers/drain" if request.method() == Method::POST => Some(drain(app, request, true)),
        "/workers/undrain" if request.method() == Method::POST => Some(drain(app, request, false)),
        _ => None,
    }
}

/// With a key, only whoever has it. Compared by hash, so that its letters cannot be timed.
fn may(app: &App, request: &Request<Incoming>) -> bool {
    let Some(key) = &app.config.admin_api_key else { return true };
    let given = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.split_once(' ')).map(|(_, key)| key.trim()).unwrap_or_default();
    let secret = crate::hashing::secret();
    crate::hashing::of_bytes(secret, given.as_bytes()) == crate::hashing::of_bytes(secret, key.as_bytes())
        && given.len() == key.len()
}

fn health(app: &App) -> Reply {
    if app.is_draining() {
        return Refusal::Draining.reply();
    }
    let workers = app.fleet.all();
    let healthy = workers.iter().filter(|worker| worker.is_healthy() && !worker.is_draining()).count();
    if healthy == 0 {
        return Refusal::NoWorker(format!("0 of {} are healthy", workers.len())).reply();
    }
    json_reply(StatusCode::OK, &json!({"status": "ok", "healthy_workers": healthy, "workers": workers.len()}))
}

fn page() -> Reply {
    let mut reply = whole(StatusCode::OK, "text/html; charset=utf-8", PAGE);
    let policy =
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'";
    reply.headers_mut().insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    reply
}

fn drain(app: &App, request: &Request<Incoming>, draining: bool) -> Reply {
    let url = request.uri().query().and_then(|query| query.strip_prefix("url=")).unwrap_or_default();
    let url = url.replace("%3A", ":").replace("%2F", "/").replace("%3a", ":").replace("%2f", "/");
    match app.fleet.find(&url) {
        Some(worker) => {
            worker.set_draining(draining);
            tracing::info!(worker = worker.url(), draining, "worker drain changed");
            json_reply(StatusCode::OK, &describe_worker(&worker, &app.index()))
        }
        None => Refusal::Unknown(format!("there is no worker {url:?}: write ?url=http://host:port")).reply(),
    }
}

fn describe(app: &App) -> Value {
    let index = app.index();
    let workers = app.fleet.all();
    let mut prompts: Vec<u64> = Vec::new();
    for worker in workers.iter() {
        for (first, _) in index.held(worker.id, NUM_LARGEST).largest {
            if !prompts.contains(&first) {
                prompts.push(first);
            }
        }
    }
    let held =
        |first: u64| -> Vec<usize> { workers.iter().map(|worker| index.held_of(worker.id, first)).collect() };
    let mut rows: Vec<(u64, Vec<usize>)> = prompts.into_iter().map(|first| (first, held(first))).collect();
    rows.sort_by_key(|(first, blocks)| (std::cmp::Reverse(blocks.iter().sum::<usize>()), *first));
    rows.truncate(NUM_LARGEST);
    let prefixes: Vec<Value> = rows
        .iter()
        .map(|(first, blocks)| json!({"prefix": format!("{first:016x}"), "blocks": blocks}))
        .collect();
    let workers: Vec<Value> = workers.iter().map(|worker| describe_worker(worker, &index)).collect();
    json!({
        "policy": app.chooser.policy().name(),
        "workers": workers,
        // Prompts that begin alike, and how many cached blocks each worker has of them, in the order of the workers.
        "prefixes": prefixes,
        "indexed_blocks": index.num_blocks(),
    })
}

fn describe_worker(worker: &Worker, index: &PrefixIndex) -> Value {
    let counts = &worker.counts;
    let held = index.held(worker.id, 0);
    let load = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
    json!({
        "url": worker.url(),
        "role": worker.role().name(),
        "models": worker.models(),
        "healthy": worker.is_healthy(),
        "draining": worker.is_draining(),
        "breaker": if worker.breaker().is_closed() { "closed" } else { "open" },
        "requests": worker.num_requests(),
        "load": worker.load(),
        "requests_total": load(&counts.requests),
        "failures_total": load(&counts.failures),
        "prompt_tokens_total": load(&counts.prompt_tokens),
        "matched_tokens_total": load(&counts.matched_tokens),
        "kv_events": counts.follows_events.load(Ordering::Relaxed),
        "kv_events_total": load(&counts.kv_events),
        "cached_blocks": held.num_blocks,
        "cached_tokens": held.num_tokens,
    })
}
