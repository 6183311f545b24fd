//! `baton route` as a user runs it: the real binary in front of real servers with the default model.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Baton, model_arg};
use serde_json::{Value, json};

/// A running `baton`, which ends with the test.
struct Running {
    _home: Baton,
    child: Child,
    address: String,
}

impl Running {
    fn start(args: &[&str]) -> Self {
        let home = Baton::new();
        let mut child = home
            .command(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("the ready line");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split_whitespace().next());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
        Self { _home: home, child, address }
    }

    /// A worker that tells of its cached blocks.
    fn telling(events: &str) -> Self {
        let model = model_arg();
        let common = ["--port", "0", "--max-model-len", "1024", "--served-model-name", "smollm2"];
        Self::start(&[&["serve", &model][..], &common[..], &["--kv-events-config", events][..]].concat())
    }

    fn worker() -> Self {
        Self::start(&[
            "serve",
            &model_arg(),
            "--port",
            "0",
            "--max-model-len",
            "1024",
            "--served-model-name",
            "smollm2",
        ])
    }

    fn router(workers: &[&Self], more: &[&str]) -> Self {
        let urls: Vec<String> = workers.iter().map(|worker| format!("http://{}", worker.address)).collect();
        let mut args = vec!["route", "--port", "0", "--health-interval", "0.2", "--health-failures", "1"];
        args.extend(more);
        args.push("--worker-urls");
        args.extend(urls.iter().map(String::as_str));
        Self::start(&args)
    }

