//! Connections to a worker. The task that passes an answer on also drives the connection it comes from, so that a piece of a
//! stream goes from one socket to the other without a second task being woken.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::HeaderMap;
use hyper::http::{request, response};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Connections that wait for the next request; more are closed.
const MAX_IDLE: usize = 512;
/// Servers close connections that wait for long; we are faster.
const MAX_IDLE_TIME: Duration = Duration::from_secs(30);

type Driver = Pin<Box<http1::Connection<TokioIo<TcpStream>, Full<Bytes>>>>;

struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    /// `None` after the connection has ended.
    driver: Option<Driver>,
}

struct Idle {
    connection: Connection,
    since: Instant,
}

/// The way to one worker.
pub struct Upstream {
    authority: String,
    path_prefix: String,
    connect_timeout: Duration,
    idle: Mutex<Vec<Idle>>,
}

impl std::fmt::Debug for Upstream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstream").field("authority", &self.authority).finish_non_exhaustive()
    }
}

/// Why there is no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SendError {
    #[error("cannot be reached: {0}")]
    Connect(String),
    #[error("has broken the connection off: {0}")]
    Broken(String),
    #[error("has not answered within {0} s")]
    Timeout(u64),
    #[error("cannot be asked that: {0}")]
    Request(String),
}

impl SendError {
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Broken(_) => "broken",
            Self::Timeout(_) => "timeout",
            Self::Request(_) => "request",
        }
    }
}

/// What is asked: the parts of a request that do not change from worker to worker.
#[derive(Clone, Debug)]
pub struct Question {
    pub method: Method,
    /// Path and query.
    pub target: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Question {
    pub fn get(target: &str) -> Self {
        Self { method: Method::GET, target: target.to_owned(), headers: HeaderMap::new(), body: Bytes::new() }
    }
}

impl Upstream {
    pub fn new(authority: String, path_prefix: String, connect_timeout: Duration) -> Self {
        Self { authority, path_prefix, connect_timeout, idle: Mutex::default() }
    }

    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Sends a question and waits for the head of its answer and for the first bytes of its body: only then has it begun.
    pub async fn ask(self: &Arc<Self>, question: &Question, limit: Duration) -> Result<Answer, SendError> {
        tokio::time::timeout(limit, self.ask_unlimited(question))
            .await
            .map_err(|_| SendError::Timeout(limit.as_secs()))?
    }

    async fn ask_unlimited(self: &Arc<Self>, question: &Question) -> Result<Answer, SendError> {
        loop {
            let idle = self.take_idle();
            let was_idle = idle.is_some();
            let mut connection = match idle {
                Some(connection) => connection,
                None => self.connect().await?,
            };
            let request = self.request(question)?;
            let Connection { sender, driver } = &mut connection;
            let sent = match drive(driver, poll_fn(|cx| sender.poll_ready(cx))).await {
                Ok(()) => drive(driver, sender.send_request(request)).await,
                Err(cause) => Err(cause),
            };
            match sent {
                Ok(response) => {
                    let mut answer = Answer::new(response, connection, Arc::clone(self));
                    answer.begin().await?;
                    return Ok(answer);
                }
                // A worker may close a connection that waits; that says nothing about this request.
                Err(_) if was_idle => {}
                Err(cause) => return Err(SendError::Broken(describe(&cause))),
            }
        }
    }

    /// A small answer as a whole.
    pub async fn fetch(
        self: &Arc<Self>,
        question: &Question,
        limit: Duration,
        max_bytes: usize,
    ) -> Result<(response::Parts, Bytes), SendError> {
        let fetched = async {
            let answer = self.ask_unlimited(question).await?;
            let (parts, mut body) = (answer.parts, answer.body);
            let mut bytes = Vec::new();
            while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                let data = frame?.into_data().unwrap_or_default();
                if bytes.len() + data.len() > max_bytes {
                    return Err(SendError::Broken(format!("its answer has more than {max_bytes} bytes")));
                }
                bytes.extend_from_slice(&data);
            }
            Ok((parts, Bytes::from(bytes)))
        };
        let late = |_| SendError::Timeout(limit.as_secs());
        tokio::time::timeout(limit, fetched).await.map_err(late)?
    }

    fn take_idle(&self) -> Option<Connection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(Idle { connection, since }) = idle.pop() {
            if since.elapsed() < MAX_IDLE_TIME {
                return Some(connection);
            }
        }
        None
    }

    fn give_back(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if connection.driver.is_some() && idle.len() < MAX_IDLE {
            idle.push(Idle { connection, since: Instant::now() });
        }
    }

    /// Closes connections that wait: their worker is gone.
    pub fn forget_idle(&self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn request(&self, question: &Question) -> Result<Request<Full<Bytes>>, SendError> {
        let target = format!("{}{}", self.path_prefix, question.target);
        let uri = target.parse().map_err(|_| SendError::Request(format!("{target:?} is not a path")))?;
        let host = self.authority.parse().map_err(|_| SendError::Request("its name is odd".to_owned()))?;
        let mut request = Request::new(Full::new(question.body.clone()));
        *request.method_mut() = question.method.clone();
        *request.uri_mut() = uri;
        *request.headers_mut() = question.headers.clone();
        request.headers_mut().insert(hyper::header::HOST, host);
        Ok(request)
    }

    async fn connect(&self) -> Result<Connection, SendError> {
        let cannot = |cause: &dyn std::fmt::Display| SendError::Connect(cause.to_string());
        let connecting = TcpStream::connect(&*self.authority);
        let stream = tokio::time::timeout(self.connect_timeout, connecting).await;
        let stream =
            stream.map_err(|_| cannot(&"the time limit is over"))?.map_err(|cause| cannot(&cause))?;
        let _ = stream.set_nodelay(true);
        let (sender, driver) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|cause| cannot(&cause))?;
        Ok(Connection { sender, driver: Some(Box::pin(driver)) })
    }
}

