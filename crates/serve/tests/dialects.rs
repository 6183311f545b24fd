//! Functions, reasoning, responses and messages over the wire. The tiny model writes nonsense, so that what it writes is
//! only compared with itself; how calls are read out of sense is tested in `baton-text`.

mod common;

use std::time::Duration;

use axum::http::StatusCode;
use baton_serve::{ParserChoice, ServerConfig};
use baton_text::ReasoningFormat;
use common::{Client, MODEL, client, client_of, client_with, engine_config};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// Shows functions, calls and results.
const TEMPLATE: &str = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}\
    {% for message in messages %}{{ message.content }}\
    {% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}\
    |{% endfor %}{% if add_generation_prompt %}>{% endif %}";

async fn with_tools() -> Client {
    client_of(ServerConfig::default(), &engine_config(), TEMPLATE).await
}

fn with(mut body: Value, mut more: Value) -> Value {
    body.as_object_mut().unwrap().append(more.as_object_mut().unwrap());
    body
}

fn chat(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    with(json!({"messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": true}), more)
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
}

#[tokio::test]
async fn functions_are_shown_unless_they_may_not_be_called() {
    let client = with_tools().await;
    let tokens = |body: Value| {
        let client = client.clone();
        async move { client.ok(CHAT, &body).await["usage"]["prompt_tokens"].as_u64().unwrap() }
    };
    let plain = tokens(chat(json!({}))).await;
    assert_eq!(tokens(chat(json!({"tools": tools()}))).await, plain + 4, "add;");
    assert_eq!(tokens(chat(json!({"tools": tools(), "tool_choice": "none"}))).await, plain);
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]);
    // add{}| and ok|
    assert_eq!(tokens(chat(json!({"messages": messages}))).await, plain + 6 + 3);
}

