//! Right answers over the wire: what a request asks of the answer is done or refused by name, never passed over.

mod common;

use axum::http::{Request, StatusCode};
use baton_serve::ServerConfig;
use common::{Answer, Client, client, client_of, client_with, engine_config};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

fn with(mut body: Value, mut more: Value) -> Value {
    body.as_object_mut().expect("an object").append(more.as_object_mut().expect("an object"));
    body
}

fn chat(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    with(json!({"messages": messages, "temperature": 1, "seed": 4, "max_tokens": 60}), more)
}

fn completion(more: Value) -> Value {
    with(json!({"prompt": "Hello", "temperature": 1, "seed": 4, "max_tokens": 20, "ignore_eos": true}), more)
}

fn message(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}), more)
}

/// Functions are told of in few letters: the tiny model has room for few.
async fn with_tools() -> Client {
    let template = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}\
        {% for message in messages %}{{ message.content }}|{% endfor %}{% if add_generation_prompt %}>{% endif %}";
    client_of(ServerConfig::default(), &engine_config(), template).await
}

async fn refused(client: &Client, path: &str, body: &Value) -> (StatusCode, Value) {
    let answer: Answer = client.post(path, body).await;
    (answer.status, answer.json()["error"].clone())
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_default()
}

/// Two keys, each with one short value, and nothing said of others.
fn open_schema() -> Value {
    json!({"type": "object", "required": ["a", "b"], "properties": {
        "a": {"enum": ["x", "y"]},
        "b": {"type": "object", "required": ["c"], "properties": {"c": {"type": "boolean"}}},
    }})
}

fn assert_closed(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(value.as_object().expect("an object").len(), 2, "{text}");
    assert_eq!(value["b"].as_object().expect("an object").len(), 1, "{text}");
}

#[tokio::test]
async fn objects_have_the_keys_of_their_schema_and_no_others() {
    let client = client().await;
    let schema = open_schema();
    for more in [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"guided_json": schema}),
        json!({"structured_outputs": {"json": schema.to_string()}}),
        json!({"json_schema": schema}),
    ] {
        assert_closed(content(&client.ok(CHAT, &chat(more)).await));
    }
    let format = json!({"type": "json_schema", "schema": schema});
    let message_answer = client.ok(MESSAGES, &message(json!({"output_config": {"format": format}}))).await;
    assert_closed(message_answer["content"][0]["text"].as_str().expect("text"));
    let parameters = json!({"type": "object", "properties": {}});
    let tools = json!([{"type": "function", "function": {"name": "add", "parameters": parameters}}]);
    let named = json!({"type": "function", "function": {"name": "add"}});
    let client = with_tools().await;
    for choice in [named, json!("required")] {
        let more = json!({"tools": tools, "tool_choice": choice, "temperature": 0, "max_tokens": 80});
        let answer = client.ok(CHAT, &chat(more)).await;
        let calls = answer["choices"][0]["message"]["tool_calls"].as_array().expect("calls");
        assert_eq!(calls.len(), 1, "{answer}");
        let arguments = calls[0]["function"]["arguments"].as_str().expect("arguments");
        let arguments: Value =
            serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{error}: {answer}"));
        assert_eq!(arguments, json!({}), "{answer}");
    }
}

