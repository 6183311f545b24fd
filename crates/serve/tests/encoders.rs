//! A server of encoders: embeddings, reranking and scores are those of PyTorch, in the shapes of OpenAI, Jina, Cohere and vLLM.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::http::StatusCode;
use baton_backend::ReferenceBackend;
use baton_core::SamplingParams;
use baton_engine::{EncoderEngine, EngineConfig};
use baton_model::{LoadFormat, ModelFiles};
use baton_serve::{ModelText, ServedModel, Server, ServerConfig};
use baton_text::Tokenizer;
use common::Client;
use serde_json::{Value, json};

const SEPARATOR: u64 = 2;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/data/golden").join(name)
}

/// A server of a golden encoder.
async fn client(name: &str) -> Client {
    let files = ModelFiles::open(&folder(name), LoadFormat::Auto).expect("the golden model");
    let backend = Box::new(ReferenceBackend::new());
    let engine = EncoderEngine::new(&files, backend, &EngineConfig::default(), &mut |_| {}).expect("loads");
    let tokenizer = std::fs::read(folder(name).join("tokenizer.json")).expect("tokenizer.json");
    let text = ModelText {
        tokenizer: Some(Arc::new(Tokenizer::from_hf(&tokenizer, None).expect("a tokenizer"))),
        chat_template: None,
        eos_token_ids: Arc::from([]),
        default_sampling: SamplingParams::default(),
        sampling_source: String::new(),
    };
    let model = ServedModel::start_encoder(engine, text, vec![name.to_owned()]);
    let config = ServerConfig { port: 0, ..ServerConfig::default() };
    Client::of(&Server::bind(model, config).await.expect("a free port"))
}

/// Texts or pairs of a golden model as their tokens without marks, and the results.
fn golden(name: &str) -> (Vec<Vec<String>>, Vec<Vec<f64>>) {
    let text = std::fs::read_to_string(folder(name).join("encoder.json")).expect("encoder.json");
    let json: Value = serde_json::from_str(&text).expect("JSON");
    let words = |ids: &Value| -> Vec<String> {
        let ids: Vec<u64> = serde_json::from_value(ids.clone()).expect("ids");
        let parts = ids[1..ids.len() - 1].split(|&id| id == SEPARATOR);
        let join = |part: &[u64]| part.iter().map(|id| format!("w{id}")).collect::<Vec<_>>().join(" ");
        parts.map(join).collect()
    };
    let texts = json["texts"].as_array().expect("texts").iter().map(words).collect();
    (texts, serde_json::from_value(json["results"].clone()).expect("results"))
}

fn close(got: &Value, expected: f64) {
    let got = got.as_f64().expect("a number");
    assert!((got - expected).abs() < 1e-4, "{got} is not {expected}");
}

#[tokio::test]
async fn embeddings_are_those_of_pytorch() {
    let client = client("bert").await;
    let (texts, vectors) = golden("bert");
    let texts: Vec<&str> = texts.iter().map(|parts| parts[0].as_str()).collect();
    let answer = client.ok("/v1/embeddings", &json!({"input": texts, "model": "bert"})).await;
    assert_eq!(answer["data"].as_array().expect("data").len(), texts.len());
    for (row, vector) in answer["data"].as_array().expect("data").iter().zip(&vectors) {
        let got = row["embedding"].as_array().expect("numbers");
        assert_eq!(got.len(), vector.len());
        got.iter().zip(vector).for_each(|(got, expected)| close(got, *expected));
    }
    let tokens: usize = texts.iter().map(|text| text.split(' ').count() + 2).sum();
    assert_eq!(answer["usage"]["prompt_tokens"], tokens);

    let short = client.ok("/v1/embeddings", &json!({"input": texts[2], "dimensions": 4})).await;
    let got = short["data"][0]["embedding"].as_array().expect("numbers").clone();
    let length = vectors[2][..4].iter().map(|x| x * x).sum::<f64>().sqrt();
    assert_eq!(got.len(), 4);
    got.iter().zip(&vectors[2]).for_each(|(got, expected)| close(got, expected / length));
    let packed = json!({"input": texts[2], "encoding_format": "base64"});
    let packed = client.ok("/v1/embeddings", &packed).await;
    assert_eq!(
        packed["data"][0]["embedding"].as_str().expect("a text").len(),
        (32_usize * 4).div_ceil(3) * 4
    );
}

