//! The router over real sockets, in front of workers that do what a test wants of them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_router::{Policy, Role, Router, RouterConfig, WorkerSpec};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};

/// What a fake worker does with a generating request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Manner {
    /// Answers with its name and what it was asked.
    Echo,
    /// Closes the connection without a word.
    Hang,
    /// Says that it is busy.
    Busy,
    /// Sends an event, and breaks off when it is told to go on.
    Break,
    /// Sends an event, and the next one when it is told to.
    Stream,
}

/// Path, body and id of every request.
type Seen = Arc<Mutex<Vec<(String, Value, Option<String>)>>>;

type Shared = (Seen, Arc<Mutex<Manner>>, Arc<tokio::sync::Mutex<mpsc::Receiver<()>>>, Arc<AtomicUsize>);

struct Fake {
    address: SocketAddr,
    seen: Seen,
    manner: Arc<Mutex<Manner>>,
    go_on: mpsc::Sender<()>,
    num_open: Arc<AtomicUsize>,
    stop: Option<oneshot::Sender<()>>,
}

type Body = http_body_util::combinators::BoxBody<Bytes, std::io::Error>;

fn whole(status: StatusCode, text: String) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed());
    *response.status_mut() = status;
    response
}

impl Fake {
    async fn start(name: &'static str, manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (go_on, goes_on) = mpsc::channel(16);
        let goes_on = Arc::new(tokio::sync::Mutex::new(goes_on));
        let seen: Arc<Mutex<Vec<_>>> = Arc::default();
        let manner = Arc::new(Mutex::new(manner));
        let num_open = Arc::new(AtomicUsize::new(0));
        let (stop, mut stopped) = oneshot::channel();
        let shared = (Arc::clone(&seen), Arc::clone(&manner), goes_on, Arc::clone(&num_open));
        tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let stream = tokio::select! {
                    accepted = listener.accept() => accepted.unwrap().0,
                    _ = &mut stopped => return,
                };
                let shared = shared.clone();
                connections.spawn(async move {
                    let service = service_fn(move |request| answer(name, request, shared.clone()));
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { address, seen, manner, go_on, num_open, stop: Some(stop) }
    }

    fn spec(&self, role: Role) -> WorkerSpec {
        WorkerSpec::new(&format!("http://{}", self.address), role).unwrap().with_events("none").unwrap()
    }

    fn set(&self, manner: Manner) {
        *self.manner.lock().unwrap() = manner;
    }

    fn num_seen(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    /// Ends all of its connections.
    fn kill(&mut self) {
        drop(self.stop.take());
    }
}

async fn answer(
    name: &'static str,
    request: Request<Incoming>,
    (seen, manner, goes_on, num_open): Shared,
) -> Result<Response<Body>, std::io::Error> {
    let path = request.uri().path().to_owned();
    match path.as_str() {
        "/health" => return Ok(whole(StatusCode::OK, String::new())),
        "/v1/models" => {
            let list = json!({"data": [{"id": name}, {"id": "shared"}]});
            return Ok(whole(StatusCode::OK, list.to_string()));
        }
        "/load" => return Ok(whole(StatusCode::NOT_FOUND, String::new())),
        _ => {}
    }
    let header = |name: &str| request.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let (key, id) = (header("authorization"), header("x-request-id"));
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    seen.lock().unwrap().push((path, body.clone(), id));
    let manner = *manner.lock().unwrap();
    match manner {
        Manner::Hang => Err(std::io::Error::other("gone")),
        Manner::Busy => Ok(whole(StatusCode::SERVICE_UNAVAILABLE, "busy".to_owned())),
        Manner::Echo => {
            let mut said = json!({"worker": name, "key": key});
            if body["kv_transfer_params"]["do_remote_decode"] == true {
                said["kv_transfer_params"] = json!({"remote_host": "here", "remote_port": 7});
            }
            Ok(whole(StatusCode::OK, said.to_string()))
        }
        Manner::Break | Manner::Stream => {
            num_open.fetch_add(1, Ordering::SeqCst);
            let (sender, mut receiver) = mpsc::channel::<Result<Frame<Bytes>, std::io::Error>>(4);
            tokio::spawn(async move {
                let event = |number: usize| Frame::data(Bytes::from(format!("data: {number}\n\n")));
                let _ = sender.send(Ok(event(1))).await;
                let mut goes_on = goes_on.lock().await;
                tokio::select! {
                    _ = goes_on.recv() => {}
                    () = sender.closed() => {}
                }
                let lost = || std::io::Error::other("lost");
                let next = if manner == Manner::Break { Err(lost()) } else { Ok(event(2)) };
                let _ = sender.send(next).await;
                drop(sender);
                num_open.fetch_sub(1, Ordering::SeqCst);
            });
            let frames = std::future::poll_fn(move |cx| receiver.poll_recv(cx));
            let mut response = Response::new(StreamBody::new(Frames(Box::pin(frames), None)).boxed());
            response.headers_mut().insert("content-type", "text/event-stream".parse().unwrap());
            let _ = body;
            Ok(response)
        }
    }
}

/// A stream out of a function that gives the next frame.
struct Frames<F>(std::pin::Pin<Box<F>>, Option<Infallible>);

impl<F> futures_core::Stream for Frames<F>
where
    F: Future<Output = Option<Result<Frame<Bytes>, std::io::Error>>>,
{
    type Item = Result<Frame<Bytes>, std::io::Error>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0.as_mut().poll(cx)
    }
}

struct Routed {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<()>,
}

impl Routed {
    async fn start(config: RouterConfig) -> Self {
        let router = Router::bind(RouterConfig { port: 0, ..config }).await.unwrap();
        let address = router.address();
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(router.run(async {
            let _ = stopped.await;
        }));
        Self { address, stop: Some(stop), task }
    }

    async fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    async fn ask(&self, method: &str, path: &str, headers: &str, body: &Value) -> (u16, String) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        read(self.send(method, path, headers, &body).await).await
    }

    async fn chat(&self, body: &Value) -> (u16, String) {
        self.ask("POST", "/v1/chat/completions", "", body).await
    }

    async fn worker_of(&self, headers: &str, body: &Value) -> String {
        let (status, said) = self.ask("POST", "/v1/completions", headers, body).await;
        assert_eq!(status, 200, "{said}");
        serde_json::from_str::<Value>(&said).unwrap()["worker"].as_str().unwrap().to_owned()
    }

    async fn metric(&self, name: &str) -> f64 {
        let (_, page) = self.ask("GET", "/metrics", "", &Value::Null).await;
        let line =
            page.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {page}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits for something that comes with the next health check.
    async fn until(&self, path: &str, expect: impl Fn(u16, &Value) -> bool) {
        for _ in 0..500 {
            let (status, body) = self.ask("GET", path, "", &Value::Null).await;
            if expect(status, &serde_json::from_str(&body).unwrap_or_default()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{path} never became what was expected");
    }
}

/// Status and body, whose chunks are put together.
async fn read(mut stream: TcpStream) -> (u16, String) {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    if !head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        return (status, body.to_owned());
    }
    let mut whole = String::new();
    let mut rest = body;
    while let Some((len, after)) = rest.split_once("\r\n") {
        let len = usize::from_str_radix(len, 16).unwrap_or(0);
        if len == 0 || after.len() < len {
            break;
        }
        whole.push_str(&after[..len]);
        rest = &after[len + 2..];
    }
    (status, whole)
}

/// A stream whose first event has come. The next one has not been sent, so this one must have come by itself.
async fn begun(router: &Routed) -> TcpStream {
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let mut stream = router.send("POST", "/v1/completions", "", &body).await;
    let mut got = Vec::new();
    while !String::from_utf8_lossy(&got).contains("data: 1") {
        let mut piece = [0; 1024];
        let len = stream.read(&mut piece).await.unwrap();
        assert!(len > 0, "{}", String::from_utf8_lossy(&got));
        got.extend_from_slice(&piece[..len]);
    }
    stream
}

fn config(policy: Policy, workers: &[&Fake]) -> RouterConfig {
    RouterConfig {
        workers: workers.iter().map(|worker| worker.spec(Role::Both)).collect(),
        policy,
        health_interval: Duration::from_millis(50),
        health_failures: 1,
        breaker_cooldown: Duration::from_millis(300),
        shutdown_timeout: Duration::from_secs(10),
        ..RouterConfig::default()
    }
}

async fn two(manner: Manner) -> (Fake, Fake) {
    (Fake::start("a", manner).await, Fake::start("b", manner).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_take_turns_and_keys_pass_through() {
    let (a, b) = two(Manner::Echo).await;
    let router = Routed::start(config(Policy::RoundRobin, &[&a, &b])).await;
    let mut workers = Vec::new();
    for _ in 0..4 {
        let (status, said) = router
            .ask("POST", "/v1/completions", "Authorization: Bearer mine\r\n", &json!({"prompt": "x"}))
            .await;
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!((status, said["key"].as_str()), (200, Some("Bearer mine")));
        workers.push(said["worker"].as_str().unwrap().to_owned());
    }
    workers.sort();
    assert_eq!(workers, ["a", "a", "b", "b"]);
    assert!(a.seen.lock().unwrap()[0].2.as_ref().is_some_and(|id| id.len() == 32), "requests get an id");
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_prefixes_and_models_have_their_workers() {
    let (a, b) = two(Manner::Echo).await;
    let router = Routed::start(config(Policy::Session, &[&a, &b])).await;
    for session in 0..8 {
        let header = format!("X-Session-Id: s{session}\r\n");
        let first = router.worker_of(&header, &json!({"prompt": "x"})).await;
        let body = json!({"prompt": "y", "user": format!("s{session}")});
        assert_eq!(router.worker_of("", &body).await, first, "header and user name the same session");
    }
    assert!(a.num_seen() > 0 && b.num_seen() > 0);
    let router =
        Routed::start(RouterConfig { load_factor: 100.0, ..config(Policy::PrefixHash, &[&a, &b]) }).await;
    for number in 0..8 {
        let start = format!("{number} ").repeat(600);
        let first = router.worker_of("", &json!({"prompt": format!("{start} one")})).await;
        assert_eq!(router.worker_of("", &json!({"prompt": format!("{start} two")})).await, first);
    }
    // Each names a model that only it has.
    router.until("/workers", |_, said| said["workers"][1]["models"][0] == "b").await;
    router.until("/workers", |_, said| said["workers"][0]["models"][0] == "a").await;
    for name in ["a", "b"] {
        assert_eq!(router.worker_of("", &json!({"prompt": "x", "model": name})).await, name);
    }
    let (_, models) = router.ask("GET", "/v1/models", "", &Value::Null).await;
    let models: Value = serde_json::from_str(&models).unwrap();
    let ids: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["a", "shared", "b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_not_begun_goes_to_another_worker() {
    let (a, b) = two(Manner::Echo).await;
    let router = Routed::start(config(Policy::RoundRobin, &[&a, &b])).await;
    for manner in [Manner::Hang, Manner::Busy] {
        a.set(manner);
        for _ in 0..4 {
            assert_eq!(router.worker_of("", &json!({"prompt": "x"})).await, "b", "{manner:?}");
        }
    }
    assert!(router.metric("baton:router_retries_total").await >= 2.0);
    b.set(Manner::Busy);
    let (status, said) = router.chat(&json!({"messages": []})).await;
    assert_eq!(
        (status, said.as_str()),
        (503, "busy"),
        "where all are busy the worker's own word is passed on"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_fails_is_left_alone_and_tried_again() {
    let (a, b) = two(Manner::Hang).await;
    b.set(Manner::Echo);
    let mut config = config(Policy::RoundRobin, &[&a, &b]);
    config.breaker_cooldown = Duration::from_secs(3600);
    let router = Routed::start(config).await;
    for _ in 0..20 {
        router.worker_of("", &json!({"prompt": "x"})).await;
    }
    // Three failures; a request on a connection that had waited is sent once more on a new one.
    assert!((3..=6).contains(&a.num_seen()), "the breaker opens after three failures in a row");
    let label = format!("baton:router_worker_breaker_open{{worker=\"http://{}\"}}", a.address);
    assert_eq!(router.metric(&label).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_has_begun_is_passed_on_at_once_and_never_repeated() {
    let (a, b) = two(Manner::Stream).await;
    let router = Routed::start(config(Policy::RoundRobin, &[&a, &b])).await;
    let mut stream = begun(&router).await;
    let holder = if a.num_seen() == 1 { &a } else { &b };
    holder.go_on.send(()).await.unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).await.unwrap();
    assert!(rest.contains("data: 2"), "{rest}");
    let before = a.num_seen() + b.num_seen();
    a.set(Manner::Break);
    b.set(Manner::Break);
    let (seen_by_a, mut stream) = (a.num_seen(), begun(&router).await);
    let holder = if a.num_seen() > seen_by_a { &a } else { &b };
    holder.go_on.send(()).await.unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).await.unwrap();
    assert!(rest.contains("lost in mid-answer"), "{rest}");
    assert_eq!(a.num_seen() + b.num_seen(), before + 1, "it is not repeated");
    assert_eq!(router.metric("baton:router_broken_streams_total").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_frees_the_worker() {
    let (a, _b) = two(Manner::Stream).await;
    let router = Routed::start(config(Policy::RoundRobin, &[&a])).await;
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let mut stream = router.send("POST", "/v1/completions", "", &body).await;
    let mut piece = [0; 512];
    assert!(stream.read(&mut piece).await.unwrap() > 0);
    assert_eq!(a.num_open.load(Ordering::SeqCst), 1);
    drop(stream);
    router.until("/workers", |_, said| said["workers"][0]["requests"] == 0).await;
    for _ in 0..500 {
        if a.num_open.load(Ordering::SeqCst) == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the worker still sends");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_workers_are_noticed_and_cost_nothing() {
    let (mut a, b) = two(Manner::Echo).await;
    let router = Routed::start(config(Policy::RoundRobin, &[&a, &b])).await;
    router.worker_of("", &json!({"prompt": "x"})).await;
    router.worker_of("", &json!({"prompt": "x"})).await;
    a.kill();
    for _ in 0..10 {
        assert_eq!(router.worker_of("", &json!({"prompt": "x"})).await, "b");
    }
    router.until("/workers", |_, said| said["workers"][0]["healthy"] == false).await;
    assert_eq!(router.ask("GET", "/health", "", &Value::Null).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_can_be_drained() {
    let (a, b) = two(Manner::Echo).await;
    let router = Routed::start(config(Policy::RoundRobin, &[&a, &b])).await;
    let drain = format!("/workers/drain?url=http://{}", a.address);
    assert_eq!(router.ask("POST", &drain, "", &Value::Null).await.0, 200);
    for _ in 0..4 {
        assert_eq!(router.worker_of("", &json!({"prompt": "x"})).await, "b");
    }
    let back = format!("/workers/undrain?url=http://{}", a.address);
    assert_eq!(router.ask("POST", &back, "", &Value::Null).await.0, 200);
    let mut workers = [router.worker_of("", &json!({})).await, router.worker_of("", &json!({})).await];
    workers.sort();
    assert_eq!(workers, ["a", "b"]);
    assert_eq!(router.ask("POST", "/workers/drain?url=http://nobody", "", &Value::Null).await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_file_of_workers_is_read_again() {
    let (a, b) = two(Manner::Echo).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("workers");
    std::fs::write(&path, format!("http://{},events=none\n", a.address)).unwrap();
    let mut config = config(Policy::RoundRobin, &[]);
    config.workers_file = Some(path.clone());
    let router = Routed::start(config).await;
    assert_eq!(router.worker_of("", &json!({"prompt": "x"})).await, "a");
    std::fs::write(&path, "this is no list of workers").unwrap();
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert_eq!(router.worker_of("", &json!({"prompt": "x"})).await, "a", "a wrong file changes nothing");
    std::fs::write(&path, format!("http://{},events=none\n", b.address)).unwrap();
    let url = format!("http://{}", b.address);
    router.until("/workers", |_, said| said["workers"][0]["url"] == url.as_str()).await;
    assert_eq!(router.worker_of("", &json!({"prompt": "x"})).await, "b");
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_hold() {
    let a = Fake::start("a", Manner::Stream).await;
    let mut config = config(Policy::RoundRobin, &[&a]);
    config.max_requests = 1;
    config.max_body_bytes = 100;
    config.admin_api_key = Some("secret".to_owned());
    let router = Routed::start(config).await;
    let (status, said) = router.chat(&json!({"messages": "x".repeat(200)})).await;
    assert_eq!(status, 413, "{said}");
    let body = json!({"prompt": "x"}).to_string();
    let mut stream = router.send("POST", "/v1/completions", "", &body).await;
    let mut piece = [0; 512];
    assert!(stream.read(&mut piece).await.unwrap() > 0);
    let (status, said) = router.chat(&json!({})).await;
    assert_eq!(status, 429, "{said}");
    assert_eq!(router.ask("GET", "/workers", "", &Value::Null).await.0, 401);
    assert_eq!(router.ask("GET", "/workers", "Authorization: Bearer wrong!\r\n", &Value::Null).await.0, 401);
    assert_eq!(router.ask("GET", "/workers", "Authorization: Bearer secret\r\n", &Value::Null).await.0, 200);
    assert_eq!(router.ask("GET", "/health", "", &Value::Null).await.0, 200, "probes are open");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_to_stop_loses_no_answer() {
    let a = Fake::start("a", Manner::Stream).await;
    let mut router = Routed::start(config(Policy::RoundRobin, &[&a])).await;
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let mut stream = router.send("POST", "/v1/completions", "", &body).await;
    let mut piece = [0; 512];
    assert!(stream.read(&mut piece).await.unwrap() > 0);
    drop(router.stop.take());
    router.until("/health", |status, _| status == 503).await;
    assert_eq!(router.chat(&json!({})).await.0, 503, "no new requests");
    a.go_on.send(()).await.unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).await.unwrap();
    assert!(rest.contains("data: 2"), "{rest}");
    router.task.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_and_decode_are_asked_one_after_the_other() {
    let (p, d) = two(Manner::Echo).await;
    let mut config = config(Policy::RoundRobin, &[]);
    config.workers = vec![p.spec(Role::Prefill), d.spec(Role::Decode)];
    let router = Routed::start(config).await;
    let body = json!({"messages": [{"role": "user", "content": "x"}], "stream": true, "max_tokens": 9});
    let (status, said) = router.chat(&body).await;
    assert_eq!(status, 200, "{said}");
    assert_eq!(serde_json::from_str::<Value>(&said).unwrap()["worker"], "b");
    let (prefill, decode) = (p.seen.lock().unwrap()[0].clone(), d.seen.lock().unwrap()[0].clone());
    assert_eq!((&prefill.1["max_tokens"], &prefill.1["stream"]), (&json!(1), &json!(false)));
    assert_eq!((&decode.1["max_tokens"], &decode.1["stream"]), (&json!(9), &json!(true)));
    assert_eq!(decode.1["kv_transfer_params"], json!({"remote_host": "here", "remote_port": 7}));
    assert_eq!(prefill.2, decode.2, "both legs have one id");
    assert!(
        decode.2.unwrap().starts_with(&format!("___prefill_addr_{}___decode_addr_{}_", p.address, d.address))
    );
    // Without a prefill worker the decode worker computes the prompt.
    p.set(Manner::Hang);
    let (status, _) = router.chat(&body).await;
    assert_eq!(status, 200);
    assert!(d.seen.lock().unwrap()[1].1.get("kv_transfer_params").is_none());
    assert_eq!(router.metric("baton:router_local_prefills_total").await, 1.0);
}