#[tokio::test]
async fn a_required_call_that_is_cut_off_is_no_content() {
    let client = with_tools().await;
    let schema = json!({"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}});
    let tools = json!([{"type": "function", "function": {"name": "add", "parameters": schema}}]);
    for max_tokens in [1, 5, 12, 20] {
        let body = chat(json!({"tools": tools, "tool_choice": "required", "max_tokens": max_tokens}));
        let answer = client.ok(CHAT, &body).await;
        assert_eq!(content(&answer), "", "{answer}");
        let events = client.events(CHAT, &body).await;
        assert!(
            events
                .iter()
                .all(|event| event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().is_empty())
        );
        let tools = json!([{"name": "add", "input_schema": schema}]);
        let more = json!({"tools": tools, "tool_choice": {"type": "any"}, "max_tokens": max_tokens});
        let answer = client.ok(MESSAGES, &message(more)).await;
        assert!(
            answer["content"].as_array().expect("blocks").iter().all(|block| block["type"] != "text"),
            "{answer}"
        );
        let tools = json!([{"type": "function", "name": "add", "parameters": schema}]);
        let body = json!({"input": "Hi", "tools": tools, "tool_choice": "required", "max_output_tokens": max_tokens});
        let answer = client.ok(RESPONSES, &body).await;
        assert!(
            answer["output"].as_array().expect("items").iter().all(|item| item["type"] != "message"),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn what_is_not_built_is_refused_by_name() {
    let client = client().await;
    for (name, value) in [
        ("logits_processors", json!(["x"])),
        ("logprob_token_ids", json!([1])),
        ("typical_p", json!(0.5)),
        ("mirostat", json!(2)),
        ("dry_multiplier", json!(0.8)),
        ("xtc_probability", json!(0.5)),
        ("min_keep", json!(3)),
        ("samplers", json!(["top_k"])),
        ("structural_tag", json!({"a": 1})),
    ] {
        for (path, body) in [
            (CHAT, chat(json!({ name: value }))),
            (COMPLETIONS, completion(json!({ name: value }))),
            (RESPONSES, json!({"input": "Hi", name: value})),
        ] {
            let (status, error) = refused(&client, path, &body).await;
            assert_eq!((status, &error["param"]), (StatusCode::BAD_REQUEST, &json!(name)), "{path}: {error}");
            assert_eq!(error["code"], "unsupported_parameter");
        }
        let (status, error) = refused(&client, MESSAGES, &message(json!({ name: value }))).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{error}");
        assert!(error["message"].as_str().expect("a message").contains(name), "{error}");
    }
    // What cannot change the answer stays ignored, and so do defaults.
    let neutral =
        json!({"typical_p": 1.0, "mirostat": 0, "mirostat_tau": 5.0, "cache_prompt": true, "grammar": ""});
    client.ok(CHAT, &chat(neutral)).await;
}

#[tokio::test]
async fn tokens_can_be_banned_and_chosen() {
    let client = client().await;
    // The tokens of 'a', 'b' and 'c' in the test's vocabulary.
    let allowed: Vec<u32> = "abc".chars().map(|letter| 3 + letter as u32 - ' ' as u32).collect();
    let body = completion(json!({"allowed_token_ids": allowed, "n": 2}));
    for choice in client.ok(COMPLETIONS, &body).await["choices"].as_array().expect("choices") {
        let text = choice["text"].as_str().expect("text");
        assert!(text.len() == 20 && text.chars().all(|letter| "abc".contains(letter)), "{text}");
    }
    let words = json!(["ab", "c"]);
    let body = completion(json!({"allowed_token_ids": allowed, "bad_words": words, "n": 4}));
    for choice in client.ok(COMPLETIONS, &body).await["choices"].as_array().expect("choices") {
        let text = choice["text"].as_str().expect("text");
        assert!(!text.contains("ab") && !text.contains('c'), "{text}");
    }
    // A word is banned in whatever tokens it is written: the first pairs of the vocabulary are "aa" and "ab".
    let pairs = [allowed[0], allowed[1], 99];
    let body = completion(json!({"allowed_token_ids": pairs, "bad_words": ["ab"], "n": 4}));
    for choice in client.ok(COMPLETIONS, &body).await["choices"].as_array().expect("choices") {
        let text = choice["text"].as_str().expect("text");
        assert!(text.len() == 20 && !text.contains("ab"), "{text}");
    }
    // Beside a grammar both are kept.
    let letters: Vec<u32> = "abcdef".chars().map(|letter| 3 + letter as u32 - ' ' as u32).collect();
    let words = ["a", "b", "c", "d", "e"];
    let more = json!({"guided_regex": "[a-f]{8}", "bad_words": words, "allowed_token_ids": letters});
    let body = chat(more);
    assert_eq!(content(&client.ok(CHAT, &body).await), "ffffffff");
    for (name, value) in
        [("bad_words", json!([""])), ("allowed_token_ids", json!([])), ("allowed_token_ids", json!([999]))]
    {
        let (status, error) = refused(&client, COMPLETIONS, &completion(json!({ name: value }))).await;
        assert_eq!((status, &error["param"]), (StatusCode::BAD_REQUEST, &json!(name)), "{error}");
    }
}

#[tokio::test]
async fn fields_of_llama_cpp_and_sglang_are_honoured() {
    let client = client().await;
    let grammar = "root ::= item (\",\" item)* \"!\"\nitem ::= [a-c] | \"(\" item \")\"\n# the end";
    for name in ["grammar", "ebnf", "guided_grammar"] {
        let answer = client.ok(CHAT, &chat(json!({ name: grammar, "max_tokens": 80 }))).await;
        if answer["choices"][0]["finish_reason"] == "stop" {
            let text = content(&answer);
            assert!(text.ends_with('!') && text.chars().all(|c| "abc(),!".contains(c)), "{text}");
        }
    }
    let answer = client.ok(CHAT, &chat(json!({"regex": "[0-9]{4}"}))).await;
    assert!(content(&answer).parse::<u32>().is_ok(), "{answer}");
    let (_, error) = refused(&client, CHAT, &chat(json!({"grammar": "root ::= missing"}))).await;
    assert!(error["message"].as_str().expect("a message").contains("missing"), "{error}");

    let plain = client.ok(COMPLETIONS, &completion(json!({"repetition_penalty": 1.9}))).await;
    let other =
        client.ok(COMPLETIONS, &completion(json!({"repeat_penalty": 1.9, "repeat_last_n": -1}))).await;
    assert_eq!(plain["choices"][0]["text"], other["choices"][0]["text"]);
    let (_, error) =
        refused(&client, COMPLETIONS, &completion(json!({"repeat_penalty": 1.9, "repeat_last_n": 64}))).await;
    assert_eq!(error["param"], "repeat_last_n");

    let whole = client.ok(COMPLETIONS, &completion(json!({"prompt": "llo"}))).await;
    let cut = client.ok(COMPLETIONS, &completion(json!({"truncate_prompt_tokens": 3}))).await;
    assert_eq!(cut["usage"]["prompt_tokens"], 3);
    assert_eq!(cut["choices"][0]["text"], whole["choices"][0]["text"]);
    let (_, error) = refused(&client, COMPLETIONS, &completion(json!({"truncate_prompt_tokens": 0}))).await;
    assert_eq!(error["param"], "truncate_prompt_tokens");
}

#[tokio::test]
async fn bodies_are_read_as_they_are_meant() {
    let client = client().await;
    let post = async |body: &str| {
        let request = Request::post(CHAT).header("content-type", "application/json");
        let answer = client.finish(request, body.to_owned()).await;
        (answer.status, answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned())
    };
    for body in ["[]", "[[{\"role\": \"user\", \"content\": \"Hi\"}]]", "null", "\"x\""] {
        let (status, message) = post(body).await;
        assert_eq!(
            (status, message.as_str()),
            (StatusCode::BAD_REQUEST, "the request body must be a JSON object")
        );
    }
    for body in [
        r#"{"messages": 3}"#,
        r#"{"messages": [3]}"#,
        r#"{"messages": [], "max_tokens": -1}"#,
        r#"{"messages": [], "temperature": "hot"}"#,
        r#"{"messages": [], "stream_options": 3}"#,
        r#"{"messages": [], "n": 1.5}"#,
        r#"{"messages": [], "response_format": "json"}"#,
        r#"{"messages": [], "tools": {}}"#,
    ] {
        let (status, message) = post(body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
        for word in ["struct", "u32", "i64", "f32", "usize", "Fields", "sequence", "enum", "serde"] {
            assert!(!message.contains(word), "{body}: {message}");
        }
    }
    let role = json!([{"role": "<|narrator|>", "content": "Hi"}]);
    let (status, error) = refused(&client, CHAT, &chat(json!({"messages": role}))).await;
    assert_eq!((status, &error["param"]), (StatusCode::BAD_REQUEST, &json!("messages[0].role")), "{error}");
    client.ok(CHAT, &chat(json!({"model": ""}))).await;
    client.ok(MESSAGES, &message(json!({"model": ""}))).await;
}

#[tokio::test]
async fn log_probabilities_stand_where_their_text_does() {
    let client = client().await;
    let body =
        completion(json!({"prompt": [1, 43, 44, 2, 45], "echo": true, "logprobs": 0, "temperature": 0}));
    let answer = client.ok(COMPLETIONS, &body).await;
    let choice = &answer["choices"][0];
    let (text, logprobs) = (choice["text"].as_str().expect("text"), &choice["logprobs"]);
    let tokens = logprobs["tokens"].as_array().expect("tokens");
    let offsets = logprobs["text_offset"].as_array().expect("offsets");
    // Special tokens of a prompt are written out, as in vLLM; those of the answer are not and take no room.
    assert!(text.starts_with("<s>HI</s>J"), "{text}");
    assert_eq!(offsets[..5], [json!(0), json!(3), json!(4), json!(5), json!(9)], "{text}");
    for (token, offset) in tokens.iter().zip(offsets).skip(4) {
        let (token, offset) =
            (token.as_str().expect("a token"), offset.as_u64().expect("an offset") as usize);
        if token != "</s>" && token != "<s>" && token != "<pad>" {
            assert!(
                text.chars().skip(offset).collect::<String>().starts_with(token),
                "{token} at {offset}: {text}"
            );
        }
    }
    // With 0 alternatives the chosen token is told of all the same.
    let top = logprobs["top_logprobs"].as_array().expect("alternatives");
    assert!(top.iter().skip(1).all(|map| map.as_object().is_some_and(|map| map.len() == 1)), "{logprobs}");
}

#[tokio::test]
async fn an_answer_that_was_begun_is_gone_on_with() {
    let client = client().await;
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]);
    let more = json!({"messages": messages, "temperature": 0});
    let begun = client.ok(MESSAGES, &message(more.clone())).await;
    // "Hi|So" without the bar and the mark of a new answer.
    assert_eq!(begun["usage"]["input_tokens"], 5, "{begun}");
    let same =
        client.ok(CHAT, &chat(with(more, json!({"continue_final_message": true, "max_tokens": 40})))).await;
    assert_eq!(begun["content"][0]["text"].as_str().unwrap_or_default(), content(&same));
}

#[tokio::test]
async fn a_choice_that_is_stopped_stops_computing() {
    let client = client().await;
    let plain = client.ok(COMPLETIONS, &completion(json!({"n": 4, "max_tokens": 80}))).await;
    let first = plain["choices"][0]["text"].as_str().expect("text");
    let stop: String = first.chars().take(3).collect();
    let before = client.metric("vllm:generation_tokens_total").await;
    let body = completion(json!({"n": 4, "max_tokens": 80, "stop": stop}));
    let stopped = client.ok(COMPLETIONS, &body).await;
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["choices"][3]["finish_reason"], "length", "others go on");
    client.assert_idle().await;
    let computed = client.metric("vllm:generation_tokens_total").await - before;
    // The engine is some steps ahead of whoever finds the stop string; without being told it computes all 320.
    assert!(
        computed < 300.0,
        "{computed} tokens were computed, {} returned",
        stopped["usage"]["completion_tokens"]
    );
}

#[tokio::test]
async fn a_browser_may_send_what_its_sdk_sends() {
    let config =
        ServerConfig { allowed_origins: vec!["https://page.example".to_owned()], ..ServerConfig::default() };
    let client = client_with(config, &engine_config()).await;
    let asked =
        "authorization,content-type,x-stainless-os,x-stainless-retry-count,anthropic-version,openai-beta";
    for method in ["POST", "DELETE"] {
        let request = Request::options(RESPONSES)
            .header("origin", "https://page.example")
            .header("access-control-request-method", method)
            .header("access-control-request-headers", asked);
        let answer = client.finish(request, "").await;
        assert_eq!(answer.headers["access-control-allow-origin"], "https://page.example");
        let methods = answer.headers["access-control-allow-methods"].to_str().expect("text");
        assert!(methods.contains(method), "{methods}");
        let headers = answer.headers["access-control-allow-headers"].to_str().expect("text");
        assert!(asked.split(',').all(|name| headers.contains(name)), "{headers}");
    }
}

#[tokio::test]
async fn clients_of_vllm_find_what_they_look_for() {
    let config =
        ServerConfig { root_path: "/llm".to_owned(), tokens_as_ids: true, ..ServerConfig::default() };
    let client = client_with(config, &engine_config()).await;
    let answer = client.ok("/llm/v1/chat/completions", &chat(json!({"logprobs": true}))).await;
    for name in ["prompt_logprobs", "prompt_token_ids", "kv_transfer_params"] {
        assert_eq!(answer.get(name), Some(&Value::Null), "{name}");
    }
    assert_eq!(answer["choices"][0]["message"].get("reasoning"), Some(&Value::Null));
    let token = answer["choices"][0]["logprobs"]["content"][0]["token"].as_str().expect("a token");
    assert!(token.starts_with("token_id:"), "{token}");
    assert_eq!(client.get("/get_load").await.json()["load"], 0);
    assert_eq!(client.get("/llm/health").await.status, StatusCode::OK);
    let info = client.get("/tokenizer_info").await.json();
    assert_eq!((&info["vocab_size"], &info["eos_token"]), (&json!(160), &json!("</s>")));
}

#[tokio::test]
async fn responses_tell_of_their_input_and_probabilities() {
    let client = client().await;
    let body = json!({"input": "Hi", "temperature": 0, "max_output_tokens": 8, "truncation": "auto",
        "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let answer = client.ok(RESPONSES, &body).await;
    assert_eq!(answer["truncation"], "auto");
    let part = &answer["output"][0]["content"][0];
    let logprobs = part["logprobs"].as_array().expect("log-probabilities");
    assert!(!logprobs.is_empty(), "{answer}");
    let text: String = logprobs.iter().filter_map(|entry| entry["token"].as_str()).collect();
    assert!(text.contains(part["text"].as_str().expect("text").trim()), "{text}: {part}");
    assert!(logprobs.iter().all(|entry| entry["top_logprobs"].as_array().is_some_and(|top| top.len() == 2)));
    let id = answer["id"].as_str().expect("an id");
    let items = client.get(&format!("/v1/responses/{id}/input_items")).await.json();
    assert_eq!(items["data"].as_array().expect("items").len(), 1, "{items}");
    assert_eq!(items["data"][0]["content"][0]["text"], "Hi");
    // What is too long loses its beginning instead of being refused.
    let long = "x".repeat(common::MAX_MODEL_LEN + 10);
    let body = json!({"input": long, "max_output_tokens": 4});
    assert_eq!(client.post(RESPONSES, &body).await.status, StatusCode::BAD_REQUEST);
    client.ok(RESPONSES, &with(body, json!({"truncation": "auto"}))).await;
}

#[tokio::test]
async fn only_allowed_tools_are_called() {
    let client = with_tools().await;
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}});
    let choice = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "g"}}]}});
    let answer = client
        .ok(CHAT, &chat(json!({"tools": [tool("f"), tool("g"), tool("h")], "tool_choice": choice})))
        .await;
    let calls = answer["choices"][0]["message"]["tool_calls"].as_array().expect("calls");
    assert!(!calls.is_empty() && calls.iter().all(|call| call["function"]["name"] == "g"), "{answer}");
    let tools = json!([{"type": "function", "name": "f"}]);
    let choice =
        json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]});
    let (status, error) =
        refused(&client, RESPONSES, &json!({"input": "Hi", "tools": tools, "tool_choice": choice})).await;
    assert_eq!((status, &error["param"]), (StatusCode::BAD_REQUEST, &json!("tool_choice")), "{error}");
}

