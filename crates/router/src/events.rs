//! Follows the KV events of a worker and keeps the index up to date. What was missed is not guessed: after a gap the worker's
//! entries are dropped and learnt anew.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_events::{Event, EventBatch, Subscriber};
use bytes::Bytes;
use http_body::Body;

use crate::config::EventSource;
use crate::index::Stored;
use crate::probe::own_question;
use crate::server::App;
use crate::upstream::SendError;
use crate::worker::Worker;

/// Between two attempts to follow a worker.
const RETRY: Duration = Duration::from_secs(2);
/// A worker without events is asked again, in case it is another one by then.
const RETRY_WITHOUT: Duration = Duration::from_secs(30);
/// Until the worker's stream begins; it sends a comment at once.
const BEGIN: Duration = Duration::from_secs(10);
/// A longer line is not an event.
const MAX_LINE_BYTES: usize = 64 << 20;

/// Follows a worker for as long as it belongs to the fleet.
pub async fn follow(app: Arc<App>, worker: Arc<Worker>) {
    while app.fleet.by_id(worker.id).is_some() {
        let pause = match &worker.spec.events {
            EventSource::None => return,
            EventSource::Auto => follow_http(&app, &worker).await,
            EventSource::Zmq(endpoint) => follow_zmq(&app, &worker, endpoint).await,
        };
        forget(&app, &worker);
        tokio::time::sleep(pause).await;
    }
    forget(&app, &worker);
}

fn forget(app: &App, worker: &Worker) {
    worker.counts.follows_events.store(false, Ordering::Relaxed);
    app.index_mut().cleared(worker.id);
}

/// Reads `/kv_events` until it ends. Says how long to wait before the next attempt.
async fn follow_http(app: &Arc<App>, worker: &Arc<Worker>) -> Duration {
    let question = own_question(&app.config, "/kv_events?from=0");
    let answer = match worker.upstream.ask(&question, BEGIN).await {
        Ok(answer) if answer.parts.status.is_success() => answer,
        // It has no such route, or events are off.
        Ok(_) => return RETRY_WITHOUT,
        Err(_) => return RETRY,
    };
    worker.counts.follows_events.store(true, Ordering::Relaxed);
    let mut body = answer.body;
    let mut lines = Lines::default();
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        if app.fleet.by_id(worker.id).is_none() {
            break;
        }
        let frame: Result<_, SendError> = frame;
        let Ok(data) = frame.map(|frame| frame.into_data().unwrap_or_else(|_| Bytes::new())) else { break };
        let fits = lines.feed(&data, |line| {
            if let Some(batch) = line.strip_prefix(b"data:")
                && let Ok(batch) = serde_json::from_slice::<EventBatch>(batch)
            {
                apply(app, worker, &batch);
            }
        });
        if !fits {
            break;
        }
    }
    worker.counts.kv_event_gaps.fetch_add(1, Ordering::Relaxed);
    RETRY
}

/// Reads a PUB socket until the worker is unhealthy or the socket fails. The socket reconnects by itself, so what was missed
/// shows in the numbers of the batches.
async fn follow_zmq(app: &Arc<App>, worker: &Arc<Worker>, endpoint: &str) -> Duration {
    let Ok(mut subscriber) = Subscriber::connect(endpoint).await else { return RETRY };
    worker.counts.follows_events.store(true, Ordering::Relaxed);
    while app.fleet.by_id(worker.id).is_some() && worker.is_healthy() {
        let received = tokio::time::timeout(RETRY, subscriber.next()).await;
        let Ok(received) = received else { continue };
        let Some(received) = received else { break };
        if received.missed {
            worker.counts.kv_event_gaps.fetch_add(1, Ordering::Relaxed);
            app.index_mut().cleared(worker.id);
        }
        apply(app, worker, &received.batch);
    }
    RETRY
}

/// Takes a batch into the index.
pub fn apply(app: &App, worker: &Worker, batch: &EventBatch) {
    worker.counts.kv_events.fetch_add(1, Ordering::Relaxed);
    let mut index = app.index_mut();
    for event in &batch.events {
        match event {
            // What lies in the worker's host memory is still found there, so only the device's news are followed.
            Event::BlockStored { medium, .. } | Event::BlockRemoved { medium, .. }
                if medium.as_deref().is_some_and(|medium| medium != "GPU") => {}
            Event::BlockStored { block_hashes, parent_block_hash, token_ids, block_size, .. } => {
                let stored = Stored {
                    hashes: block_hashes,
                    parent: *parent_block_hash,
                    token_ids,
                    block_size: *block_size,
                };
                index.stored(worker.id, &stored);
            }
            Event::BlockRemoved { block_hashes, .. } => index.removed(worker.id, block_hashes),
            Event::AllBlocksCleared => index.cleared(worker.id),
        }
    }
}

/// Lines out of bytes that may be cut anywhere.
#[derive(Debug, Default)]
struct Lines {
    carry: Vec<u8>,
}

impl Lines {
    /// Calls `line` with every line that is complete. False when one never ends.
    fn feed(&mut self, mut bytes: &[u8], mut line: impl FnMut(&[u8])) -> bool {
        while let Some(end) = bytes.iter().position(|&byte| byte == b'\n') {
            if self.carry.is_empty() {
                line(&bytes[..end]);
            } else {
                self.carry.extend_from_slice(&bytes[..end]);
                line(&self.carry);
                self.carry.clear();
            }
            bytes = &bytes[end + 1..];
        }
        self.carry.extend_from_slice(bytes);
        self.carry.len() <= MAX_LINE_BYTES
    }
}
