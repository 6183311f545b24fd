//! Prefill and decode on different workers, as vLLM's routers have it: a prefill worker computes the prompt with one token of
//! output and says in `kv_transfer_params` where its KV can be had; a decode worker is given these and goes on.
//!
//! Whatever goes wrong with the first leg, the decode worker gets the request as it came and computes the prompt itself.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::Bytes;
use hyper::header::HeaderValue;
use serde_json::{Map, Value, json};

use crate::config::Role;
use crate::error::Refusal;
use crate::proxy::{self, RoutedRequest};
use crate::server::{App, new_id};
use crate::upstream::{Answer, Question};
use crate::worker::{Taken, Worker};

/// Of a prefill worker's answer: one token and where the KV is.
const MAX_PREFILL_ANSWER: usize = 1 << 20;
const PARAMS: &str = "kv_transfer_params";

pub async fn send(app: &Arc<App>, mut routed: RoutedRequest) -> Result<(Answer, Taken), Refusal> {
    let decodes = |role| role == Role::Decode;
    let has_decode = app.fleet.all().iter().any(|worker| decodes(worker.role()));
    let may_decode = move |role| if has_decode { decodes(role) } else { role == Role::Both };
    // The decode worker is named in the id that both legs carry, so it is chosen first.
    let Some((decode, _)) = proxy::pick(app, &routed, &may_decode, &[]) else {
        return Err(Refusal::NoWorker("there is no decode worker".to_owned()));
    };
    match serde_json::from_slice::<Map<String, Value>>(&routed.question.body) {
        // A client that brings its own parameters knows what it does.
        Ok(body) if !body.contains_key(PARAMS) => {
            if let Some((params, id)) = prefill(app, &routed, &body, &decode).await {
                routed.question = decode_question(&routed.question, body, params, &id);
            } else {
                app.metrics.local_prefills.fetch_add(1, Ordering::Relaxed);
            }
        }
        // The worker says what is wrong with it.
        _ => {}
    }
    routed.owner = Some(decode.id);
    proxy::send(app, &routed, may_decode).await
}

/// The first leg: what the decode worker must know, and the id of both legs. `None` where there is no such leg.
async fn prefill(
    app: &Arc<App>,
    routed: &RoutedRequest,
    body: &Map<String, Value>,
    decode: &Arc<Worker>,
) -> Option<(Value, HeaderValue)> {
    let mut tried = Vec::new();
    for _ in 0..app.config.max_attempts.max(1) {
        let (worker, choice) = proxy::pick(app, routed, &|role| role == Role::Prefill, &tried)?;
        tried.push(worker.id);
        if !worker.breaker().allow(Instant::now()) {
            continue;
        }
        app.metrics.chose(choice);
        let (prefill, decode) = (worker.upstream.authority(), decode.upstream.authority());
        let id = format!("___prefill_addr_{prefill}___decode_addr_{decode}_{}", new_id());
        let id = HeaderValue::from_str(&id).ok()?;
        let question = prefill_question(&routed.question, body, &id);
        let _taken = worker.take(routed.belongs.num_prompt_tokens, routed.matched(worker.id));
        let limit = app.config.request_timeout;
        match worker.upstream.fetch(&question, limit, MAX_PREFILL_ANSWER).await {
            Ok((parts, answer)) if parts.status.is_success() => {
                worker.succeeded();
                let answer: Value = serde_json::from_slice(&answer).ok()?;
                return answer
                    .get(PARAMS)
                    .filter(|params| params.is_object())
                    .cloned()
                    .map(|params| (params, id));
            }
            // What one refuses for its content another refuses too; the decode worker says so to the client.
            Ok((parts, _)) if parts.status.is_client_error() && parts.status.as_u16() != 429 => {
                worker.succeeded();
                return None;
            }
            Ok(_) => worker.succeeded(),
            Err(error) => {
                worker.failed();
                tracing::warn!(worker = worker.url(), "prefill failed: the worker {error}");
            }
        }
    }
    None
}

fn prefill_question(question: &Question, body: &Map<String, Value>, id: &HeaderValue) -> Question {
    let mut body = body.clone();
    body.insert("max_tokens".to_owned(), json!(1));
    if body.contains_key("max_completion_tokens") {
        body.insert("max_completion_tokens".to_owned(), json!(1));
    }
    body.remove("min_tokens");
    body.remove("stream_options");
    body.insert("stream".to_owned(), json!(false));
    let params = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                        "remote_block_ids": null, "remote_host": null, "remote_port": null});
    body.insert(PARAMS.to_owned(), params);
    with_body(question, body, id)
}

fn decode_question(
    question: &Question,
    mut body: Map<String, Value>,
    params: Value,
    id: &HeaderValue,
) -> Question {
    body.insert(PARAMS.to_owned(), params);
    with_body(question, body, id)
}

fn with_body(question: &Question, body: Map<String, Value>, id: &HeaderValue) -> Question {
    let mut question = question.clone();
    question.headers.insert("x-request-id", id.clone());
    question.body = Bytes::from(Value::Object(body).to_string());
    question
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legs_carry_what_vllm_expects() {
        let body = json!({"model": "m", "prompt": "p", "stream": true, "stream_options": {}, "max_tokens": 50,
                          "max_completion_tokens": 60, "min_tokens": 5});
        let body = body.as_object().unwrap();
        let id = HeaderValue::from_static("id");
        let question = Question::get("/v1/completions");
        let prefill = prefill_question(&question, body, &id);
        let sent: Value = serde_json::from_slice(&prefill.body).unwrap();
        assert_eq!((&sent["max_tokens"], &sent["max_completion_tokens"]), (&json!(1), &json!(1)));
        assert_eq!((&sent["stream"], sent.get("stream_options")), (&json!(false), None));
        assert_eq!(sent[PARAMS]["do_remote_decode"], true);
        assert_eq!(prefill.headers["x-request-id"], "id");
        let decode = decode_question(&question, body.clone(), json!({"remote_port": 7}), &id);
        let sent: Value = serde_json::from_slice(&decode.body).unwrap();
        assert_eq!((&sent["max_tokens"], &sent["stream"]), (&json!(50), &json!(true)));
        assert_eq!(sent[PARAMS], json!({"remote_port": 7}));
    }
}
