//! Connections: how many there may be, who makes room, and the HTTP on each.
//!
//! When there are as many as there may be, the oldest one that waits for a request is closed for a new one: whoever opens
//! connections and says nothing keeps nobody out. Where all are at work, a few more are let in that are only told how the
//! server is, so that a probe of a busy server still gets its answer. No clock decides: a newcomer waits until the
//! connection that was asked to make room has gone or has answered that it is at work after all.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Sleep;
use tokio_rustls::TlsAcceptor;

use crate::routes;
use crate::state::App;

const MAX_HEADERS: usize = 100;
const MAX_HEAD_BYTES: usize = 64 << 10;
/// For the last bytes of finished answers to leave.
pub const LAST_BYTES: Duration = Duration::from_secs(5);
/// After a failure of `accept` that may last (no more file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Connections beyond `--max-connections` that are only told how the server is.
const NUM_PROBES: usize = 16;

pub struct Connections {
    all: Lane,
    /// Beyond `all`; its router knows the open routes and nothing else.
    probes: Lane,
    tls: Option<TlsAcceptor>,
    graceful: GracefulShutdown,
    /// True when what is left must end at once.
    closed: watch::Sender<bool>,
    read_timeout: Duration,
    half_close_timeout: Duration,
}

/// A number of places for connections, and the routes they may ask.
struct Lane {
    router: Router,
    places: Arc<Semaphore>,
    open: Arc<Open>,
}

/// The connections there are, oldest first.
#[derive(Default)]
struct Open {
    next: AtomicU64,
    by_age: Mutex<BTreeMap<u64, Arc<Connection>>>,
}

/// What is known of a connection.
#[derive(Default)]
struct Connection {
    /// Requests whose answers are not complete.
    num_requests: AtomicUsize,
    /// A newcomer asks it to make room.
    close: Notify,
    /// Its answer where a request has come in the meantime.
    declined: Notify,
}

/// One of the open connections with its place, until it is dropped.
struct Entry {
    number: u64,
    connection: Arc<Connection>,
    open: Arc<Open>,
    /// Behind the list: who gets this place finds the connection gone from there.
    _place: OwnedSemaphorePermit,
}

impl Lane {
    fn new(router: Router, num_places: usize) -> Self {
        Self { router, places: Arc::new(Semaphore::new(num_places)), open: Arc::default() }
    }

    /// A place, where need be that of the oldest connection that waits for a request. None where all are at work.
    async fn enter(&self) -> Option<Entry> {
        loop {
            if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
                return Some(self.open.enter(place));
            }
            let idle = self.open.oldest_idle()?;
            idle.close.notify_one();
            tokio::select! {
                place = Arc::clone(&self.places).acquire_owned() => return place.ok().map(|place| self.open.enter(place)),
                // It is at work now, so the next look finds another one.
                () = idle.declined.notified() => {}
            }
        }
    }
}

impl Connection {
    fn is_idle(&self) -> bool {
        self.num_requests.load(Ordering::Relaxed) == 0
    }

    /// Returns when a newcomer needs the place and there is still no request on this connection.
    async fn must_close(&self) {
        loop {
            self.close.notified().await;
            // What has arrived meanwhile is read first: the runtime looks at its sockets before it comes back.
            tokio::task::yield_now().await;
            if self.is_idle() {
                return;
            }
            self.declined.notify_one();
        }
    }
}

impl Open {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Connection>>> {
        self.by_age.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(self: &Arc<Self>, place: OwnedSemaphorePermit) -> Entry {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let connection = Arc::<Connection>::default();
        self.lock().insert(number, Arc::clone(&connection));
        Entry { number, connection, open: Arc::clone(self), _place: place }
    }