#[tokio::test]
async fn a_named_function_is_called() {
    let client = with_tools().await;
    let choice = json!({"type": "function", "function": {"name": "add"}});
    let body = chat(json!({"tools": tools(), "tool_choice": choice}));
    let whole = client.ok(CHAT, &body).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["content"], Value::Null);
    let call = &message["tool_calls"][0];
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("add")));
    assert!(call["id"].as_str().unwrap().starts_with("call_"));
    let arguments = call["function"]["arguments"].as_str().unwrap();
    assert!(!arguments.is_empty());
    assert_eq!(whole["choices"][0]["finish_reason"], "length");

    let events = client.events(CHAT, &body).await;
    let deltas: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    assert_eq!(deltas[0]["function"]["name"], "add");
    assert!(deltas.iter().skip(1).all(|delta| delta.get("id").is_none() && delta["index"] == 0));
    let streamed: String =
        deltas.iter().map(|delta| delta["function"]["arguments"].as_str().unwrap()).collect();
    assert_eq!(streamed, arguments);

    // Where the model stops by itself, it waits for the result.
    let stop: String = arguments.chars().skip(3).take(2).collect();
    let stopped = client.ok(CHAT, &with(body, json!({"stop": stop}))).await;
    assert_eq!(stopped["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn what_is_no_call_is_content() {
    let client = with_tools().await;
    let plain = client.ok(CHAT, &chat(json!({}))).await["choices"][0]["message"].clone();
    assert!(plain.get("tool_calls").is_none());
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let body = chat(json!({"messages": messages, "tools": tools(), "tool_choice": "required"}));
    let answer = client.ok(CHAT, &body).await;
    let streamed: String = client
        .events(CHAT, &body)
        .await
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(answer["choices"][0]["message"]["content"].as_str().unwrap_or_default(), streamed);
}

#[tokio::test]
async fn reasoning_is_told_apart() {
    let config = ServerConfig {
        reasoning_parser: ParserChoice::Fixed(ReasoningFormat::DeepSeekR1),
        ..ServerConfig::default()
    };
    let client = client_with(config, &engine_config()).await;
    let whole = client.ok(CHAT, &chat(json!({}))).await;
    let message = &whole["choices"][0]["message"];
    let reasoning = message["reasoning_content"].as_str().unwrap();
    assert!(!reasoning.is_empty());
    assert_eq!(message["reasoning"], reasoning);
    assert_eq!(message["content"], "");
    assert_eq!(whole["usage"]["completion_tokens_details"]["reasoning_tokens"], 12);
    let streamed: String = client
        .events(CHAT, &chat(json!({})))
        .await
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["reasoning_content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(streamed, reasoning);

    let response = client.ok(RESPONSES, &response(json!({}))).await;
    assert_eq!(response["output"][0]["type"], "reasoning");
    assert!(response["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0);
    let message = client.ok(MESSAGES, &message_body(json!({}))).await;
    assert_eq!(message["content"][0]["type"], "thinking");
}

fn response(more: Value) -> Value {
    with(
        json!({"model": MODEL, "input": "Hi", "temperature": 0, "max_output_tokens": 8, "ignore_eos": true}),
        more,
    )
}

fn output_text(response: &Value) -> String {
    response["output"][0]["content"][0]["text"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_response_has_openais_shape() {
    let client = client().await;
    let answer = client.ok(RESPONSES, &response(json!({"metadata": {"a": "b"}}))).await;
    assert!(answer["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!(answer["object"], "response");
    assert_eq!(answer["status"], "incomplete");
    assert_eq!(answer["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(answer["metadata"], json!({"a": "b"}));
    assert_eq!(answer["usage"]["input_tokens"], 4);
    assert_eq!(answer["usage"]["output_tokens"], 8);
    let chat = client.ok(CHAT, &chat(json!({"max_tokens": 8}))).await;
    assert_eq!(output_text(&answer), chat["choices"][0]["message"]["content"].as_str().unwrap());
}

#[tokio::test]
async fn responses_stream_in_openais_order() {
    let client = client().await;
    let whole = client.ok(RESPONSES, &response(json!({}))).await;
    let events = client.named_events(RESPONSES, &response(json!({}))).await;
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    let expect = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(kinds, expect);
    let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(text, output_text(&whole));
    let last = &events.last().unwrap()["response"];
    assert_eq!(output_text(last), text);
    assert_eq!(last["usage"], whole["usage"].clone_without_cache(last));
}

/// The second of two equal requests finds its prefix cached.
trait WithoutCache {
    fn clone_without_cache(&self, other: &Value) -> Value;
}

impl WithoutCache for Value {
    fn clone_without_cache(&self, other: &Value) -> Value {
        let mut usage = self.clone();
        usage["input_tokens_details"] = other["usage"]["input_tokens_details"].clone();
        usage
    }
}

#[tokio::test]
async fn a_response_calls_a_function() {
    let client = with_tools().await;
    let tool = json!({"type": "function", "name": "add", "parameters": {"type": "object"}});
    let choice = json!({"type": "function", "name": "add"});
    let body = response(json!({"tools": [tool], "tool_choice": choice}));
    let events = client.named_events(RESPONSES, &body).await;
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    let expect = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(kinds, expect);
    let whole = client.ok(RESPONSES, &body).await;
    let call = &whole["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("add")));
    let done = events.iter().find(|event| event["type"] == "response.function_call_arguments.done").unwrap();
    assert_eq!(call["arguments"], done["arguments"]);
    // The result is given back with the next request.
    let result = json!([{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}]);
    let next =
        client.ok(RESPONSES, &response(json!({"input": result, "previous_response_id": whole["id"]}))).await;
    assert!(
        next["usage"]["input_tokens"].as_u64().unwrap() > whole["usage"]["input_tokens"].as_u64().unwrap()
    );
}

#[tokio::test]
async fn responses_are_kept_for_whoever_asked() {
    let config =
        ServerConfig { api_keys: vec!["one".to_owned(), "two".to_owned()], ..ServerConfig::default() };
    let client = client_with(config, &engine_config()).await;
    let (one, two) = (client.with_key("one"), client.with_key("two"));
    let first = one.ok(RESPONSES, &response(json!({"instructions": "Be"}))).await;
    let id = first["id"].as_str().unwrap();
    let path = format!("{RESPONSES}/{id}");
    assert_eq!(one.get(&path).await.json(), first);
    let next = response(json!({"previous_response_id": id, "input": "Go"}));
    let second = one.ok(RESPONSES, &next).await;
    // "Hi|", the answer and its bar, "Go|>"; the instructions are not carried over.
    let answer = output_text(&first).chars().count() as u64;
    assert_eq!(second["usage"]["input_tokens"].as_u64().unwrap(), 3 + answer + 1 + 4);
    for (answer, param) in
        [(two.get(&path).await, "id"), (two.post(RESPONSES, &next).await, "previous_response_id")]
    {
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{}", answer.text);
        assert_eq!(answer.json()["error"]["param"], param);
    }
    assert_eq!(one.delete(&path).await.json()["deleted"], true);
    assert_eq!(one.get(&path).await.status, StatusCode::NOT_FOUND);
    let unstored = one.ok(RESPONSES, &response(json!({"store": false}))).await;
    let path = format!("{RESPONSES}/{}", unstored["id"].as_str().unwrap());
    assert_eq!(one.get(&path).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_response_is_made_in_the_background() {
    let client = client().await;
    let queued = client.ok(RESPONSES, &response(json!({"background": true}))).await;
    assert_eq!(queued["status"], "queued");
    let path = format!("{RESPONSES}/{}", queued["id"].as_str().unwrap());
    let mut status = String::new();
    for _ in 0..6000 {
        let now = client.get(&path).await.json();
        status = now["status"].as_str().unwrap().to_owned();
        if status != "in_progress" {
            assert!(!output_text(&now).is_empty());
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(status, "incomplete");
    let refused = client.post(RESPONSES, &response(json!({"background": true, "store": false}))).await;
    assert_eq!(refused.json()["error"]["param"], "background");
    client.assert_idle().await;
}

#[tokio::test]
async fn only_the_background_can_be_cancelled() {
    let client = client().await;
    let slow = response(json!({"background": true, "max_output_tokens": 80}));
    let queued = client.ok(RESPONSES, &slow).await;
    let path = format!("{RESPONSES}/{}", queued["id"].as_str().unwrap());
    let cancelled = client.ok(&format!("{path}/cancel"), &json!({})).await;
    // It may have been faster.
    assert!(["cancelled", "incomplete"].contains(&cancelled["status"].as_str().unwrap()), "{cancelled}");
    client.assert_idle().await;
    let plain = client.ok(RESPONSES, &response(json!({}))).await;
    let path = format!("{RESPONSES}/{}/cancel", plain["id"].as_str().unwrap());
    assert_eq!(client.post(&path, &json!({})).await.status, StatusCode::BAD_REQUEST);
    let unknown = client.post(&format!("{RESPONSES}/x/cancel"), &json!({})).await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    // In OpenAI's words, which clients look for.
    assert!(unknown.text.contains("Response with id \\\"x\\\" not found"), "{}", unknown.text);
}

#[tokio::test]
async fn wrong_fields_of_responses_are_named() {
    let client = client().await;
    for (more, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": 5}), "input"),
        (json!({"input": [{"type": "item_reference"}]}), "input[0].type"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name"),
        (json!({"conversation": "x"}), "conversation"),
        (json!({"truncation": "sometimes"}), "truncation"),
        (json!({"n": 2}), "n"),
    ] {
        let answer = client.post(RESPONSES, &response(more.clone())).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{more}: {}", answer.text);
        assert_eq!(answer.json()["error"]["param"], param, "{more}");
    }
}

fn message_body(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    with(json!({"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}), more)
}

#[tokio::test]
async fn a_message_has_anthropics_shape() {
    let client = client().await;
    let answer = client.ok(MESSAGES, &message_body(json!({}))).await;
    assert!(answer["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!((&answer["type"], &answer["role"]), (&json!("message"), &json!("assistant")));
    let text = answer["content"][0]["text"].as_str().unwrap();
    assert!(!text.is_empty());
    assert_eq!(answer["usage"]["input_tokens"], 4);
    let count = client.ok("/v1/messages/count_tokens", &message_body(json!({}))).await;
    assert_eq!(count, json!({"input_tokens": 4}));
    // More than there is room for is what there is room for.
    let long = client.ok(MESSAGES, &message_body(json!({"max_tokens": 100_000}))).await;
    assert!(["max_tokens", "end_turn"].contains(&long["stop_reason"].as_str().unwrap()));

    let stop: String = text.chars().skip(2).take(2).collect();
    let stopped = client.ok(MESSAGES, &message_body(json!({"stop_sequences": [stop]}))).await;
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
}

#[tokio::test]
async fn messages_stream_in_anthropics_order() {
    let client = client().await;
    let whole = client.ok(MESSAGES, &message_body(json!({}))).await;
    let events = client.named_events(MESSAGES, &message_body(json!({}))).await;
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    let expect = [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(kinds, expect);
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, whole["content"][0]["text"].as_str().unwrap());
    let last = &events[events.len() - 2];
    assert_eq!(last["delta"]["stop_reason"], whole["stop_reason"]);
    assert_eq!(last["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
}

#[tokio::test]
async fn a_message_uses_a_tool() {
    let client = with_tools().await;
    let tool = json!({"name": "add", "input_schema": {"type": "object"}});
    let body = message_body(json!({"tools": [tool], "tool_choice": {"type": "tool", "name": "add"}}));
    let events = client.named_events(MESSAGES, &body).await;
    let start = events.iter().find(|event| event["type"] == "content_block_start").unwrap();
    assert_eq!(
        (&start["content_block"]["type"], &start["content_block"]["name"]),
        (&json!("tool_use"), &json!("add"))
    );
    assert!(events.iter().any(|event| event["delta"]["type"] == "input_json_delta"));
    let result = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}]},
    ]);
    // "Hi|add{}|ok|>" after "add;"
    let body = message_body(json!({"messages": result, "tools": [{"name": "add"}]}));
    assert_eq!(client.ok("/v1/messages/count_tokens", &body).await["input_tokens"], 4 + 3 + 6 + 3 + 1);
}

#[tokio::test]
async fn errors_of_messages_have_anthropics_shape() {
    let config = ServerConfig { api_keys: vec!["one".to_owned()], ..ServerConfig::default() };
    let client = client_with(config, &engine_config()).await;
    let known = client.with_key("one");
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    for (answer, status, kind, word) in [
        (client.post(MESSAGES, &message_body(json!({}))).await, 401, "authentication_error", "key"),
        (known.post(MESSAGES, &message_body(json!({"model": "x"}))).await, 404, "not_found_error", "served"),
        (
            known.post(MESSAGES, &message_body(json!({"max_tokens": null}))).await,
            400,
            "invalid_request_error",
            "max_tokens",
        ),
        (
            known.post(MESSAGES, &message_body(json!({"messages": image}))).await,
            400,
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
        (known.get(MESSAGES).await, 405, "invalid_request_error", "GET"),
        (known.get("/v1/messages/x").await, 404, "not_found_error", "/v1/messages/x"),
    ] {
        assert_eq!(answer.status.as_u16(), status, "{}", answer.text);
        let body = answer.json();
        assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)));
        assert!(body["error"]["message"].as_str().unwrap().contains(word), "{body}");
    }
    // Other routes keep OpenAI's words.
    assert_eq!(client.get("/v1/models").await.json()["error"]["code"], "invalid_api_key");
}

#[tokio::test]
async fn embeddings_are_unit_vectors() {
    const EMBEDDINGS: &str = "/v1/embeddings";
    let client = client().await;
    let vector = |answer: &Value, index: usize| -> Vec<f64> {
        serde_json::from_value(answer["data"][index]["embedding"].clone()).expect("numbers")
    };
    let tokens = client.ok("/tokenize", &json!({"prompt": "Hello"})).await["tokens"].clone();
    let answer = client.ok(EMBEDDINGS, &json!({"input": ["Hello", "Bye", "Hello"]})).await;
    assert_eq!((&answer["object"], &answer["data"][2]["index"]), (&json!("list"), &json!(2)));
    assert_eq!(answer["usage"], json!({"prompt_tokens": 13, "total_tokens": 13}));
    let first = vector(&answer, 0);
    assert!((first.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5);
    assert_ne!(first, vector(&answer, 1));
    let by_ids = client.ok(EMBEDDINGS, &json!({"input": tokens})).await;
    for (a, b) in first.iter().zip(vector(&by_ids, 0)) {
        assert!((a - b).abs() < 1e-5);
    }
    let short = client.ok(EMBEDDINGS, &json!({"input": "Hello", "dimensions": 4})).await;
    let short = vector(&short, 0);
    assert_eq!(short.len(), 4);
    assert!((short.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5);
    let text =
        client.ok(EMBEDDINGS, &json!({"input": "Hello", "dimensions": 4, "encoding_format": "base64"})).await;
    // 16 bytes.
    assert_eq!(text["data"][0]["embedding"].as_str().unwrap().len(), 24);
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": ""}), "input"),
        (json!({"input": "Hello", "dimensions": 0}), "dimensions"),
        (json!({"input": "Hello", "dimensions": 100_000}), "dimensions"),
        (json!({"input": "Hello", "encoding_format": "x"}), "encoding_format"),
    ] {
        let answer = client.post(EMBEDDINGS, &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}: {}", answer.text);
        assert_eq!(answer.json()["error"]["param"], param, "{body}");
    }
    client.assert_idle().await;
}
