//! Chat and completions over the wire: shapes, streams against whole answers, log-probabilities, stop strings.

mod common;

use axum::http::{Request, StatusCode};
use baton_serve::ServerConfig;
use common::{MODEL, client, client_with, engine_config};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn chat(mut more: Value) -> Value {
    let mut body = json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": true,
    });
    body.as_object_mut().unwrap().append(more.as_object_mut().unwrap());
    body
}

fn completion(mut more: Value) -> Value {
    let mut body = json!({"prompt": "Hello", "temperature": 0, "max_tokens": 8, "ignore_eos": true});
    body.as_object_mut().unwrap().append(more.as_object_mut().unwrap());
    body
}

#[tokio::test]
async fn a_chat_answer_has_openais_shape() {
    let answer = client().await.ok(CHAT, &chat(json!({"return_token_ids": true}))).await;
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], MODEL);
    let choice = &answer["choices"][0];
    assert_eq!(choice["index"], 0);
    assert_eq!(choice["message"]["role"], "assistant");
    assert!(!choice["message"]["content"].as_str().unwrap().is_empty());
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["logprobs"], Value::Null);
    assert_eq!(choice["token_ids"].as_array().unwrap().len(), 12);
    // "Hello", the template's bar and its mark of the answer.
    assert_eq!(answer["usage"]["prompt_tokens"], 7);
    assert_eq!(answer["usage"]["completion_tokens"], 12);
    assert_eq!(answer["usage"]["total_tokens"], 19);
    assert_eq!(answer["prompt_token_ids"].as_array().unwrap().len(), 7);
}

#[tokio::test]
async fn a_stream_is_the_whole_answer_in_pieces() {
    let client = client().await;
    let whole = client.ok(CHAT, &chat(json!({}))).await;
    let events = client.events(CHAT, &chat(json!({"stream_options": {"include_usage": true}}))).await;
    let (first, last) = (&events[0], events.last().unwrap());
    assert_eq!(first["object"], "chat.completion.chunk");
    assert_eq!(first["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(first["usage"], Value::Null);
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 12);
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().unwrap());
    let reasons: Vec<&Value> = events
        .iter()
        .map(|event| &event["choices"][0]["finish_reason"])
        .filter(|reason| !reason.is_null())
        .collect();
    assert_eq!(reasons, ["length"]);
    let plain = client.events(CHAT, &chat(json!({}))).await;
    assert!(plain.iter().all(|event| event.get("usage").is_none()));
    let continuous = json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let continuous = client.events(CHAT, &chat(continuous)).await;
    assert!(continuous.iter().all(|event| event["usage"]["prompt_tokens"] == 7));
    let forced = ServerConfig { force_include_usage: true, ..ServerConfig::default() };
    let events = client_with(forced, &engine_config()).await.events(CHAT, &chat(json!({}))).await;
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 12);
}

#[tokio::test]
async fn several_answers_have_their_own_indices() {
    let client = client().await;
    let body = chat(json!({"n": 3, "temperature": 1, "seed": 7}));
    let whole = client.ok(CHAT, &body).await;
    let indices: Vec<&Value> =
        whole["choices"].as_array().unwrap().iter().map(|choice| &choice["index"]).collect();
    assert_eq!(indices, [0, 1, 2]);
    assert_eq!(whole["usage"]["completion_tokens"], 36);
    let again = client.ok(CHAT, &body).await;
    assert_eq!(whole["choices"], again["choices"], "the same seed");
    let mut texts = vec![String::new(); 3];
    for event in client.events(CHAT, &body).await {
        let choice = &event["choices"][0];
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or_default());
    }
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(text, whole["choices"][index]["message"]["content"].as_str().unwrap());
    }
}

