//! The requests that are being served right now, for `/stats`: how far each is, and never what it says.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_core::RequestId;
use baton_engine::{OutputReceiver, RequestClock, RequestTimes};

use crate::auth::TenantId;

/// Every request of the engine, in the order in which they came.
#[derive(Debug, Default)]
pub struct Activity(Mutex<BTreeMap<RequestId, Arc<Active>>>);

/// One request.
#[derive(Debug)]
pub struct Active {
    pub tenant: TenantId,
    pub id: RequestId,
    pub num_prompt_tokens: usize,
    /// Of one continuation.
    pub max_tokens: Option<u32>,
    /// How many continuations it has.
    pub n: u32,
    clock: RequestClock,
    num_cached_tokens: AtomicUsize,
    num_output_tokens: AtomicUsize,
}

/// Takes the request off the list when it is dropped.
#[derive(Debug)]
pub struct Listed {
    activity: Arc<Activity>,
    active: Arc<Active>,
}

impl Activity {
    pub fn list(
        self: &Arc<Self>,
        tenant: TenantId,
        receiver: &OutputReceiver,
        num_prompt_tokens: usize,
        (max_tokens, n): (Option<u32>, u32),
    ) -> Listed {
        let id = receiver.request_id();
        let active = Arc::new(Active {
            tenant,
            id,
            num_prompt_tokens,
            max_tokens,
            n,
            clock: receiver.clock(),
            num_cached_tokens: AtomicUsize::new(0),
            num_output_tokens: AtomicUsize::new(0),
        });
        self.lock().insert(id, Arc::clone(&active));
        Listed { activity: Arc::clone(self), active }
    }

    /// The oldest first.
    pub fn all(&self) -> Vec<Arc<Active>> {
        self.lock().values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<RequestId, Arc<Active>>> {
        // Inserting and removing are whole operations: a panic elsewhere leaves no half of one.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Active {
    pub fn times(&self) -> RequestTimes {
        self.clock.times()
    }

    pub fn num_cached_tokens(&self) -> usize {
        self.num_cached_tokens.load(Ordering::Relaxed)
    }

    /// Tokens that have been handed on, of all continuations.
    pub fn num_output_tokens(&self) -> usize {
        self.num_output_tokens.load(Ordering::Relaxed)
    }
}

impl Listed {
    pub fn note(&self, num_cached_tokens: usize, num_output_tokens: usize) {
        self.active.num_cached_tokens.store(num_cached_tokens, Ordering::Relaxed);
        self.active.num_output_tokens.store(num_output_tokens, Ordering::Relaxed);
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.activity.lock().remove(&self.active.id);
    }
}
