//! A server in process: the tiny golden model of `crates/model` on the reference backend, with a tokenizer of single
//! characters, so that every token can be read.
#![allow(dead_code, reason = "each test file uses its own part of this")]

use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use baton_backend::{KvDtype, ReferenceBackend};
use baton_core::SamplingParams;
use baton_cpu::{CpuGraph, CpuOptions};
use baton_engine::{Engine, EngineConfig};
use baton_graph::{GraphConfig, GraphEngine, GraphModelConfig, GraphService, synthetic};
use baton_model::{LoadFormat, ModelFiles};
use baton_serve::{GraphServing, ModelText, ServedModel, Server, ServerConfig};
use baton_text::{ChatTemplate, GgufVocab, Tokenizer};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::ServiceExt;

pub const MODEL: &str = "tiny";
/// The golden model's vocabulary and length.
const VOCAB_SIZE: usize = 160;
pub const MAX_MODEL_LEN: usize = 96;

/// Three control tokens, then the printable characters, then pairs of letters that no text is encoded with.
pub fn tokenizer() -> Tokenizer {
    let mut tokens: Vec<String> = ["<pad>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((' '..='~').map(|c| if c == ' ' { "Ġ".to_owned() } else { c.to_string() }));
    let letters = || 'a'..='z';
    let pairs = letters().flat_map(|first| letters().map(move |second| format!("{first}{second}")));
    tokens.extend(pairs.take(VOCAB_SIZE - tokens.len()));
    let kind = |index: usize| if index < 3 { 3 } else { 1 };
    let vocab = GgufVocab {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        token_types: (0..tokens.len()).map(kind).collect(),
        tokens,
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        add_bos: Some(false),
        ..GgufVocab::default()
    };
    Tokenizer::from_gguf(vocab).expect("the vocabulary is sound")
}

pub fn engine_config() -> EngineConfig {
    EngineConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: Some(MAX_MODEL_LEN),
        block_size: Some(4),
        kv_dtype: KvDtype::F32,
        swap_space: 1 << 20,
        ..EngineConfig::default()
    }
}

