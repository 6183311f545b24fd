//! Structured outputs over HTTP. The tiny model writes nonsense, so that only the masks can make it write this.

mod common;

use common::client;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn schema() -> Value {
    json!({"type": "object", "additionalProperties": false, "required": ["name", "ok"], "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,5}$"},
        "ok": {"type": "boolean"},
        "kind": {"enum": ["x", "y"]},
    }})
}

fn assert_valid(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let name = value["name"].as_str().expect("a name");
    assert!((2..=5).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_lowercase()), "{text}");
    assert!(value["ok"].is_boolean(), "{text}");
    let keys: Vec<&String> = value.as_object().expect("an object").keys().collect();
    assert!(keys.iter().all(|key| ["name", "ok", "kind"].contains(&key.as_str())), "{text}");
}

#[tokio::test]
async fn a_chat_answers_in_json() {
    let client = client().await;
    let formats = [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(), "strict": true}}}),
        json!({"structured_outputs": {"json": schema()}}),
        json!({"guided_json": schema().to_string()}),
    ];
    for format in formats {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "temperature": 1, "max_tokens": 80,
            "n": 3, "seed": 5, "ignore_eos": true});
        body.as_object_mut().expect("an object").extend(format.as_object().expect("an object").clone());
        let answer = client.ok(CHAT, &body).await;
        let choices = answer["choices"].as_array().expect("choices");
        assert_eq!(choices.len(), 3);
        for choice in choices {
            assert_eq!(choice["finish_reason"], "stop", "{choice}");
            assert_eq!(choice["stop_reason"], Value::Null);
            assert_valid(choice["message"]["content"].as_str().expect("content"));
        }
    }
}

#[tokio::test]
async fn a_stream_has_the_same_text() {
    let client = client().await;
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "temperature": 1, "max_tokens": 80, "seed": 9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema()}}});
    let whole = client.ok(CHAT, &body).await;
    body["stream"] = json!(true);
    let events = client.post(CHAT, &body).await.events();
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().expect("content"));
    assert_valid(&text);
}

#[tokio::test]
async fn completions_take_every_shape() {
    let client = client().await;
    let ask = async |field: &str, value: Value| -> Vec<String> {
        let mut body = json!({"prompt": ["Hi", "Ho"], "temperature": 1, "max_tokens": 60, "seed": 1, "n": 2});
        body[field] = value;
        let answer = client.ok(COMPLETIONS, &body).await;
        let choices = answer["choices"].as_array().expect("choices");
        assert!(choices.iter().all(|choice| choice["finish_reason"] == "stop"), "{answer}");
        choices.iter().map(|choice| choice["text"].as_str().expect("text").to_owned()).collect()
    };
    for (field, value) in [
        ("structured_outputs", json!({"choice": ["yes", "no"]})),
        ("guided_choice", json!(["yes", "no"])),
        ("guided_grammar", json!("start: \"yes\" | \"no\"")),
        ("structured_outputs", json!({"regex": "yes|no"})),
    ] {
        let texts = ask(field, value).await;
        assert_eq!(texts.len(), 4);
        assert!(texts.iter().all(|text| text == "yes" || text == "no"), "{field}: {texts:?}");
    }
    for text in ask("guided_regex", json!("[0-9]{3}-[ab]")).await {
        assert!(text.len() == 5 && text.as_bytes()[3] == b'-', "{text}");
    }
}

#[tokio::test]
async fn many_at_once_each_have_their_own() {
    let client = client().await;
    let mut tasks = Vec::new();
    for number in 0..24 {
        let own = client.clone();
        tasks.push(tokio::spawn(async move {
            let client = own;
            let body = json!({"prompt": "Hi", "max_tokens": 40, "temperature": 1.5,
                "guided_json": {"const": {"number": number, "text": format!("t{number}")}}});
            let answer = client.ok(COMPLETIONS, &body).await;
            let text = answer["choices"][0]["text"].as_str().expect("text").to_owned();
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert_eq!(value, json!({"number": number, "text": format!("t{number}")}));
        }));
        if number % 3 == 0 {
            let client = client.clone();
            tasks.push(tokio::spawn(async move {
                let body = json!({"prompt": "Hi", "max_tokens": 20, "ignore_eos": true});
                assert_eq!(client.ok(COMPLETIONS, &body).await["usage"]["completion_tokens"], 20);
            }));
        }
    }
    for task in tasks {
        task.await.expect("no request fails");
    }
}

/// Large and never the same, so that each takes a while and none is found in the cache.
fn large_schema(number: usize) -> Value {
    let property = |index: usize| (format!("p{index}_{number}"), json!({"type": "integer"}));
    json!({"type": "object", "properties": (0..4000).map(property).collect::<serde_json::Map<_, _>>()})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_known_schema_does_not_wait_for_those_that_are_compiled() {
    let client = client().await;
    let ask = |schema: Value| json!({"prompt": "Hi", "max_tokens": 4, "guided_json": schema});
    client.ok(COMPLETIONS, &ask(schema())).await;
    let heavy: Vec<_> = (0..12)
        .map(|number| {
            let (client, body) = (client.clone(), ask(large_schema(number)));
            tokio::spawn(async move { client.post(COMPLETIONS, &body).await.status })
        })
        .collect();
    // All of them wait or are compiled; this one is known.
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    client.ok(COMPLETIONS, &ask(schema())).await;
    assert!(!heavy.iter().all(tokio::task::JoinHandle::is_finished), "it waited for all of them");
    heavy.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn a_schema_that_nobody_could_compile_is_refused_at_once() {
    let client = client().await;
    for step in [2_147_483_648_u64, 99_999_989] {
        let body = json!({"prompt": "Hi", "guided_json": {"type": "integer", "multipleOf": step}});
        let refused = client.post(COMPLETIONS, &body).await;
        assert_eq!(refused.status, 400, "{}", refused.text);
        assert!(refused.text.contains("the JSON schema cannot be used"), "{}", refused.text);
    }
}
