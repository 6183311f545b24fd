//! The pinned system prompt: whole and cached for the first chat of every dialect and key, whatever came between.

mod common;

use baton_engine::EngineConfig;
use baton_serve::{Server, ServerConfig, SystemPrompt};
use common::{Client, client_of, client_with, engine_config, served_model};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
/// With the mark of the template behind it, 25 tokens of one character: six whole blocks of four.
const TEXT: &str = "Be brief and kind to all";
const PINNED: u64 = 24;

fn prompt(model: Option<&str>, text: &str) -> SystemPrompt {
    SystemPrompt { file: "house.txt".to_owned(), model: model.map(str::to_owned), text: text.to_owned() }
}

fn config() -> ServerConfig {
    ServerConfig { system_prompts: vec![prompt(None, TEXT)], ..ServerConfig::default() }
}

/// Tokens of the prompt, and those of them that were cached.
fn usage(answer: &Value) -> (u64, u64) {
    let usage = &answer["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
    (usage["prompt_tokens"].as_u64().expect("a count"), cached.expect("a count"))
}

async fn chat(client: &Client, messages: Value) -> (u64, u64) {
    usage(&client.ok(CHAT, &json!({"messages": messages, "max_tokens": 1})).await)
}

#[tokio::test]
async fn the_first_chat_of_every_key_finds_it_cached() {
    let api_keys = vec!["first".to_owned(), "second".to_owned()];
    let open = client_with(ServerConfig { api_keys, ..config() }, &engine_config()).await;
    let question = json!([{"role": "user", "content": "Hi"}]);
    for key in ["first", "second"] {
        // "Be brief and kind to all|Hi|>"
        assert_eq!(chat(&open.with_key(key), question.clone()).await, (29, PINNED), "{key}");
    }
    let salted = json!({"messages": question, "max_tokens": 1, "cache_salt": "mine"});
    assert_eq!(usage(&open.with_key("first").ok(CHAT, &salted).await), (29, PINNED));
    // What follows it is a tenant's own.
    let long = json!([{"role": "user", "content": "my secret question"}]);
    assert_eq!(chat(&open.with_key("first"), long.clone()).await.1, PINNED);
    assert_eq!(chat(&open.with_key("first"), long.clone()).await.1, 44);
    assert_eq!(chat(&open.with_key("second"), long).await.1, PINNED);
}

#[tokio::test]
async fn it_outlives_ten_times_the_cache() {
    // The longest sequence takes 24 of 40 blocks.
    let engine = EngineConfig { kv_cache_memory: Some(40 * block_bytes()), ..engine_config() };
    let client = client_with(config(), &engine).await;
    assert_eq!(client.metric("baton:kv_blocks_pinned").await, 6.0);
    let question = json!([{"role": "user", "content": "Hi"}]);
    assert_eq!(chat(&client, question.clone()).await, (29, PINNED));
    for number in 0..20 {
        let other = format!("{number:02}{}", "x".repeat(80));
        client.ok("/v1/completions", &json!({"prompt": other, "max_tokens": 4})).await;
    }
    let computed = client.metric("vllm:prompt_tokens_total").await;
    assert!(computed > 10.0 * 160.0, "{computed} tokens are ten times the cache");
    assert_eq!(chat(&client, question).await, (29, PINNED));
}

/// Two layers of the golden model in f32, four tokens per block.
fn block_bytes() -> u64 {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/data/golden/llama");
    let files =
        baton_model::ModelFiles::open(&folder, baton_model::LoadFormat::Auto).expect("the golden model");
    files.config().kv_spec(baton_backend::KvDtype::F32, 4).bytes_per_block() as u64
}

#[tokio::test]
async fn every_dialect_gets_it_and_none_loses_its_own() {
    let client = client_with(config(), &engine_config()).await;
    let user = json!({"role": "user", "content": "Hi"});
    let response = client.ok("/v1/responses", &json!({"input": "Hi", "max_output_tokens": 1})).await;
    assert_eq!(response["usage"]["input_tokens"], 29);
    assert_eq!(response["usage"]["input_tokens_details"]["cached_tokens"], PINNED);
    let with = json!({"input": "Hi", "instructions": "Sir", "max_output_tokens": 1});
    assert_eq!(client.ok("/v1/responses", &with).await["usage"]["input_tokens"], "Sir|Hi|>".len());
    // A response that follows another has it once.
    let next = json!({"input": "Yo", "previous_response_id": response["id"], "max_output_tokens": 1});
    let followed =
        client.ok("/v1/responses", &next).await["usage"]["input_tokens"].as_u64().expect("a count");
    assert!((32..40).contains(&followed), "{followed}");

    let message = json!({"messages": [user], "max_tokens": 1});
    let counted = client.ok("/v1/messages/count_tokens", &message).await;
    assert_eq!(counted["input_tokens"], 29);
    let another = json!({"messages": [{"role": "user", "content": "Yo"}], "max_tokens": 1});
    let answer = client.ok("/v1/messages", &another).await;
    assert_eq!(answer["usage"]["cache_read_input_tokens"], PINNED, "{answer}");
    let own = json!({"messages": [user], "system": "Sir", "max_tokens": 1});
    assert_eq!(client.ok("/v1/messages/count_tokens", &own).await["input_tokens"], 8);

    for role in ["system", "developer"] {
        let own = json!([{"role": role, "content": "Sir"}, user]);
        assert_eq!(chat(&client, own).await.0, 8, "{role}");
    }
    let tokens = client.ok("/tokenize", &json!({"messages": [user]})).await;
    assert_eq!(tokens["count"], 29);
    assert_eq!(client.post(CHAT, &json!({"messages": []})).await.status, 400);
}

#[tokio::test]
async fn names_have_their_own_and_clients_may_send_it_themselves() {
    let system_prompts = vec![prompt(None, TEXT), prompt(Some("alias"), "You are the other one.")];
    let named =
        client_with(ServerConfig { system_prompts, ..ServerConfig::default() }, &engine_config()).await;
    let ask = |model: &str| json!({"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    assert_eq!(usage(&named.ok(CHAT, &ask("tiny")).await), (29, PINNED));
    assert_eq!(usage(&named.ok(CHAT, &ask("alias")).await), (27, 20));

    let kept = client_with(ServerConfig { inject_system_prompt: false, ..config() }, &engine_config()).await;
    assert_eq!(usage(&kept.ok(CHAT, &ask("tiny")).await), (4, 0));
    let sent = json!([{"role": "system", "content": TEXT}, {"role": "user", "content": "Hi"}]);
    assert_eq!(chat(&kept, sent).await, (29, PINNED));
}

#[tokio::test]
async fn a_template_without_a_system_message_has_it_in_the_first_question() {
    let template = "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no') }}\
                    {% endif %}{{ message.content }}|{% endfor %}{% if add_generation_prompt %}>{% endif %}";
    let text = "Be brief and kind to all.";
    let config = ServerConfig { system_prompts: vec![prompt(None, text)], ..ServerConfig::default() };
    let client = client_of(config, &engine_config(), template).await;
    let (tokens, cached) = chat(&client, json!([{"role": "user", "content": "Hi"}])).await;
    // The test's vocabulary has no line breaks, which stand between the two.
    assert_eq!((tokens, cached), (text.len() as u64 + 4, 24));
}

#[tokio::test]
async fn one_that_cannot_be_used_is_named_before_the_server_is_ready() {
    let tight = EngineConfig { kv_cache_memory: Some(26 * block_bytes()), ..engine_config() };
    let uncached = EngineConfig { enable_prefix_caching: false, ..engine_config() };
    let long = "x".repeat(95);
    let huge = "x".repeat(1 << 20);
    for (engine, prompt, expected) in [
        (engine_config(), prompt(None, &long), "raise --max-model-len"),
        (engine_config(), prompt(None, &huge), "shorten the text"),
        (tight, prompt(None, TEXT), "raise --kv-cache-memory"),
        (uncached, prompt(None, TEXT), "--no-enable-prefix-caching"),
        (engine_config(), prompt(Some("nobody"), TEXT), "is served as tiny, alias"),
    ] {
        let config = ServerConfig { port: 0, system_prompts: vec![prompt], ..ServerConfig::default() };
        let bound = Server::bind(served_model(&engine), config).await;
        let error = bound.expect_err("it cannot be used").to_string();
        assert!(error.starts_with("system prompt house.txt") && error.contains(expected), "{error}");
    }
}