/// A client of a server in process.
#[derive(Clone)]
pub struct Client {
    router: Router,
    key: Option<String>,
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The events of a stream, which must end with `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        let mut events: Vec<&str> = self
            .text
            .split_terminator("\n\n")
            .map(|event| event.strip_prefix("data: ").unwrap_or_else(|| panic!("no event: {event:?}")))
            .collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{}", self.text);
        events.into_iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
    }
}

const TEMPLATE: &str = "{% for message in messages %}{{ message.content }}|{% endfor %}\
                        {% if add_generation_prompt %}>{% endif %}";

pub async fn client() -> Client {
    client_with(ServerConfig::default(), &engine_config()).await
}

pub async fn client_with(config: ServerConfig, engine: &EngineConfig) -> Client {
    client_of(config, engine, TEMPLATE).await
}

/// A client of a server whose model has this chat template.
pub async fn client_of(config: ServerConfig, engine: &EngineConfig, template: &str) -> Client {
    let server = Server::bind(model_with(engine, template), ServerConfig { port: 0, ..config }).await;
    Client { router: server.expect("a free port").router(), key: None }
}

/// The golden model with its engine running.
pub fn served_model(engine: &EngineConfig) -> ServedModel {
    model_with(engine, TEMPLATE)
}

/// The same under another name.
pub fn named_model(engine: &EngineConfig, name: &str) -> ServedModel {
    model_of(engine, TEMPLATE, vec![name.to_owned()])
}

fn model_with(engine: &EngineConfig, template: &str) -> ServedModel {
    model_of(engine, template, vec![MODEL.to_owned(), "alias".to_owned()])
}

fn model_of(engine: &EngineConfig, template: &str, names: Vec<String>) -> ServedModel {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/data/golden/llama");
    let files = ModelFiles::open(&folder, LoadFormat::Auto).expect("the golden model");
    let engine = Engine::new(&files, Box::new(ReferenceBackend::new()), engine, &mut |_| {}).expect("loads");
    let text = ModelText {
        tokenizer: Some(Arc::new(tokenizer())),
        chat_template: Some(ChatTemplate::new(template, None, None).expect("the template is sound")),
        eos_token_ids: Arc::from([2]),
        default_sampling: SamplingParams::default(),
        sampling_source: String::new(),
    };
    ServedModel::start(engine, text, names, None)
}

/// GraphSAGE with two features, two layers and three outputs.
pub fn graph_engine() -> GraphEngine {
    let model = synthetic::sage(&[2, 8, 3], GraphModelConfig::default(), 1).expect("a model");
    let device = CpuGraph::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("a device");
    let config = GraphConfig { device_bytes: 1 << 20, host_bytes: 1 << 20, ..GraphConfig::default() };
    GraphEngine::new(model, Box::new(device), config).expect("an engine")
}

pub fn graph_serving() -> GraphServing {
    let (service, _) = GraphService::start(graph_engine()).expect("a thread");
    GraphServing { service, max_graphs: 4, max_bytes: 1 << 20, max_requests: 8 }
}

impl Client {
    pub fn of(server: &Server) -> Self {
        Self { router: server.router(), key: None }
    }

    pub fn with_key(&self, key: &str) -> Self {
        Self { key: Some(key.to_owned()), ..self.clone() }
    }

    pub async fn send(
        &self,
        request: axum::http::request::Builder,
        body: impl Into<Body>,
    ) -> axum::http::Response<Body> {
        let request = match &self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        };
        let request = request.body(body.into()).expect("a request");
        self.router.clone().oneshot(request).await.expect("the router answers")
    }

    pub async fn finish(&self, request: axum::http::request::Builder, body: impl Into<Body>) -> Answer {
        let (head, body) = self.send(request, body).await.into_parts();
        let bytes = body.collect().await.expect("a body").to_bytes();
        let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
        Answer { status: head.status, headers: head.headers, text }
    }

    /// Posts a stream whose events have names, which must be those of their types.
    pub async fn named_events(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let answer = self.post(path, &body).await;
        assert_eq!(answer.status, StatusCode::OK, "{body}: {}", answer.text);
        let event = |event: &str| {
            let (name, data) =
                event.strip_prefix("event: ").and_then(|rest| rest.split_once("\ndata: ")).expect(event);
            let value: Value = serde_json::from_str(data).expect("JSON");
            assert_eq!(value["type"], name);
            value
        };
        answer.text.split_terminator("\n\n").map(event).collect()
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.finish(Request::delete(path), Body::empty()).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.finish(Request::get(path), Body::empty()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.finish(Request::post(path).header("content-type", "application/json"), body.to_string()).await
    }

    /// Posts and expects success.
    pub async fn ok(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{body}: {}", answer.text);
        answer.json()
    }

    /// Posts a stream and gives its events.
    pub async fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let answer = self.post(path, &body).await;
        assert_eq!(answer.status, StatusCode::OK, "{body}: {}", answer.text);
        assert!(answer.headers["content-type"].to_str().unwrap().starts_with("text/event-stream"));
        answer.events()
    }

    /// The value of a metric by the beginning of its line.
    pub async fn metric(&self, line: &str) -> f64 {
        let page = self.get("/metrics").await.text;
        let found = page.lines().find(|found| found.starts_with(line));
        let found = found.unwrap_or_else(|| panic!("{line} is not in:\n{page}"));
        found.rsplit(' ').next().expect("a value").parse().expect("a number")
    }

    /// Waits until the engine holds nothing.
    pub async fn assert_idle(&self) {
        for _ in 0..6000 {
            let mut held = 0.0;
            for name in ["baton:kv_blocks_used", "vllm:num_requests_running", "vllm:num_requests_waiting"] {
                held += self.metric(name).await;
            }
            if held == 0.0 {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("blocks stay in use:\n{}", self.get("/metrics").await.text);
    }
}
