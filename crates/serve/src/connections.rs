//! Connections: how many there may be, who makes room, and the HTTP on each.
//!
//! When there are as many as there may be, the oldest one that waits for a request is closed for a new one: whoever opens
//! connections and says nothing keeps nobody out. Where all are at work, a few more are let in that are only told how the
//! server is, so that a probe of a busy server still gets its answer.

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
/// How long a new connection waits for the one that makes room for it.
const HANDOVER: Duration = Duration::from_secs(1);

pub struct Connections {
    router: Router,
    /// Knows the open routes and nothing else.
    probes: Router,
    tls: Option<TlsAcceptor>,
    graceful: GracefulShutdown,
    slots: Arc<Semaphore>,
    probe_slots: Arc<Semaphore>,
    open: Arc<Open>,
    /// True when what is left must end at once.
    closed: watch::Sender<bool>,
    read_timeout: Duration,
    half_close_timeout: Duration,
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
    close: Notify,
}

/// One of the open connections, until it is dropped.
struct Entry {
    number: u64,
    connection: Arc<Connection>,
    open: Arc<Open>,
}

impl Open {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Connection>>> {
        self.by_age.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(self: &Arc<Self>) -> Entry {
        let entry = self.enter_probe();
        self.lock().insert(entry.number, Arc::clone(&entry.connection));
        entry
    }

    /// A connection whose end gives no other one a place.
    fn enter_probe(self: &Arc<Self>) -> Entry {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Entry { number, connection: Arc::default(), open: Arc::clone(self) }
    }

    /// Tells the oldest connection that waits for a request to close. False where there is none.
    fn close_oldest_idle(&self) -> bool {
        let mut open = self.lock();
        let is_idle = |connection: &Connection| connection.num_requests.load(Ordering::Relaxed) == 0;
        let Some(number) = open.iter().find(|(_, one)| is_idle(one)).map(|(number, _)| *number) else {
            return false;
        };
        // Out of the list at once, so that the next newcomer does not count on the same one.
        if let Some(connection) = open.remove(&number) {
            connection.close.notify_one();
        }
        true
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
            router: routes::router(app),
            probes: routes::probe_router(app),
            tls,
            graceful: GracefulShutdown::new(),
            slots: Arc::new(Semaphore::new(app.config.max_connections)),
            probe_slots: Arc::new(Semaphore::new(NUM_PROBES)),
            open: Arc::default(),
            closed: watch::Sender::new(false),
            read_timeout: app.config.read_timeout,
            half_close_timeout: app.config.half_close_timeout,
        }
    }

    /// Never ends by itself.
    pub async fn accept(&self, listener: &TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => self.admit(stream),
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn admit(&self, stream: TcpStream) {
        if let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() {
            self.serve(stream, Slot::Now(slot), self.open.enter(), self.router.clone());
        } else if self.open.close_oldest_idle() {
            let slot = Slot::Soon(Arc::clone(&self.slots));
            self.serve(stream, slot, self.open.enter(), self.router.clone());
        } else if let Ok(slot) = Arc::clone(&self.probe_slots).try_acquire_owned() {
            self.serve(stream, Slot::Now(slot), self.open.enter_probe(), self.probes.clone());
        } else if self.tls.is_none() {
            refuse(stream);
        }
        // Inside TLS nothing can be said before a handshake, which is what there is no room for.
    }

    fn serve(&self, stream: TcpStream, slot: Slot, entry: Entry, router: Router) {
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
            let Some(_slot) = slot.taken().await else {
                if tls.is_none() {
                    refuse(stream);
                }
                return;
            };
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
                () = conversation => {}
                () = connection.close.notified() => tracing::debug!("an idle connection made room for a new one"),
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

/// A place among the connections.
enum Slot {
    Now(OwnedSemaphorePermit),
    /// When the connection that makes room has gone.
    Soon(Arc<Semaphore>),
}

impl Slot {
    async fn taken(self) -> Option<OwnedSemaphorePermit> {
        match self {
            Self::Now(permit) => Some(permit),
            Self::Soon(slots) => tokio::time::timeout(HANDOVER, slots.acquire_owned()).await.ok()?.ok(),
        }
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
        Content-Type: application/json\r\nContent-Length: 128\r\n\r\n\
        {\"error\":{\"message\":\"the server has as many connections as it may hold\",\
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
        let body = "{\"error\":{\"message\":\"the server has as many connections as it may hold\",\
                    \"type\":\"server_error\",\"param\":null,\"code\":\"overloaded\"}}";
        assert_eq!(body.len(), 128);
    }

    #[test]
    fn the_oldest_idle_connection_makes_room_once() {
        let open = Arc::new(Open::default());
        let entries: Vec<Entry> = (0..3).map(|_| open.enter()).collect();
        let busy = Pending::new(&entries[0].connection);
        assert!(open.close_oldest_idle());
        assert_eq!(open.lock().keys().copied().collect::<Vec<_>>(), [0, 2]);
        assert!(open.close_oldest_idle());
        assert!(!open.close_oldest_idle(), "the one that is left is at work");
        let probe = open.enter_probe();
        assert!(!open.close_oldest_idle(), "a probe has no place to give");
        drop((busy, probe));
        assert!(open.close_oldest_idle());
        drop(entries);
        assert!(open.lock().is_empty());
    }
}