#[tokio::test]
async fn embeddings_are_made_as_asked() {
    let client = client().await;
    let vector = async |more: Value| -> Vec<f64> {
        let answer = client.ok("/v1/embeddings", &with(json!({"input": "Hello"}), more)).await;
        answer["data"][0]["embedding"]
            .as_array()
            .expect("a vector")
            .iter()
            .filter_map(Value::as_f64)
            .collect()
    };
    let length = |vector: &[f64]| vector.iter().map(|x| x * x).sum::<f64>().sqrt();
    let (unit, raw) = (vector(json!({})).await, vector(json!({"normalize": false})).await);
    assert!((length(&unit) - 1.0).abs() < 1e-3 && (length(&raw) - 1.0).abs() > 1e-2, "{}", length(&raw));
    assert!((unit[0] * length(&raw) - raw[0]).abs() < 1e-3);
    let cut = vector(json!({"truncate_prompt_tokens": 3, "pooling": "last"})).await;
    assert_eq!(cut, vector(json!({"input": "llo"})).await);
    assert_ne!(cut, unit);
    for (name, value) in [("pooling", json!("mean")), ("truncate_prompt_tokens", json!(0))] {
        let (status, error) =
            refused(&client, "/v1/embeddings", &json!({"input": "Hello", name: value})).await;
        assert_eq!((status, &error["param"]), (StatusCode::BAD_REQUEST, &json!(name)), "{error}");
    }
}

