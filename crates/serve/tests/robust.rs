//! What one client must not be able to do to another: pages of other origins, bodies that take all memory.

mod common;

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::{Request, StatusCode};
use baton_serve::ServerConfig;
use common::{client, client_with, engine_config};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn a_name_that_is_not_this_machines_is_refused_without_keys() {
    let version = |host: &str| Request::get("/version").header("host", host);
    let client = client().await;
    for host in ["localhost:8000", "127.0.0.1", "[::1]:8000"] {
        assert_eq!(client.finish(version(host), Body::empty()).await.status, 200, "{host}");
    }
    // A page whose name was pointed at 127.0.0.1.
    let rebound = client.finish(version("evil.example:8000"), Body::empty()).await;
    assert_eq!(rebound.status, StatusCode::FORBIDDEN);
    assert!(rebound.text.contains("--allowed-hosts"), "{}", rebound.text);
    let probe = Request::get("/health").header("host", "10.0.0.7:8000");
    assert_eq!(client.finish(probe, Body::empty()).await.status, 200);
    let allowed_hosts = vec!["box.example".to_owned()];
    let named =
        client_with(ServerConfig { allowed_hosts, ..ServerConfig::default() }, &engine_config()).await;
    assert_eq!(named.finish(version("box.example"), Body::empty()).await.status, 200);
    let api_keys = vec!["key".to_owned()];
    let keyed = client_with(ServerConfig { api_keys, ..ServerConfig::default() }, &engine_config()).await;
    assert_eq!(keyed.with_key("key").finish(version("any.example"), Body::empty()).await.status, 200);
}

#[tokio::test]
async fn a_page_of_another_origin_cannot_ask() {
    let body = json!({"prompt": "Hi", "max_tokens": 1}).to_string();
    let post = |origin: &str| {
        let post = Request::post(COMPLETIONS).header("host", "127.0.0.1:8000").header("origin", origin);
        post.header("content-type", "application/json")
    };
    let client = client().await;
    assert_eq!(client.finish(post("http://127.0.0.1:8000"), body.clone()).await.status, 200);
    for origin in ["http://evil.example", "null", "http://127.0.0.1:3000"] {
        let refused = client.finish(post(origin), body.clone()).await;
        assert_eq!(refused.status, StatusCode::FORBIDDEN, "{origin}");
        assert_eq!(refused.json()["error"]["code"], "origin_not_allowed");
    }
    let allowed_origins = vec!["http://app.example".to_owned()];
    let open =
        client_with(ServerConfig { allowed_origins, ..ServerConfig::default() }, &engine_config()).await;
    assert_eq!(open.finish(post("http://app.example"), body.clone()).await.status, 200);
    // What a page can send without asking first is no JSON: a blob has no type at all.
    let blob = Request::post(COMPLETIONS).header("host", "127.0.0.1:8000");
    assert_eq!(client.finish(blob, body).await.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
}

#[tokio::test]
async fn the_list_of_routes_may_run_nothing_but_its_own_script() {
    let docs = client().await.get("/docs").await;
    let policy = docs.headers["content-security-policy"].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
}

#[tokio::test]
async fn a_body_of_many_small_parts_is_refused_before_it_is_parsed() {
    let client = client().await;
    let message = json!({"role": "user", "content": "a"});
    let body = json!({"messages": vec![message; 60_000], "max_tokens": 1});
    let refused = client.post(CHAT, &body).await;
    assert_eq!(refused.status, StatusCode::PAYLOAD_TOO_LARGE, "{}", refused.text);
    assert!(refused.text.contains("--max-body-items"), "{}", refused.text);
}

#[tokio::test]
async fn bodies_that_are_declared_and_not_sent_cost_nothing() {
    let config = ServerConfig {
        api_keys: vec!["one".to_owned(), "two".to_owned()],
        max_bodies_bytes: 1 << 20,
        ..ServerConfig::default()
    };
    let client = client_with(config, &engine_config()).await;
    let (one, two) = (client.with_key("one"), client.with_key("two"));
    // One key declares as many bodies as would take everything, and sends a byte of each.
    let slow: Vec<_> = (0..64)
        .map(|_| {
            let body = Body::new(SlowBody { is_first: true });
            let post = Request::post(COMPLETIONS).header("content-type", "application/json");
            let post = post.header("content-length", (512 << 10).to_string());
            let one = one.clone();
            tokio::spawn(async move { one.finish(post, body).await.status })
        })
        .collect();
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    let body = json!({"prompt": "Hi", "max_tokens": 1});
    assert_eq!(two.post(COMPLETIONS, &body).await.status, 200);
    assert_eq!(one.post(COMPLETIONS, &body).await.status, 200);
    slow.iter().for_each(tokio::task::JoinHandle::abort);
    // Even bodies that do arrive leave half to others.
    let large = format!("{{\"prompt\": \"{}\"}}", "x".repeat(200 << 10));
    let post = || Request::post(COMPLETIONS).header("content-type", "application/json");
    let refused = one.finish(post(), large).await;
    assert_eq!(refused.status, StatusCode::PAYLOAD_TOO_LARGE, "{}", refused.text);
    assert!(refused.text.contains("--max-bodies-size"), "{}", refused.text);
}

/// A body of which one byte is sent, and no more until it is dropped.
struct SlowBody {
    is_first: bool,
}

impl http_body::Body for SlowBody {
    type Data = bytes::Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<bytes::Bytes>, Self::Error>>> {
        if std::mem::take(&mut self.is_first) {
            return Poll::Ready(Some(Ok(http_body::Frame::data(bytes::Bytes::from_static(b"{")))));
        }
        Poll::Pending
    }
}
