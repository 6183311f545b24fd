//! What operators meet: errors, keys, limits, metrics, descriptions of the API.

mod common;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use baton_engine::EngineConfig;
use baton_serve::{PublicContent, PublicPrefix, Server, ServerConfig};
use common::{MAX_MODEL_LEN, client, client_with, engine_config, served_model};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn every_wrong_field_is_named() {
    let client = client().await;
    let message = json!([{"role": "user", "content": "Hi"}]);
    let chats = [
        (json!({}), "messages", "missing"),
        (json!({"messages": []}), "messages", "at least one"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content", "missing"),
        (json!({"messages": [{"content": "Hi"}]}), "messages[0].role", "must be"),
        (json!({"messages": "Hi"}), "messages", "messages"),
        (json!({"messages": message, "temperature": "hot"}), "temperature", "temperature"),
        (json!({"messages": message, "temperature": -1}), "temperature", ">= 0"),
        (json!({"messages": message, "top_p": 2}), "top_p", "(0, 1]"),
        (json!({"messages": message, "top_k": -2}), "top_k", "-1"),
        (json!({"messages": message, "n": 0}), "n", "1..="),
        (json!({"messages": message, "max_tokens": 0}), "max_tokens", ">= 1"),
        (json!({"messages": message, "max_tokens": 1000}), "max_tokens", "96"),
        (json!({"messages": message, "top_logprobs": 2}), "top_logprobs", "logprobs"),
        (json!({"messages": message, "logprobs": true, "top_logprobs": 21}), "top_logprobs", "20"),
        (json!({"messages": message, "stop_token_ids": vec![5; 1025]}), "stop_token_ids", "1024"),
        (json!({"messages": message, "cache_salt": ""}), "cache_salt", "1024"),
        (json!({"messages": message, "logit_bias": {"x": 1}}), "logit_bias", "not a token id"),
        (json!({"messages": message, "logit_bias": {"5": 101}}), "logit_bias", "100"),
        (json!({"messages": message, "stop": [""]}), "stop", "non-empty"),
        (json!({"messages": message, "stop": 5}), "stop", "stop"),
        (json!({"messages": message, "stream_options": {}}), "stream_options", "stream"),
        (json!({"messages": message, "tools": [{"type": "function"}]}), "tools[0]", "function"),
        (json!({"messages": message, "tools": "x"}), "tools", "tools"),
        (
            json!({"messages": message, "tools": [{"type": "x", "function": {"name": "f"}}]}),
            "tools[0].type",
            "function",
        ),
        (
            json!({"messages": message, "tools": [{"type": "function", "function": {"name": "a b"}}]}),
            "tools[0].function.name",
            "letters",
        ),
        (json!({"messages": message, "tool_choice": "required"}), "tool_choice", "no tools"),
        (json!({"messages": message, "tool_choice": "perhaps"}), "tool_choice", "perhaps"),
        (
            json!({"messages": message, "response_format": {"type": "xml"}}),
            "response_format.type",
            "json_schema",
        ),
        (
            json!({"messages": message, "response_format": {"type": "json_schema", "json_schema": {"schema":
                {"not": {"type": "null"}}}}}),
            "response_format",
            "not supported: not",
        ),
        (json!({"messages": message, "guided_json": "{"}), "guided_json", "not JSON"),
        (json!({"messages": message, "guided_regex": "("}), "guided_regex", "cannot be used"),
        (json!({"messages": message, "guided_choice": []}), "guided_choice", "1 to"),
        (json!({"messages": message, "guided_grammar": "root ::= nothing"}), "guided_grammar", "not defined"),
        (
            json!({"messages": message, "guided_regex": "a", "use_beam_search": true, "n": 2}),
            "guided_regex",
            "beam search",
        ),
        (
            json!({"messages": message, "structured_outputs": {"whitespace_pattern": " "}}),
            "structured_outputs.whitespace_pattern",
            "not supported",
        ),
        (json!({"messages": message, "modalities": ["audio"]}), "modalities", "not supported"),
    ];
    for (body, param, expect) in chats {
        check_refused(&client, CHAT, &body, param, expect).await;
    }
    let completions = [
        (json!({}), "prompt", "missing"),
        (json!({"prompt": ""}), "prompt", "empty"),
        (json!({"prompt": []}), "prompt", "1 to"),
        (json!({"prompt": [1, 160]}), "prompt", "vocabulary"),
        (json!({"prompt": "Hi", "suffix": "x"}), "suffix", "not supported"),
        (json!({"prompt": "Hi", "max_tokens": 0}), "max_tokens", ">= 1"),
        (json!({"prompt": "x".repeat(96)}), "prompt", "96"),
        (json!({"prompt": "x".repeat(10_000)}), "prompt", "bytes"),
        (json!({"prompt": "Hi", "n": 128, "temperature": 1}), "", "--max-num-seqs"),
    ];
    for (body, param, expect) in completions {
        check_refused(&client, COMPLETIONS, &body, param, expect).await;
    }
    client.assert_idle().await;
}

async fn check_refused(client: &common::Client, path: &str, body: &Value, param: &str, expect: &str) {
    let answer = client.post(path, body).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}: {}", answer.text);
    let error = &answer.json()["error"];
    assert_eq!(error["type"], "invalid_request_error", "{body}");
    assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{body}: {error}");
    assert!(error["message"].as_str().unwrap().contains(expect), "{body}: {error}");
}

