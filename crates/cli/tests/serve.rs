//! `baton serve` as a user runs it: the real binary and the default model, over real sockets.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Baton, model_arg};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// Nothing takes so long, however loaded the machine is.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running server, which ends with the test.
struct Served {
    _home: Baton,
    child: Child,
    address: String,
    key: Option<&'static str>,
}

struct Reply {
    status: u16,
    head: String,
    body: String,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

impl Served {
    fn start(more: &[&str]) -> Self {
        Self::start_in(Baton::new(), &[&["--max-model-len", "2048"], more].concat())
    }

    fn start_in(home: Baton, more: &[&str]) -> Self {
        let model = model_arg();
        let mut args = vec!["serve", &model, "--port", "0", "--served-model-name", "smollm2"];
        args.extend(more);
        Self::spawn(home, &args)
    }

    fn spawn(home: Baton, args: &[&str]) -> Self {
        let mut child = home
            .command(args)
            .env_remove("BATON_API_KEY")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        stdout.read_line(&mut line).expect("the ready line");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split_whitespace().next());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
        line.clear();
        stdout.read_line(&mut line).expect("the hint");
        assert!(line.contains("curl"), "{line}");
        Self { _home: home, child, address, key: None }
    }

    fn open(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout");
        let key = self.key.map(|key| format!("Authorization: Bearer {key}\r\n")).unwrap_or_default();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n{key}\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .expect("the request leaves");
        stream
    }

    fn request(&self, method: &str, path: &str, body: &str) -> Reply {
        read_reply(self.open(method, path, body))
    }

    fn get(&self, path: &str) -> Reply {
        self.request("GET", path, "")
    }

    fn post(&self, path: &str, body: &Value) -> Reply {
        self.request("POST", path, &body.to_string())
    }

