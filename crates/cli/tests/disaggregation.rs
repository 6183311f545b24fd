//! Prefill and decode in two processes: the real binary and a real model, in either order, and what happens when one of them is
//! lost, is a stranger, or is shouted at.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use common::Baton;
use common::worker::{Worker, cached, free_port, prompt, read_answer};
use serde_json::{Value, json};

/// The KV blocks that requests hold.
const BLOCKS_USED: &str = "baton:kv_blocks_used";
const HANDED_OVER: &str = "baton:kv_store_rows_total{store=\"transfer\",kind=\"fetched\"}";

fn body(prompt: &str) -> Value {
    json!({ "prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": true })
}

fn tokens(answer: &Value) -> &Value {
    let tokens = &answer["choices"][0]["token_ids"];
    assert!(tokens.as_array().is_some_and(|tokens| !tokens.is_empty()), "{answer}");
    tokens
}

fn prefill(baton: &Baton, key: &str, port: &str) -> Worker {
    let flags = ["--dtype", "float32", "--kv-role", "prefill", "--kv-transfer-port", port];
    Worker::start_with_key(baton, key, &flags)
}

fn decode(baton: &Baton, key: &str, port: &str) -> Worker {
    let workers = format!("127.0.0.1:{port}");
    let flags = ["--dtype", "float32", "--kv-role", "decode", "--kv-prefill-workers", &workers];
    Worker::start_with_key(baton, key, &flags)
}

/// What one process answers.
fn alone(baton: &Baton, bodies: &[Value]) -> Vec<Value> {
    let server = Worker::start(baton, &["--dtype", "float32"]);
    bodies.iter().map(|body| server.post(body)).collect()
}

/// The first leg as vLLM's router sends it; what the second one is to be given.
fn hand_over(worker: &Worker, path: &str, body: &Value) -> Value {
    let mut first = body.clone();
    first["max_tokens"] = json!(1);
    first["kv_transfer_params"] = json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
        "remote_host": null, "remote_port": null
    });
    let params = worker.ask(path, &first)["kv_transfer_params"].clone();
    assert_eq!(params["do_remote_prefill"], true, "{params}");
    params
}

#[test]
fn tokens_are_those_of_one_process() {
    let (baton, port, prompt) = (Baton::new(), free_port(), prompt(60));
    let chat = json!({
        "messages": [{"role": "user", "content": format!("Go on: {prompt}")}], "max_tokens": 12, "temperature": 0,
        "return_token_ids": true
    });
    let bodies =
        [&prompt, &format!("And then: {prompt}"), &format!("At last: {prompt}")].map(|prompt| body(prompt));
    let server = Worker::start(&baton, &["--dtype", "float32"]);
    let expected: Vec<Value> = bodies.iter().map(|body| server.post(body)).collect();
    let expected_chat = server.ask("/v1/chat/completions", &chat);
    drop(server);
    let (first, second) = (prefill(&baton, "shared", &port), decode(&baton, "shared", &port));
    // Prefill first: a router asks one and gives what it answered to the other. Some routers send the port as a text.
    let mut with_params = bodies[0].clone();
    with_params["kv_transfer_params"] = hand_over(&first, "/v1/completions", &bodies[0]);
    with_params["kv_transfer_params"]["remote_port"] = json!(port);
    let answer = second.post(&with_params);
    assert_eq!(tokens(&answer), tokens(&expected[0]));
    assert!(cached(&answer) >= 300, "{answer}");
    let mut with_params = chat.clone();
    with_params["kv_transfer_params"] = hand_over(&first, "/v1/chat/completions", &chat);
    let answer = second.ask("/v1/chat/completions", &with_params);
    assert_eq!(answer["choices"][0]["message"], expected_chat["choices"][0]["message"]);
    assert!(cached(&answer) >= 300, "{answer}");
    // Decode first: it asks by itself.
    let before = first.metric(HANDED_OVER);
    let answer = second.post(&bodies[1]);
    assert_eq!(tokens(&answer), tokens(&expected[1]));
    assert!(cached(&answer) >= 300, "{answer}");
    assert!(first.metric(HANDED_OVER) >= before + 20.0);
    // A worker that the decode worker was not told of is never asked, whatever a request says.
    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    stranger.set_nonblocking(true).unwrap();
    let mut elsewhere = body(&format!("Elsewhere: {prompt}"));
    elsewhere["kv_transfer_params"] = json!({
        "do_remote_prefill": true, "remote_host": "127.0.0.1", "remote_port": stranger.local_addr().unwrap().port()
    });
    second.post(&elsewhere);
    assert!(stranger.accept().is_err(), "nobody has connected");
    // Without the prefill worker the decode worker computes, and the tokens are the same.
    first.kill();
    let answer = second.post(&bodies[2]);
    assert_eq!((cached(&answer), tokens(&answer)), (0, tokens(&expected[2])), "{answer}");
    second.until(BLOCKS_USED, |used| used == 0.0);
}

