//! Connections: HTTP/2 without TLS, as many as the HTTP server may have, each with a limited number of calls.
//!
//! Every call passes through [`admit`] before it is decoded: its key is checked and its body read within the limits of size, time
//! and memory that the HTTP server has.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use baton_serve::{ApiError, Frontend};
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{AbortHandle, JoinSet};
use tonic::service::Routes;
use tonic::{Code, Status};
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};
use vllm_proto::control_server::ControlServer;
use vllm_proto::inference_server::InferenceServer;

use crate::abort::Running;
use crate::control::{ControlFacts, ControlService};
use crate::inference::InferenceService;
use crate::request::check_message;

/// Calls of one connection at a time.
const MAX_CALLS: u32 = 1024;
/// A message is one prompt; no prompt is larger.
const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// What a message may take once it is decoded, as a multiple of its length: empty texts and values are the worst.
const DECODED_FACTOR: usize = 32;
/// The head of a message: whether it is compressed, and its length.
const MESSAGE_HEAD: usize = 5;
/// What a client of HTTP/2 says first, how long it may take, and how many may be about to.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const GREETING_LIMIT: Duration = Duration::from_secs(5);
const MAX_STRANGERS: usize = 64;
/// A peer that does not answer a ping within this time is gone.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);
/// For the last bytes of calls that have ended.
const LAST_BYTES: Duration = Duration::from_secs(1);
const SERVICES: [&str; 3] = ["", "vllm.Inference", "vllm.Control"];

#[derive(Debug, Error)]
pub enum GrpcError {
    #[error("cannot listen on {address}: {cause}; choose another --grpc-port or --host")]
    Bind { address: SocketAddr, cause: io::Error },
}

/// A server that answers until it is dropped or [`GrpcServer::finish`]ed.
#[derive(Debug)]
pub struct GrpcServer {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl GrpcServer {
    pub async fn start(
        frontend: Frontend,
        facts: ControlFacts,
        address: SocketAddr,
        max_connections: usize,
    ) -> Result<Self, GrpcError> {
        let wrong = |cause| GrpcError::Bind { address, cause };
        let listener = TcpListener::bind(address).await.map_err(wrong)?;
        let address = listener.local_addr().map_err(wrong)?;
        let (reporter, health) = health_reporter();
        let running = Running::default();
        let instance_id = format!("baton-{address}-{}", std::process::id());
        let control =
            ControlService { frontend: frontend.clone(), running: running.clone(), facts, instance_id };
        let inference = InferenceService { frontend: frontend.clone(), running };
        report(&frontend, &reporter).await;
        let routes =
            Routes::new(InferenceServer::new(inference).max_decoding_message_size(MAX_MESSAGE_BYTES))
                .add_service(ControlServer::new(control).max_decoding_message_size(MAX_MESSAGE_BYTES))
                .add_service(health);
        let router = routes.into_axum_router().layer(from_fn_with_state(frontend.clone(), admit));
        let (stop, stopped) = watch::channel(false);
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, router, stopped, max_connections.max(1)));
        tasks.spawn(async move {
            loop {
                tokio::time::sleep(HEALTH_INTERVAL).await;
                report(&frontend, &reporter).await;
            }
        });
        Ok(Self { address, stop, tasks })
    }

    /// Where it listens; the port is a real one even if 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more calls and gives those that have ended the time to send their last bytes.
    pub async fn finish(mut self) {
        let _ = self.stop.send(true);
        let _ = tokio::time::timeout(LAST_BYTES, self.tasks.join_next()).await;
    }
}

async fn report(frontend: &Frontend, reporter: &HealthReporter) {
    let status = if frontend.is_ready() { ServingStatus::Serving } else { ServingStatus::NotServing };
    for service in SERVICES {
        reporter.set_service_status(service, status).await;
    }
}

