//! A prompt's tokens, from a worker: its tokenizer and its chat template are the ones that count. Only `longest_prefix` asks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::Method;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::body::{BodySummary, Kind};
use crate::server::App;
use crate::upstream::Question;

/// A prompt this short is computed sooner than asked about.
const MIN_TEXT_BYTES: usize = 128;
const LIMIT: Duration = Duration::from_millis(250);
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// Fields of a request that decide what its prompt is.
const FIELDS: [&str; 9] = [
    "model",
    "prompt",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
];

#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<u32>,
}

/// The tokens of a request's prompt; `None` where they cannot be had quickly, and the prompt is placed by its hash.
pub async fn tokens(app: &Arc<App>, question: &Question, kind: Kind, body: &BodySummary) -> Option<Vec<u32>> {
    if !matches!(kind, Kind::Chat | Kind::Completion) || body.text_bytes < MIN_TEXT_BYTES {
        return None;
    }
    let asked = tokenize_question(question)?;
    let now = Instant::now();
    let workers = app.fleet.all();
    let model = body.model.as_deref().unwrap_or_default();
    let idle = workers
        .iter()
        .filter(|worker| worker.is_available(now, usize::MAX) && (model.is_empty() || worker.serves(model)))
        .min_by_key(|worker| worker.load())?;
    let answer = idle.upstream.fetch(&asked, LIMIT, MAX_ANSWER_BYTES).await;
    let tokens = answer
        .ok()
        .filter(|(parts, _)| parts.status.is_success())
        .and_then(|(_, body)| serde_json::from_slice::<Tokens>(&body).ok());
    if tokens.is_none() {
        app.metrics.tokenize_failures.fetch_add(1, Ordering::Relaxed);
    }
    tokens.map(|tokens| tokens.tokens)
}

fn tokenize_question(question: &Question) -> Option<Question> {
    let body: Map<String, Value> = serde_json::from_slice(&question.body).ok()?;
    let kept = body.into_iter().filter(|(name, _)| FIELDS.contains(&name.as_str())).collect();
    Some(Question {
        method: Method::POST,
        target: "/tokenize".to_owned(),
        headers: question.headers.clone(),
        body: Bytes::from(Value::Object(kept).to_string()),
    })
}