#[tokio::test]
async fn harmless_fields_are_ignored() {
    let body = json!({
        "prompt": "Hi", "max_tokens": 2, "user": "me", "unknown": {"deep": [1]}, "top_k": -1, "logit_bias": null,
        "stop": null, "suffix": null,
    });
    client().await.ok(COMPLETIONS, &body).await;
    let chat = json!({
        "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 2, "tools": [], "tool_choice": "none",
        "store": false, "metadata": {}, "response_format": {"type": "text"},
    });
    client().await.ok(CHAT, &chat).await;
}

#[tokio::test]
async fn http_errors_have_openais_shape() {
    let client =
        client_with(ServerConfig { max_body_bytes: 1000, ..ServerConfig::default() }, &engine_config()).await;
    let post = |path: &str| Request::post(path).header("content-type", "application/json");
    let big = format!("{{\"prompt\": \"{}\"}}", "x".repeat(2000));
    let cases = [
        (client.get("/nothing").await, 404, "unknown_url"),
        (client.get(CHAT).await, 405, "method_not_supported"),
        (client.finish(post(CHAT), "{\"messages\": [").await, 400, ""),
        (client.finish(post(CHAT), "[1]").await, 400, ""),
        (client.finish(post(CHAT), "{} {}").await, 400, ""),
        (client.finish(post(COMPLETIONS), "\u{0}").await, 400, ""),
        (client.finish(post(COMPLETIONS), Body::empty()).await, 400, ""),
        (client.finish(post(COMPLETIONS), big).await, 413, ""),
        (client.finish(Request::post(CHAT).header("content-type", "text/plain"), "{}").await, 415, ""),
        (client.post(CHAT, &json!({"model": "gpt-4", "messages": []})).await, 404, "model_not_found"),
        (client.get("/v1/models/gpt-4").await, 404, "model_not_found"),
    ];
    for (answer, status, code) in cases {
        assert_eq!(answer.status.as_u16(), status, "{}", answer.text);
        let error = &answer.json()["error"];
        assert!(error["message"].is_string() && error["type"].is_string(), "{error}");
        assert_eq!(error["code"].as_str().unwrap_or_default(), code, "{error}");
        assert!(answer.headers.contains_key("x-request-id"));
    }
}