/// Lets connections in until it is told to stop, then waits for those that are there.
async fn accept(listener: TcpListener, router: Router, mut stopped: watch::Receiver<bool>, limit: usize) {
    let places = Arc::new(Semaphore::new(limit));
    let mut strangers = Strangers::default();
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(greeted) = strangers.tasks.join_next() => {
                // One too many is closed, and its client tries again: that is what gRPC makes of it.
                if let Ok(Some(socket)) = greeted
                    && let Ok(place) = Arc::clone(&places).try_acquire_owned()
                {
                    let (router, stopped) = (router.clone(), stopped.clone());
                    connections.spawn(async move {
                        let _place = place;
                        serve(socket, router, stopped).await;
                    });
                }
                continue;
            }
            Some(_) = connections.join_next() => continue,
            _ = stopped.changed() => break,
        };
        match accepted {
            Ok((socket, _)) => strangers.enter(socket),
            // Too many open files: others may be closed meanwhile.
            Err(error) => {
                tracing::warn!(%error, "a gRPC connection was not accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    drop((listener, strangers));
    while connections.join_next().await.is_some() {}
}

/// Connections that have not said yet that they speak HTTP/2. They take no place from those that do; when there are too many, the
/// oldest goes.
#[derive(Debug, Default)]
struct Strangers {
    tasks: JoinSet<Option<TcpStream>>,
    by_age: VecDeque<AbortHandle>,
}

impl Strangers {
    fn enter(&mut self, socket: TcpStream) {
        self.by_age.retain(|task| !task.is_finished());
        if self.by_age.len() >= MAX_STRANGERS
            && let Some(oldest) = self.by_age.pop_front()
        {
            oldest.abort();
        }
        self.by_age.push_back(self.tasks.spawn(async move {
            let greeted = tokio::time::timeout(GREETING_LIMIT, has_greeted(&socket)).await;
            greeted.is_ok_and(|greeted| greeted).then_some(socket)
        }));
    }
}

/// Waits for the first bytes of HTTP/2 and leaves them where they are. False where others come.
async fn has_greeted(socket: &TcpStream) -> bool {
    let mut start = [0; PREFACE.len()];
    loop {
        match socket.peek(&mut start).await {
            Ok(len) if len == PREFACE.len() => return start == *PREFACE,
            Ok(len) if len > 0 && PREFACE.starts_with(&start[..len]) => {
                // The rest of it cannot be waited for without taking these.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            _ => return false,
        }
    }
}

async fn serve(socket: TcpStream, router: Router, mut stopped: watch::Receiver<bool>) {
    let _ = socket.set_nodelay(true);
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_CALLS)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    let service = TowerToHyperService::new(router);
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(socket), service));
    tokio::select! {
        // Whatever ended it, there is nobody to tell.
        _ = connection.as_mut() => return,
        _ = stopped.changed() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

/// Every call passes here; services find the tenant in its extensions.
async fn admit(State(frontend): State<Frontend>, request: Request, next: Next) -> Response {
    let is_inference = request.uri().path().starts_with("/vllm.Inference/");
    let is_open = request.uri().path().starts_with("/grpc.health.v1.Health/");
    let limits = baton_serve::MessageLimits { max_bytes: MAX_MESSAGE_BYTES, factor: DECODED_FACTOR, is_open };
    let handled = frontend.run(request, limits, |request, body| async move {
        let message = body.get(MESSAGE_HEAD..).unwrap_or_default();
        match check_message(if is_inference { message } else { &[] }) {
            Ok(()) => next.run(request).await,
            Err(refused) => refused.into_http(),
        }
    });
    match handled.await {
        Ok(response) => response,
        Err(error) => status(&error).into_http(),
    }
}

/// An error of the API in gRPC's words.
pub fn status(error: &ApiError) -> Status {
    let code = match error.status {
        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => Code::InvalidArgument,
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::NOT_FOUND => Code::NotFound,
        StatusCode::REQUEST_TIMEOUT => Code::DeadlineExceeded,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::PAYLOAD_TOO_LARGE => Code::ResourceExhausted,
        StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
        StatusCode::NOT_IMPLEMENTED => Code::Unimplemented,
        _ => Code::Internal,
    };
    Status::new(code, error.body().error.message)
}
