//! The listener, what all requests share, and the orderly end.

use std::convert::Infallible;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, SystemTime};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::config::{ConfigError, RouterConfig, WorkerSpec, parse_workers_file};
use crate::error::Refusal;
use crate::fleet::Fleet;
use crate::index::PrefixIndex;
use crate::metrics::Metrics;
use crate::policy::Chooser;
use crate::responses::Owners;
use crate::{events, probe, proxy};

/// How long a client may take to send the head of a request.
const HEADER_READ: Duration = Duration::from_secs(60);
const MAX_HEAD_BYTES: usize = 64 << 10;
/// After a failure of `accept` that may last (no more file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How often the file of workers is looked at.
const FILE_POLL: Duration = Duration::from_secs(1);
/// For the last bytes of finished answers to leave.
const LAST_BYTES: Duration = Duration::from_secs(5);

/// What all requests share.
#[derive(Debug)]
pub struct App {
    pub config: RouterConfig,
    pub fleet: Fleet,
    pub chooser: Chooser,
    pub metrics: Metrics,
    pub responses: Owners,
    index: RwLock<PrefixIndex>,
    in_flight: watch::Sender<usize>,
    draining: AtomicBool,
}

/// A request that is being served.
#[derive(Debug)]
pub struct Served(Arc<App>);

impl Drop for Served {
    fn drop(&mut self) {
        self.0.in_flight.send_modify(|count| *count -= 1);
    }
}

impl App {
    fn new(config: RouterConfig) -> Self {
        Self {
            fleet: Fleet::new(),
            chooser: Chooser::new(config.policy, config.load_factor),
            metrics: Metrics::new(),
            responses: Owners::default(),
            index: RwLock::new(PrefixIndex::new(config.max_indexed_blocks)),
            in_flight: watch::Sender::new(0),
            draining: AtomicBool::new(false),
            config,
        }
    }

    pub fn index(&self) -> RwLockReadGuard<'_, PrefixIndex> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn index_mut(&self) -> RwLockWriteGuard<'_, PrefixIndex> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Lets a request in.
    pub fn admit(self: &Arc<Self>) -> Result<Served, Refusal> {
        let mut allowed = false;
        self.in_flight.send_modify(|count| {
            *count += 1;
            allowed = *count <= self.config.max_requests;
        });
        let served = Served(Arc::clone(self));
        if self.is_draining() {
            return Err(Refusal::Draining);
        }
        if allowed { Ok(served) } else { Err(Refusal::Busy { limit: self.config.max_requests }) }
    }

