//! A cheap HTTP client on `hyper`: one task per request, kept-alive connections, no work beyond what the figures need. (`reqwest` wakes a
//! second task for every chunk, brings TLS and pooling, and would measure itself.)
//!
//! It shares the machine with the server it measures, so the connection is driven by the task that reads the answer:
//! bytes go from the socket to the parser without a second task being woken. Plain HTTP only; a server behind TLS is
//! measured through a local proxy.

pub mod chunk;
pub mod sse;

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::BenchError;

/// What is read of an answer that is not a stream.
const MAX_PLAIN_BYTES: usize = 1 << 20;

type Driver = Pin<Box<http1::Connection<TokioIo<TcpStream>, Full<Bytes>>>>;

struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    /// `None` after the connection has ended.
    driver: Option<Driver>,
}

/// A server, with connections to it that wait for the next request.
pub struct Client {
    addresses: Vec<SocketAddr>,
    base_url: String,
    /// Of the base URL: what stands before every route.
    path_prefix: String,
    headers: HeaderMap,
    idle: Mutex<Vec<Connection>>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("base_url", &self.base_url).finish_non_exhaustive()
    }
}

/// An answer under way.
pub struct Answer<'a> {
    client: &'a Client,
    connection: Connection,
    response: Response<Incoming>,
}

impl Client {
    /// Finds the server's address. Nothing is sent yet.
    pub async fn new(base_url: &str, headers: &[(String, String)]) -> Result<Self, BenchError> {
        let wrong = |cause: &str| BenchError::options(format!("--base-url {base_url:?}: {cause}"));
        let uri: Uri = base_url.parse().map_err(|_| wrong("write for example http://127.0.0.1:8000"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(wrong("https is not spoken; put a local proxy before it")),
            _ => return Err(wrong("it must begin with http://")),
        }
        let host = uri.host().ok_or_else(|| wrong("there is no host"))?;
        let port = uri.port_u16().unwrap_or(80);
        let lookup = (host.trim_matches(['[', ']']), port);
        let addresses: Vec<SocketAddr> = tokio::net::lookup_host(lookup)
            .await
            .map_err(|cause| BenchError::server(base_url, format!("has no address: {cause}")))?
            .collect();
        let mut map = HeaderMap::new();
        let authority = uri.authority().map_or_else(String::new, ToString::to_string);
        map.insert(hyper::header::HOST, header_value("Host", &authority)?);
        map.insert(hyper::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        for (name, value) in headers {
            let parsed: HeaderName = name
                .parse()
                .map_err(|_| BenchError::options(format!("{name:?} is not the name of a header")))?;
            map.insert(parsed, header_value(name, value)?);
        }
        Ok(Self {
            addresses,
            base_url: base_url.to_owned(),
            path_prefix: uri.path().trim_end_matches('/').to_owned(),
            headers: map,
            idle: Mutex::default(),
        })
    }

    /// Sends a request and waits for the head of its answer.
    pub async fn send(&self, method: Method, route: &str, body: Bytes) -> Result<Answer<'_>, String> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let was_idle = idle.is_some();
            let mut connection = match idle {
                Some(connection) => connection,
                None => self.connect().await?,
            };
            let request = self.request(method.clone(), route, body.clone())?;
            let Connection { sender, driver } = &mut connection;
            // A connection that has just ended an answer must see so before it takes the next request.
            let sent = match drive(driver, poll_fn(|cx| sender.poll_ready(cx))).await {
                Ok(()) => drive(driver, sender.send_request(request)).await,
                Err(cause) => Err(cause),
            };
            match sent {
                Ok(response) => return Ok(Answer { client: self, connection, response }),
                // The server may close a connection that waits; that says nothing about this request.
                Err(_) if was_idle => {}
                Err(cause) => return Err(describe(&cause)),
            }
        }
    }

    /// A small JSON answer.
    pub async fn get_json(&self, route: &str) -> Result<Value, BenchError> {
        let failed = |cause: String| BenchError::server(format!("{}{route}", self.base_url), cause);
        let answer = self.send(Method::GET, route, Bytes::new()).await.map_err(&failed)?;
        let (status, body) = answer.whole().await.map_err(&failed)?;
        if !status.is_success() {
            return Err(failed(format!("says {status}")));
        }
        serde_json::from_slice(&body).map_err(|cause| failed(format!("does not answer with JSON: {cause}")))
    }

    fn request(&self, method: Method, route: &str, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
        let path = format!("{}{route}", self.path_prefix);
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().map_err(|_| format!("{path:?} is not a path"))?;
        *request.headers_mut() = self.headers.clone();
        Ok(request)
    }

    async fn connect(&self) -> Result<Connection, String> {
        let cannot = |cause: &dyn std::fmt::Display| format!("cannot be reached: {cause}");
        let stream = TcpStream::connect(&*self.addresses).await.map_err(|cause| cannot(&cause))?;
        let _ = stream.set_nodelay(true);
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (sender, driver) = handshake.map_err(|cause| cannot(&cause))?;
        Ok(Connection { sender, driver: Some(Box::pin(driver)) })
    }
}

fn header_value(name: &str, value: &str) -> Result<HeaderValue, BenchError> {
    HeaderValue::from_str(value)
        .map_err(|_| BenchError::options(format!("the value of the header {name} has odd characters")))
}

impl Answer<'_> {
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// The next bytes of the body; `None` at its end, after which the connection waits for the next request.
    pub async fn next(&mut self) -> Option<Result<Bytes, String>> {
        loop {
            let frame = drive(&mut self.connection.driver, self.response.body_mut().frame()).await?;
            match frame.map(Frame::into_data) {
                Ok(Ok(data)) => return Some(Ok(data)),
                Ok(Err(_trailers)) => {}
                Err(cause) => return Some(Err(describe(&cause))),
            }
        }
    }

    /// Gives the connection back. Only after the end of the body.
    pub fn finish(self) {
        if self.connection.driver.is_some() {
            self.client.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self.connection);
        }
    }

    /// Status and body of an answer that is not a stream.
    pub async fn whole(mut self) -> Result<(StatusCode, Vec<u8>), String> {
        let mut body = Vec::new();
        while let Some(data) = self.next().await {
            body.extend_from_slice(&data?);
            if body.len() > MAX_PLAIN_BYTES {
                return Err("answers with more than a message".to_owned());
            }
        }
        let status = self.status();
        self.finish();
        Ok((status, body))
    }
}

/// Waits for `future`, which moves only when the connection does.
///
/// The future is given a waker that does nothing: it is asked again after every move of the connection, which has the
/// task's own. With the task's own waker every frame would wake the task that is just taking it.
async fn drive<F: Future>(driver: &mut Option<Driver>, future: F) -> F::Output {
    let mut future = pin!(future);
    poll_fn(|cx| {
        let mut quiet = Context::from_waker(Waker::noop());
        if let Poll::Ready(output) = future.as_mut().poll(&mut quiet) {
            return Poll::Ready(output);
        }
        let Some(connection) = driver else {
            // The future must find out by itself that the connection is gone.
            return future.as_mut().poll(cx);
        };
        if connection.as_mut().poll(cx).is_ready() {
            *driver = None;
            cx.waker().wake_by_ref();
        }
        future.as_mut().poll(&mut quiet)
    })
    .await
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
