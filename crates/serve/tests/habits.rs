//! The dialects of Ollama and of llama.cpp's server.

mod common;

use axum::http::StatusCode;
use common::{MODEL, client};
use serde_json::{Value, json};

fn lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

#[tokio::test]
async fn ollama_streams_lines_of_json() {
    let client = client().await;
    let asked = json!({"model": format!("{MODEL}:latest"), "messages": [{"role": "user", "content": "a b"}],
        "options": {"temperature": 0, "num_predict": 6, "num_ctx": 4096}});
    let answer = client.post("/api/chat", &asked).await;
    assert_eq!(
        (answer.status, &answer.headers["content-type"]),
        (StatusCode::OK, &"application/x-ndjson".parse().unwrap())
    );
    let lines = lines(&answer.text);
    let (last, pieces) = lines.split_last().expect("at least one line");
    assert!(pieces.iter().all(|line| line["done"] == false && line["message"]["role"] == "assistant"));
    assert_eq!((&last["done"], &last["eval_count"]), (&json!(true), &json!(6)));
    assert!(last["total_duration"].as_u64() > Some(0) && last["created_at"].as_str().unwrap().ends_with('Z'));
    let text: String = pieces.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    let mut whole = asked.clone();
    whole["stream"] = false.into();
    let whole = client.ok("/api/chat", &whole).await;
    assert_eq!((whole["message"]["content"].as_str(), &whole["done"]), (Some(text.as_str()), &json!(true)));
    // The same as OpenAI's.
    let same = json!({"messages": [{"role": "user", "content": "a b"}], "temperature": 0, "max_tokens": 6});
    let same = client.ok("/v1/chat/completions", &same).await;
    assert_eq!(same["choices"][0]["message"]["content"].as_str(), Some(text.as_str()));
    assert_eq!(same["choices"][0]["finish_reason"], last["done_reason"]);
    client.assert_idle().await;
}

#[tokio::test]
async fn ollama_continues_and_answers_prompts() {
    let client = client().await;
    let options = json!({"temperature": 0, "num_predict": 5});
    let raw = json!({"model": MODEL, "prompt": "a b", "raw": true, "stream": false, "options": options});
    let raw = client.ok("/api/generate", &raw).await;
    let same = json!({"prompt": "a b", "temperature": 0, "max_tokens": 5});
    let same = client.ok("/v1/completions", &same).await;
    assert_eq!(raw["response"], same["choices"][0]["text"]);
    let chat = json!({"model": MODEL, "prompt": "a b", "system": "c", "options": options});
    let streamed = lines(&client.post("/api/generate", &chat).await.text);
    assert!(streamed.len() > 1 && streamed.iter().all(|line| line["response"].is_string()), "{streamed:?}");
    let shaped = json!({"model": MODEL, "prompt": "a", "stream": false, "options": {"num_predict": 200, "seed": 1},
        "format": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}});
    let shaped = client.ok("/api/generate", &shaped).await;
    let value: Value = serde_json::from_str(shaped["response"].as_str().unwrap()).expect("JSON");
    assert!(value["x"].is_boolean());
    let loaded = client.ok("/api/generate", &json!({"model": MODEL})).await;
    assert_eq!((&loaded["done_reason"], &loaded["response"]), (&json!("load"), &json!("")));
}

#[tokio::test]
async fn ollama_lists_what_is_served() {
    let client = client().await;
    for route in ["/api/tags", "/api/ps"] {
        let models = client.get(route).await.json();
        assert_eq!(
            (&models["models"][0]["name"], &models["models"][1]["name"]),
            (&json!(MODEL), &json!("alias"))
        );
        assert_eq!(models["models"][0]["details"]["family"], "llama");
    }
    assert!(client.get("/api/version").await.json()["version"].is_string());
    let shown = client.ok("/api/show", &json!({"model": MODEL})).await;
    assert!(shown["parameters"].as_str().unwrap().contains("temperature") && shown["details"].is_object());
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("completion")));
}