#[tokio::test]
async fn chat_logprobs_have_openais_shape() {
    let client = client().await;
    let body = chat(json!({"logprobs": true, "top_logprobs": 3}));
    let whole = client.ok(CHAT, &body).await;
    let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(content.len(), 12);
    let mut text = String::new();
    for token in &content {
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 3);
        // Greedy: the chosen token is the best one.
        assert_eq!(token["top_logprobs"][0]["token"], token["token"]);
        let bytes: Vec<u8> = serde_json::from_value(token["bytes"].clone()).unwrap();
        if !["<pad>", "<s>", "</s>"].contains(&token["token"].as_str().unwrap()) {
            text.push_str(std::str::from_utf8(&bytes).unwrap());
        }
    }
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().unwrap());
    let streamed: Vec<Value> = client
        .events(CHAT, &body)
        .await
        .iter()
        .flat_map(|event| event["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(streamed, content);
}

#[tokio::test]
async fn completions_take_prompts_of_every_shape() {
    let client = client().await;
    let text = client.ok(COMPLETIONS, &completion(json!({}))).await;
    assert_eq!(text["object"], "text_completion");
    let tokens = client.ok("/tokenize", &json!({"prompt": "Hello"})).await["tokens"].clone();
    for (prompt, count) in
        [(tokens.clone(), 1), (json!(["Hello", "Hello"]), 2), (json!([tokens, tokens.clone()]), 2)]
    {
        let answer = client.ok(COMPLETIONS, &completion(json!({"prompt": prompt}))).await;
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.len(), count);
        for (index, choice) in choices.iter().enumerate() {
            assert_eq!(choice["index"], index);
            assert_eq!(choice["text"], text["choices"][0]["text"]);
        }
        assert_eq!(answer["usage"]["prompt_tokens"], 5 * count);
    }
}

#[tokio::test]
async fn completions_give_pytorchs_tokens() {
    let golden: Value =
        serde_json::from_str(include_str!("../../model/tests/data/golden/llama/golden.json")).unwrap();
    let prompt = &golden["prompts"][0];
    let expect = prompt["greedy"].as_array().unwrap();
    let body = json!({
        "prompt": prompt["token_ids"], "temperature": 0, "max_tokens": expect.len(), "ignore_eos": true,
        "return_token_ids": true,
    });
    let answer = client().await.ok(COMPLETIONS, &body).await;
    assert_eq!(answer["choices"][0]["token_ids"].as_array().unwrap(), expect);
    assert_eq!(answer["choices"][0]["prompt_token_ids"], prompt["token_ids"]);
}

#[tokio::test]
async fn completion_logprobs_are_parallel_lists() {
    let client = client().await;
    let body = completion(json!({"logprobs": 2, "echo": true}));
    let choice = client.ok(COMPLETIONS, &body).await["choices"][0].clone();
    let text = choice["text"].as_str().unwrap();
    assert!(text.starts_with("Hello"));
    let lists = &choice["logprobs"];
    let length = 5 + 8;
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[list].as_array().unwrap().len(), length, "{list}");
    }
    assert_eq!(lists["token_logprobs"][0], Value::Null);
    assert_eq!(lists["top_logprobs"][0], Value::Null);
    assert!(lists["token_logprobs"][1].as_f64().unwrap() < 0.0);
    assert!(lists["top_logprobs"][1].as_object().unwrap().len() >= 2);
    assert_eq!(lists["text_offset"].as_array().unwrap()[..6], [0, 1, 2, 3, 4, 5]);
    // The token itself comes first among its alternatives. Read as text: objects lose their order here.
    let written = client.post(COMPLETIONS, &body).await.text;
    let (_, alternatives) = written.split_once("\"top_logprobs\":[null,").expect("the list");
    for (token, alternative) in lists["tokens"].as_array().unwrap()[1..5].iter().zip(alternatives.split("},"))
    {
        assert!(alternative.starts_with(&format!("{{{token}:")), "{token}: {alternative}");
    }
    // The same in a stream.
    let (mut streamed, mut offsets) = (String::new(), Vec::new());
    for event in client.events(COMPLETIONS, &body).await {
        streamed.push_str(event["choices"][0]["text"].as_str().unwrap());
        offsets.extend(event["choices"][0]["logprobs"]["text_offset"].as_array().unwrap().clone());
    }
    assert_eq!(streamed, text);
    assert_eq!(&offsets, lists["text_offset"].as_array().unwrap());
    // The prompt alone, for its probabilities.
    let alone =
        client.ok(COMPLETIONS, &completion(json!({"logprobs": 1, "echo": true, "max_tokens": 0}))).await;
    assert_eq!(alone["choices"][0]["text"], "Hello");
    assert_eq!(alone["choices"][0]["logprobs"]["tokens"], json!(["H", "e", "l", "l", "o"]));
    assert_eq!(alone["usage"]["completion_tokens"], 0);
}