    fn oldest_idle(&self) -> Option<Arc<Connection>> {
        self.lock().values().find(|one| one.is_idle()).cloned()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.open.lock().remove(&self.number);
    }
}

impl Connections {
    pub fn new(app: &Arc<App>, tls: Option<TlsAcceptor>) -> Self {
        Self {
            all: Lane::new(routes::router(app), app.config.max_connections),
            probes: Lane::new(routes::probe_router(app), NUM_PROBES),
            tls,
            graceful: GracefulShutdown::new(),
            closed: watch::Sender::new(false),
            read_timeout: app.config.read_timeout,
            half_close_timeout: app.config.half_close_timeout,
        }
    }

    /// Never ends by itself.
    pub async fn accept(&self, listener: &TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => self.admit(stream).await,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn admit(&self, stream: TcpStream) {
        if let Some(entry) = self.all.enter().await {
            self.serve(stream, entry, self.all.router.clone());
        } else if let Some(entry) = self.probes.enter().await {
            self.serve(stream, entry, self.probes.router.clone());
        } else if self.tls.is_none() {
            refuse(stream);
        }
        // Inside TLS nothing can be said before a handshake, which is what there is no room for.
    }

    fn serve(&self, stream: TcpStream, entry: Entry, router: Router) {
        // A token is a small packet: it must not wait for the next one.
        let _ = stream.set_nodelay(true);
        let talk = Talk {
            service: Counted {
                inner: TowerToHyperService::new(router),
                connection: Arc::clone(&entry.connection),
            },
            watcher: self.graceful.watcher(),
            read_timeout: self.read_timeout,
            half_close_timeout: self.half_close_timeout,
        };
        let (tls, timeout) = (self.tls.clone(), self.read_timeout);
        let mut closed = self.closed.subscribe();
        tokio::spawn(async move {
            let connection = Arc::clone(&entry.connection);
            let conversation = async {
                match tls {
                    None => talk.over(stream).await,
                    Some(tls) => match tokio::time::timeout(timeout, tls.accept(stream)).await {
                        Ok(Ok(stream)) => talk.over(stream).await,
                        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                        Err(_) => tracing::debug!("a TLS handshake took too long"),
                    },
                }
            };
            tokio::select! {
                // In this order, so that a request that is there is seen before the connection counts as idle.
                biased;
                () = conversation => {}
                () = connection.must_close() => tracing::debug!("an idle connection made room for a new one"),
                _ = closed.wait_for(|closed| *closed) => {}
            }
            drop(entry);
        });
    }

    /// Lets answers under way leave, then closes what is left.
    pub async fn finish(self) {
        let _ = tokio::time::timeout(LAST_BYTES, self.graceful.shutdown()).await;
        self.closed.send_replace(true);
    }
}

/// A request whose answer is not complete.
struct Pending(Arc<Connection>);

impl Pending {
    fn new(connection: &Arc<Connection>) -> Self {
        connection.num_requests.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(connection))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.num_requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The routes, and a count of the requests of one connection.
struct Counted {
    inner: TowerToHyperService<Router>,
    connection: Arc<Connection>,
}

type BoxedFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl Service<Request<Incoming>> for Counted {
    type Response = Response<CountedBody>;
    type Error = Infallible;
    type Future = BoxedFuture<Result<Self::Response, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let pending = Pending::new(&self.connection);
        let answer = self.inner.call(request);
        Box::pin(async move {
            let response = answer.await?;
            Ok(response.map(|inner| CountedBody { inner, _pending: pending }))
        })
    }
}

struct CountedBody {
    inner: Body,
    _pending: Pending,
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// HTTP on one connection.
struct Talk {
    service: Counted,
    watcher: Watcher,
    read_timeout: Duration,
    half_close_timeout: Duration,
}

impl Talk {
    /// Until either side has had enough.
    async fn over<S>(self, stream: S)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let connection = Arc::clone(&self.service.connection);
        let stream = HalfClose { inner: stream, connection, timeout: self.half_close_timeout, timer: None };
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.read_timeout)
            .max_headers(MAX_HEADERS)
            // An event is small: copied behind its chunk's head, it leaves in one plain write.
            .writev(false)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), self.service);
        if let Err(error) = self.watcher.watch(connection).await {
            // Clients come and go; that is no event for an operator.
            tracing::trace!(%error, "a connection ended early");
        }
    }
}