#[tokio::test]
async fn ollamas_errors_are_one_sentence() {
    let client = client().await;
    for (route, asked, status) in [
        ("/api/chat", json!({"model": "other", "messages": [{"role": "user", "content": "a"}]}), 404),
        ("/api/chat", json!({"messages": [{"role": "user", "content": "a"}]}), 400),
        ("/api/generate", json!({"model": MODEL, "prompt": "a", "images": ["x"]}), 400),
        ("/api/generate", json!({"model": MODEL, "prompt": "a", "suffix": "b"}), 400),
        (
            "/api/chat",
            json!({"model": MODEL, "messages": [{"role": "user", "content": "a"}], "format": "xml"}),
            400,
        ),
        ("/api/show", json!({"model": "other"}), 404),
        ("/api/blobs", json!({}), 404),
    ] {
        let answer = client.post(route, &asked).await;
        assert_eq!(answer.status.as_u16(), status, "{route} {asked}: {}", answer.text);
        assert!(answer.json()["error"].is_string(), "{}", answer.text);
    }
}

#[tokio::test]
async fn llamacpps_completion_is_a_translation() {
    let client = client().await;
    let asked = json!({"prompt": "a b", "temperature": 0, "n_predict": 6, "n_probs": 2});
    let whole = client.ok("/completion", &asked).await;
    let same =
        client.ok("/v1/completions", &json!({"prompt": "a b", "temperature": 0, "max_tokens": 6})).await;
    assert_eq!(whole["content"], same["choices"][0]["text"]);
    assert_eq!(
        (&whole["stop_type"], &whole["tokens_predicted"], &whole["stop"]),
        (&json!("limit"), &json!(6), &json!(true))
    );
    let endless = json!({"prompt": "a b", "temperature": 0, "n_predict": -1, "ignore_eos": true});
    let endless = client.ok("/completion", &endless).await;
    assert_eq!((&whole["truncated"], &endless["truncated"]), (&json!(false), &json!(true)));
    assert_eq!(whole["completion_probabilities"].as_array().map(Vec::len), Some(6));
    assert_eq!(whole["completion_probabilities"][0]["top_logprobs"].as_array().map(Vec::len), Some(2));
    assert!(
        whole["timings"]["predicted_per_second"].is_number()
            && whole["generation_settings"]["top_k"].is_number()
    );
    let mut streamed = asked.clone();
    streamed["stream"] = true.into();
    let text = client.post("/completion", &streamed).await.text;
    let events: Vec<Value> = text
        .split_terminator("\n\n")
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").expect("an event")).expect("JSON"))
        .collect();
    let (last, pieces) = events.split_last().expect("events");
    let joined: String = pieces.iter().map(|event| event["content"].as_str().unwrap()).collect();
    assert_eq!((Value::from(joined), &last["stop"]), (whole["content"].clone(), &json!(true)));
    assert!(
        whole["timings"]["predicted_ms"].as_f64() > Some(0.0)
            && whole["timings"]["prompt_ms"].as_f64() > Some(0.0)
    );
    assert_eq!(
        client.ok("/completions", &asked).await["content"],
        whole["content"],
        "llama.cpp's, without /v1"
    );
    let wrong = client.post("/completion", &json!({"n_predict": 3})).await;
    assert_eq!(wrong.status, StatusCode::BAD_REQUEST);
    let infill = client.post("/infill", &json!({"input_prefix": "a", "input_suffix": "b"})).await;
    assert!(infill.text.contains("was not made to fill in the middle"), "{}", infill.text);
}

#[tokio::test]
async fn llamacpps_own_names_are_known() {
    let client = client().await;
    let props = client.get("/props").await.json();
    assert!(
        props["total_slots"].as_u64() > Some(0) && props["default_generation_settings"]["n_ctx"].is_number()
    );
    let slots = client.get("/slots").await.json();
    assert_eq!(slots.as_array().map(Vec::len), props["total_slots"].as_u64().map(|count| count as usize));
    let plain = client.ok("/tokenize", &json!({"prompt": "a b", "add_special_tokens": false})).await;
    let content = client.ok("/tokenize", &json!({"content": "a b"})).await;
    assert_eq!(plain["tokens"], content["tokens"]);
    let pieces = client.ok("/tokenize", &json!({"content": "a b", "with_pieces": true})).await;
    assert!(pieces["tokens"][0]["id"].is_number() && pieces["tokens"][0]["piece"].is_string());
    let back = client.ok("/detokenize", &json!({"tokens": content["tokens"]})).await;
    assert_eq!(back["content"], back["prompt"]);
    let applied =
        client.ok("/apply-template", &json!({"messages": [{"role": "user", "content": "ab"}]})).await;
    assert_eq!(applied["prompt"], "ab|>");
    let models = client.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["default_sampling_params"]["temperature"], 1.0);
}