/// An answer that has begun.
#[derive(Debug)]
pub struct Answer {
    pub parts: response::Parts,
    pub body: AnswerBody,
}

impl Answer {
    fn new(response: Response<Incoming>, connection: Connection, upstream: Arc<Upstream>) -> Self {
        let (parts, incoming) = response.into_parts();
        let connection = Some(connection);
        Self { parts, body: AnswerBody { first: None, incoming, connection, upstream, ended: false } }
    }

    /// Waits for the first bytes, or for the end of an empty body.
    async fn begin(&mut self) -> Result<(), SendError> {
        if self.body.is_end_stream() {
            self.body.end();
            return Ok(());
        }
        let frame = poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await;
        self.body.first = frame.transpose()?;
        Ok(())
    }
}

/// The bytes of an answer as they come. The connection is given back at its end; dropped before, it is closed, and the worker
/// learns that nobody waits any more.
pub struct AnswerBody {
    first: Option<Frame<Bytes>>,
    incoming: Incoming,
    connection: Option<Connection>,
    upstream: Arc<Upstream>,
    ended: bool,
}

impl std::fmt::Debug for AnswerBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AnswerBody").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl AnswerBody {
    /// The bytes that came first, if any.
    pub fn first(&self) -> &[u8] {
        self.first.as_ref().and_then(Frame::data_ref).map_or(&[], |data| data)
    }

    fn end(&mut self) {
        self.ended = true;
        if let Some(connection) = self.connection.take() {
            self.upstream.give_back(connection);
        }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = SendError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, SendError>>> {
        let this = &mut *self;
        if let Some(frame) = this.first.take() {
            return Poll::Ready(Some(Ok(frame)));
        }
        let Some(connection) = &mut this.connection else { return Poll::Ready(None) };
        let incoming = &mut this.incoming;
        let next = poll_driven(&mut connection.driver, cx, |cx| Pin::new(&mut *incoming).poll_frame(cx));
        match next {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(Ok(frame))) => {
                if this.incoming.is_end_stream() {
                    this.end();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(cause))) => {
                this.connection = None;
                this.ended = true;
                Poll::Ready(Some(Err(SendError::Broken(describe(&cause)))))
            }
            Poll::Ready(None) => {
                this.end();
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && (self.ended || self.incoming.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let left = self.incoming.size_hint();
        match (left.exact(), self.first.as_ref().and_then(Frame::data_ref)) {
            (Some(left), first) => SizeHint::with_exact(left + first.map_or(0, |data| data.len() as u64)),
            (None, _) => SizeHint::default(),
        }
    }
}

/// Waits for a future that moves only when the connection does.
async fn drive<F: Future>(driver: &mut Option<Driver>, future: F) -> F::Output {
    let mut future = pin!(future);
    poll_fn(|cx| poll_driven(driver, cx, |cx| future.as_mut().poll(cx))).await
}

/// Asks `poll`, moves the connection, and asks again. `poll` is given a waker that does nothing: it is asked again after every
/// move of the connection, which has the task's own.
fn poll_driven<T>(
    driver: &mut Option<Driver>,
    cx: &mut Context<'_>,
    mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
) -> Poll<T> {
    let mut quiet = Context::from_waker(Waker::noop());
    if let Poll::Ready(output) = poll(&mut quiet) {
        return Poll::Ready(output);
    }
    let Some(connection) = driver else {
        // It must find out by itself that the connection is gone.
        return poll(cx);
    };
    if connection.as_mut().poll(cx).is_ready() {
        *driver = None;
        cx.waker().wake_by_ref();
    }
    poll(&mut quiet)
}

/// With its causes: hyper's own messages say little.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Headers that belong to a connection and not to what is sent over it.
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Takes off what does not go beyond this connection.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<String> = headers
        .get_all(hyper::header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(',').map(|name| name.trim().to_ascii_lowercase()))
        .collect();
    for name in HOP_BY_HOP.iter().copied().chain(named.iter().map(String::as_str)) {
        headers.remove(name);
    }
}

/// The question that a client's request becomes. Its length is that of the body that is sent.
pub fn question(parts: &request::Parts, body: Bytes) -> Question {
    let mut headers = parts.headers.clone();
    strip_hop_by_hop(&mut headers);
    for name in [hyper::header::HOST, hyper::header::CONTENT_LENGTH, hyper::header::EXPECT] {
        headers.remove(name);
    }
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
    Question { method: parts.method.clone(), target, headers, body }
}
