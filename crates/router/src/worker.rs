//! A worker as the router sees it: whether it may be asked, how busy it is, and what came of it so far.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use crate::breaker::Breaker;
use crate::config::{Role, RouterConfig, WorkerSpec};
use crate::hashing;
use crate::upstream::Upstream;

/// Work of this long ago counts half.
const HALF_LIFE_S: f64 = 30.0;

#[derive(Debug)]
pub struct Worker {
    /// No other worker of this process ever has it.
    pub id: u32,
    pub spec: WorkerSpec,
    /// Of the URL, for hashing.
    pub key: u64,
    pub upstream: Arc<Upstream>,
    breaker: Mutex<Breaker>,
    healthy: AtomicBool,
    draining: AtomicBool,
    num_requests: AtomicUsize,
    /// Requests that it has from others, as it said last.
    foreign_requests: AtomicUsize,
    recent: Mutex<Recent>,
    /// Names of its models, as it said last; empty while it has not.
    models: RwLock<Vec<String>>,
    pub counts: Counts,
}

/// What came of a worker's requests.
#[derive(Debug, Default)]
pub struct Counts {
    pub requests: AtomicU64,
    pub failures: AtomicU64,
    pub prompt_tokens: AtomicU64,
    pub matched_tokens: AtomicU64,
    pub kv_events: AtomicU64,
    /// Times that its events had to be begun anew.
    pub kv_event_gaps: AtomicU64,
    pub follows_events: AtomicBool,
}

/// Tokens given to compute, the older the less.
#[derive(Debug)]
struct Recent {
    tokens: f64,
    at: Instant,
}

impl Recent {
    fn decayed(&self, now: Instant) -> f64 {
        self.tokens * (-(now - self.at).as_secs_f64() / HALF_LIFE_S * std::f64::consts::LN_2).exp()
    }
}

impl Worker {
    pub fn new(id: u32, spec: WorkerSpec, config: &RouterConfig) -> Self {
        let upstream = Upstream::new(spec.authority(), spec.path_prefix(), config.connect_timeout);
        Self {
            id,
            key: hashing::of_bytes(0, spec.url.as_bytes()),
            upstream: Arc::new(upstream),
            breaker: Mutex::new(Breaker::new(config.breaker_failures, config.breaker_cooldown)),
            // Until the first check says otherwise: a router must not refuse what came in the first second.
            healthy: AtomicBool::new(true),
            draining: AtomicBool::new(spec.drain),
            num_requests: AtomicUsize::new(0),
            foreign_requests: AtomicUsize::new(0),
            recent: Mutex::new(Recent { tokens: 0.0, at: Instant::now() }),
            models: RwLock::default(),
            counts: Counts::default(),
            spec,
        }
    }

    pub fn url(&self) -> &str {
        &self.spec.url
    }

    pub fn role(&self) -> Role {
        self.spec.role
    }

    pub fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    /// Whether this changed anything.
    pub fn set_healthy(&self, healthy: bool) -> bool {
        let changed = self.healthy.swap(healthy, Ordering::Relaxed) != healthy;
        if changed && !healthy {
            self.upstream.forget_idle();
        }
        changed
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    pub fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Ordering::Relaxed);
    }

    pub fn num_requests(&self) -> usize {
        self.num_requests.load(Ordering::Relaxed)
    }

    /// With those of other routers and clients.
    pub fn load(&self) -> usize {
        self.num_requests() + self.foreign_requests.load(Ordering::Relaxed)
    }

    /// The worker says how many requests it has in all.
    pub fn set_reported_load(&self, load: usize) {
        self.foreign_requests.store(load.saturating_sub(self.num_requests()), Ordering::Relaxed);
    }

    pub fn models(&self) -> Vec<String> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set_models(&self, models: Vec<String>) {
        *self.models.write().unwrap_or_else(PoisonError::into_inner) = models;
    }

    /// Whether it serves this model, or has not said what it serves.
    pub fn serves(&self, model: &str) -> bool {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        models.is_empty() || models.iter().any(|name| name == model)
    }

    /// Whether a request could go there now.
    pub fn is_available(&self, now: Instant, max_requests: usize) -> bool {
        self.is_healthy()
            && !self.is_draining()
            && self.num_requests() < max_requests
            && self.breaker().would_allow(now)
    }

    pub fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn recent_tokens(&self, now: Instant) -> f64 {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner).decayed(now)
    }

    fn add_tokens(&self, num_tokens: usize, now: Instant) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        *recent = Recent { tokens: recent.decayed(now) + num_tokens as f64, at: now };
    }

    /// Gives it a request, of whose prompt it has so much cached.
    pub fn take(self: &Arc<Self>, num_prompt_tokens: usize, matched_tokens: usize) -> Taken {
        self.num_requests.fetch_add(1, Ordering::Relaxed);
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        let matched = matched_tokens.min(num_prompt_tokens);
        self.counts.prompt_tokens.fetch_add(num_prompt_tokens as u64, Ordering::Relaxed);
        self.counts.matched_tokens.fetch_add(matched as u64, Ordering::Relaxed);
        // What is cached costs something as well: the answer to it.
        self.add_tokens(num_prompt_tokens - matched + num_prompt_tokens / 8 + 1, Instant::now());
        Taken(Arc::clone(self))
    }

    pub fn succeeded(&self) {
        self.breaker().succeeded();
    }

    pub fn failed(&self) {
        self.counts.failures.fetch_add(1, Ordering::Relaxed);
        self.breaker().failed(Instant::now());
    }
}

/// A request that a worker has, until this is dropped.
#[derive(Debug)]
pub struct Taken(Arc<Worker>);

impl Taken {
    pub fn worker(&self) -> &Arc<Worker> {
        &self.0
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.num_requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Of a session's name.
pub fn session_key(name: &str) -> u64 {
    hashing::of_bytes(2, name.as_bytes())
}

/// Of the beginning of a prompt.
pub fn prefix_key(text: &[u8], token_ids: &[u32], max_bytes: usize) -> Option<u64> {
    if !token_ids.is_empty() {
        let tokens = &token_ids[..token_ids.len().min((max_bytes / 4).max(1))];
        return Some(hashing::of_tokens(1, tokens));
    }
    (!text.is_empty()).then(|| hashing::of_bytes(1, &text[..text.len().min(max_bytes)]))
}