#[tokio::test]
async fn llamacpps_completion_takes_several_prompts_and_gives_the_fields_that_are_wanted() {
    let client = client().await;
    let ask = |prompt: Value| json!({"prompt": prompt, "n_predict": 4, "temperature": 0, "ignore_eos": true});
    let one = client.ok("/completion", &ask(json!("Hello"))).await;
    let tokens =
        client.ok("/tokenize", &json!({"content": "Hello", "add_special": true})).await["tokens"].clone();
    let mixed = json!([tokens, "Hello", {"prompt_string": "Hello"}, "Bye"]);
    let several = client.ok("/completion", &ask(mixed)).await;
    let several = several.as_array().expect("a list");
    assert_eq!(several.len(), 4);
    for (index, answer) in several.iter().enumerate() {
        assert_eq!((&answer["index"], &answer["tokens_predicted"]), (&json!(index), &json!(4)));
        assert_eq!(answer["tokens_evaluated"], if index < 3 { 5 } else { 3 });
    }
    assert!(several[..3].iter().all(|answer| answer["content"] == one["content"]), "{several:?}");
    let mut streamed = ask(json!(["Hello", "Bye"]));
    streamed["stream"] = true.into();
    assert_eq!(client.post("/completion", &streamed).await.status, StatusCode::BAD_REQUEST);
    let picture = json!({"prompt_string": "Hello", "multimodal_data": "x"});
    let refused = client.post("/completion", &ask(picture)).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert!(refused.text.contains("models take text only"), "{}", refused.text);
    let mut wanted = ask(json!("Hello"));
    wanted["response_fields"] = json!(["content", "generation_settings/n_predict", "none"]);
    let wanted = client.ok("/completion", &wanted).await;
    assert_eq!(wanted, json!({"content": one["content"], "generation_settings/n_predict": 4}));
    let question = json!({"messages": [{"role": "user", "content": "Hello"}]});
    for path in ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"] {
        assert_eq!(client.ok(path, &question).await, json!({"input_tokens": 7}));
    }
}

#[tokio::test]
async fn biases_may_be_a_list_of_tokens_and_texts() {
    let client = client().await;
    let ask = |bias: Value| json!({"prompt": "Hello", "n_predict": 4, "temperature": 0, "return_tokens": true, "logit_bias": bias});
    let plain = client.ok("/completion", &ask(json!(null))).await;
    let first = plain["tokens"][0].as_u64().expect("a token");
    let by_map = client.ok("/completion", &ask(json!({first.to_string(): -100}))).await;
    let by_list = client.ok("/completion", &ask(json!([[first, -100]]))).await;
    assert_ne!(by_map["tokens"][0], plain["tokens"][0]);
    assert_eq!(by_list["tokens"], by_map["tokens"]);
    let letters = client.ok("/tokenize", &json!({"content": "ab"})).await["tokens"].clone();
    let by_text = client.ok("/completion", &ask(json!([["ab", 100]]))).await;
    let is_one_of_them = |token: &Value| letters.as_array().is_some_and(|letters| letters.contains(token));
    assert!(
        by_text["tokens"].as_array().is_some_and(|tokens| tokens.iter().all(is_one_of_them)),
        "{by_text}"
    );
    let text_in_map = client.ok("/completion", &ask(json!({"ab": 100}))).await;
    assert_eq!(text_in_map["tokens"], by_text["tokens"]);
    for wrong in [json!(5), json!([[1]]), json!([["x".repeat(65), 1]]), json!({"x".repeat(65): 1})] {
        let refused = client.post("/completion", &ask(wrong)).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        assert!(refused.text.contains("logit_bias"), "{}", refused.text);
    }
}