#[tokio::test]
async fn prompt_logprobs_have_vllms_shape() {
    let answer = client().await.ok(COMPLETIONS, &completion(json!({"prompt_logprobs": 1}))).await;
    let positions = answer["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!(positions.len(), 5);
    assert_eq!(positions[0], Value::Null);
    let second = positions[1].as_object().unwrap();
    let prompt_token =
        second.values().find(|token| token["decoded_token"] == "e").expect("the prompt's own token");
    assert!(prompt_token["rank"].as_u64().unwrap() >= 1);
}

#[tokio::test]
async fn a_stop_string_ends_the_text_and_the_request() {
    let client = client().await;
    let long = completion(json!({"max_tokens": 60}));
    let whole = client.ok(COMPLETIONS, &long).await;
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let stop: String = text.chars().skip(3).take(2).collect();
    let expect = &text[..text.find(&stop).unwrap()];
    for body in [
        completion(json!({"max_tokens": 60, "stop": stop})),
        completion(json!({"max_tokens": 60, "stop": ["☃", stop]})),
    ] {
        let choice = client.ok(COMPLETIONS, &body).await["choices"][0].clone();
        assert_eq!(choice["text"], expect);
        assert_eq!(choice["finish_reason"], "stop");
        assert_eq!(choice["stop_reason"], stop);
        let streamed: String = client
            .events(COMPLETIONS, &body)
            .await
            .iter()
            .map(|event| event["choices"][0]["text"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(streamed, expect);
    }
    let kept = completion(json!({"max_tokens": 60, "stop": stop, "include_stop_str_in_output": true}));
    let kept = client.ok(COMPLETIONS, &kept).await;
    assert_eq!(kept["choices"][0]["text"], format!("{expect}{stop}"));
    client.assert_idle().await;
    assert_eq!(
        client
            .metric("vllm:request_success_total{engine=\"0\",model_name=\"tiny\",finished_reason=\"stop\"}")
            .await,
        5.0
    );
}

#[tokio::test]
async fn a_stop_token_is_the_reason() {
    let client = client().await;
    let whole = client.ok(COMPLETIONS, &completion(json!({"return_token_ids": true}))).await;
    let token = &whole["choices"][0]["token_ids"][4];
    let choice =
        client.ok(COMPLETIONS, &completion(json!({"stop_token_ids": [token]}))).await["choices"][0].clone();
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), token));
}

#[tokio::test]
async fn beams_and_best_of_come_at_the_end() {
    let client = client().await;
    let beams =
        client.ok(COMPLETIONS, &completion(json!({"use_beam_search": true, "n": 2, "max_tokens": 5}))).await;
    assert_eq!(beams["choices"].as_array().unwrap().len(), 2);
    let best = client.ok(COMPLETIONS, &completion(json!({"best_of": 3, "temperature": 1, "seed": 1}))).await;
    assert_eq!(best["choices"].as_array().unwrap().len(), 1);
    let refused = client.post(COMPLETIONS, &completion(json!({"best_of": 3, "stream": true}))).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert_eq!(refused.json()["error"]["param"], "best_of");
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_blocks() {
    let client = client().await;
    let body = completion(json!({"max_tokens": 80, "stream": true}));
    let request = || Request::post(COMPLETIONS).header("content-type", "application/json");
    for _ in 0..3 {
        // The answer has begun, so the request runs; whoever drops it has not read to its end.
        let answer = client.send(request(), body.to_string()).await;
        assert_eq!(answer.status(), StatusCode::OK);
        drop(answer);
    }
    client.assert_idle().await;
    let aborted = "vllm:request_success_total{engine=\"0\",model_name=\"tiny\",finished_reason=\"abort\"}";
    assert_eq!(client.metric(aborted).await, 3.0);
    assert_eq!(client.metric("baton:http_requests_in_flight").await, 0.0);
}

#[tokio::test]
async fn an_unfinished_message_is_continued() {
    let client = client().await;
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes, "}]);
    let body = json!({"messages": messages, "continue_final_message": true, "echo": true, "max_tokens": 4, "temperature": 0});
    let answer = client.ok(CHAT, &body).await;
    assert!(answer["choices"][0]["message"]["content"].as_str().unwrap().starts_with("Yes, "));
    let tokens = client.ok("/tokenize", &json!({"messages": messages, "continue_final_message": true})).await;
    // "Hi|Yes," without the bar after it.
    assert_eq!(tokens["count"], 7);
}
