//! `baton serve` under bad conditions: stuck logs, silent and half-closed clients, files that go away, ports that are
//! taken. The real binary over real sockets.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Baton, model_arg};
use serde_json::json;

/// A running server, which ends with the test.
struct Served {
    _home: Baton,
    child: Child,
    address: String,
    stderr: Option<ChildStderr>,
}

impl Served {
    fn start(model: &str, more: &[&str]) -> Self {
        let home = Baton::new();
        let args = [&["serve", model, "--port", "0", "--max-model-len", "1024"], more].concat();
        let mut command = home.command(&args);
        command
            .env_remove("BATON_API_KEY")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary starts");
        let stderr = child.stderr.take();
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("the ready line");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split_whitespace().next());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
        Self { _home: home, child, address, stderr }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout");
        stream
    }

    fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let sent = write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        sent.expect("the request leaves");
        stream
    }

    fn get(&self, path: &str) -> (u16, String) {
        read(self.send("GET", path, ""))
    }

    fn metric(&self, name: &str) -> f64 {
        let (_, page) = self.get("/metrics");
        let line = page.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("no {name}"))
    }

    /// Threads of the process, where the system tells (Linux).
    fn num_threads(&self) -> Option<usize> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        status.lines().find_map(|line| line.strip_prefix("Threads:"))?.trim().parse().ok()
    }

    fn wait(&mut self) -> i32 {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code().unwrap_or(-1);
            }
            assert!(started.elapsed() < Duration::from_secs(120), "the server does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(mut stream: TcpStream) -> (u16, String) {
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, answer)
}

fn completion(max_tokens: u32) -> String {
    json!({"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": true}).to_string()
}

#[test]
fn a_log_that_nobody_reads_stops_no_request() {
    let served = Served::start(&model_arg(), &["--max-queued-log-lines", "16", "--log-level", "debug"]);
    // The pipe holds some hundred lines; its reader never reads.
    for number in 0..1500 {
        assert_eq!(served.get("/version").0, 200, "request {number}");
    }
    assert_eq!(read(served.send("POST", "/v1/completions", &completion(4))).0, 200);
    assert!(served.metric("baton:log_lines_lost_total") > 0.0);
}

#[test]
fn a_closed_log_ends_nothing() {
    let mut served = Served::start(&model_arg(), &["--log-level", "debug"]);
    drop(served.stderr.take());
    for _ in 0..20 {
        assert_eq!(served.get("/version").0, 200);
    }
    assert_eq!(read(served.send("POST", "/v1/completions", &completion(4))).0, 200);
    assert!(served.metric("baton:log_lines_lost_total") > 0.0);
    let stopped = Command::new("kill").arg(served.child.id().to_string()).status().expect("kill runs");
    assert!(stopped.success());
    assert_eq!(served.wait(), 0);
}

#[test]
fn no_thread_is_started_after_the_start() {
    let served = Served::start(&model_arg(), &[]);
    let Some(before) = served.num_threads() else {
        println!("skipped: this system does not tell how many threads there are");
        return;
    };
    let chat = |format: serde_json::Value| {
        let message = json!([{"role": "user", "content": "Hi"}]);
        json!({"messages": message, "max_tokens": 8, "response_format": format}).to_string()
    };
    let schema = |number: u32| {
        let schema = json!({"type": "object", "properties": {format!("p{number}"): {"type": "integer"}}});
        chat(json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}))
    };
    let mut streams: Vec<TcpStream> = Vec::new();
    for number in 0..8 {
        streams.push(served.send("POST", "/v1/chat/completions", &schema(number)));
        streams.push(served.send("POST", "/v1/chat/completions", &chat(json!({"type": "text"}))));
        streams.push(served.send("POST", "/tokenize", &json!({"prompt": "some words"}).to_string()));
    }
    for stream in streams {
        let (status, answer) = read(stream);
        assert_eq!(status, 200, "{answer}");
    }
    assert_eq!(served.num_threads(), Some(before));
}

#[test]
fn silent_connections_keep_nobody_out() {
    let served = Served::start(&model_arg(), &["--max-connections", "4"]);
    let silent: Vec<TcpStream> = (0..40).map(|_| served.connect()).collect();
    for _ in 0..8 {
        assert_eq!(served.get("/health").0, 200);
        assert_eq!(served.get("/version").0, 200);
    }
    drop(silent);
    // All at work: probes are still answered, everything else is told to come back.
    let long = json!({"prompt": "Once", "max_tokens": 900, "ignore_eos": true, "stream": true}).to_string();
    let busy: Vec<TcpStream> = (0..4)
        .map(|_| {
            let mut stream = served.send("POST", "/v1/completions", &long);
            assert!(stream.read(&mut [0; 256]).expect("the answer begins") > 0);
            stream
        })
        .collect();
    assert_eq!(served.get("/health").0, 200);
    let (status, answer) = served.get("/version");
    assert_eq!(status, 503, "{answer}");
    assert!(answer.contains("--max-connections"), "{answer}");
    drop(busy);
}

#[test]
fn a_client_that_has_closed_its_sending_side_gets_its_answer() {
    let served = Served::start(&model_arg(), &["--half-close-timeout", "50"]);
    let stream = served.send("POST", "/v1/completions", &completion(30));
    stream.shutdown(Shutdown::Write).expect("half closed");
    let (status, answer) = read(stream);
    assert_eq!(status, 200, "{answer}");
    assert!(answer.contains("\"finish_reason\":\"length\""), "{answer}");
}

#[test]
fn ports_and_certificates_are_checked_before_a_model_is_loaded() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let baton = Baton::new();
    baton.fails(&["serve", "/no/such/model.gguf", "--port", &port], "cannot listen on 127.0.0.1");
    let certificate = ["--ssl-certfile", "/no/such/cert.pem", "--ssl-keyfile", "/no/such/key.pem"];
    let args = [&["serve", "/no/such/model.gguf", "--port", "0"][..], &certificate].concat();
    baton.fails(&args, "cert.pem");
}
