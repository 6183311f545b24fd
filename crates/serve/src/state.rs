//! What all handlers share, and the count of requests that must be finished before the server may end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::sync::{Semaphore, watch};

use crate::auth::Keys;
use crate::error::ApiError;
use crate::otlp::Spans;
use crate::public::PublicPrefixes;
use crate::speech::Speech;
use crate::store::ResponseStore;
use crate::system::SystemPrompts;
use crate::{ServedModel, ServerConfig};

/// Unit of the budget for request bodies: a semaphore counts in 32 bits.
pub const BODY_UNIT_BYTES: usize = 1024;

#[derive(Debug)]
pub struct App {
    pub model: ServedModel,
    pub config: ServerConfig,
    pub speech: Speech,
    pub keys: Keys,
    pub public: PublicPrefixes,
    pub system_prompts: SystemPrompts,
    /// Where the spans of ended requests go, if anybody wants them.
    pub spans: Option<Spans>,
    /// Answers that later requests may refer to.
    pub responses: ResponseStore,
    pub started: Instant,
    /// Request bodies that are held in memory, in units of [`BODY_UNIT_BYTES`].
    pub bodies: Arc<Semaphore>,
    /// Prompts that are rendered and tokenised at a time: one a core, so that a burst of long prompts cannot take
    /// every thread and all memory.
    pub text_workers: Arc<Semaphore>,
    in_flight: watch::Sender<usize>,
    draining: AtomicBool,
}

/// A generation request that is being served. The server does not end before it, unless it takes too long.
#[derive(Debug)]
pub struct InFlight(Arc<App>);

impl App {
    pub fn new(
        model: ServedModel,
        config: ServerConfig,
        public: PublicPrefixes,
        system_prompts: SystemPrompts,
        spans: Option<Spans>,
    ) -> Arc<Self> {
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(Self {
            speech: Speech::new(model.text.chat_template.as_ref(), &config),
            keys: Keys::new(&config.api_keys),
            public,
            system_prompts,
            spans,
            responses: ResponseStore::new(&config),
            started: Instant::now(),
            bodies: Arc::new(Semaphore::new(config.max_bodies_bytes / BODY_UNIT_BYTES)),
            text_workers: Arc::new(Semaphore::new(workers)),
            in_flight: watch::Sender::new(0),
            draining: AtomicBool::new(false),
            model,
            config,
        })
    }

    /// Lets a request in, unless the server is about to end.
    pub fn admit(self: &Arc<Self>) -> Result<InFlight, ApiError> {
        // Counted first, then looked: a drain that begins between the two waits for this request.
        self.in_flight.send_modify(|count| *count += 1);
        let in_flight = InFlight(Arc::clone(self));
        if self.is_draining() {
            return Err(ApiError::unavailable("the server is shutting down: try another one"));
        }
        Ok(in_flight)
    }

    pub fn num_in_flight(&self) -> usize {
        *self.in_flight.borrow()
    }

    pub fn begin_drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Waits until no generation request is being served.
    pub async fn idle(&self) {
        let mut count = self.in_flight.subscribe();
        // The sender lives as long as `self`, so this cannot fail.
        let _ = count.wait_for(|count| *count == 0).await;
    }

    /// Why the server cannot answer requests, if it cannot.
    pub fn failure(&self) -> Option<&'static str> {
        let beat = self.model.engine.pulse().beat();
        if beat.ended && !self.is_draining() {
            return Some("the engine has stopped");
        }
        let stuck = beat.phase != baton_engine::Phase::Idle && beat.for_time > self.config.stall_timeout;
        stuck.then_some("the engine is stuck")
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.send_modify(|count| *count -= 1);
    }
}
