//! Masks of structured outputs, computed beside the engine's thread.
//!
//! A sequence that draws a token is held back by the scheduler until a worker has said what may follow it; sequences
//! whose masks are ready do not wait for one that is slow. What each sequence has written is all that its mask depends
//! on, so preemption, swapping and the order of steps change nothing here, and continuations of one prompt each start
//! from the same first mask.
//!
//! Not here: grammars. The request brings its `Constraint`, compiled.

use std::collections::HashMap;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_core::{Constraint, ConstraintMatcher, RequestId, SeqId, TokenId};

use crate::priority::lower_priority;

/// Masks take tens of microseconds, so that a few threads feed any device.
const MAX_WORKERS: usize = 8;
/// Steps of `nice`: where cores are short, computing goes before masks, which get a tenth.
const NICE: i32 = 10;

pub(crate) struct Masks {
    /// What the outputs of a request must be like.
    constraints: HashMap<RequestId, Arc<dyn Constraint>>,
    /// Sequences that have output tokens; the others are at the first mask.
    seqs: HashMap<SeqId, State>,
    workers: Workers,
    num_computing: usize,
}

enum State {
    Computing,
    Ready { matcher: Box<dyn ConstraintMatcher>, mask: Vec<u32> },
}

/// A sequence whose mask is ready, or the reason why there is none.
pub(crate) struct Computed {
    pub(crate) seq_id: SeqId,
    pub(crate) failure: Option<String>,
}

impl std::fmt::Debug for Masks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Masks").field("num_requests", &self.constraints.len()).finish_non_exhaustive()
    }
}

impl Masks {
    /// Starts the threads, so that none has to be started when the system may have none to give.
    pub(crate) fn start() -> io::Result<Self> {
        let workers = Workers::start()?;
        Ok(Self { constraints: HashMap::new(), seqs: HashMap::new(), workers, num_computing: 0 })
    }

    pub(crate) fn add_request(&mut self, id: RequestId, constraint: Arc<dyn Constraint>) {
        self.constraints.insert(id, constraint);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.constraints.is_empty()
    }

    /// What a planned sequence may draw; `None` where nothing was asked. It is ready, since others are held back.
    pub(crate) fn of(&self, request_id: RequestId, seq_id: SeqId) -> Option<&[u32]> {
        let constraint = self.constraints.get(&request_id)?;
        Some(match self.seqs.get(&seq_id) {
            None => constraint.first_mask(),
            Some(State::Ready { mask, .. }) => mask,
            Some(State::Computing) => unreachable!("a sequence is held back until its mask is ready"),
        })
    }

    /// A token was drawn: begins to compute what may follow it. False for a request without structure.
    pub(crate) fn advance(&mut self, request_id: RequestId, seq_id: SeqId, token_id: TokenId) -> bool {
        let Some(constraint) = self.constraints.get(&request_id) else { return false };
        let source = match self.seqs.insert(seq_id, State::Computing) {
            None => Source::Start(Arc::clone(constraint)),
            Some(State::Ready { matcher, mask }) => Source::GoOn(matcher, mask),
            Some(State::Computing) => unreachable!("a sequence draws no token while its mask is computed"),
        };
        self.num_computing += 1;
        self.workers.give(Job { seq_id, token_id, source });
        true
    }

    /// Takes in what has been computed, waiting for the rest up to this long.
    pub(crate) fn collect(&mut self, wait: Duration) -> Vec<Computed> {
        let mut computed = Vec::new();
        let deadline = Instant::now() + wait;
        while self.num_computing > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(done) = self.workers.done.recv_timeout(left) else { break };
            self.num_computing -= 1;
            // The sequence may have been aborted meanwhile.
            let Some(state) = self.seqs.get_mut(&done.seq_id) else { continue };
            let failure = match done.result {
                Ok((matcher, mask)) => {
                    *state = State::Ready { matcher, mask };
                    None
                }
                Err(reason) => Some(reason),
            };
            computed.push(Computed { seq_id: done.seq_id, failure });
        }
        computed
    }

    /// Forgets requests and sequences that have ended.
    pub(crate) fn retain(
        &mut self,
        has_request: impl Fn(RequestId) -> bool,
        is_live: impl Fn(SeqId) -> bool,
    ) {
        self.constraints.retain(|&id, _| has_request(id));
        self.seqs.retain(|&id, _| is_live(id));
    }
}

enum Source {
    Start(Arc<dyn Constraint>),
    /// The old mask gives its memory to the new one.
    GoOn(Box<dyn ConstraintMatcher>, Vec<u32>),
}

struct Job {
    seq_id: SeqId,
    token_id: TokenId,
    source: Source,
}

struct Done {
    seq_id: SeqId,
    result: Result<(Box<dyn ConstraintMatcher>, Vec<u32>), String>,
}

/// Threads that end when this is dropped.
struct Workers {
    jobs: Sender<Job>,
    done: Receiver<Done>,
}

impl Workers {
    fn start() -> io::Result<Self> {
        let (jobs, queue) = channel::<Job>();
        let (results, done) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..(cores / 2).clamp(1, MAX_WORKERS) {
            let (queue, results) = (Arc::clone(&queue), results.clone());
            let work = move || {
                lower_priority(NICE);
                loop {
                    let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(job) = job else { return };
                    if results.send(job.run()).is_err() {
                        return;
                    }
                }
            };
            std::thread::Builder::new().name("baton-mask".to_owned()).spawn(work)?;
        }
        Ok(Self { jobs, done })
    }

    fn give(&self, job: Job) {
        self.jobs.send(job).expect("workers live as long as somebody gives them jobs");
    }
}

impl Job {
    fn run(self) -> Done {
        let Self { seq_id, token_id, source } = self;
        let compute = || {
            let (mut matcher, mut mask) = match source {
                Source::Start(constraint) => (constraint.start(), Vec::new()),
                Source::GoOn(matcher, mask) => (matcher, mask),
            };
            matcher.advance(token_id, &mut mask)?;
            Ok((matcher, mask))
        };
        // A grammar that breaks its matcher must not take the worker with it.
        let result = std::panic::catch_unwind(AssertUnwindSafe(compute))
            .unwrap_or_else(|_| Err("the matcher panicked".to_owned()));
        Done { seq_id, result }
    }
}
