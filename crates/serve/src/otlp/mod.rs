//! Traces of requests for OpenTelemetry: one span a prompt, with vLLM's attribute names, sent to a collector as
//! OTLP over HTTP in JSON.
//!
//! The format is small enough to be written here, so every build can do it. `opentelemetry-otlp` with JSON over HTTP would add some
//! forty crates and a provider with global state, for spans that are complete when they are made.
//!
//! The engine never waits for a collector: spans go into a bounded queue, a task of its own sends them in batches, and what a slow
//! or absent collector does not take is dropped and counted in the log.

mod context;
mod endpoint;
mod span;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

pub use context::{TraceParent, current_parent, in_context};
pub use endpoint::{Endpoint, EndpointError};
pub use span::RequestSpan;

/// Spans that may wait for the collector.
const QUEUE: usize = 4096;
const BATCH: usize = 512;
/// A span waits for others at most this long.
const BATCH_TIME: Duration = Duration::from_secs(1);
/// At the end, for the last batch to leave.
const LAST_BATCH: Duration = Duration::from_secs(2);

/// Where spans are handed in.
#[derive(Debug)]
pub struct Spans {
    queue: mpsc::Sender<RequestSpan>,
    num_dropped: Arc<AtomicU64>,
}

/// The task that sends them.
#[derive(Debug)]
pub struct Exporter {
    queue: mpsc::Receiver<RequestSpan>,
    num_dropped: Arc<AtomicU64>,
    endpoint: Endpoint,
    model: String,
}

/// Both ends of the queue to a collector.
pub fn channel(endpoint: Endpoint, model: &str) -> (Spans, Exporter) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let num_dropped = Arc::new(AtomicU64::new(0));
    let spans = Spans { queue: sender, num_dropped: Arc::clone(&num_dropped) };
    (spans, Exporter { queue: receiver, num_dropped, endpoint, model: model.to_owned() })
}

impl Spans {
    /// Never waits.
    pub fn push(&self, span: RequestSpan) {
        if self.queue.try_send(span).is_err() {
            self.num_dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Exporter {
    pub fn spawn(self, stop: tokio::sync::oneshot::Receiver<()>) -> JoinHandle<()> {
        tokio::spawn(self.run(stop))
    }

    async fn run(mut self, mut stop: tokio::sync::oneshot::Receiver<()>) {
        let mut failing = false;
        loop {
            let mut batch = Vec::new();
            tokio::select! {
                received = self.queue.recv_many(&mut batch, BATCH) => if received == 0 { return },
                _ = &mut stop => break,
            }
            // The first one is here; those of the next moment go with it.
            let more =
                async { while batch.len() < BATCH && self.queue.recv_many(&mut batch, BATCH).await > 0 {} };
            let stopped = tokio::select! {
                _ = tokio::time::timeout(BATCH_TIME, more) => false,
                _ = &mut stop => true,
            };
            self.send(&batch, &mut failing).await;
            if stopped {
                break;
            }
        }
        let mut rest = Vec::new();
        while let Ok(span) = self.queue.try_recv() {
            rest.push(span);
        }
        if !rest.is_empty() {
            let _ = tokio::time::timeout(LAST_BATCH, self.send(&rest, &mut failing)).await;
        }
    }

    async fn send(&self, batch: &[RequestSpan], failing: &mut bool) {
        let spans: Vec<_> = batch.iter().map(|span| span.to_json(&self.model)).collect();
        let resource = [("service.name", "baton"), ("service.version", env!("CARGO_PKG_VERSION"))];
        let resource = resource.map(|(key, value)| json!({"key": key, "value": {"stringValue": value}}));
        let scope = json!({"name": "baton", "version": env!("CARGO_PKG_VERSION")});
        let body = json!({"resourceSpans": [{
            "resource": {"attributes": resource},
            "scopeSpans": [{"scope": scope, "spans": spans}],
        }]});
        let dropped = self.num_dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            tracing::warn!(dropped, "more spans than the trace collector takes");
        }
        match self.endpoint.post(&body.to_string()).await {
            Ok(()) => *failing = false,
            // Said once, not with every batch.
            Err(error) if !*failing => {
                *failing = true;
                tracing::warn!(endpoint = %self.endpoint, %error, "traces cannot be delivered and are dropped");
            }
            Err(_) => {}
        }
    }
}