/// A client that sends no more may still wait for its answer (`nc -N`) or may have gone: nothing tells before something
/// is written to it. So its end is held back for a while if an answer is under way; a stream finds out by writing.
struct HalfClose<S> {
    inner: S,
    connection: Arc<Connection>,
    timeout: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for HalfClose<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let num_before = buffer.filled().len();
        match Pin::new(&mut self.inner).poll_read(cx, buffer) {
            Poll::Ready(Ok(())) if buffer.filled().len() == num_before && buffer.remaining() > 0 => {}
            other => return other,
        }
        if self.connection.num_requests.load(Ordering::Relaxed) == 0 {
            return Poll::Ready(Ok(()));
        }
        let timeout = self.timeout;
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        timer.as_mut().poll(cx).map(Ok)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HalfClose<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// More connections than there may be: say so and close.
fn refuse(stream: TcpStream) {
    const ANSWER: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n\
        Content-Type: application/json\r\nContent-Length: 116\r\n\r\n\
        {\"error\":{\"message\":\"too many connections: try again later\",\
        \"type\":\"server_error\",\"param\":null,\"code\":\"overloaded\"}}";
    tokio::spawn(async move {
        if let Ok(Ok(())) = tokio::time::timeout(LAST_BYTES, stream.writable()).await {
            // A new socket has room for so few bytes; where it has not, closing says the same.
            let _ = stream.try_write(ANSWER);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refusal_states_its_length() {
        let body = "{\"error\":{\"message\":\"too many connections: try again later\",\
                    \"type\":\"server_error\",\"param\":null,\"code\":\"overloaded\"}}";
        assert_eq!(body.len(), 116);
    }

    fn lane(num_places: usize) -> Lane {
        Lane::new(Router::new(), num_places)
    }

    /// A connection as `serve` keeps it: it ends when it is asked to and has no request.
    fn keep(entry: Entry) -> tokio::task::JoinHandle<()> {
        tokio::spawn(async move { entry.connection.must_close().await })
    }

    #[tokio::test]
    async fn the_oldest_idle_connection_makes_room() {
        let lane = lane(3);
        let mut kept = Vec::new();
        let mut busy = Vec::new();
        for _ in 0..3 {
            let entry = lane.enter().await.expect("a place");
            busy.push(Pending::new(&entry.connection));
            kept.push(keep(entry));
        }
        assert!(lane.enter().await.is_none(), "all are at work");
        drop(busy.remove(1));
        let newcomer = lane.enter().await.expect("the place of the idle one");
        assert_eq!(lane.open.lock().keys().copied().collect::<Vec<_>>(), [0, 2, 3]);
        drop((busy, newcomer));
        // However many come and say nothing, each finds a place, and there are never more than three.
        for number in 4..200 {
            kept.push(keep(lane.enter().await.expect("a place")));
            assert!(lane.open.lock().len() <= 3);
            assert!(lane.open.lock().contains_key(&number));
        }
    }

    #[tokio::test]
    async fn a_request_that_came_in_time_keeps_its_connection() {
        let lane = lane(2);
        let first = lane.enter().await.expect("a place");
        let connection = Arc::clone(&first.connection);
        // Its request is there, but nobody has read it when the newcomer asks for the place.
        let served = tokio::spawn(async move {
            let mut request = None;
            let read = async {
                tokio::task::yield_now().await;
                request = Some(Pending::new(&connection));
                std::future::pending::<()>().await;
            };
            tokio::select! {
                biased;
                () = read => {}
                () = first.connection.must_close() => {}
            }
            request.is_some()
        });
        let second = keep(lane.enter().await.expect("a place"));
        let third = lane.enter().await.expect("the place of the silent one");
        second.await.expect("the silent one has ended");
        assert!(!served.is_finished(), "the one at work goes on");
        assert_eq!(lane.open.lock().keys().copied().collect::<Vec<_>>(), [0, 2]);
        drop(third);
        served.abort();
    }
}