#[tokio::test]
async fn a_cross_encoder_reranks_and_scores() {
    let client = client("bert-reranker").await;
    let (pairs, scores) = golden("bert-reranker");
    for (pair, score) in pairs.iter().zip(&scores) {
        let asked = json!({"text_1": pair[0], "text_2": pair[1]});
        for path in ["/v1/score", "/score"] {
            let answer = client.ok(path, &asked).await;
            assert_eq!(answer["data"][0]["object"], "score");
            close(&answer["data"][0]["score"], score[0]);
        }
    }
    let documents: Vec<&str> = pairs.iter().map(|pair| pair[1].as_str()).collect();
    let asked = json!({"query": pairs[1][0], "documents": documents});
    for path in ["/v1/rerank", "/rerank", "/v2/rerank"] {
        let answer = client.ok(path, &asked).await;
        let results = answer["results"].as_array().expect("results");
        assert_eq!(results.len(), documents.len());
        let relevance = |result: &Value| result["relevance_score"].as_f64().expect("a score");
        assert!(results.windows(2).all(|pair| relevance(&pair[0]) >= relevance(&pair[1])));
        for result in results {
            let index = result["index"].as_u64().expect("an index") as usize;
            assert_eq!(result["document"]["text"], documents[index]);
            if index == 1 {
                close(&result["relevance_score"], scores[1][0]);
            }
        }
    }
    let objects: Vec<Value> = documents.iter().map(|text| json!({"text": text})).collect();
    let best = json!({"query": pairs[1][0], "documents": objects, "top_n": 1, "return_documents": false});
    let best = client.ok("/v1/rerank", &best).await;
    assert_eq!(best["results"].as_array().expect("results").len(), 1);
    assert!(best["results"][0].get("document").is_none());
}

#[tokio::test]
async fn an_embedding_model_scores_by_the_cosine() {
    let client = client("bert-cls").await;
    let (texts, vectors) = golden("bert-cls");
    let cosine = |a: &[f64], b: &[f64]| {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    let many: Vec<&str> = texts[1..].iter().map(|parts| parts[0].as_str()).collect();
    let answer = client.ok("/score", &json!({"text_1": texts[0][0], "text_2": many})).await;
    for (row, vector) in answer["data"].as_array().expect("data").iter().zip(&vectors[1..]) {
        close(&row["score"], cosine(&vectors[0], vector));
    }
    let paired = json!({"text_1": [texts[1][0], texts[2][0]], "text_2": [texts[3][0], texts[0][0]]});
    let answer = client.ok("/score", &paired).await;
    close(&answer["data"][0]["score"], cosine(&vectors[1], &vectors[3]));
    close(&answer["data"][1]["score"], cosine(&vectors[2], &vectors[0]));
}

#[tokio::test]
async fn what_is_wrong_is_refused() {
    let reranker = client("bert-reranker").await;
    let embedder = client("bert").await;
    let refused = async |client: &Client, path: &str, body: Value, expected: &str| {
        let answer = client.post(path, &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
        assert!(answer.text.contains(expected), "{}", answer.text);
    };
    refused(&reranker, "/v1/embeddings", json!({"input": "w8"}), "scores pairs of texts").await;
    let long = vec!["w8"; 70].join(" ");
    for client in [&reranker, &embedder] {
        refused(client, "/v1/completions", json!({"prompt": "w8", "max_tokens": 4}), "encoder").await;
        let chat = json!({"messages": [{"role": "user", "content": "w8"}]});
        assert_eq!(client.post("/v1/chat/completions", &chat).await.status, StatusCode::BAD_REQUEST);
        refused(client, "/v1/rerank", json!({"documents": ["w8"]}), "query is missing").await;
        refused(client, "/v1/rerank", json!({"query": "w8", "documents": []}), "1 to 1023").await;
        refused(client, "/v1/rerank", json!({"query": "w8", "documents": ["w9"], "top_n": 0}), "at least 1")
            .await;
        refused(
            client,
            "/score",
            json!({"text_1": ["w8", "w9"], "text_2": ["w8", "w8", "w8"]}),
            "as many as text_2",
        )
        .await;
        let asked = json!({"query": "w8", "documents": [long]});
        assert_eq!(client.post("/v1/rerank", &asked).await.status, StatusCode::BAD_REQUEST);
        let cut = json!({"query": "w8", "documents": [long], "truncate_prompt_tokens": -1});
        client.ok("/v1/rerank", &cut).await;
    }
    refused(&embedder, "/v1/embeddings", json!({"input": "w8", "dimensions": 33}), "1 to 32").await;
    refused(&embedder, "/v1/embeddings", json!({"input": "w8", "pooling": "cls"}), "mean").await;
}
