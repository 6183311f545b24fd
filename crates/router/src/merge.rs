//! Questions that concern all workers: the list of models, and forgetting cached prefixes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::http::request;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::error::{Reply, json_reply, whole};
use crate::server::App;
use crate::upstream::question;

const LIMIT: Duration = Duration::from_secs(5);
const MAX_BYTES: usize = 4 << 20;

/// `None` for what one worker can answer.
pub async fn handle(app: &Arc<App>, parts: &request::Parts, body: &Bytes) -> Option<Reply> {
    let is_list = parts.method == Method::GET && matches!(parts.uri.path(), "/v1/models" | "/models");
    let is_reset = parts.method == Method::POST && parts.uri.path() == "/reset_prefix_cache";
    if !is_list && !is_reset {
        return None;
    }
    let asked = Arc::new(question(parts, body.clone()));
    let mut answers = JoinSet::new();
    for (index, worker) in app.fleet.all().iter().enumerate().filter(|(_, worker)| worker.is_healthy()) {
        let (upstream, asked) = (Arc::clone(&worker.upstream), Arc::clone(&asked));
        answers.spawn(async move { (index, upstream.fetch(&asked, LIMIT, MAX_BYTES).await) });
    }
    let mut good = Vec::new();
    let mut bad = None;
    for (index, answer) in answers.join_all().await {
        match answer {
            Ok((parts, body)) if parts.status.is_success() => good.push((index, body)),
            Ok((parts, body)) => bad = Some((parts.status, body)),
            Err(error) => tracing::debug!("a worker {error}"),
        }
    }
    good.sort_by_key(|(index, _)| *index);
    match bad {
        // All or nothing: whoever asks to forget wants all of it forgotten. A list may lack what nobody can say.
        Some((status, body)) if is_reset || good.is_empty() => Some(whole(status, "application/json", body)),
        _ if good.is_empty() => Some(crate::error::Refusal::NoWorker("none has answered".to_owned()).reply()),
        _ if is_reset => Some(whole(StatusCode::OK, "application/json", Bytes::new())),
        _ => Some(json_reply(StatusCode::OK, &merge_models(&good))),
    }
}

fn merge_models(answers: &[(usize, Bytes)]) -> Value {
    let mut models: Vec<Value> = Vec::new();
    for (_, body) in answers {
        let list = serde_json::from_slice::<Value>(body).ok();
        let list = list.as_ref().and_then(|list| list.get("data")?.as_array());
        for model in list.into_iter().flatten() {
            if models.iter().all(|known| known["id"] != model["id"]) {
                models.push(model.clone());
            }
        }
    }
    json!({"object": "list", "data": models})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_of_several_workers_is_listed_once() {
        let answer = |text: &'static str| (0, Bytes::from_static(text.as_bytes()));
        let merged = merge_models(&[
            answer(r#"{"data":[{"id":"a","n":1}]}"#),
            answer("nonsense"),
            answer(r#"{"data":[{"id":"a","n":2},{"id":"b"}]}"#),
        ]);
        assert_eq!(merged, json!({"object": "list", "data": [{"id": "a", "n": 1}, {"id": "b"}]}));
    }
}
