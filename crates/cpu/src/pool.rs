//! A fixed set of threads that all run the same job at the same time, with barriers inside the job.
//!
//! One op is one [`Pool::run`]: the caller is worker 0 and the others wake, run and go back to waiting. Waiting spins
//! first, because the next op follows within microseconds, then sleeps: the machine may be shared. It never yields: whoever is let
//! in that way, of however low priority, keeps the core until the system's next tick, and all workers wait for that long.
//! Nothing is allocated and no lock is taken on the way. A panic of any worker ends the job on all of them and goes
//! on in the caller.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crate::topology::{Core, Machine};
use crate::units::Groups;

/// Looks before sleeping: some tens of microseconds.
const SPINS: u32 = 1 << 11;

/// A number that threads wait for to change.
#[derive(Debug, Default)]
struct Signal {
    value: AtomicU32,
    sleepers: AtomicU32,
}

impl Signal {
    fn get(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Adds one and wakes whoever sleeps on it.
    fn advance(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            atomic_wait::wake_all(&raw const self.value);
        }
    }

    /// Waits until the value is no longer `seen`.
    fn wait_past(&self, seen: u32) {
        for _ in 0..SPINS {
            if self.get() != seen {
                return;
            }
            std::hint::spin_loop();
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.value.load(Ordering::SeqCst) == seen {
            atomic_wait::wait(&self.value, seen);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

type Job<'a> = &'a (dyn Fn(&Worker<'_>) + Sync);

struct Shared {
    num_threads: usize,
    groups: Groups,
    /// Of each worker.
    group_of: Vec<usize>,
    /// The job of the current round; written by the caller while all workers wait.
    job: UnsafeCell<Option<Job<'static>>>,
    round: Signal,
    /// Workers that have not finished the current round.
    unfinished: AtomicUsize,
    finished: Signal,
    arrived: AtomicUsize,
    barrier: Signal,
    panicked: AtomicBool,
    payload: UnsafeCell<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

// SAFETY: `job` is written only between rounds and read only within one, ordered by `round` and `finished`;
// `payload` is written only by the one worker that turned `panicked` on, and taken after the round.
unsafe impl Sync for Shared {}
// SAFETY: every field may move between threads; the job reference points to a `Sync` closure.
unsafe impl Send for Shared {}

/// What a panicking barrier throws in the workers that did not cause the panic.
struct Abandoned;

/// One thread's view of a running job.
pub struct Worker<'a> {
    pub index: usize,
    /// Which of the pool's groups it belongs to.
    pub group: usize,
    shared: &'a Shared,
}

impl Worker<'_> {
    /// Waits until every worker of the job has come here.
    pub fn barrier(&self) {
        let shared = self.shared;
        if shared.num_threads == 1 {
            return;
        }
        let seen = shared.barrier.get();
        if shared.arrived.fetch_add(1, Ordering::AcqRel) + 1 == shared.num_threads {
            shared.arrived.store(0, Ordering::Release);
            shared.barrier.advance();
        } else {
            // A panic elsewhere is seen either here or by the advance that follows it.
            while shared.barrier.get() == seen && !shared.panicked.load(Ordering::SeqCst) {
                shared.barrier.wait_past(seen);
            }
        }
        if shared.panicked.load(Ordering::SeqCst) {
            resume_unwind(Box::new(Abandoned));
        }
    }
}

/// The threads. Dropping it ends them.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.num_threads())
    }
}

impl Pool {
    /// `num_threads` workers, the caller included. With `pin`, and if there are as many cores, each worker but the
    /// caller is bound to a core of its own, on different physical cores as long as there are any; the caller stays free
    /// because its children would inherit the binding, and is taken to run where a core is left for it.
    pub fn new(num_threads: usize, pin: bool) -> std::io::Result<Self> {
        let num_threads = num_threads.max(1);
        let mut cores = if pin { Machine::read().cores } else { Vec::new() };
        cores.truncate(num_threads);
        if cores.len() < num_threads {
            cores.clear();
        }
        // A group each, those of a NUMA node side by side.
        let mut order: Vec<usize> = (0..num_threads).collect();
        order.sort_by_key(|&worker| cores.get(worker).map(|core| core.node));
        let mut groups = vec![0; num_threads];
        for (group, &worker) in order.iter().enumerate() {
            groups[worker] = group;
        }
        Self::start(&groups, &cores)
    }

    /// Workers of these groups, not bound.
    #[cfg(test)]
    pub fn with_groups(groups: &[usize]) -> std::io::Result<Self> {
        Self::start(groups, &[])
    }

    /// A worker for each of `groups`, bound to the core of the same place if there is one.
    fn start(groups: &[usize], cores: &[Core]) -> std::io::Result<Self> {
        let num_threads = groups.len();
        let (groups, group_of) = Groups::new(groups);
        let shared = Arc::new(Shared {
            num_threads,
            groups,
            group_of,
            job: UnsafeCell::new(None),
            round: Signal::default(),
            unfinished: AtomicUsize::new(0),
            finished: Signal::default(),
            arrived: AtomicUsize::new(0),
            barrier: Signal::default(),
            panicked: AtomicBool::new(false),
            payload: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { shared, threads: Vec::with_capacity(num_threads - 1) };
        for index in 1..num_threads {
            let shared = Arc::clone(&pool.shared);
            let core = cores.get(index).copied();
            let thread = std::thread::Builder::new().name(format!("baton-cpu-{index}")).spawn(move || {
                if let Some(core) = core {
                    bind_to_core(core.id);
                }
                work(&shared, index);
            })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    pub fn num_threads(&self) -> usize {
        self.shared.num_threads
    }

    /// How the workers share the weights.
    pub fn groups(&self) -> &Groups {
        &self.shared.groups
    }

    /// Runs `job` once on every worker and returns when all are done.
    pub fn run(&self, job: Job<'_>) {
        let shared = &*self.shared;
        if shared.num_threads == 1 {
            job(&Worker { index: 0, group: 0, shared });
            return;
        }
        shared.unfinished.store(shared.num_threads - 1, Ordering::Relaxed);
        shared.arrived.store(0, Ordering::Relaxed);
        let finished = shared.finished.get();
        // SAFETY: the workers wait, so nobody reads `job` now; the reference outlives the round because this function
        // returns only after all of them have finished with it.
        unsafe { *shared.job.get() = Some(std::mem::transmute::<Job<'_>, Job<'static>>(job)) };
        shared.round.advance();
        run_guarded(shared, 0, job);
        while shared.unfinished.load(Ordering::Acquire) > 0 {
            shared.finished.wait_past(finished);
        }
        if shared.panicked.swap(false, Ordering::SeqCst) {
            // SAFETY: the round is over; only the caller is here.
            let payload = unsafe { (*shared.payload.get()).take() };
            resume_unwind(payload.unwrap_or_else(|| Box::new("a worker of the CPU pool panicked")));
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.round.advance();
        for thread in self.threads.drain(..) {
            // A worker catches its panics; there is nothing to learn from its end.
            let _ = thread.join();
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut round = 0;
    loop {
        shared.round.wait_past(round);
        round = round.wrapping_add(1);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the caller wrote the job before it advanced `round` and keeps it until all have finished.
        let job = unsafe { (*shared.job.get()).expect("a round has a job") };
        run_guarded(shared, index, job);
        if shared.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
            shared.finished.advance();
        }
    }
}

fn run_guarded(shared: &Shared, index: usize, job: Job<'_>) {
    let worker = Worker { index, group: shared.group_of[index], shared };
    let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(&worker))) else { return };
    if payload.is::<Abandoned>() {
        return;
    }
    if !shared.panicked.swap(true, Ordering::SeqCst) {
        // SAFETY: only the worker that turned the flag on comes here in this round.
        unsafe { *shared.payload.get() = Some(payload) };
    }
    shared.barrier.advance();
}

#[cfg(target_os = "linux")]
fn bind_to_core(core: usize) {
    // SAFETY: binds the calling thread to a core it was allowed on; failure leaves it free, which only costs speed.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

#[cfg(not(target_os = "linux"))]
fn bind_to_core(_core: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_runs_every_phase_in_order() {
        for num_threads in [1, 2, 3, 5] {
            let pool = Pool::new(num_threads, true).expect("threads");
            for _ in 0..200 {
                let first = AtomicUsize::new(0);
                let second = AtomicUsize::new(0);
                pool.run(&|worker| {
                    first.fetch_add(1, Ordering::Relaxed);
                    worker.barrier();
                    assert_eq!(first.load(Ordering::Relaxed), num_threads);
                    second.fetch_add(1, Ordering::Relaxed);
                    worker.barrier();
                    assert_eq!(second.load(Ordering::Relaxed), num_threads);
                });
            }
        }
    }

    #[test]
    fn sleeping_workers_wake() {
        let pool = Pool::new(2, false).expect("threads");
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let count = AtomicUsize::new(0);
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 2);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3, false).expect("threads");
        for culprit in [0, 1, 2] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|worker| {
                    assert!(worker.index != culprit, "culprit {culprit}");
                    worker.barrier();
                });
            }));
            let payload = result.expect_err("must panic");
            assert_eq!(payload.downcast_ref::<String>().expect("message"), &format!("culprit {culprit}"));
            pool.run(&|worker| worker.barrier());
        }
    }
}