#[tokio::test]
async fn texts_and_token_ids_are_mixed_in_prompts() {
    let client = client().await;
    let ids = client.ok("/tokenize", &json!({"content": "lo w"})).await["tokens"].clone();
    let mut mixed = vec![json!("Hel")];
    mixed.extend(ids.as_array().expect("ids").iter().cloned());
    mixed.push(json!("orld"));
    let ask = |prompt: Value| json!({"prompt": prompt, "n_predict": 4, "temperature": 0});
    let plain = client.ok("/completion", &ask(json!("Hello world"))).await;
    let one = client.ok("/completion", &ask(json!(mixed))).await;
    assert_eq!((&one["content"], &one["prompt"]), (&plain["content"], &plain["prompt"]));
    let many = client.ok("/completion", &ask(json!(["Hello world", mixed, ids]))).await;
    assert_eq!(many.as_array().map(Vec::len), Some(3));
    assert_eq!((&many[1]["content"], &many[2]["prompt"]), (&plain["content"], &json!("lo w")));
    let vectors = client.ok("/v1/embeddings", &json!({"input": ["Hello world", mixed]})).await;
    assert_eq!(vectors["data"][0]["embedding"], vectors["data"][1]["embedding"]);
    let wrong = client.post("/completion", &ask(json!([1, [2]]))).await;
    assert_eq!(wrong.status, StatusCode::BAD_REQUEST, "{}", wrong.text);
}

#[tokio::test]
async fn sagemaker_has_one_address_for_all() {
    let client = client().await;
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 4});
    let completion = json!({"prompt": "a", "temperature": 0, "max_tokens": 4});
    for (path, body) in [("/v1/chat/completions", &chat), ("/v1/completions", &completion)] {
        let (invoked, direct) = (client.ok("/invocations", body).await, client.ok(path, body).await);
        assert_eq!((&invoked["object"], &invoked["choices"]), (&direct["object"], &direct["choices"]));
    }
    let input = json!({"input": "a"});
    assert_eq!(
        client.ok("/invocations", &input).await["data"],
        client.ok("/v1/embeddings", &input).await["data"]
    );
    let mut streamed = chat.clone();
    streamed["stream"] = true.into();
    assert!(!client.events("/invocations", &streamed).await.is_empty());
    for wrong in [json!({}), json!({"text_2": "a"})] {
        let refused = client.post("/invocations", &wrong).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        assert!(refused.text.contains("messages, prompt, input"), "{}", refused.text);
    }
    assert_eq!(client.get("/ping").await.status, StatusCode::OK);
    client.assert_idle().await;
}

#[tokio::test]
async fn roles_are_any_words() {
    let client = client().await;
    let ask = |content: Value| json!({"messages": [{"role": "my-own_role", "content": content}], "temperature": 0, "max_tokens": 4});
    let one = client.ok("/v1/chat/completions", &ask(json!("a b"))).await;
    let other = client.ok("/v1/chat/completions", &ask(json!([{"type": "text", "text": "a b"}]))).await;
    assert_eq!(one["choices"], other["choices"]);
    for role in ["", "<|im_start|>", "two words", &"x".repeat(65)] {
        let body = json!({"messages": [{"role": role, "content": "a"}]});
        let refused = client.post("/v1/chat/completions", &body).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{role}");
        assert!(refused.text.contains("messages[0].role"), "{}", refused.text);
    }
}

#[tokio::test]
async fn tools_are_part_of_the_prompt_that_is_shown_and_counted() {
    let client = client().await;
    let plain = json!({"messages": [{"role": "user", "content": "ab"}]});
    let mut with_tools = plain.clone();
    with_tools["tools"] = json!([{"type": "function", "function": {"name": "tell_time"}}]);
    let prompt = client.ok("/apply-template", &with_tools).await["prompt"].clone();
    assert!(prompt.as_str().is_some_and(|prompt| prompt.contains("tell_time")), "{prompt}");
    let count = |answer: Value| answer["count"].as_u64();
    assert!(count(client.ok("/tokenize", &with_tools).await) > count(client.ok("/tokenize", &plain).await));
}