#[tokio::test]
async fn a_batch_of_conversations_has_the_answers_that_each_has_alone() {
    let client = client().await;
    let batch = format!("{CHAT}/batch");
    let conversations = ["Hi", "Hello there", "Once"].map(|text| json!([{"role": "user", "content": text}]));
    let fields = json!({"temperature": 0, "max_tokens": 8, "ignore_eos": true});
    let body = with(fields.clone(), json!({"messages": conversations}));
    let answer = client.ok(&batch, &body).await;
    assert_eq!((&answer["object"], &answer["prompt_token_ids"]), (&json!("chat.completion"), &Value::Null));
    let (mut prompt_tokens, choices) = (0, answer["choices"].as_array().expect("choices"));
    assert_eq!(choices.len(), 3);
    for (index, (messages, choice)) in conversations.iter().zip(choices).enumerate() {
        let alone = client.ok(CHAT, &with(fields.clone(), json!({"messages": messages}))).await;
        assert_eq!(choice["index"], index);
        assert_eq!(choice["message"], alone["choices"][0]["message"]);
        prompt_tokens += alone["usage"]["prompt_tokens"].as_u64().expect("a number");
    }
    assert_eq!(answer["usage"]["prompt_tokens"], prompt_tokens);
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    // What one choice a conversation cannot say is refused by name.
    for (name, value) in [
        ("stream", json!(true)),
        ("n", json!(2)),
        ("best_of", json!(2)),
        ("use_beam_search", json!(true)),
        ("prompt_logprobs", json!(1)),
        ("tools", json!([{"type": "function", "function": {"name": "add"}}])),
        ("messages", json!([])),
        ("messages", Value::Null),
    ] {
        let (status, error) = refused(&client, &batch, &with(body.clone(), json!({ name: value }))).await;
        assert_eq!((status, &error["param"]), (StatusCode::BAD_REQUEST, &json!(name)), "{error}");
    }
    let one = json!([{"role": "user", "content": "Hi"}]);
    let (status, error) = refused(&client, &batch, &with(fields, json!({"messages": one}))).await;
    assert_eq!((status, &error["param"]), (StatusCode::BAD_REQUEST, &json!("messages[0]")), "{error}");
}

