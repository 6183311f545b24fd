//! A `baton serve` with the default model, asked over plain sockets and killed as `kill -9` does.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Baton, model_arg};

const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub struct Worker {
    child: Child,
    pub port: u16,
}

impl Worker {
    pub fn start(baton: &Baton, flags: &[&str]) -> Self {
        Self::start_with_key(baton, "shared", flags)
    }

    /// With this secret in `BATON_KV_KEY`.
    pub fn start_with_key(baton: &Baton, key: &str, flags: &[&str]) -> Self {
        let model = model_arg();
        let mut arguments =
            vec!["serve", model.as_str(), "--port", "0", "--max-model-len", "2048", "--swap-space", "256MiB"];
        // However busy the machine is, what a store has is waited for.
        arguments.extend(["--kv-store-timeout-ms", "5000"]);
        arguments.extend_from_slice(flags);
        let mut command = baton.command(&arguments);
        command.env("BATON_KV_KEY", key).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the binary starts");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let line = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("http://")));
        let line = line.expect("the server says where it listens").expect("UTF-8");
        let address = line.split("http://").nth(1).expect("an address");
        let port = address.split(':').nth(1).expect("a port");
        let port = port.chars().take_while(char::is_ascii_digit).collect::<String>().parse().expect("a port");
        // Whatever else it says is of no interest, but it must be able to say it.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, port }
    }

    /// Sends a request; whoever reads the stream has the answer.
    pub fn send(&self, path: &str, body: &Value) -> TcpStream {
        let body = body.to_string();
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("the server listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).expect("the server reads");
        stream
    }

    pub fn ask(&self, path: &str, body: &Value) -> Value {
        read_answer(self.send(path, body)).expect("the server answers")
    }

    pub fn post(&self, body: &Value) -> Value {
        self.ask("/v1/completions", body)
    }

    pub fn complete(&self, prompt: &str, salt: &str) -> (String, u64) {
        let answer = self.post(&json!({
            "prompt": prompt, "max_tokens": 12, "temperature": 0, "cache_salt": salt
        }));
        let text = answer["choices"][0]["text"].as_str().expect("a text").to_owned();
        (text, cached(&answer))
    }

    pub fn metric(&self, name: &str) -> f64 {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("the server listens");
        // A server without keys takes any.
        let head = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer one\r\n\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        let line = page.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
    }

    /// Until a figure is as expected.
    pub fn until(&self, name: &str, expect: impl Fn(f64) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !expect(self.metric(name)) {
            assert!(Instant::now() < deadline, "{name} is {}", self.metric(name));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Until a figure is at least this.
    pub fn wait_for(&self, name: &str, least: f64) {
        self.until(name, |value| value >= least);
    }

    /// As `kill -9` does.
    pub fn kill(mut self) {
        self.child.kill().expect("it runs");
        let _ = self.child.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The JSON of an answer that is a success; `None` where the connection broke off.
pub fn read_answer(mut stream: TcpStream) -> Option<Value> {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    // The body may come in chunks.
    serde_json::from_str(&body[body.find('{')?..=body.rfind('}')?]).ok()
}

/// What an answer took from a cache.
pub fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number")
}

pub fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

/// About seven tokens a word.
pub fn prompt(words: usize) -> String {
    (0..words).fold(String::new(), |text, word| text + &format!("runner {} hands it on. ", word % 37))
}
