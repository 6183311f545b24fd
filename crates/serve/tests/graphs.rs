//! Graphs over HTTP: uploaded once, embedded as often as one likes, apart by key, within limits.

mod common;

use std::io::{Read, Write};
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use baton_graph::{Graph, GraphData, GraphRequest, HostRows, NanPolicy, Sampling};
use baton_serve::{Server, ServerConfig};
use common::{Client, client_with, engine_config, graph_engine, graph_serving, served_model};
use serde_json::{Value, json};

fn config() -> ServerConfig {
    ServerConfig { graph: Some(graph_serving()), ..ServerConfig::default() }
}

async fn graph_client() -> Client {
    client_with(config(), &engine_config()).await
}

fn ring(id: &str) -> Value {
    json!({"id": id, "edge_index": [[0, 1, 2, 3], [1, 2, 3, 0]],
        "features": [[1.0, 0.5], [0.0, 1.0], [-1.0, 2.0], [0.25, -0.5]]})
}

fn rows(answer: &Value) -> Vec<Vec<f32>> {
    let row = |row: &Value| {
        row["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
    };
    answer["data"].as_array().unwrap().iter().map(row).collect()
}

/// What the engine itself says.
fn expected(targets: Option<Vec<u32>>, sampling: Option<Sampling>) -> Vec<Vec<f32>> {
    let graph = Graph::new(4, &[(0, 1), (1, 2), (2, 3), (3, 0)]).unwrap();
    let values = vec![1.0, 0.5, 0.0, 1.0, -1.0, 2.0, 0.25, -0.5];
    let features = HostRows::from_f32(4, 2, values).unwrap();
    let data = Arc::new(GraphData::new("ring", 1, graph, features, NanPolicy::Reject).unwrap());
    let mut engine = graph_engine();
    engine.add_graph(GraphRequest { data, targets, sampling, priority: 0 }).unwrap();
    let embeddings = engine.run_all().unwrap().remove(0).result.unwrap();
    embeddings.values.chunks(embeddings.cols).map(<[f32]>::to_vec).collect()
}

async fn refused(client: &Client, path: &str, body: &Value, status: StatusCode, words: &str) {
    let answer = client.post(path, body).await;
    assert_eq!(answer.status, status, "{body}: {}", answer.text);
    assert!(
        answer.json()["error"]["message"].as_str().unwrap().contains(words),
        "{words:?}: {}",
        answer.text
    );
}

#[tokio::test]
async fn embeddings_are_those_of_the_engine() {
    let client = graph_client().await;
    let info = client.ok("/v1/graphs", &ring("ring")).await;
    assert_eq!((&info["num_nodes"], &info["num_edges"], &info["version"]), (&json!(4), &json!(4), &json!(1)));
    let all = client.ok("/v1/graphs/ring/embeddings", &json!({})).await;
    assert_eq!(rows(&all), expected(None, None));
    let some = json!({"nodes": [3, 1], "fan_outs": [1, -1], "seed": 5});
    let some = client.ok("/v1/graphs/ring/embeddings", &some).await;
    let sampling = Some(Sampling { fan_outs: vec![1, usize::MAX], seed: 5 });
    assert_eq!(rows(&some), expected(Some(vec![3, 1]), sampling));
    assert_eq!((&some["data"][0]["node"], &some["data"][1]["index"]), (&json!(3), &json!(1)));
    // The same bytes in base64: `<f` of the first number.
    let base64 =
        client.ok("/v1/graphs/ring/embeddings", &json!({"nodes": [0], "encoding_format": "base64"})).await;
    assert_eq!(base64["data"][0]["embedding"].as_str().unwrap().len(), 16, "12 bytes");
    let listed = client.get("/v1/graphs").await.json();
    assert_eq!((&listed["data"][0]["id"], &listed["model"]["num_outputs"]), (&json!("ring"), &json!(3)));
    // 3 views at 8 rows a whole graph: what is there is not computed again.
    assert!(client.metric("baton:graph_rows_reused_total").await > 0.0);
    let deleted = client.delete("/v1/graphs/ring").await;
    assert_eq!(deleted.json()["deleted"], true);
    refused(&client, "/v1/graphs/ring/embeddings", &json!({}), StatusCode::NOT_FOUND, "no graph").await;
}

#[tokio::test]
async fn graphs_come_in_base64_too() {
    let client = graph_client().await;
    // [[0, 1], [1, 0]] and [[1, 2], [3, 4]], as NumPy writes them.
    let body = json!({"id": "b", "edge_index_base64": "AAAAAAEAAAABAAAAAAAAAA==",
        "features_base64": "AACAPwAAAEAAAEBAAACAQA=="});
    assert_eq!(client.ok("/v1/graphs", &body).await["num_nodes"], 2);
    let plain = json!({"id": "p", "edges": [[0, 1], [1, 0]], "features": [[1, 2], [3, 4]]});
    client.ok("/v1/graphs", &plain).await;
    let one_way = json!({"id": "u", "edges": [[0, 1]], "undirected": true, "features": [[1, 2], [3, 4]]});
    client.ok("/v1/graphs", &one_way).await;
    let of = async |id: &str| rows(&client.ok(&format!("/v1/graphs/{id}/embeddings"), &json!({})).await);
    let encoded = of("b").await;
    assert_eq!(encoded, of("p").await);
    assert_eq!(encoded, of("u").await);
}

#[tokio::test]
async fn wrong_graphs_are_refused_and_disturb_nobody() {
    let client = graph_client().await;
    client.ok("/v1/graphs", &ring("good")).await;
    let bad = StatusCode::BAD_REQUEST;
    let features = json!([[1, 2], [3, 4]]);
    for (body, words) in [
        (json!({"id": "x", "edges": [[0, 2]], "features": features}), "edge 0 goes from node 0 to node 2"),
        (json!({"id": "x", "edges": [[0, -1]], "features": features}), "whole number from 0"),
        (json!({"id": "x", "edges": [], "features": []}), "no nodes"),
        (json!({"id": "x", "edges": [], "features": [[1, 2], [3]]}), "node 1 has 1 features"),
        (json!({"id": "x", "edges": []}), "either features or features_base64"),
        (json!({"id": "x", "features": features}), "give one of edge_index"),
        (json!({"id": "a/b", "edges": [], "features": features}), "id must be"),
        (json!({"id": "x", "edge_index": [[0, 1], [0]], "features": features}), "2 sources and 1 targets"),
        (json!({"id": "x", "edges": [], "features_base64": "AAAA"}), "no whole number of rows"),
        (json!({"id": "x", "edges": [], "features_base64": "A*AA"}), "not base64"),
        // A NaN and a 0.
        (json!({"id": "x", "edges": [], "features_base64": "AADAfwAAAAA="}), "NaN policy"),
    ] {
        refused(&client, "/v1/graphs", &body, bad, words).await;
    }
    let nan = json!({"id": "nan", "edges": [], "features_base64": "AADAfwAAAAA=", "nan": "allow"});
    client.ok("/v1/graphs", &nan).await;
    let path = "/v1/graphs/good/embeddings";
    for (body, words) in [
        (json!({"nodes": [4]}), "target 4 is not a node"),
        (json!({"nodes": [1, 1]}), "asked for twice"),
        (json!({"nodes": []}), "no targets"),
        (json!({"fan_outs": [1]}), "1 fan-outs, but the model has 2 layers"),
        (json!({"fan_outs": [0, 1]}), "a fan-out is 0"),
        (json!({"fan_outs": [-2, 1]}), "a fan-out is -2"),
    ] {
        refused(&client, path, &body, bad, words).await;
    }
    assert_eq!(rows(&client.ok(path, &json!({})).await), expected(None, None));
}

#[tokio::test]
async fn a_changed_graph_has_a_higher_version() {
    let client = graph_client().await;
    client.ok("/v1/graphs", &ring("g")).await;
    refused(&client, "/v1/graphs", &ring("g"), StatusCode::CONFLICT, "exists in version 1").await;
    let before = rows(&client.ok("/v1/graphs/g/embeddings", &json!({})).await);
    let mut changed = ring("g");
    changed["version"] = 2.into();
    changed["features"][0][0] = (-3.0).into();
    client.ok("/v1/graphs", &changed).await;
    let answer = client.ok("/v1/graphs/g/embeddings", &json!({})).await;
    assert_eq!(answer["version"], 2);
    assert_ne!(rows(&answer), before);
}

#[tokio::test]
async fn keys_have_graphs_and_limits_of_their_own() {
    let keys = vec!["one".to_owned(), "two".to_owned()];
    let client = client_with(ServerConfig { api_keys: keys, ..config() }, &engine_config()).await;
    let (one, two) = (client.with_key("one"), client.with_key("two"));
    assert_eq!(client.post("/v1/graphs", &ring("mine")).await.status, StatusCode::UNAUTHORIZED);
    one.ok("/v1/graphs", &ring("mine")).await;
    assert_eq!(two.get("/v1/graphs").await.json()["data"], json!([]));
    assert_eq!(two.delete("/v1/graphs/mine").await.status, StatusCode::NOT_FOUND);
    refused(&two, "/v1/graphs/mine/embeddings", &json!({}), StatusCode::NOT_FOUND, "no graph").await;
    // The same name is another graph.
    let mut other = ring("mine");
    other["features"][0] = json!([9.0, 9.0]);
    two.ok("/v1/graphs", &other).await;
    let path = "/v1/graphs/mine/embeddings";
    let (first, second) = (one.ok(path, &json!({})).await, two.ok(path, &json!({})).await);
    assert_eq!(rows(&first), expected(None, None));
    assert_ne!(rows(&first), rows(&second));
    // Of four graphs, one key may have two.
    one.ok("/v1/graphs", &ring("second")).await;
    refused(&one, "/v1/graphs", &ring("third"), StatusCode::CONFLICT, "--max-graphs").await;
    two.ok("/v1/graphs", &ring("second")).await;
}

#[tokio::test]
async fn memory_and_answers_are_bounded() {
    let mut graph = graph_serving();
    graph.max_bytes = 200;
    let config = ServerConfig { graph: Some(graph), ..ServerConfig::default() };
    let client = client_with(config, &engine_config()).await;
    let tiny = |id: &str, nodes: usize| json!({"id": id, "edges": [], "features_base64": "A".repeat((nodes * 8).div_ceil(3) * 4)[..(nodes * 32).div_ceil(3)]});
    // 8 bytes of features and 4 of offsets a node.
    client.ok("/v1/graphs", &tiny("a", 15)).await;
    refused(&client, "/v1/graphs", &tiny("b", 10), StatusCode::CONFLICT, "no room").await;
    refused(&client, "/v1/graphs", &tiny("b", 30), StatusCode::PAYLOAD_TOO_LARGE, "--max-graph-memory").await;
    assert_eq!(client.delete("/v1/graphs/a").await.status, StatusCode::OK);
    client.ok("/v1/graphs", &tiny("b", 10)).await;
    client.ok("/v1/graphs/b/embeddings", &json!({})).await;
    let small =
        ServerConfig { graph: Some(graph_serving()), max_bodies_bytes: 11_500, ..ServerConfig::default() };
    let client = client_with(small, &engine_config()).await;
    client.ok("/v1/graphs", &tiny("c", 200)).await;
    // 60 bytes an embedding.
    let path = "/v1/graphs/c/embeddings";
    refused(&client, path, &json!({}), StatusCode::PAYLOAD_TOO_LARGE, "at most 191 nodes").await;
    client.ok(path, &json!({"nodes": [0, 199]})).await;
}

#[tokio::test]
async fn requests_are_counted_while_they_run() {
    let mut graph = graph_serving();
    graph.max_requests = 0;
    let config = ServerConfig { graph: Some(graph), ..ServerConfig::default() };
    let client = client_with(config, &engine_config()).await;
    client.ok("/v1/graphs", &ring("g")).await;
    let answer = client.post("/v1/graphs/g/embeddings", &json!({})).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(answer.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn without_a_graph_model_the_routes_say_so() {
    let client = common::client().await;
    refused(&client, "/v1/graphs", &ring("g"), StatusCode::NOT_FOUND, "--graph-model").await;
    let answer = client.finish(Request::get("/v1/graphs"), Body::empty()).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn many_ask_at_once() {
    let mut graph = graph_serving();
    graph.max_requests = 64;
    let client =
        client_with(ServerConfig { graph: Some(graph), ..ServerConfig::default() }, &engine_config()).await;
    client.ok("/v1/graphs", &ring("g")).await;
    let ask = |node: u32| {
        let client = client.clone();
        tokio::spawn(async move { client.ok("/v1/graphs/g/embeddings", &json!({"nodes": [node % 4]})).await })
    };
    let asked: Vec<_> = (0..32).map(ask).collect();
    for (node, answer) in asked.into_iter().enumerate() {
        let expected = expected(Some(vec![node as u32 % 4]), None);
        assert_eq!(rows(&answer.await.unwrap()), expected);
    }
    assert_eq!(client.metric("baton:graph_rows_computed_total").await, 8.0, "each row once");
    client.assert_idle().await;
}

/// Over a socket, as a client does it.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_does_both() {
    let model = served_model(&engine_config());
    let server = Server::bind(model, ServerConfig { port: 0, ..config() }).await.expect("a free port");
    let address = server.address();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(server.run(async move { drop(stopped.await) }));
    let asking = tokio::task::spawn_blocking(move || {
        let send = |path: &str, body: &Value| {
            let body = body.to_string();
            let mut socket = std::net::TcpStream::connect(address).expect("connects");
            let head = format!(
                "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
                 Content-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            socket
                .write_all(head.as_bytes())
                .and_then(|()| socket.write_all(body.as_bytes()))
                .expect("writes");
            let mut answer = String::new();
            socket.read_to_string(&mut answer).expect("reads");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            let start = answer.find("\r\n\r\n").expect("a body") + 4;
            serde_json::from_str::<Value>(&answer[start..]).expect("JSON")
        };
        send("/v1/graphs", &ring("g"));
        let graph = send("/v1/graphs/g/embeddings", &json!({"nodes": [2]}));
        let text = send("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 4}));
        (graph, text)
    });
    let (graph, text) = asking.await.expect("asks");
    assert_eq!(rows(&graph), expected(Some(vec![2]), None));
    assert!(text["choices"][0]["text"].is_string());
    stop.send(()).expect("it runs");
    running.await.expect("it ends").expect("it ends well");
}