#[tokio::test]
async fn keys_guard_everything_but_the_probes() {
    let keys = vec!["first".to_owned(), "second".to_owned()];
    let open =
        client_with(ServerConfig { api_keys: keys, ..ServerConfig::default() }, &engine_config()).await;
    for path in ["/health", "/live", "/ready"] {
        assert_eq!(open.get(path).await.status, StatusCode::OK, "{path}");
    }
    for path in
        ["/v1/models", "/metrics", "/docs", "/openapi.json", "/version", "/load", "/nothing", "/health/"]
    {
        let answer = open.get(path).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
        assert_eq!(open.with_key("wrong").get(path).await.status, StatusCode::UNAUTHORIZED, "{path}");
    }
    assert_eq!(open.with_key("second").get("/v1/models").await.status, StatusCode::OK);
    // The same prompt twice with one key is found in the cache; with another key it is not.
    let body = json!({"prompt": "a long enough prompt", "max_tokens": 1});
    let cached = |answer: Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let (first, second) = (open.with_key("first"), open.with_key("second"));
    assert_eq!(cached(first.ok(COMPLETIONS, &body).await), 0);
    assert!(cached(first.ok(COMPLETIONS, &body).await) > 0);
    assert_eq!(cached(second.ok(COMPLETIONS, &body).await), 0);
    let salted = json!({"prompt": "a long enough prompt", "max_tokens": 1, "cache_salt": "mine"});
    assert_eq!(cached(first.ok(COMPLETIONS, &salted).await), 0);
    // No key takes from another what it has computed.
    assert_eq!(first.post("/reset_prefix_cache", &json!({})).await.status, StatusCode::FORBIDDEN);
    assert!(cached(first.ok(COMPLETIONS, &body).await) > 0);
}

#[tokio::test]
async fn the_prefix_cache_can_be_reset() {
    let client = client().await;
    let body = json!({"prompt": "a long enough prompt", "max_tokens": 1});
    let cached = |answer: Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    client.ok(COMPLETIONS, &body).await;
    assert!(cached(client.ok(COMPLETIONS, &body).await) > 0);
    assert_eq!(client.post("/reset_prefix_cache", &json!({})).await.status, StatusCode::OK);
    assert_eq!(cached(client.ok(COMPLETIONS, &body).await), 0);
}

#[tokio::test]
async fn public_prefixes_are_shared_by_all_keys_and_nothing_after_them() {
    let public = "You are the assistant of this house. ";
    let messages = vec![json!({"role": "system", "content": "Be brief and kind."})];
    let prefix = |name: &str, content| PublicPrefix { name: name.to_owned(), content };
    let config = ServerConfig {
        api_keys: vec!["first".to_owned(), "second".to_owned()],
        public_prefixes: vec![
            prefix("house.txt", PublicContent::Text(public.to_owned())),
            prefix("house.json", PublicContent::Messages(messages)),
        ],
        ..ServerConfig::default()
    };
    let open = client_with(config, &engine_config()).await;
    let (first, second) = (open.with_key("first"), open.with_key("second"));
    let cached = |answer: Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    // One character is one token, four are a block: 37 public ones are nine whole blocks.
    let body = json!({"prompt": format!("{public}My name is Anna, 43"), "max_tokens": 1});
    assert_eq!(cached(first.ok(COMPLETIONS, &body).await), 0);
    assert_eq!(cached(second.ok(COMPLETIONS, &body).await), 36);
    assert_eq!(cached(second.ok(COMPLETIONS, &body).await), 52);
    // The salt of a request divides a tenant's part, not the public one.
    let salted = json!({"prompt": body["prompt"], "max_tokens": 1, "cache_salt": "mine"});
    assert_eq!(cached(first.ok(COMPLETIONS, &salted).await), 36);
    // A conversation that begins with the public messages: "Be brief and kind.|" are four whole blocks.
    let chat = |user: &str| {
        let system = json!({"role": "system", "content": "Be brief and kind."});
        json!({"messages": [system, {"role": "user", "content": user}], "max_tokens": 1})
    };
    assert_eq!(cached(first.ok(CHAT, &chat("my secret question")).await), 0);
    assert_eq!(cached(second.ok(CHAT, &chat("my secret question")).await), 16);
}