#[tokio::test]
async fn every_dialect_keeps_a_shape_in_anothers_words() {
    let client = client().await;
    let shape = json!({"guided_regex": "[ab]{4}c"});
    let answer = client.ok(MESSAGES, &message(shape.clone())).await;
    let text = answer["content"][0]["text"].as_str().expect("text");
    assert!(text.len() == 5 && text.ends_with('c'), "{text}");
    let input = json!({"input": "Hi", "max_output_tokens": 40});
    let answer = client.ok(RESPONSES, &with(input.clone(), shape.clone())).await;
    let text = answer["output"][0]["content"][0]["text"].as_str().expect("text");
    assert!(text.len() == 5 && text.ends_with('c'), "{text}");
    let format = json!({"type": "json_schema", "schema": {"type": "integer"}});
    let both = with(message(shape.clone()), json!({"output_config": {"format": format}}));
    let (status, error) = refused(&client, MESSAGES, &both).await;
    assert_eq!(
        (status, &error["type"]),
        (StatusCode::BAD_REQUEST, &json!("invalid_request_error")),
        "{error}"
    );
    let both = with(with(input, shape), json!({"text": {"format": {"type": "json_object"}}}));
    let (status, error) = refused(&client, RESPONSES, &both).await;
    assert_eq!((status, &error["param"]), (StatusCode::BAD_REQUEST, &json!("guided_regex")), "{error}");
    let letters: Vec<u32> = "ab".chars().map(|letter| 3 + letter as u32 - ' ' as u32).collect();
    let answer =
        client.ok(MESSAGES, &message(json!({"allowed_token_ids": letters, "ignore_eos": true}))).await;
    let text = answer["content"][0]["text"].as_str().expect("text");
    assert!(text.len() == 40 && text.chars().all(|letter| "ab".contains(letter)), "{text}");
}

#[tokio::test]
async fn a_list_is_no_object_however_deep() {
    let client = client().await;
    let function = json!({"type": "function", "function": ["add"]});
    for (path, body, param) in [
        (CHAT, chat(json!({"stream": true, "stream_options": [true]})), "stream_options"),
        (CHAT, chat(json!({"response_format": ["json_object", null, null]})), "response_format"),
        (CHAT, chat(json!({"tools": [["function", {"name": "add"}]]})), "tools[0]"),
        (CHAT, chat(json!({"tools": [function]})), "tools[0].function"),
        (RESPONSES, json!({"input": "Hi", "reasoning": ["low"]}), "reasoning"),
        (RESPONSES, json!({"input": "Hi", "text": [null]}), "text"),
    ] {
        let (status, error) = refused(&client, path, &body).await;
        assert_eq!((status, &error["param"]), (StatusCode::BAD_REQUEST, &json!(param)), "{error}");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains("invalid type: list, expected an object"), "{message}");
    }
    let lists = json!({"messages": [["user", "Hi"]]});
    let (status, error) = refused(&client, MESSAGES, &message(lists)).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{error}");
    assert!(error["message"].as_str().is_some_and(|text| text.contains("expected an object")), "{error}");
}
