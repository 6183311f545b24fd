//! The listener: connections in, a drain at the end.
//!
//! A signal to stop does not close the listener at once: `/ready` must be able to say no, and every request that was
//! accepted is finished, as long as the shutdown timeout allows. Only then do the connections and the engine end.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use thiserror::Error;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_rustls::{TlsAcceptor, rustls};

use crate::auth::TenantId;
use crate::connections::{Connections, LAST_BYTES};
use crate::frontend::Frontend;
use crate::otlp::{self, Exporter};
use crate::public::{PublicPrefixError, PublicPrefixes};
use crate::state::App;
use crate::system::{SystemPromptError, SystemPrompts};
use crate::tls::{self, TlsError};
use crate::{ServedModel, ServerConfig, routes, watchdog};

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;

#[derive(Debug, Error)]
pub enum ServeError {
    #[error("cannot listen on {address}: {cause}; choose another --port or --host")]
    Bind { address: SocketAddr, cause: io::Error },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    PublicPrefix(#[from] PublicPrefixError),
    #[error("the server's threads could not be started: {cause}")]
    Threads { cause: io::Error },
    #[error(transparent)]
    SystemPrompt(#[from] SystemPromptError),
    #[error("the engine did not stop within the shutdown timeout")]
    EngineStuck,
}

/// A port that is taken and a certificate that was read: what can be wrong without a model is known. Nobody can connect
/// yet.
#[derive(Debug)]
pub struct Reserved {
    socket: TcpSocket,
    tls: Option<Arc<rustls::ServerConfig>>,
    address: SocketAddr,
}

impl Reserved {
    pub fn new(config: &ServerConfig) -> Result<Self, ServeError> {
        let tls = config.tls.as_ref().map(tls::read).transpose()?;
        let address = SocketAddr::new(config.host, config.port);
        let bind = || {
            let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            let address = socket.local_addr()?;
            Ok((socket, address))
        };
        let (socket, address) = bind().map_err(|cause| ServeError::Bind { address, cause })?;
        Ok(Self { socket, tls, address })
    }
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
        let reserved = Reserved::new(&config)?;
        Self::listen(reserved, model, config).await
    }

    /// Listens on a port that was reserved. Async, because listening needs the runtime.
    #[allow(clippy::unused_async)] // The listener belongs to the runtime that it is made in.
    pub async fn listen(
        reserved: Reserved,
        model: ServedModel,
        config: ServerConfig,
    ) -> Result<Self, ServeError> {
        let Reserved { socket, tls, address } = reserved;
        let kwargs = &config.chat_template_kwargs;
        let mut public = PublicPrefixes::new(&model, &config.public_prefixes, kwargs)?;
        let (system_prompts, tokens) =
            SystemPrompts::new(&model, &config.system_prompts, config.inject_system_prompt, kwargs)?;
        public.extend(tokens);
        let traces = config.otlp_traces_endpoint.clone();
        let (spans, exporter) = traces.map(|endpoint| otlp::channel(endpoint, model.name())).unzip();
        let app = App::new(model, config, public, system_prompts, spans)
            .map_err(|cause| ServeError::Threads { cause })?;
        let listener = socket.listen(BACKLOG).map_err(|cause| ServeError::Bind { address, cause })?;
        Ok(Self { app, listener, tls, exporter, address })
    }

    /// Where it listens; the port is a real one even if 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The way in for other protocols.
    pub fn frontend(&self) -> Frontend {
        Frontend::new(&self.app)
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
        let unloading = app.models.clone().map(|models| tokio::spawn(models.watch()));
        let begun = accept_and_drain(&app, &connections, &listener, shutdown).await;
        drop(listener);
        connections.finish().await;
        watchdog.abort();
        if let Some(unloading) = unloading {
            unloading.abort();
        }
        if let Some(exporter) = exporter {
            let _ = stop_exporter.send(());
            let _ = exporter.await;
        }
        let left = app.config.shutdown_timeout.saturating_sub(begun.elapsed()).max(LAST_BYTES);
        let engine = app.model.engine.clone();
        let models = app.models.clone();
        let stopped = app.text_workers.run(TenantId::default(), move || {
            if let Some(models) = models {
                models.shutdown();
            }
            engine.shutdown();
        });
        tokio::time::timeout(left, stopped).await.map_err(|_| ServeError::EngineStuck)?.ok();
        tracing::info!("stopped");
        Ok(())
    }
}

/// Lets connections in until `shutdown` is ready, and then until all that was accepted is done. Returns when the drain began.
async fn accept_and_drain(
    app: &App,
    connections: &Connections,
    listener: &TcpListener,
    shutdown: impl Future<Output = ()>,
) -> Instant {
    // One future for both: a connection that waits for its place when the signal comes is not lost.
    let mut accepting = std::pin::pin!(connections.accept(listener));
    tokio::select! {
        () = &mut accepting => {}
        () = shutdown => {}
    }
    app.begin_drain();
    let (timeout, begun) = (app.config.shutdown_timeout, Instant::now());
    tracing::info!(in_flight = app.num_in_flight(), timeout_s = timeout.as_secs_f64(), "draining");
    tokio::select! {
        () = accepting => {}
        () = app.idle() => {}
        () = tokio::time::sleep(timeout) => {
            tracing::warn!(lost = app.num_in_flight(), "the shutdown timeout is over: requests are lost");
        }
    }
    begun
}
