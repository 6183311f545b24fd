//! Threads for the work that would hold up the async ones: prompts become tokens, schemas become grammars.
//!
//! All of them are started before the server listens: a system that has no thread to give later cannot stop a request
//! half-way. Each key has a queue of its own, the queues take turns, and where there are several keys none has all the
//! threads. The queues hold at most one job a connection, so that `--max-connections` bounds them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use baton_engine::lower_priority;
use tokio::sync::oneshot;

use crate::auth::TenantId;
use crate::error::ApiError;

/// What the panic hook of the binary knows these threads by: a panic there is one request's failure.
pub const THREAD_NAME: &str = "baton-text";

type Job = Box<dyn FnOnce() + Send>;

/// How to set up a pool.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    pub num_threads: usize,
    pub stack_bytes: usize,
    /// Steps of `nice` below the engine.
    pub nice: i32,
    /// Threads that the jobs of one key may have at a time.
    pub max_per_tenant: usize,
    /// Called on each thread before its first job.
    pub prepare: fn(),
}

#[derive(Debug)]
pub struct Workers {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Queues {
    jobs: HashMap<TenantId, VecDeque<Job>>,
    /// Tenants that have jobs, the next to have a turn first.
    turns: VecDeque<TenantId>,
    running: HashMap<TenantId, usize>,
    is_closed: bool,
}

struct Shared {
    queues: Mutex<Queues>,
    changed: Condvar,
    max_per_tenant: usize,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("max_per_tenant", &self.max_per_tenant).finish_non_exhaustive()
    }
}

impl Workers {
    pub fn start(pool: Pool) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queues: Mutex::default(),
            changed: Condvar::new(),
            max_per_tenant: pool.max_per_tenant.max(1),
        });
        let workers = Self { shared };
        for _ in 0..pool.num_threads.max(1) {
            let shared = Arc::clone(&workers.shared);
            let thread = std::thread::Builder::new().name(THREAD_NAME.to_owned());
            thread.stack_size(pool.stack_bytes).spawn(move || {
                lower_priority(pool.nice);
                (pool.prepare)();
                shared.work();
            })?;
        }
        Ok(workers)
    }

    /// Runs `work` when it is the tenant's turn. If whoever waits goes away before that, it is not run.
    pub async fn run<T: Send + 'static>(
        &self,
        tenant: TenantId,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let (sender, receiver) = oneshot::channel();
        let job = move || {
            if !sender.is_closed() {
                let done = std::panic::catch_unwind(AssertUnwindSafe(work));
                let _ = sender.send(done);
            }
        };
        self.shared.push(tenant, Box::new(job));
        let done = receiver.await.map_err(|gone| ApiError::internal(&gone))?;
        done.map_err(|_| ApiError::internal(&"the work panicked"))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        // Nothing in here can panic half-way through a change that matters.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, tenant: TenantId, job: Job) {
        let mut queues = self.lock();
        let own = queues.jobs.entry(tenant).or_default();
        own.push_back(job);
        if own.len() == 1 {
            queues.turns.push_back(tenant);
        }
        drop(queues);
        self.changed.notify_one();
    }

    /// Until the pool is dropped.
    fn work(&self) {
        let mut queues = self.lock();
        loop {
            if let Some((tenant, job)) = queues.take(self.max_per_tenant) {
                drop(queues);
                job();
                queues = self.lock();
                queues.finished(tenant);
                // Its tenant may have another one that was held back.
                self.changed.notify_one();
            } else if queues.is_closed {
                return;
            } else {
                queues = self.changed.wait(queues).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Queues {
    /// The next job of the first tenant that may have one more thread.
    fn take(&mut self, max_per_tenant: usize) -> Option<(TenantId, Job)> {
        let may_run =
            |tenant: &TenantId| self.running.get(tenant).is_none_or(|&count| count < max_per_tenant);
        let position = self.turns.iter().position(may_run)?;
        let tenant = self.turns.remove(position)?;
        let own = self.jobs.get_mut(&tenant)?;
        let job = own.pop_front()?;
        if own.is_empty() {
            self.jobs.remove(&tenant);
        } else {
            self.turns.push_back(tenant);
        }
        *self.running.entry(tenant).or_default() += 1;
        Some((tenant, job))
    }

    fn finished(&mut self, tenant: TenantId) {
        if let Some(count) = self.running.get_mut(&tenant) {
            *count -= 1;
            if *count == 0 {
                self.running.remove(&tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const ONE: TenantId = TenantId(1);
    const TWO: TenantId = TenantId(2);

    fn pool(num_threads: usize, max_per_tenant: usize) -> Workers {
        let pool = Pool { num_threads, stack_bytes: 1 << 20, nice: 0, max_per_tenant, prepare: || {} };
        Workers::start(pool).expect("threads")
    }

    /// A job that says its name and waits until it is told to end.
    fn hold(workers: &Workers, tenant: TenantId, name: u32, begun: &mpsc::Sender<u32>) -> mpsc::Sender<()> {
        let (end, ended) = mpsc::channel::<()>();
        let begun = begun.clone();
        workers.shared.push(
            tenant,
            Box::new(move || {
                let _ = begun.send(name);
                let _ = ended.recv();
            }),
        );
        end
    }

    #[test]
    fn keys_take_turns_and_none_has_all_threads() {
        let workers = pool(2, 1);
        let (begun, names) = mpsc::channel();
        let ends: Vec<_> = (0..3).map(|name| hold(&workers, ONE, name, &begun)).collect();
        assert_eq!(names.recv().expect("begins"), 0);
        // One thread is free, but not for this key.
        assert!(names.recv_timeout(Duration::from_millis(50)).is_err());
        let other = hold(&workers, TWO, 10, &begun);
        assert_eq!(names.recv().expect("begins"), 10);
        drop(other);
        drop(ends);
        assert_eq!((names.recv().expect("begins"), names.recv().expect("begins")), (1, 2));
    }

    #[tokio::test]
    async fn a_panic_is_one_requests_failure_and_the_thread_stays() {
        let workers = pool(1, 1);
        for _ in 0..3 {
            let failed = workers.run(ONE, || -> u32 { panic!("a defect") }).await.expect_err("a failure");
            assert_eq!(failed.status.as_u16(), 500);
        }
        assert_eq!(workers.run(ONE, || 7).await.expect("works"), 7);
    }

    #[tokio::test]
    async fn what_nobody_waits_for_any_more_is_not_run() {
        let workers = pool(1, 1);
        let (begun, names) = mpsc::channel();
        let end = hold(&workers, ONE, 0, &begun);
        names.recv().expect("begins");
        let abandoned = begun.clone();
        let waiting = workers.run(ONE, move || abandoned.send(99));
        tokio::time::timeout(Duration::from_millis(20), waiting).await.expect_err("the thread is taken");
        drop(end);
        assert_eq!(workers.run(ONE, || 7).await.expect("works"), 7);
        assert!(names.try_recv().is_err());
    }
}
