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

use baton_core::{Constraint, ConstraintMatcher, RequestId, SeqId, TokenId, mask_allows};
use baton_sched::Drafts;

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
    Ready(Box<dyn ConstraintMatcher>),
}

/// A matcher that follows guesses.
pub(crate) type Branch = Box<dyn ConstraintMatcher>;
/// A branch that has taken a guess, and what may follow it.
pub(crate) type Followed = (SeqId, Branch, Arc<Vec<u32>>);

/// A sequence whose mask is ready, or the reason why there is none.
pub(crate) struct Computed {
    pub(crate) seq_id: SeqId,
    pub(crate) mask: Result<Arc<Vec<u32>>, String>,
    /// The guesses that the grammar allows, with what may follow each.
    pub(crate) drafts: Drafts,
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

    /// Tokens were drawn: begins to compute what may follow them, and what after guesses of the next. False for a request
    /// without structure.
    pub(crate) fn advance(
        &mut self,
        request_id: RequestId,
        seq_id: SeqId,
        token_ids: Vec<TokenId>,
        drafts: Vec<TokenId>,
    ) -> bool {
        let Some(constraint) = self.constraints.get(&request_id) else { return false };
        let source = match self.seqs.insert(seq_id, State::Computing) {
            None => Source::Start(Arc::clone(constraint)),
            Some(State::Ready(matcher)) => Source::GoOn(matcher),
            Some(State::Computing) => unreachable!("a sequence draws no token while its mask is computed"),
        };
        self.num_computing += 1;
        self.workers.give(Job { seq_id, token_ids, drafts, source, reply: None });
        true
    }

    /// A copy of where a sequence stands in its grammar, to follow guesses with.
    pub(crate) fn branch(&self, seq_id: SeqId) -> Option<Box<dyn ConstraintMatcher>> {
        match self.seqs.get(&seq_id)? {
            State::Ready(matcher) => Some(matcher.fork()),
            State::Computing => None,
        }
    }

    /// Follows one guess along each branch, all at once. A branch that a guess leads out of its grammar is gone, and so is
    /// one that takes longer than this.
    pub(crate) fn follow(&self, branches: Vec<(SeqId, Branch, TokenId)>, limit: Duration) -> Vec<Followed> {
        let (reply, done) = channel();
        let deadline = Instant::now() + limit;
        for (seq_id, branch, guess) in branches {
            let source = Source::GoOn(branch);
            let job = Job {
                seq_id,
                token_ids: vec![guess],
                drafts: Vec::new(),
                source,
                reply: Some(reply.clone()),
            };
            self.workers.give(job);
        }
        drop(reply);
        let mut followed = Vec::new();
        while let Ok(Done { seq_id, result }) =
            done.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            if let Ok((branch, mask, _)) = result {
                followed.push((seq_id, branch, Arc::new(mask)));
            }
        }
        followed
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
            let mut drafts = Drafts::default();
            let mask = done.result.map(|(matcher, mask, allowed)| {
                *state = State::Ready(matcher);
                drafts = allowed;
                Arc::new(mask)
            });
            computed.push(Computed { seq_id: done.seq_id, mask, drafts });
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
    GoOn(Box<dyn ConstraintMatcher>),
}

struct Job {
    seq_id: SeqId,
    token_ids: Vec<TokenId>,
    drafts: Vec<TokenId>,
    source: Source,
    /// Who is told, if not everybody's queue.
    reply: Option<Sender<Done>>,
}

/// A matcher that has moved on, what may come next, and the guesses that it allows.
type Advanced = (Box<dyn ConstraintMatcher>, Vec<u32>, Drafts);

struct Done {
    seq_id: SeqId,
    result: Result<Advanced, String>,
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
                    let Ok(mut job) = job else { return };
                    match job.reply.take() {
                        // Whoever waited may have given up.
                        Some(reply) => drop(reply.send(job.run())),
                        None if results.send(job.run()).is_err() => return,
                        None => {}
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
        let Self { seq_id, token_ids, drafts, source, reply: _ } = self;
        let compute = || {
            let mut matcher = match source {
                Source::Start(constraint) => constraint.start(),
                Source::GoOn(matcher) => matcher,
            };
            let mut mask = Vec::new();
            token_ids.iter().try_for_each(|&token_id| matcher.advance(token_id, &mut mask))?;
            let drafts = allowed_drafts(&*matcher, &mask, &drafts);
            Ok((matcher, mask, drafts))
        };
        // A grammar that breaks its matcher must not take the worker with it.
        let result = std::panic::catch_unwind(AssertUnwindSafe(compute))
            .unwrap_or_else(|_| Err("the matcher panicked".to_owned()));
        Done { seq_id, result }
    }
}

/// Follows guesses as far as the grammar allows them.
fn allowed_drafts(matcher: &dyn ConstraintMatcher, mask: &[u32], drafts: &[TokenId]) -> Drafts {
    let mut allowed = Drafts::default();
    if !drafts.first().is_some_and(|&draft| mask_allows(mask, draft)) {
        return allowed;
    }
    let mut branch = matcher.fork();
    for &draft in drafts {
        let before = allowed.masks.last().map_or(mask, |mask| mask.as_slice());
        let mut after = Vec::new();
        if !mask_allows(before, draft) || branch.advance(draft, &mut after).is_err() {
            break;
        }
        allowed.token_ids.push(draft);
        allowed.masks.push(Arc::new(after));
    }
    allowed
}
