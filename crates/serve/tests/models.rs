//! Several models in one server: loaded when they are named, unloaded when nobody asks, never more than may be.

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::StatusCode;
use baton_serve::{AvailableModel, ModelSource, MoreModels, ServedModel, Server, ServerConfig};
use common::{Client, MODEL, client_with, engine_config, named_model};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Loads the golden model under any of its names, slowly if told so.
#[derive(Debug, Default)]
struct Folder {
    delay: Duration,
    loads: Mutex<HashMap<String, usize>>,
    at_once: AtomicUsize,
    most_at_once: AtomicUsize,
}

impl Folder {
    fn loads(&self, name: &str) -> usize {
        self.loads.lock().unwrap().get(name).copied().unwrap_or(0)
    }
}

impl ModelSource for Folder {
    fn list(&self) -> Vec<AvailableModel> {
        ["broken", "one", "three", "two"]
            .map(|name| AvailableModel { name: name.to_owned(), bytes: 7 })
            .into()
    }

    fn load(&self, name: &str) -> Result<ServedModel, String> {
        let now = self.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_at_once.fetch_max(now, Ordering::SeqCst);
        std::thread::sleep(self.delay);
        *self.loads.lock().unwrap().entry(name.to_owned()).or_default() += 1;
        self.at_once.fetch_sub(1, Ordering::SeqCst);
        if name == "broken" { Err("it is torn".to_owned()) } else { Ok(named_model(&engine_config(), name)) }
    }
}

fn config(folder: &Arc<Folder>, max_loaded: usize) -> ServerConfig {
    let more = MoreModels {
        source: Arc::clone(folder) as Arc<dyn ModelSource>,
        max_loaded,
        idle_timeout: Duration::from_secs(3600),
        load_timeout: Duration::from_secs(60),
    };
    ServerConfig { more_models: Some(more), ..ServerConfig::default() }
}

fn ask(model: &str) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0})
}

