//! The listener: connections in, a drain at the end.
//!
//! A signal to stop does not close the listener at once: `/ready` must be able to say no, and every request that was
//! accepted is finished, as long as the shutdown timeout allows. Only then do the connections and the engine end.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio_rustls::{TlsAcceptor, rustls};

use crate::otlp::{self, Exporter};
use crate::public::{PublicPrefixError, PublicPrefixes};
use crate::state::App;
use crate::system::{SystemPromptError, SystemPrompts};
use crate::tls::{self, TlsError};
use crate::{ServedModel, ServerConfig, routes, watchdog};

const MAX_HEADERS: usize = 100;
const MAX_HEAD_BYTES: usize = 64 << 10;
/// For the last bytes of finished answers to leave.
const LAST_BYTES: Duration = Duration::from_secs(5);
/// After a failure of `accept` that may last (no more file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, Error)]
pub enum ServeError {
    #[error("cannot listen on {address}: {cause}; choose another --port or --host")]
    Bind { address: SocketAddr, cause: io::Error },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    PublicPrefix(#[from] PublicPrefixError),
    #[error(transparent)]
    SystemPrompt(#[from] SystemPromptError),
    #[error("the engine did not stop within the shutdown timeout")]
    EngineStuck,
}

/// A server that listens and does not yet answer.
#[derive(Debug)]
pub struct Server {
    app: Arc<App>,
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    exporter: Option<Exporter>,
    address: SocketAddr,
}

impl Server {
    pub async fn bind(model: ServedModel, config: ServerConfig) -> Result<Self, ServeError> {
        let tls = config.tls.as_ref().map(tls::read).transpose()?;
        let mut public = PublicPrefixes::new(&model, &config.public_prefixes)?;
        let (system_prompts, tokens) =
            SystemPrompts::new(&model, &config.system_prompts, config.inject_system_prompt)?;
        public.extend(tokens);
        let address = SocketAddr::new(config.host, config.port);
        let bind = async {
            let listener = TcpListener::bind(address).await?;
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) = bind.await.map_err(|cause| ServeError::Bind { address, cause })?;
        let traces = config.otlp_traces_endpoint.clone();
        let (spans, exporter) = traces.map(|endpoint| otlp::channel(endpoint, model.name())).unzip();
        Ok(Self {
            app: App::new(model, config, public, system_prompts, spans),
            listener,
            tls,
            exporter,
            address,
        })
    }

    /// Where it listens; the port is a real one even if 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The routes without a listener, for tests in process.
    pub fn router(&self) -> Router {
        routes::router(&self.app)
    }

    /// Serves until `shutdown` is ready, then drains.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), ServeError> {
        let Self { app, listener, tls, exporter, .. } = self;
        let (stop_exporter, stopped) = oneshot::channel();
        let exporter = exporter.map(|exporter| exporter.spawn(stopped));
        let connections = Connections::new(&app, tls.map(TlsAcceptor::from));
        let watchdog = tokio::spawn(watchdog::watch(Arc::clone(&app)));
        tokio::select! {
            () = connections.accept(&listener) => {}
            () = shutdown => {}
        }
        app.begin_drain();
        let (timeout, begun) = (app.config.shutdown_timeout, tokio::time::Instant::now());
        tracing::info!(in_flight = app.num_in_flight(), timeout_s = timeout.as_secs_f64(), "draining");
        tokio::select! {
            () = connections.accept(&listener) => {}
            () = app.idle() => {}
            () = tokio::time::sleep(timeout) => {
                tracing::warn!(lost = app.num_in_flight(), "the shutdown timeout is over: requests are lost");
            }
        }
        drop(listener);
        connections.finish().await;
        watchdog.abort();
        if let Some(exporter) = exporter {
            let _ = stop_exporter.send(());
            let _ = exporter.await;
        }
        let left = timeout.saturating_sub(begun.elapsed()).max(LAST_BYTES);
        let engine = app.model.engine.clone();
        let stopped = tokio::task::spawn_blocking(move || engine.shutdown());
        tokio::time::timeout(left, stopped).await.map_err(|_| ServeError::EngineStuck)?.ok();
        tracing::info!("stopped");
        Ok(())
    }
}

struct Connections {
    router: Router,
    tls: Option<TlsAcceptor>,
    graceful: GracefulShutdown,
    slots: Arc<Semaphore>,
    /// True when what is left must end at once.
    closed: watch::Sender<bool>,
    read_timeout: Duration,
}

impl Connections {
    fn new(app: &Arc<App>, tls: Option<TlsAcceptor>) -> Self {
        Self {
            router: routes::router(app),
            tls,
            graceful: GracefulShutdown::new(),
            slots: Arc::new(Semaphore::new(app.config.max_connections)),
            closed: watch::Sender::new(false),
            read_timeout: app.config.read_timeout,
        }
    }

    /// Never ends by itself.
    async fn accept(&self, listener: &TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => match Arc::clone(&self.slots).try_acquire_owned() {
                    Ok(slot) => self.serve(stream, slot),
                    // Inside TLS nothing can be said before a handshake, which is what there is no room for.
                    Err(_) if self.tls.is_some() => drop(stream),
                    Err(_) => refuse(stream),
                },
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn serve(&self, stream: TcpStream, slot: OwnedSemaphorePermit) {
        // A token is a small packet: it must not wait for the next one.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(self.router.clone());
        let watcher = self.graceful.watcher();
        let (tls, timeout) = (self.tls.clone(), self.read_timeout);
        let mut closed = self.closed.subscribe();
        tokio::spawn(async move {
            let _slot = slot;
            let talk = async {
                match tls {
                    None => converse(stream, service, watcher, timeout).await,
                    Some(tls) => match tokio::time::timeout(timeout, tls.accept(stream)).await {
                        Ok(Ok(stream)) => converse(stream, service, watcher, timeout).await,
                        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                        Err(_) => tracing::debug!("a TLS handshake took too long"),
                    },
                }
            };
            tokio::select! {
                () = talk => {}
                _ = closed.wait_for(|closed| *closed) => {}
            }
        });
    }

    /// Lets answers under way leave, then closes what is left.
    async fn finish(self) {
        let _ = tokio::time::timeout(LAST_BYTES, self.graceful.shutdown()).await;
        self.closed.send_replace(true);
    }
}

/// HTTP over a stream, until either side has had enough.
async fn converse<S>(
    stream: S,
    service: TowerToHyperService<Router>,
    watcher: Watcher,
    read_timeout: Duration,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(read_timeout)
        .max_headers(MAX_HEADERS)
        // An event is small: copied behind its chunk's head, it leaves in one plain write.
        .writev(false)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection).await {
        // Clients come and go; that is no event for an operator.
        tracing::trace!(%error, "a connection ended early");
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
    #[test]
    fn the_refusal_states_its_length() {
        let body = "{\"error\":{\"message\":\"the server has as many connections as it may hold\",\
                    \"type\":\"server_error\",\"param\":null,\"code\":\"overloaded\"}}";
        assert_eq!(body.len(), 128);
    }
}
