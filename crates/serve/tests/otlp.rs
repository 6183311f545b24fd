//! Spans arrive at a collector, with the caller's trace and vLLM's names; and no collector is no harm.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;
use std::time::Duration;

use baton_serve::{Server, ServerConfig};
use common::{engine_config, served_model};
use serde_json::{Value, json};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

/// Takes one POST after the other and passes on path and body.
fn collector() -> (String, mpsc::Receiver<(String, Value)>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.expect("a connection"));
            let (mut line, mut path, mut length) = (String::new(), String::new(), 0);
            while stream.read_line(&mut line).expect("a head") > 2 {
                let lower = line.to_lowercase();
                if let Some(rest) = lower.strip_prefix("content-length:") {
                    length = rest.trim().parse().expect("a length");
                } else if line.starts_with("POST") {
                    line.split(' ').nth(1).expect("a path").clone_into(&mut path);
                }
                line.clear();
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).expect("a body");
            stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}").expect("answered");
            if sender.send((path, serde_json::from_slice(&body).expect("JSON"))).is_err() {
                return;
            }
        }
    });
    (address, receiver)
}

/// Serves, posts a completion with this header, stops; the answer's status line.
async fn complete_once(endpoint: &str, traceparent: &str) -> String {
    let config = ServerConfig {
        port: 0,
        otlp_traces_endpoint: Some(endpoint.parse().expect("an address")),
        ..ServerConfig::default()
    };
    let server = Server::bind(served_model(&engine_config()), config).await.expect("a free port");
    let address = server.address();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(server.run(async {
        let _ = stopped.await;
    }));
    let traceparent = traceparent.to_owned();
    let answer = tokio::task::spawn_blocking(move || {
        let body =
            json!({"prompt": "Hello", "max_tokens": 6, "ignore_eos": true, "temperature": 0.5}).to_string();
        let mut stream = std::net::TcpStream::connect(address).expect("a connection");
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json";
        write!(
            stream,
            "{head}\r\ntraceparent: {traceparent}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    });
    let answer = answer.await.expect("the client is content");
    stop.send(()).expect("the server listens");
    running.await.expect("no panic").expect("a clean end");
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_span_arrives_with_the_callers_trace() {
    let (address, received) = collector();
    let answer = complete_once(&address, &format!("00-{TRACE}-b7ad6b7169203331-01")).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let (path, document) = received.recv_timeout(Duration::from_secs(60)).expect("a batch of spans");
    assert_eq!(path, "/v1/traces");
    let resource = &document["resourceSpans"][0];
    assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "baton");
    let spans = resource["scopeSpans"][0]["spans"].as_array().expect("spans");
    assert_eq!(spans.len(), 1, "{document}");
    let span = &spans[0];
    assert_eq!(span["traceId"], TRACE);
    assert_eq!(span["parentSpanId"], "b7ad6b7169203331");
    assert_eq!(span["spanId"].as_str().map(str::len), Some(16));
    assert_eq!(span["name"], "llm_request");
    let nanos = |key: &str| span[key].as_str().and_then(|text| text.parse::<u128>().ok()).expect("a time");
    assert!(nanos("startTimeUnixNano") < nanos("endTimeUnixNano"));
    let attribute = |key: &str| {
        let found = span["attributes"].as_array().unwrap().iter().find(|one| one["key"] == key);
        found.unwrap_or_else(|| panic!("{key} is not in {span}"))["value"].clone()
    };
    assert_eq!(attribute("gen_ai.response.model"), json!({"stringValue": "tiny"}));
    assert_eq!(attribute("gen_ai.usage.prompt_tokens"), json!({"intValue": "5"}));
    assert_eq!(attribute("gen_ai.usage.completion_tokens"), json!({"intValue": "6"}));
    assert_eq!(attribute("gen_ai.request.max_tokens"), json!({"intValue": "6"}));
    assert_eq!(attribute("gen_ai.request.temperature"), json!({"doubleValue": 0.5}));
    for key in
        ["time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode", "e2e"]
    {
        let seconds = attribute(&format!("gen_ai.latency.{key}"))["doubleValue"].as_f64().expect("seconds");
        assert!((0.0..60.0).contains(&seconds), "{key}: {seconds}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_caller_does_not_record_is_not_sent() {
    let (address, received) = collector();
    let answer = complete_once(&address, &format!("00-{TRACE}-b7ad6b7169203331-00")).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(received.recv_timeout(Duration::from_millis(500)).is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn no_collector_is_no_harm() {
    let nobody = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let answer = complete_once(&format!("http://{nobody}"), "nonsense").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
