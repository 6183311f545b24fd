//! `/stats`: what is served, and the requests that are running, to their own key only.

mod common;

use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use baton_serve::ServerConfig;
use common::{Client, MAX_MODEL_LEN, MODEL, client, client_with, engine_config};
use http_body_util::BodyExt;
use serde_json::{Value, json};

/// A request that goes on for as long as the answer is held.
async fn hold(client: &Client, max_tokens: usize) -> Response<Body> {
    let body = json!({"prompt": "Hello", "stream": true, "max_tokens": max_tokens, "ignore_eos": true});
    let request = Request::post("/v1/completions").header("content-type", "application/json");
    let response = client.send(request, body.to_string()).await;
    assert_eq!(response.status(), StatusCode::OK);
    response
}

async fn stats(client: &Client) -> Value {
    let answer = client.get("/stats").await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    answer.json()
}

#[tokio::test]
async fn the_server_says_what_it_is() {
    let stats = stats(&client().await).await;
    assert_eq!(stats["model"], MODEL);
    assert_eq!(stats["max_model_len"], MAX_MODEL_LEN);
    assert_eq!(stats["version"], env!("CARGO_PKG_VERSION"));
    assert!(!stats["device"].as_str().unwrap().is_empty());
    let kv = &stats["kv_cache"];
    assert_eq!(kv["block_size"], 4);
    assert_eq!(kv["num_tokens"].as_u64().unwrap(), kv["num_blocks"].as_u64().unwrap() * 4);
    assert_eq!(stats["sampling_defaults"]["temperature"], 1.0);
    assert_eq!(stats["requests"], json!([]));
}

#[tokio::test]
async fn running_requests_are_listed_until_they_end() {
    let client = client().await;
    // The tiny model may be done before it is asked about.
    let mut tries = 0;
    let (held, running) = loop {
        let mut held = hold(&client, 60).await;
        held.body_mut().frame().await.expect("an event").expect("a frame");
        let running = stats(&client).await;
        if running["num_requests"] == 1 {
            break (held, running);
        }
        tries += 1;
        assert!(tries < 200, "a running request was never listed: {running}");
    };
    let request = &running["requests"][0];
    assert_eq!(request["num_prompt_tokens"], 5);
    assert_eq!(request["max_tokens"], 60);
    assert_eq!(request["state"], "decode");
    assert!(request["num_output_tokens"].as_u64().unwrap() >= 1, "{request}");
    assert!(request["time_to_first_token_s"].as_f64().unwrap() <= request["age_s"].as_f64().unwrap());
    drop(held);
    while stats(&client).await["requests"] != json!([]) {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    // One that ends by itself is no longer listed either.
    client.ok("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 2})).await;
    assert_eq!(stats(&client).await["num_requests"], 0);
}

#[tokio::test]
async fn a_key_sees_only_its_own() {
    let api_keys = vec!["first".to_owned(), "second".to_owned()];
    let open = client_with(ServerConfig { api_keys, ..ServerConfig::default() }, &engine_config()).await;
    let (first, second) = (open.with_key("first"), open.with_key("second"));
    let held = hold(&first, 60).await;
    let own = stats(&first).await;
    assert_eq!((&own["num_requests"], &own["num_other_requests"]), (&json!(1), &json!(0)));
    let other = stats(&second).await;
    assert_eq!((&other["requests"], &other["num_other_requests"]), (&json!([]), &json!(1)));
    drop(held);
    assert_eq!(stats(&second).await["num_other_requests"], 0);
}