    fn metric(&self, name: &str) -> f64 {
        let page = self.get("/metrics").body;
        let line =
            page.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {page}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    fn signal(&self, name: &str) {
        let sent =
            Command::new("kill").args([name, &self.child.id().to_string()]).status().expect("kill runs");
        assert!(sent.success());
    }

    /// Waits for the process to end; its exit code.
    fn wait(&mut self) -> i32 {
        let started = Instant::now();
        while started.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait().expect("the process can be asked") {
                return status.code().unwrap_or(-1);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the server did not end within {PATIENCE:?}");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_reply(mut stream: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("the whole answer");
    let text = String::from_utf8(bytes).expect("UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let chunked = head.to_lowercase().contains("transfer-encoding: chunked");
    Reply { status, head: head.to_owned(), body: if chunked { unchunk(body) } else { body.to_owned() } }
}

fn unchunk(mut rest: &str) -> String {
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).expect("a chunk size");
        if size == 0 {
            return body;
        }
        body.push_str(&after[..size]);
        rest = after[size..].strip_prefix("\r\n").expect("the end of a chunk");
    }
    panic!("the answer was cut off: {body}");
}

fn events(body: &str) -> Vec<Value> {
    let mut events: Vec<&str> =
        body.split_terminator("\n\n").map(|event| event.trim_start_matches("data: ")).collect();
    assert_eq!(events.pop(), Some("[DONE]"), "{body}");
    events.into_iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
}

fn question(mut more: Value) -> Value {
    let mut body = json!({
        "model": "smollm2", "temperature": 0, "max_tokens": 24,
        "messages": [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
    });
    body.as_object_mut().unwrap().append(more.as_object_mut().unwrap());
    body
}

#[test]
fn serves_chats_streams_and_completions() {
    let served = Served::start(&[]);
    let whole = served.post(CHAT, &question(json!({})));
    assert_eq!(whole.status, 200, "{}", whole.body);
    let content = whole.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(content.contains("Paris"), "{content}");
    assert_eq!(whole.json()["choices"][0]["finish_reason"], "stop");

    let streamed =
        served.post(CHAT, &question(json!({"stream": true, "stream_options": {"include_usage": true}})));
    let events = events(&streamed.body);
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, content);
    assert_eq!(
        events.last().unwrap()["usage"]["completion_tokens"],
        whole.json()["usage"]["completion_tokens"]
    );
    // The second time, the prompt is in the prefix cache.
    let cached = &events.last().unwrap()["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert!(cached.as_u64().unwrap() > 0, "{cached}");

    let body =
        json!({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "logprobs": 2});
    let completion = served.post(COMPLETIONS, &body).json();
    let choice = &completion["choices"][0];
    assert!(choice["text"].as_str().unwrap().contains("Paris"), "{choice}");
    assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), 4);
    assert_eq!(
        choice["logprobs"]["tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| t.as_str().unwrap())
            .collect::<String>(),
        choice["text"].as_str().unwrap()
    );

    assert_eq!(served.get("/health").status, 200);
    assert_eq!(served.get("/v1/models").json()["data"][0]["id"], "smollm2");
    assert_eq!(served.request("POST", CHAT, "{").status, 400);
    assert_eq!(served.get("/v1/nothing").status, 404);
    assert_eq!(
        served.metric(
            "vllm:request_success_total{engine=\"0\",model_name=\"smollm2\",finished_reason=\"stop\"}"
        ),
        2.0
    );
}

/// The other dialects give the same answer, and embeddings tell topics apart.
#[test]
fn every_dialect_gives_the_same_answer() {
    let served = Served::start(&["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]);
    let ask = "What is the capital of France? Answer in one word.";
    let chat = served.post(CHAT, &question(json!({}))).json();
    let content = &chat["choices"][0]["message"]["content"];
    let body = json!({"model": "smollm2", "input": ask, "temperature": 0, "max_output_tokens": 24});
    let response = served.post("/v1/responses", &body).json();
    assert_eq!(response["status"], "completed");
    assert_eq!(&response["output"][0]["content"][0]["text"], content);
    let messages = json!([{"role": "user", "content": ask}]);
    let body = json!({"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 24});
    let message = served.post("/v1/messages", &body).json();
    assert_eq!(message["stop_reason"], "end_turn");
    assert_eq!(&message["content"][0]["text"], content);

    // This model's template knows no functions, so that they are told in words.
    let tool =
        json!({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}});
    let told = served.post(CHAT, &question(json!({"tools": [tool]})));
    assert_eq!(told.status, 200, "{}", told.body);
    let more = told.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(more > chat["usage"]["prompt_tokens"].as_u64().unwrap() + 50, "{more}");

    let body = json!({"input": ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Stocks fell sharply today."]});
    let answer = served.post("/v1/embeddings", &body).json();
    let vector = |index: usize| -> Vec<f64> {
        serde_json::from_value(answer["data"][index]["embedding"].clone()).expect("numbers")
    };
    let dot = |a: usize, b: usize| vector(a).iter().zip(vector(b)).map(|(x, y)| x * y).sum::<f64>();
    assert_eq!(vector(0).len(), 576);
    assert!((dot(0, 0) - 1.0).abs() < 1e-4);
    assert!(dot(0, 1) > dot(0, 2), "{} and {}", dot(0, 1), dot(0, 2));
}

#[test]
fn a_gone_client_frees_its_blocks() {
    let served = Served::start(&["--half-close-timeout", "1"]);
    let long = question(json!({"stream": true, "max_tokens": 1500, "ignore_eos": true}));
    let clients: Vec<TcpStream> = (0..4)
        .map(|_| {
            let mut stream = served.open("POST", CHAT, &long.to_string());
            let mut first = [0; 512];
            assert!(stream.read(&mut first).expect("the answer begins") > 0);
            stream
        })
        .collect();
    // Two that want their answer whole: nothing comes back before they go away.
    let whole = question(json!({"max_tokens": 1500, "ignore_eos": true})).to_string();
    let silent = [served.open("POST", CHAT, &whole), served.open("POST", CHAT, &whole)];
    let started = Instant::now();
    while served.metric("vllm:num_requests_running") < 6.0 {
        assert!(started.elapsed() < PATIENCE, "not all requests run");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(served.metric("baton:kv_blocks_used") > 0.0);
    assert_eq!(served.metric("baton:http_requests_in_flight"), 6.0);
    drop((clients, silent));
    let started = Instant::now();
    let held = ["baton:kv_blocks_used", "vllm:num_requests_running", "baton:http_requests_in_flight"];
    while held.iter().any(|name| served.metric(name) > 0.0) {
        assert!(started.elapsed() < PATIENCE, "blocks stay in use");
        std::thread::sleep(Duration::from_millis(20));
    }
    let aborted = "vllm:request_success_total{engine=\"0\",model_name=\"smollm2\",finished_reason=\"abort\"}";
    assert_eq!(served.metric(aborted), 6.0);
}

#[test]
fn a_signal_loses_no_accepted_request() {
    let mut served = Served::start(&[]);
    let long = question(json!({"stream": true, "max_tokens": 500, "ignore_eos": true}));
    let clients: Vec<TcpStream> = (0..3)
        .map(|_| {
            let mut stream = served.open("POST", CHAT, &long.to_string());
            // The head of the answer: the request is accepted.
            let mut first = [0; 15];
            stream.read_exact(&mut first).expect("the answer begins");
            assert_eq!(&first, b"HTTP/1.1 200 OK");
            stream
        })
        .collect();
    served.signal("-TERM");
    let started = Instant::now();
    while served.get("/ready").status != 503 {
        assert!(started.elapsed() < PATIENCE, "/ready still says yes");
    }
    let refused = served.post(CHAT, &question(json!({})));
    assert_eq!(refused.status, 503);
    assert!(refused.head.to_lowercase().contains("retry-after: 1"), "{}", refused.head);
    for mut client in clients {
        let mut rest = String::new();
        client.read_to_string(&mut rest).expect("the whole answer");
        let body = rest.split_once("\r\n\r\n").expect("a body").1;
        let events = events(&unchunk(body));
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    }
    assert_eq!(served.wait(), 0);
}

#[test]
fn keys_are_asked_for() {
    let mut served = Served::start(&["--api-key", "secret"]);
    assert_eq!(served.get("/v1/models").status, 401);
    assert_eq!(served.get("/health").status, 200);
    served.key = Some("secret");
    assert_eq!(served.get("/v1/models").status, 200);
}

#[test]
fn a_profile_is_a_chrome_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let mut served = Served::start(&["--profile", path.to_str().unwrap()]);
    assert_eq!(served.post(CHAT, &question(json!({"max_tokens": 5}))).status, 200);
    served.signal("-INT");
    assert_eq!(served.wait(), 0);
    let events: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).expect("a list of events");
    for phase in ["schedule", "launch", "wait", "apply", "deliver", "detokenise"] {
        assert!(events.as_array().unwrap().iter().any(|event| event["name"] == phase), "{phase}");
    }
}

#[test]
fn what_cannot_be_served_is_said_in_one_line() {
    let baton = Baton::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ran = baton.run(&["serve", &model_arg(), "--port", &port, "--log-level", "off"]);
    assert_eq!(ran.code, 1);
    common::assert_is_error(&ran, "cannot listen on 127.0.0.1");
    let ran = baton.run(&["serve", "--public-prefix", "/no/such/file.json"]);
    assert_eq!(ran.code, 1);
    common::assert_is_error(&ran, "--public-prefix: cannot read /no/such/file.json");
    let wrong = baton.home.path().join("prefix.json");
    std::fs::write(&wrong, "{\"role\": \"system\"}").unwrap();
    let ran = baton.run(&["serve", "--public-prefix", wrong.to_str().unwrap()]);
    common::assert_is_error(&ran, "must be a list of messages");
    let missing = ["--ssl-certfile", "/no/cert.pem", "--ssl-keyfile", "/no/key.pem", "--log-level", "off"];
    let ran = baton.run(&[&["serve", &model_arg(), "--port", "0"][..], &missing].concat());
    common::assert_is_error(&ran, "cannot read /no/cert.pem");
    let ran = baton.run(&["serve", "--host", "nowhere"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("not an address"), "{}", ran.stderr);
}

#[test]
fn a_system_prompt_stays_cached_for_good() {
    let home = Baton::new();
    let file = home.home.path().join("system.txt");
    let text =
        "You are the assistant of a small library. Answer in one sentence, and name the shelf. ".repeat(8);
    std::fs::write(&file, format!("{text}\n")).unwrap();
    let path = file.display().to_string();
    // SmolLM2 takes 23,040 bytes per token: about 1,000 tokens.
    let flags = [
        "--max-model-len",
        "512",
        "--kv-cache-memory",
        "22MiB",
        "--system-prompt-file",
        &path,
        "--api-key",
        "a",
    ];
    let mut served = Served::start_in(home, &flags);
    served.key = Some("a");
    let chat = |content: &str| {
        let messages = json!([{"role": "user", "content": content}]);
        let reply = served.post(CHAT, &json!({"messages": messages, "max_tokens": 1}));
        assert_eq!(reply.status, 200, "{}", reply.body);
        let usage = reply.json()["usage"].clone();
        let count = |value: &Value| value.as_u64().expect("a count") as usize;
        (count(&usage["prompt_tokens"]), count(&usage["prompt_tokens_details"]["cached_tokens"]))
    };
    let pinned = served.metric("baton:kv_blocks_pinned") as usize * 16;
    let (num_tokens, num_cached) = chat("Where are the maps?");
    assert!((100..num_tokens).contains(&pinned), "{pinned} of {num_tokens} tokens are pinned");
    // All but the question, the marks around it and a block that is not full.
    assert!(
        num_cached == pinned && num_cached + 48 > num_tokens,
        "{num_cached} of {num_tokens} tokens are cached"
    );
    let num_blocks = served.get("/metrics").body;
    let num_blocks = num_blocks.split("num_gpu_blocks=\"").nth(1).and_then(|rest| rest.split('"').next());
    let cache_tokens = 16 * num_blocks.and_then(|count| count.parse::<usize>().ok()).expect("a count");
    for number in 0..(10 * cache_tokens).div_ceil(480) {
        let prompt: Vec<usize> = (0..480).map(|index| 300 + (index * 37 + number * 1009) % 9000).collect();
        let reply = served.post(COMPLETIONS, &json!({"prompt": prompt, "max_tokens": 1}));
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    assert!(served.metric("vllm:prompt_tokens_total") as usize >= 10 * cache_tokens);
    assert_eq!(chat("Where are the maps?"), (num_tokens, pinned));
}

#[test]
fn a_graph_model_is_served_beside_the_language_model() {
    let graph_model =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../graph/tests/data/sage-mean.safetensors");
    let graph_model = graph_model.display().to_string();
    let served = Served::start(&["--graph-model", &graph_model, "--graph-threads", "1"]);
    let info = served.get("/v1/graphs").json();
    let (features, outputs) =
        (info["model"]["num_features"].as_u64().unwrap(), info["model"]["num_outputs"].clone());
    let row = |node: u64| (0..features).map(|col| (node * 7 + col * 3) % 11).collect::<Vec<_>>();
    let graph =
        json!({"id": "ring", "edges": [[0, 1], [1, 2], [2, 0]], "features": [row(0), row(1), row(2)]});
    assert_eq!(served.post("/v1/graphs", &graph).json()["num_edges"], 3);
    let answer = served.post("/v1/graphs/ring/embeddings", &json!({"nodes": [2]})).json();
    assert_eq!(answer["data"][0]["embedding"].as_array().unwrap().len() as u64, outputs.as_u64().unwrap());
    let text = served.post(COMPLETIONS, &json!({"prompt": "The sky is", "max_tokens": 2})).json();
    assert!(text["choices"][0]["text"].is_string(), "{text}");
    let page = served.get("/metrics").body;
    assert!(page.contains("baton:graph_rows_computed_total"), "{page}");
    Baton::new().fails(
        &["serve", &model_arg(), "--port", "0", "--graph-model", "none.safetensors"],
        "none.safetensors",
    );
}

#[test]
fn models_of_a_directory_are_loaded_on_demand() {
    let folder = tempfile::tempdir().expect("a directory");
    let models = folder.path().join("models");
    std::fs::create_dir(&models).expect("makes");
    for name in ["first.gguf", "second.gguf"] {
        std::os::unix::fs::symlink(model_arg(), models.join(name)).expect("links");
    }
    std::fs::write(models.join("torn.gguf"), "GGUF").expect("writes");
    let models = models.display().to_string();
    let home = Baton::new();
    let args =
        ["serve", "--model-dir", &models, "--port", "0", "--max-model-len", "256", "--max-num-seqs", "4"];
    let served = Served::spawn(home, &args);
    let listed = served.get("/v1/models").json();
    let card =
        |name: &str| listed["data"].as_array().unwrap().iter().find(|card| card["id"] == name).cloned();
    assert_eq!(card("first").unwrap()["loaded"], true);
    assert_eq!(card("second").unwrap()["loaded"], false);
    let ask =
        |model: &str| json!({"model": model, "prompt": "The sky is", "max_tokens": 4, "temperature": 0});
    let first = served.post(COMPLETIONS, &ask("first")).json();
    let second = served.post(COMPLETIONS, &ask("second")).json();
    assert_eq!(
        (&second["model"], &second["choices"][0]["text"]),
        (&json!("second"), &first["choices"][0]["text"])
    );
    let torn = served.post(COMPLETIONS, &ask("torn"));
    assert_eq!(torn.status, 503);
    assert!(torn.body.contains("could not be loaded"), "{}", torn.body);
    // The torn one took the place of the second, which comes again.
    assert_eq!(
        served.post(COMPLETIONS, &ask("second")).json()["choices"][0]["text"],
        first["choices"][0]["text"]
    );
    let empty = folder.path().join("empty");
    std::fs::create_dir(&empty).expect("makes");
    let empty = empty.display().to_string();
    Baton::new().fails(&["serve", "--model-dir", &empty, "--port", "0"], "there is no model in");
}