/// Bytes that are no peer's, in several ways.
fn shout_at(port: &str) {
    let address = format!("127.0.0.1:{port}");
    let hello = [b"BATONKV1".as_slice(), &[7; 16]].concat();
    let endless = [hello.as_slice(), &u32::MAX.to_le_bytes(), &[5; 40]].concat();
    let noise: Vec<u8> =
        (0..1_u32 << 16).map(|byte| (byte.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let shouts = [b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".as_slice(), &noise, &hello, &endless, b""];
    for shout in shouts {
        let mut stream = TcpStream::connect(&address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        // It may have hung up before all is written.
        let _ = stream.write_all(shout);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() < 128, "a greeting is all that a stranger gets, not {} bytes", answer.len());
    }
}

#[test]
fn strangers_get_nothing_and_harm_nobody() {
    let (baton, port, prompt) = (Baton::new(), free_port(), prompt(60));
    let bodies = [&prompt, &format!("And then: {prompt}")].map(|prompt| body(prompt));
    let expected = alone(&baton, &bodies);
    let first = prefill(&baton, "the key", &port);
    let corrupt = "baton:kv_store_errors_total{store=\"transfer\",kind=\"corrupt\"}";
    // A decode worker with another key computes by itself.
    let wrong = decode(&baton, "another key", &port);
    let answer = wrong.post(&bodies[0]);
    assert_eq!((cached(&answer), tokens(&answer)), (0, tokens(&expected[0])), "{answer}");
    assert_eq!(first.metric(HANDED_OVER), 0.0);
    first.wait_for(corrupt, 1.0);
    drop(wrong);
    let before = first.metric(corrupt);
    shout_at(&port);
    first.wait_for(corrupt, before + 3.0);
    // Connections that say nothing take no place from those who have the key.
    let silent: Vec<TcpStream> =
        (0..100).map_while(|_| TcpStream::connect(format!("127.0.0.1:{port}")).ok()).collect();
    assert_eq!(silent.len(), 100);
    let second = decode(&baton, "the key", &port);
    let answer = second.post(&bodies[1]);
    assert_eq!(tokens(&answer), tokens(&expected[1]));
    assert!(cached(&answer) >= 300, "{answer}");
    drop(silent);
}

#[test]
fn a_lost_worker_leaves_nothing_behind() {
    let (baton, port, text) = (Baton::new(), free_port(), prompt(60));
    let bodies: Vec<Value> = (0..4).map(|number| body(&format!("Story {number}. {text}"))).collect();
    let expected = alone(&baton, &bodies);
    let mut first = prefill(&baton, "shared", &port);
    let mut second = decode(&baton, "shared", &port);
    for round in 0..3_u64 {
        let pause = Duration::from_millis(60 * round + 20);
        // The prefill worker goes while prompts are computed: every answer comes, and is right.
        let waiting: Vec<TcpStream> =
            bodies.iter().map(|body| second.send("/v1/completions", &salted(body, round))).collect();
        std::thread::sleep(pause);
        first.kill();
        for (stream, expected) in waiting.into_iter().zip(&expected) {
            let answer = read_answer(stream).expect("an answer");
            assert_eq!(tokens(&answer), tokens(expected), "round {round}");
        }
        second.until(BLOCKS_USED, |used| used == 0.0);
        first = prefill(&baton, "shared", &port);
        // The decode worker goes: what the other computed for it is let go of.
        second.kill();
        second = decode(&baton, "shared", &port);
        let waiting: Vec<TcpStream> =
            bodies.iter().map(|body| second.send("/v1/completions", &salted(body, 100 + round))).collect();
        std::thread::sleep(pause);
        second.kill();
        drop(waiting);
        first.until("vllm:num_requests_running", |running| running == 0.0);
        first.until(BLOCKS_USED, |used| used == 0.0);
        second = decode(&baton, "shared", &port);
        let answer = second.post(&salted(&bodies[0], 200 + round));
        assert_eq!(tokens(&answer), tokens(&expected[0]));
        assert!(cached(&answer) >= 300, "they have found each other again: {answer}");
    }
}

/// The same request for the first time.
fn salted(body: &Value, salt: u64) -> Value {
    let mut body = body.clone();
    body["cache_salt"] = json!(format!("{salt}"));
    body
}