    async fn idle(&self) {
        // The sender lives as long as `self`, so this cannot fail.
        let _ = self.in_flight.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Makes this the list of workers, and has the new ones watched.
    fn set_workers(self: &Arc<Self>, specs: &[WorkerSpec]) -> Result<(), ConfigError> {
        let changes = self.fleet.set(specs, &self.config)?;
        for worker in changes.removed {
            tracing::info!(worker = worker.url(), "worker removed");
        }
        for worker in changes.added {
            tracing::info!(worker = worker.url(), role = worker.role().name(), "worker added");
            tokio::spawn(probe::watch(Arc::clone(self), Arc::clone(&worker)));
            tokio::spawn(events::follow(Arc::clone(self), worker));
        }
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum RouteError {
    #[error("cannot listen on {address}: {cause}")]
    Bind { address: SocketAddr, cause: io::Error },
    #[error("cannot read the workers file {}: {cause}", path.display())]
    File { path: PathBuf, cause: io::Error },
    #[error("the workers file {}: {cause}", path.display())]
    FileContent { path: PathBuf, cause: ConfigError },
    #[error("{0}")]
    Config(#[from] ConfigError),
}

/// A router that listens and does not yet answer.
#[derive(Debug)]
pub struct Router {
    app: Arc<App>,
    listener: TcpListener,
    address: SocketAddr,
}

impl Router {
    /// Listens, and begins to watch the workers.
    pub async fn bind(config: RouterConfig) -> Result<Self, RouteError> {
        let specs = workers(&config)?;
        if specs.is_empty() && config.workers_file.is_none() {
            return Err(ConfigError::new(
                "there are no workers: name them with --worker-urls or --workers-file",
            )
            .into());
        }
        let address = SocketAddr::new(config.host, config.port);
        let listener =
            TcpListener::bind(address).await.map_err(|cause| RouteError::Bind { address, cause })?;
        let address = listener.local_addr().map_err(|cause| RouteError::Bind { address, cause })?;
        let app = Arc::new(App::new(config));
        app.set_workers(&specs)?;
        Ok(Self { app, listener, address })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn num_workers(&self) -> usize {
        self.app.fleet.all().len()
    }

    /// Serves until `shutdown` is ready, then finishes what it has.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let Self { app, listener, .. } = self;
        let graceful = GracefulShutdown::new();
        let reload = tokio::spawn(reload(Arc::clone(&app)));
        tokio::select! {
            () = accept(&app, &listener, &graceful) => {}
            () = shutdown => {}
        }
        app.draining.store(true, Ordering::SeqCst);
        let timeout = app.config.shutdown_timeout;
        tracing::info!(in_flight = *app.in_flight.borrow(), timeout_s = timeout.as_secs_f64(), "draining");
        tokio::select! {
            () = accept(&app, &listener, &graceful) => {}
            () = app.idle() => {}
            () = tokio::time::sleep(timeout) => {
                tracing::warn!(lost = *app.in_flight.borrow(), "the shutdown timeout is over: requests are lost");
            }
        }
        drop(listener);
        reload.abort();
        let _ = tokio::time::timeout(LAST_BYTES, graceful.shutdown()).await;
        tracing::info!("stopped");
    }
}

/// Those of the flags and those of the file.
fn workers(config: &RouterConfig) -> Result<Vec<WorkerSpec>, RouteError> {
    let mut specs = config.workers.clone();
    if let Some(path) = &config.workers_file {
        let text =
            std::fs::read_to_string(path).map_err(|cause| RouteError::File { path: path.clone(), cause })?;
        let listed = parse_workers_file(&text)
            .map_err(|cause| RouteError::FileContent { path: path.clone(), cause })?;
        specs.extend(listed);
    }
    Ok(specs)
}

/// Reads the file of workers again whenever it has changed. One that is wrong changes nothing.
async fn reload(app: Arc<App>) {
    let Some(path) = app.config.workers_file.clone() else { return };
    let stamp = || -> Option<(SystemTime, u64)> {
        let metadata = std::fs::metadata(&path).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    };
    let mut last = stamp();
    loop {
        tokio::time::sleep(FILE_POLL).await;
        let now = stamp();
        if now == last || now.is_none() {
            continue;
        }
        last = now;
        match workers(&app.config).and_then(|specs| Ok(app.set_workers(&specs)?)) {
            Ok(()) => tracing::info!(workers = app.fleet.all().len(), "workers file read again"),
            Err(error) => tracing::error!("the old workers are kept: {error}"),
        }
    }
}

async fn accept(app: &Arc<App>, listener: &TcpListener, graceful: &GracefulShutdown) {
    let slots = Arc::new(Semaphore::new(app.config.max_connections));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("a connection could not be taken: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let connection = graceful.watch(serve(Arc::clone(app), stream));
        tokio::spawn(async move {
            let _slot = slot;
            if let Err(error) = connection.await {
                tracing::debug!("a connection ended: {error}");
            }
        });
    }
}

fn serve(
    app: Arc<App>,
    stream: TcpStream,
) -> http1::Connection<
    TokioIo<TcpStream>,
    impl hyper::service::Service<
        hyper::Request<hyper::body::Incoming>,
        Response = crate::error::Reply,
        Error = Infallible,
        Future: Send,
    >,
> {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let app = Arc::clone(&app);
        async move { Ok::<_, Infallible>(proxy::handle(app, request).await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service)
}

/// An id that no other request of this or another router has, for all that is likely.
pub fn new_id() -> String {
    static START: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}{:016x}", *START, crate::hashing::mix(*START, number))
}