    fn open(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout");
        let len = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
             {headers}Content-Length: {len}\r\n\r\n{body}"
        )
        .expect("the request leaves");
        stream
    }

    /// Head and body as they came.
    fn raw(&self, method: &str, path: &str, headers: &str, body: &Value) -> (String, String) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut text = String::new();
        let _ = self.open(method, path, headers, &body).read_to_string(&mut text);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
        (head.to_ascii_lowercase(), body.to_owned())
    }

    /// Who answered a chat, which must succeed.
    fn chat(&self, headers: &str, content: &str) -> (String, Value) {
        let body = json!({"model": "smollm2", "messages": [{"role": "user", "content": content}],
                          "max_tokens": 4, "temperature": 0});
        let (head, body) = self.raw("POST", "/v1/chat/completions", headers, &body);
        assert!(head.starts_with("http/1.1 200"), "{head}\n{body}");
        let worker = head.lines().find_map(|line| line.strip_prefix("x-baton-worker: ")).expect("a worker");
        (worker.trim().to_owned(), serde_json::from_str(&body).expect("JSON"))
    }

    fn workers(&self) -> Value {
        serde_json::from_str(&self.raw("GET", "/workers", "", &Value::Null).1).expect("JSON")
    }

    fn until(&self, expect: impl Fn(&Value) -> bool) {
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(60) {
            if expect(&self.workers()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("never as expected: {}", self.workers());
    }

    fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn real_workers_are_routed_to_and_one_is_killed() {
    let (mut a, b) = (Running::worker(), Running::worker());
    let router = Running::router(&[&a, &b], &["--policy", "session"]);
    // A session stays with its worker; several sessions use both.
    let mut homes = std::collections::BTreeSet::new();
    for session in 0..6 {
        let header = format!("X-Session-Id: s{session}\r\n");
        let (first, answer) = router.chat(&header, "Say hello.");
        assert!(answer["usage"]["completion_tokens"].as_u64() > Some(0), "{answer}");
        assert_eq!(router.chat(&header, "And again.").0, first);
        homes.insert(first);
    }
    assert_eq!(homes.len(), 2, "six sessions on two workers: {homes:?}");
    // A stream passes through whole, with its end.
    let body = json!({"model": "smollm2", "prompt": "One, two,", "max_tokens": 8, "stream": true});
    let (head, events) = router.raw("POST", "/v1/completions", "", &body);
    assert!(head.contains("text/event-stream") && events.contains("data: [DONE]"), "{head}\n{events}");
    // Requests are under way on both workers when one of them is killed: none that had not begun is lost.
    let waiting: Vec<_> = (0..12)
        .map(|number| {
            let body = json!({"model": "smollm2", "prompt": "a word ".repeat(100 + number), "max_tokens": 2,
                              "ignore_eos": true, "temperature": 0});
            router.open("POST", "/v1/completions", &format!("X-Session-Id: s{number}\r\n"), &body.to_string())
        })
        .collect();
    a.kill();
    for mut stream in waiting {
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        assert!(text.contains("\"completion_tokens\":2"), "{text}");
    }
    router.until(|said| said["workers"][0]["healthy"] == false && said["workers"][1]["healthy"] == true);
    for session in 0..6 {
        assert_eq!(router.chat(&format!("X-Session-Id: s{session}\r\n"), "Still there?").0, b.address);
    }
    let page = router.raw("GET", "/", "", &Value::Null).1;
    assert!(page.contains("Who holds what"), "{page}");
    let metrics = router.raw("GET", "/metrics", "", &Value::Null).1;
    assert!(
        metrics.contains(&format!("baton:router_worker_up{{worker=\"http://{}\"}} 0", a.address)),
        "{metrics}"
    );
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Prompts are computed on workers behind the router's back; by their events it knows where to send them. One worker tells
/// over HTTP, the other over ZeroMQ.
#[test]
fn prompts_go_where_their_kv_is() {
    let endpoint = format!("tcp://127.0.0.1:{}", free_port());
    let zmq = format!("{{\"enable_kv_cache_events\": true, \"endpoint\": \"{endpoint}\"}}");
    let a = Running::telling(r#"{"enable_kv_cache_events": true, "publisher": "null"}"#);
    let b = Running::telling(&zmq);
    let second = format!("http://{},events={endpoint}", b.address);
    let router = Running::router(&[&a], &["--policy", "longest_prefix", "--worker-urls", &second]);
    router.until(|said| {
        said["workers"].as_array().is_some_and(|all| all.iter().all(|one| one["kv_events"] == true))
    });
    let prompts: Vec<String> = (0..8)
        .map(|number| format!("Chapter {number} tells of the river and of those who live on it. ").repeat(12))
        .collect();
    // Whatever the hash of a prompt says, the holder is another rule: even ones here, odd ones there.
    for (number, prompt) in prompts.iter().enumerate() {
        let body = json!({"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0});
        let worker = if number % 2 == 0 { &a } else { &b };
        let (head, said) = worker.raw("POST", "/v1/completions", "", &body);
        assert!(head.starts_with("http/1.1 200"), "{head}\n{said}");
    }
    let held = |said: &Value, worker: &Running| {
        let url = format!("http://{}", worker.address);
        let all = said["workers"].as_array().expect("a list of workers");
        all.iter().find(|one| one["url"] == url).and_then(|one| one["cached_blocks"].as_u64()).unwrap_or(0)
    };
    router.until(|said| held(said, &a) >= 32 && held(said, &b) >= 32);
    for (number, prompt) in prompts.iter().enumerate() {
        let body = json!({"model": "smollm2", "prompt": format!("{prompt} What then?"), "max_tokens": 1});
        let (head, said) = router.raw("POST", "/v1/completions", "", &body);
        let worker = head.lines().find_map(|line| line.strip_prefix("x-baton-worker: ")).expect("a worker");
        let holder = if number % 2 == 0 { &a } else { &b };
        assert_eq!(worker, holder.address, "prompt {number}");
        let said: Value = serde_json::from_str(&said).expect("JSON");
        let cached = said["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert!(cached > Some(64), "{said}");
    }
    let metrics = router.raw("GET", "/metrics", "", &Value::Null).1;
    assert!(metrics.contains("baton:router_choices_total{by=\"longest_prefix\"} 8"), "{metrics}");
    // What is forgotten there is forgotten here.
    a.raw("POST", "/reset_prefix_cache", "", &Value::Null);
    router.until(|said| held(said, &a) == 0 && held(said, &b) >= 32);
}

#[test]
fn a_signal_ends_the_router() {
    let worker = Running::start(&["route", "--port", "0", "--worker-urls", "http://127.0.0.1:9"]);
    let (head, body) = worker.raw("POST", "/v1/completions", "", &json!({"prompt": "x"}));
    assert!(head.starts_with("http/1.1 50"), "{head}\n{body}");
    assert!(body.contains("\"error\""), "{body}");
    let mut worker = worker;
    let id = worker.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().expect("kill runs").success());
    assert_eq!(worker.child.wait().expect("it ends").code(), Some(0));
}

#[test]
fn wrong_flags_say_what_to_do() {
    let baton = Baton::new();
    baton.fails(&["route"], "there are no workers");
    baton.fails(&["route", "--workers-file", "/nonexistent/workers"], "cannot read the workers file");
    let ran = baton.run(&["route", "--worker-urls", "https://secure:1"]);
    assert!(ran.code == 2 && ran.stderr.contains("TLS"), "{ran:?}");
    let ran = baton.run(&["route", "--policy", "best"]);
    assert!(ran.code == 2 && ran.stderr.contains("longest_prefix"), "{ran:?}");
}