async fn loaded(client: &Client) -> Vec<String> {
    let cards = client.get("/v1/models").await.json();
    let cards = cards["data"].as_array().unwrap().clone();
    let loaded = cards.iter().filter(|card| card["loaded"] == true);
    loaded.map(|card| card["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_model_is_loaded_when_it_is_named() {
    let folder = Arc::new(Folder::default());
    let client = client_with(config(&folder, 2), &engine_config()).await;
    let cards = client.get("/v1/models").await.json();
    let ids: Vec<&str> =
        cards["data"].as_array().unwrap().iter().map(|card| card["id"].as_str().unwrap()).collect();
    assert_eq!(ids, [MODEL, "alias", "broken", "one", "three", "two"]);
    assert_eq!(loaded(&client).await, [MODEL, "alias"]);
    let expected = client.ok(CHAT, &ask(MODEL)).await["choices"][0]["message"]["content"].clone();
    for _ in 0..2 {
        let answer = client.ok(CHAT, &ask("one")).await;
        assert_eq!(
            (&answer["model"], &answer["choices"][0]["message"]["content"]),
            (&json!("one"), &expected)
        );
    }
    assert_eq!(folder.loads("one"), 1);
    assert_eq!(loaded(&client).await, [MODEL, "alias", "one"]);
    assert_eq!(client.get("/v1/models/one").await.json()["loaded"], true);
    // Every dialect finds it, and asks for the same.
    client.ok("/v1/completions", &json!({"model": "one", "prompt": "Hello", "max_tokens": 2})).await;
    let body = json!({"model": "one", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
    assert_eq!(client.ok("/v1/messages", &body).await["model"], "one");
    client.ok("/v1/embeddings", &json!({"model": "one", "input": "Hello"})).await;
    client.ok("/tokenize", &json!({"model": "one", "prompt": "Hello"})).await;
    let body =
        json!({"model": "one:latest", "prompt": "Hello", "stream": false, "options": {"num_predict": 2}});
    client.ok("/api/generate", &body).await;
    let stored =
        client.ok("/v1/responses", &json!({"model": "one", "input": "Hi", "max_output_tokens": 2})).await;
    let id = stored["id"].as_str().unwrap();
    assert_eq!(client.get(&format!("/v1/responses/{id}")).await.json()["model"], "one");
    assert_eq!(folder.loads("one"), 1);
    let tags = client.get("/api/tags").await.json();
    assert_eq!(tags["models"].as_array().unwrap().len(), 6);
    assert_eq!(client.get("/api/ps").await.json()["models"].as_array().unwrap().len(), 3);
    assert_eq!(client.metric("baton:models_loaded").await, 2.0);
}

#[tokio::test]
async fn what_is_not_there_or_broken_says_so() {
    let folder = Arc::new(Folder::default());
    let client = client_with(config(&folder, 1), &engine_config()).await;
    let unknown = client.post(CHAT, &ask("none")).await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    assert_eq!(client.get("/v1/models/none").await.status, StatusCode::NOT_FOUND);
    for _ in 0..2 {
        let broken = client.post(CHAT, &ask("broken")).await;
        assert_eq!(broken.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(
            broken.text.contains("it is torn") && broken.text.contains("model_not_loaded"),
            "{}",
            broken.text
        );
    }
    assert_eq!(folder.loads("broken"), 2, "it is tried again");
    client.ok(CHAT, &ask("one")).await;
}

#[tokio::test]
async fn all_who_ask_while_it_is_loaded_wait_for_one_load() {
    let folder = Arc::new(Folder { delay: Duration::from_millis(300), ..Folder::default() });
    let client = client_with(config(&folder, 1), &engine_config()).await;
    let asking = |model: &'static str| {
        let client = client.clone();
        tokio::spawn(async move { client.ok(CHAT, &ask(model)).await })
    };
    let asked: Vec<_> = (0..6).map(|_| asking("one")).chain([asking(MODEL)]).collect();
    for answer in asked {
        answer.await.expect("an answer");
    }
    assert_eq!((folder.loads("one"), folder.most_at_once.load(Ordering::SeqCst)), (1, 1));
    // A client that leaves does not break off the load.
    let leaving = asking("two");
    while folder.at_once.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    leaving.abort();
    client.ok(CHAT, &ask("two")).await;
    assert_eq!(folder.loads("two"), 1);
}

#[tokio::test]
async fn the_one_that_was_idle_for_longest_makes_room() {
    let folder = Arc::new(Folder::default());
    let client = client_with(config(&folder, 2), &engine_config()).await;
    for name in ["one", "two", "one", "three"] {
        client.ok(CHAT, &ask(name)).await;
    }
    assert_eq!(loaded(&client).await, [MODEL, "alias", "one", "three"]);
    client.ok(CHAT, &ask("two")).await;
    assert_eq!(loaded(&client).await, [MODEL, "alias", "three", "two"]);
    assert_eq!(client.metric("baton:model_unloads_total").await, 2.0);
    assert_eq!((folder.loads("one"), folder.loads("two"), folder.loads("three")), (1, 2, 1));
}

#[tokio::test]
async fn a_model_at_work_is_not_unloaded() {
    let folder = Arc::new(Folder::default());
    let mut config = config(&folder, 1);
    config.more_models.as_mut().unwrap().load_timeout = Duration::from_millis(600);
    let client = client_with(config, &engine_config()).await;
    client.ok(CHAT, &ask("one")).await;
    // A stream that is not read to its end keeps its model.
    let mut body = ask("one");
    body["stream"] = true.into();
    let request = axum::http::Request::post(CHAT).header("content-type", "application/json");
    let open = client.send(request, body.to_string()).await;
    let refused = client.post(CHAT, &ask("two")).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE, "{}", refused.text);
    assert!(refused.text.contains("not ready") && refused.headers.contains_key("retry-after"));
    assert_eq!(loaded(&client).await, [MODEL, "alias", "one"]);
    drop(open);
    client.ok(CHAT, &ask("two")).await;
    assert_eq!(loaded(&client).await, [MODEL, "alias", "two"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_asks_for_is_unloaded_and_comes_again() {
    let folder = Arc::new(Folder::default());
    let mut config = config(&folder, 2);
    config.more_models.as_mut().unwrap().idle_timeout = Duration::ZERO;
    let model = common::served_model(&engine_config());
    let server = Server::bind(model, ServerConfig { port: 0, ..config }).await.expect("a free port");
    let client = Client::of(&server);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(server.run(async move { drop(stopped.await) }));
    for round in 1..=2 {
        client.ok(CHAT, &ask("one")).await;
        while loaded(&client).await.len() > 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(folder.loads("one"), round);
    }
    client.ok(CHAT, &ask("two")).await;
    stop.send(()).expect("it runs");
    running.await.expect("it ends").expect("it ends well");
}
