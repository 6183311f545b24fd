//! `/kv_events`: what `--kv-events-config` publishes over ZeroMQ, for those without it.
//!
//! An event of the stream is a batch, its id the batch's number. `?from=N` or `Last-Event-ID` begin with an earlier one. What is
//! no longer kept is announced by an `AllBlocksCleared`: the reader then knows less than is true, and nothing that is wrong.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Uri, header};
use axum::response::{IntoResponse, Response};
use baton_events::{Event, EventBatch, EventHub};
use bytes::Bytes;
use http_body::Frame;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;
use crate::state::App;

/// Readers at one time.
const MAX_STREAMS: usize = 16;
/// Batches in one frame.
const AT_ONCE: usize = 64;
/// How often it is looked whether the server is about to end.
const TICK: Duration = Duration::from_secs(1);
/// Ticks between two signs of life.
const TICKS_PER_COMMENT: u32 = 15;

/// Events carry the tokens of all prompts, so several keys may not read them here.
pub async fn stream(State(app): State<Arc<App>>, uri: Uri, headers: HeaderMap) -> Result<Response, ApiError> {
    if app.config.api_keys.len() > 1 {
        return Err(ApiError::shared_by_keys("the KV cache"));
    }
    let Some(hub) = app.model.kv_events.clone() else {
        return Err(ApiError::no_kv_events());
    };
    let permit = Arc::clone(streams()).try_acquire_owned().map_err(|_| ApiError::busy())?;
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse::<u64>().ok());
    let mut fields = uri.query().into_iter().flat_map(|query| query.split('&'));
    let asked = fields.find_map(|field| field.strip_prefix("from=")?.parse::<u64>().ok());
    let next = asked.or(last.map(|last| last.saturating_add(1))).unwrap_or_else(|| hub.next());
    let body = EventBody { app, hub, next, begun: false, num_ticks: 0, waiting: None, _permit: permit };
    let mut response = Body::new(body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

fn streams() -> &'static Arc<Semaphore> {
    static STREAMS: std::sync::LazyLock<Arc<Semaphore>> =
        std::sync::LazyLock::new(|| Arc::new(Semaphore::new(MAX_STREAMS)));
    &STREAMS
}

type Waiting = Pin<Box<dyn Future<Output = ()> + Send + Sync>>;

struct EventBody {
    app: Arc<App>,
    hub: Arc<EventHub>,
    next: u64,
    begun: bool,
    num_ticks: u32,
    /// For more events, or for the next tick.
    waiting: Option<Waiting>,
    _permit: OwnedSemaphorePermit,
}

impl EventBody {
    fn wait(&self) -> Waiting {
        let (mut more, next) = (self.hub.watch(), self.next);
        Box::pin(async move {
            let _ = tokio::time::timeout(TICK, more.wait_for(|end| *end > next)).await;
        })
    }

    /// What there is to send now.
    fn ready(&mut self) -> Option<Bytes> {
        if !std::mem::replace(&mut self.begun, true) {
            return Some(Bytes::from_static(b": KV events\n\n"));
        }
        // A reader of an earlier run asks for numbers that this one has not had.
        let restarted = self.next > self.hub.next();
        let read = self.hub.read(if restarted { 0 } else { self.next }, AT_ONCE);
        let mut out = Vec::new();
        if read.missed || restarted {
            let cleared =
                EventBatch { ts: 0.0, events: vec![Event::AllBlocksCleared], data_parallel_rank: Some(0) };
            write(&mut out, None, &cleared);
        }
        for (number, batch) in &read.batches {
            write(&mut out, Some(*number), batch);
        }
        self.next = read.next;
        (!out.is_empty()).then(|| Bytes::from(out))
    }
}

fn write(out: &mut Vec<u8>, number: Option<u64>, batch: &EventBatch) {
    if let Some(number) = number {
        out.extend_from_slice(format!("id: {number}\n").as_bytes());
    }
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, batch).expect("events serialise");
    out.extend_from_slice(b"\n\n");
}

impl http_body::Body for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        loop {
            if this.app.is_draining() {
                return Poll::Ready(None);
            }
            if let Some(bytes) = this.ready() {
                this.waiting = None;
                this.num_ticks = 0;
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            if this.waiting.is_none() {
                this.waiting = Some(this.wait());
            }
            let waiting = this.waiting.as_mut().expect("it was just made");
            std::task::ready!(waiting.as_mut().poll(cx));
            this.waiting = None;
            this.num_ticks += 1;
            if this.num_ticks >= TICKS_PER_COMMENT {
                this.num_ticks = 0;
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b": still here\n\n")))));
            }
        }
    }
}
