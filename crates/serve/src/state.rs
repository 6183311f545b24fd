//! What all handlers share, and the count of requests that must be finished before the server may end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::sync::watch;

use crate::activity::Activity;
use crate::auth::Keys;
use crate::budget::BodyBudget;
use crate::chat_format::ChatFormat;
use crate::error::ApiError;
use crate::graphs::Graphs;
use crate::models::Models;
use crate::otlp::Spans;
use crate::public::PublicPrefixes;
use crate::refusals::Refusals;
use crate::scope;
use crate::store::ResponseStore;
use crate::system::SystemPrompts;
use crate::workers::{Pool, Workers};
use crate::{ServedModel, ServerConfig};

/// More would only wait for each other's memory.
const MAX_TEXT_WORKERS: usize = 16;
/// Steps of `nice` below the engine. A prompt is wanted soon, a new schema may take its time.
const TEXT_NICE: i32 = 10;
const GRAMMAR_NICE: i32 = 19;

/// What requests of one model see: the model, and what all models share.
#[derive(Debug)]
pub struct App {
    pub model: ServedModel,
    pub chat_format: ChatFormat,
    pub public: PublicPrefixes,
    pub system_prompts: SystemPrompts,
    shared: Arc<Shared>,
}

/// What the models of a server share.
#[derive(Debug)]
pub struct Shared {
    pub config: ServerConfig,
    pub keys: Keys,
    pub refusals: Refusals,
    /// Where the spans of ended requests go, if anybody wants them.
    pub spans: Option<Spans>,
    /// Answers that later requests may refer to.
    pub responses: ResponseStore,
    pub started: Instant,
    /// Where a graph model is served.
    pub graphs: Option<Arc<Graphs>>,
    /// Models that are loaded when they are asked for.
    pub models: Option<Arc<Models>>,
    /// What is being served right now.
    pub activity: Arc<Activity>,
    /// Memory for requests that have not become tokens yet.
    pub bodies: Arc<BodyBudget>,
    /// Render and tokenise prompts: one per core, so that a burst of long prompts cannot take all memory.
    pub text_workers: Workers,
    /// Compile what outputs must be like, on at most half of the cores.
    pub grammar_workers: Workers,
    in_flight: watch::Sender<usize>,
    draining: AtomicBool,
}

impl std::ops::Deref for App {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

/// A generation request that is being served. The server does not end before it, unless it takes too long.
#[derive(Debug)]
pub struct InFlight(Arc<Shared>);

impl App {
    pub fn new(
        model: ServedModel,
        config: ServerConfig,
        public: PublicPrefixes,
        system_prompts: SystemPrompts,
        spans: Option<Spans>,
    ) -> io::Result<Arc<Self>> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let has_many_keys = config.api_keys.len() > 1;
        let chat_format = ChatFormat::new(model.text.chat_template.as_ref(), &config);
        let shared = Arc::new(Shared {
            keys: Keys::new(&config.api_keys),
            refusals: Refusals::default(),
            spans,
            responses: ResponseStore::new(&config),
            started: Instant::now(),
            graphs: config.graph.clone().map(|serving| Graphs::new(serving, has_many_keys)),
            models: config.more_models.clone().map(|more| Arc::new(Models::new(more))),
            activity: Arc::default(),
            bodies: BodyBudget::new(config.max_bodies_bytes, has_many_keys),
            text_workers: Workers::start(text_pool(cores.min(MAX_TEXT_WORKERS), has_many_keys))?,
            grammar_workers: Workers::start(grammar_pool(cores / 2, has_many_keys))?,
            in_flight: watch::Sender::new(0),
            draining: AtomicBool::new(false),
            config,
        });
        Ok(Arc::new(Self { model, chat_format, public, system_prompts, shared }))
    }

    /// Another model of the same server.
    pub fn beside(shared: &Arc<Shared>, model: ServedModel) -> Arc<Self> {
        Arc::new(Self {
            chat_format: ChatFormat::new(model.text.chat_template.as_ref(), &shared.config),
            public: PublicPrefixes::default(),
            system_prompts: SystemPrompts::default(),
            shared: Arc::clone(shared),
            model,
        })
    }

    /// The model that a request names, loaded if need be; without a name, this one.
    pub async fn for_model(self: &Arc<Self>, asked: Option<&str>) -> Result<Arc<Self>, ApiError> {
        let Some(name) = asked.filter(|name| !name.is_empty() && !self.model.is_named(name)) else {
            return Ok(Arc::clone(self));
        };
        let Some(models) = &self.models else {
            return Err(ApiError::no_such_model(name, self.model.name()));
        };
        if !models.more.source.list().iter().any(|known| known.name == name) {
            return Err(ApiError::no_such_model(name, self.model.name()));
        }
        let app = models.get(&self.shared, name).await?;
        app.check_queue(1)?;
        Ok(app)
    }

    /// Lets a request in, unless the server is about to end.
    pub fn admit(&self) -> Result<InFlight, ApiError> {
        // Counted first, then looked: a drain that begins between the two waits for this request.
        self.in_flight.send_modify(|count| *count += 1);
        let in_flight = InFlight(Arc::clone(&self.shared));
        if self.is_draining() {
            return Err(ApiError::unavailable("the server is shutting down: try another one"));
        }
        Ok(in_flight)
    }

    /// Refuses requests that the engine would refuse because too many wait, before any work is done for them.
    pub fn check_queue(&self, num_requests: usize) -> Result<(), ApiError> {
        let room = self.model.engine.heartbeat().queue_room(scope::tenant().0);
        if num_requests > room { Err(ApiError::busy()) } else { Ok(()) }
    }

    /// Why the server cannot answer requests, if it cannot.
    pub fn failure(&self) -> Option<&'static str> {
        let snapshot = self.model.engine.heartbeat().snapshot();
        if snapshot.ended && !self.is_draining() {
            return Some("the engine has stopped");
        }
        let stuck =
            snapshot.phase != baton_engine::Phase::Idle && snapshot.for_time > self.config.stall_timeout;
        stuck.then_some("the engine is stuck")
    }
}

impl Shared {
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
}

fn text_pool(num_threads: usize, has_many_keys: bool) -> Pool {
    Pool {
        num_threads,
        stack_bytes: baton_text::TEMPLATE_STACK_BYTES,
        nice: TEXT_NICE,
        max_per_tenant: share(num_threads, has_many_keys),
        prepare: baton_text::declare_large_stack,
    }
}

fn grammar_pool(num_threads: usize, has_many_keys: bool) -> Pool {
    Pool {
        num_threads,
        stack_bytes: baton_grammar::STACK_BYTES,
        nice: GRAMMAR_NICE,
        max_per_tenant: share(num_threads, has_many_keys),
        prepare: || {},
    }
}

/// Threads that one key may have at a time: with several keys, half of them.
fn share(num_threads: usize, has_many_keys: bool) -> usize {
    if has_many_keys { num_threads.div_ceil(2) } else { num_threads }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.send_modify(|count| *count -= 1);
    }
}