#[tokio::test]
async fn a_public_prefix_that_cannot_be_used_is_named() {
    let message =
        |content: Value| PublicContent::Messages(vec![json!({"role": "system", "content": content})]);
    for (content, expected) in [
        (PublicContent::Text(String::new()), "no tokens"),
        (PublicContent::Text("x".repeat(MAX_MODEL_LEN)), "limit is 96"),
        (PublicContent::Messages(vec![json!("Hi")]), "messages[0] is not an object"),
        (message(json!(null)), "messages[0].content is missing"),
        (message(json!([{"type": "image_url"}])), "is not a text"),
    ] {
        let public_prefixes = vec![PublicPrefix { name: "house.json".to_owned(), content }];
        let config = ServerConfig { port: 0, public_prefixes, ..ServerConfig::default() };
        let bound = Server::bind(served_model(&engine_config()), config).await;
        let error = bound.expect_err("it cannot be used").to_string();
        assert!(error.starts_with("public prefix house.json: ") && error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn the_console_is_open_and_holds_no_data() {
    let keys = vec!["key".to_owned()];
    let config = ServerConfig { api_keys: keys, ..ServerConfig::default() };
    let client = client_with(config.clone(), &engine_config()).await;
    let page = client.get("/").await;
    assert_eq!(page.status, StatusCode::OK);
    assert!(page.headers["content-type"].to_str().unwrap().starts_with("text/html"));
    let policy = page.headers["content-security-policy"].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert!(!page.text.contains("tiny"), "the name of the model is data");
    let again = Request::get("/").header("if-none-match", &page.headers["etag"]);
    assert_eq!(client.finish(again, Body::empty()).await.status, StatusCode::NOT_MODIFIED);
    assert_eq!(client.get("/console/main.js").await.status, StatusCode::OK);
    for path in ["/console/", "/console/../metrics", "/console/none.js", "//"] {
        assert_eq!(client.get(path).await.status, StatusCode::UNAUTHORIZED, "{path}");
    }
    // A browser that opens /docs gets the page that asks for the key; a program gets an error.
    let browser = Request::get("/docs").header("accept", "text/html,*/*;q=0.8");
    let docs = client.finish(browser, Body::empty()).await;
    assert_eq!(docs.status, StatusCode::UNAUTHORIZED);
    assert!(docs.text.contains("key-dialog") && docs.text.contains("/v1/models"), "{}", docs.text);
    let without = client_with(ServerConfig { console: false, ..config }, &engine_config()).await;
    assert_eq!(without.get("/console/docs.js").await.status, StatusCode::OK);
    assert_eq!(without.get("/console/main.js").await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(without.get("/").await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(without.with_key("key").get("/").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_full_queue_turns_requests_away() {
    let engine = EngineConfig { max_num_seqs: 1, max_num_queued_reqs: 2, ..engine_config() };
    let client = client_with(ServerConfig::default(), &engine).await;
    let many = json!({"prompt": vec!["Hi"; 50], "max_tokens": 50});
    let answer = client.post(COMPLETIONS, &many).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS, "{}", answer.text);
    assert_eq!(answer.headers["retry-after"], "1");
    assert_eq!(answer.json()["error"]["code"], "rate_limit_exceeded");
    // What was in the queue leaves it with its client, so whoever tries again as told gets in.
    for _ in 0..6000 {
        let again = client.post(COMPLETIONS, &json!({"prompt": "Hi", "max_tokens": 2})).await;
        if again.status == StatusCode::OK {
            return client.assert_idle().await;
        }
        assert_eq!(again.status, StatusCode::TOO_MANY_REQUESTS, "{}", again.text);
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("the queue stays full");
}

#[tokio::test]
async fn too_many_continuations_are_refused() {
    let client =
        client_with(ServerConfig { max_choices: 4, ..ServerConfig::default() }, &engine_config()).await;
    let body = json!({"prompt": ["a", "b", "c"], "n": 2});
    assert_eq!(client.post(COMPLETIONS, &body).await.json()["error"]["param"], "n");
    let body = json!({"prompt": ["a", "b", "c", "d", "e"]});
    assert_eq!(client.post(COMPLETIONS, &body).await.json()["error"]["param"], "prompt");
}

#[tokio::test]
async fn models_and_tokens() {
    let client = client().await;
    let models = client.get("/v1/models").await.json();
    let ids: Vec<&Value> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["tiny", "alias"]);
    assert_eq!(models["data"][0]["max_model_len"], MAX_MODEL_LEN);
    assert_eq!(client.get("/v1/models/alias").await.json()["id"], "alias");
    let tokens = client.ok("/tokenize", &json!({"prompt": "Hi yo", "return_token_strs": true})).await;
    assert_eq!(tokens["count"], 5);
    assert_eq!(tokens["token_strs"], json!(["H", "i", "Ġ", "y", "o"]));
    let text = client.ok("/detokenize", &json!({"tokens": tokens["tokens"]})).await;
    assert_eq!(text["prompt"], "Hi yo");
    let chat = client.ok("/tokenize", &json!({"messages": [{"role": "user", "content": "Hi"}]})).await;
    assert_eq!(chat["count"], 4);
    let wrong = client.post("/detokenize", &json!({"tokens": [999]})).await;
    assert_eq!(wrong.json()["error"]["param"], "tokens");
}

#[tokio::test]
async fn metrics_have_vllms_names() {
    let client = client().await;
    client.ok(COMPLETIONS, &json!({"prompt": "Hello", "max_tokens": 6, "ignore_eos": true})).await;
    client.assert_idle().await;
    let page = client.get("/metrics").await;
    assert!(page.headers["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
    let labels = "{engine=\"0\",model_name=\"tiny\"}";
    for (name, value) in [
        ("vllm:num_requests_running", 0.0),
        ("vllm:num_requests_waiting", 0.0),
        ("vllm:kv_cache_usage_perc", 0.0),
        ("vllm:prompt_tokens_total", 5.0),
        ("vllm:generation_tokens_total", 6.0),
        ("vllm:num_preemptions_total", 0.0),
        ("vllm:time_to_first_token_seconds_count", 1.0),
        ("vllm:inter_token_latency_seconds_count", 5.0),
        ("vllm:e2e_request_latency_seconds_count", 1.0),
        ("vllm:request_queue_time_seconds_count", 1.0),
        ("vllm:request_prefill_time_seconds_count", 1.0),
        ("vllm:request_decode_time_seconds_count", 1.0),
        ("vllm:request_inference_time_seconds_count", 1.0),
        ("vllm:iteration_tokens_total_count", 6.0),
        ("vllm:iteration_tokens_total_sum", 11.0),
        ("vllm:request_prompt_tokens_sum", 5.0),
        ("vllm:request_generation_tokens_sum", 6.0),
        ("vllm:request_params_max_tokens_sum", 6.0),
    ] {
        assert_eq!(client.metric(&format!("{name}{labels}")).await, value, "{name}");
    }
    assert!(client.metric(&format!("vllm:prefix_cache_queries_total{labels}")).await > 0.0);
    assert!(page.text.contains("vllm:cache_config_info{block_size=\"4\""));
    assert!(
        page.text.contains(
            "vllm:inter_token_latency_seconds_bucket{engine=\"0\",model_name=\"tiny\",le=\"0.0005\"}"
        )
    );
    for line in page.text.lines().filter(|line| !line.starts_with('#')) {
        let value = line.rsplit(' ').next().unwrap();
        assert!(value.parse::<f64>().is_ok(), "{line}");
    }
}

#[tokio::test]
async fn the_api_describes_itself() {
    let client = client().await;
    let document = client.get("/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    let docs = client.get("/docs").await.text;
    for (path, methods) in document["paths"].as_object().unwrap() {
        assert!(docs.contains(path.as_str()), "{path}");
        let method = methods.as_object().unwrap().keys().next().unwrap().to_uppercase();
        let request = Request::builder().method(method.as_str()).uri(path.replace("{id}", "tiny"));
        let answer = client.finish(request, Body::empty()).await;
        assert_ne!(answer.status, StatusCode::METHOD_NOT_ALLOWED, "{path}");
        // There may be nothing of that name, but there is a route.
        assert!(!answer.text.contains("unknown_url"), "{path}: {}", answer.text);
    }
    assert!(client.get("/version").await.json()["version"].is_string());
    assert_eq!(client.get("/load").await.json()["server_load"], 0);
}

#[tokio::test]
async fn every_example_is_answered() {
    let config = ServerConfig { graph: Some(common::graph_serving()), ..ServerConfig::default() };
    let client = client_with(config, &engine_config()).await;
    let document = client.get("/openapi.json").await.json();
    let mut num_sent = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let example = &methods["post"]["requestBody"]["content"]["application/json"]["example"];
        if example.is_object() {
            client.ok(&path.replace("{id}", "ring"), example).await;
            num_sent += 1;
        }
    }
    assert!(num_sent >= 8, "{num_sent} examples");
}

#[tokio::test]
async fn browsers_need_permission() {
    let ask = || {
        Request::options(CHAT)
            .header("origin", "https://page.example")
            .header("access-control-request-method", "POST")
    };
    let closed = client().await.finish(ask(), Body::empty()).await;
    assert!(!closed.headers.contains_key("access-control-allow-origin"));
    let allowed_origins = vec!["https://page.example".to_owned()];
    let keys = vec!["key".to_owned()];
    let config = ServerConfig { allowed_origins, api_keys: keys, ..ServerConfig::default() };
    let open = client_with(config, &engine_config()).await.finish(ask(), Body::empty()).await;
    assert_eq!(open.headers["access-control-allow-origin"], "https://page.example");
}

#[tokio::test]
async fn health_fails_while_a_step_takes_too_long() {
    // With no patience at all, every step takes too long.
    let config = ServerConfig { stall_timeout: std::time::Duration::ZERO, ..ServerConfig::default() };
    let client = client_with(config, &engine_config()).await;
    assert_eq!(client.get("/health").await.status, StatusCode::OK);
    let body = json!({"prompt": vec!["Hello"; 40], "max_tokens": 80, "ignore_eos": true});
    let mut failures = 0;
    // Whoever asks may be held up for as long as the work takes: then once more.
    for _ in 0..50 {
        let (working, body) = (client.clone(), body.clone());
        let work = tokio::spawn(async move { working.ok(COMPLETIONS, &body).await });
        while !work.is_finished() {
            let answer = client.get("/health").await;
            if answer.status == StatusCode::SERVICE_UNAVAILABLE {
                assert!(answer.json()["error"]["message"].as_str().unwrap().contains("stuck"));
                assert_eq!(client.get("/live").await.status, StatusCode::OK);
                failures += 1;
            }
            tokio::task::yield_now().await;
        }
        work.await.expect("the work is done all the same");
        if failures > 0 {
            break;
        }
    }
    assert!(failures > 0, "nobody noticed");
    client.assert_idle().await;
    // The loop goes to sleep just after its figures say that nothing is left.
    for _ in 0..6000 {
        if client.get("/health").await.status == StatusCode::OK {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("an idle engine is not stuck");
}

#[tokio::test]
async fn more_prompts_than_may_wait_are_refused_before_they_are_read() {
    let keys = vec!["first".to_owned(), "second".to_owned()];
    let engine = EngineConfig { max_num_queued_reqs_per_key: Some(4), ..engine_config() };
    let open = client_with(ServerConfig { api_keys: keys, ..ServerConfig::default() }, &engine).await;
    let first = open.with_key("first");
    // A prompt that is too long would be a 400 if anybody looked at it.
    let long = "x".repeat(MAX_MODEL_LEN * 2);
    let body = |count: usize| json!({"prompt": vec![long.as_str(); count], "max_tokens": 1});
    assert_eq!(first.post(COMPLETIONS, &body(5)).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(first.post(COMPLETIONS, &body(4)).await.status, StatusCode::BAD_REQUEST);
    let answer = first.ok(COMPLETIONS, &json!({"prompt": vec!["Hi"; 4], "max_tokens": 1})).await;
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(4));
}
