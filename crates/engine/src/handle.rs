//! The loop thread, and the handle that any number of threads may hold to it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{
    Receiver, RecvError, RecvTimeoutError, Sender, SyncSender, TryRecvError, TrySendError, channel,
    sync_channel,
};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_core::{Request, RequestId, TokenId};

use crate::observe::{Heartbeat, Observer, Phase};
use crate::outbox::{Outbox, outbox};
use crate::{Engine, EngineError, EngineStats, OutputReceiver};

/// Commands that may wait between two steps.
pub(crate) const MAILBOX_LEN: usize = 8192;
/// Commands that are taken between two steps: however many come, sequences that run go on.
const COMMANDS_PER_STEP: usize = 256;

/// How often finished stores are looked for while there is nothing else to do.
const STORE_POLL: Duration = Duration::from_millis(20);
/// How long the end waits for KV to be stored.
const FLUSH_LIMIT: Duration = Duration::from_secs(10);

pub(crate) enum Command {
    Add(Request, Outbox),
    Abort(RequestId),
    /// One continuation of a request.
    AbortSequence(RequestId, u32),
    Stats(Sender<EngineStats>),
    /// Computes a prefix and keeps its blocks, before the first request.
    Pin(Vec<TokenId>, Sender<Result<usize, EngineError>>),
    /// Forgets every cached prefix that is not pinned.
    ResetPrefixCache,
    /// Finish what is running, then stop.
    Drain,
}

/// A way to the engine's loop thread. Cheap to clone; the last one dropped lets the thread finish its work and end.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    mailbox: SyncSender<Command>,
    next_request_id: Arc<AtomicU64>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
    heartbeat: Arc<Heartbeat>,
}

impl EngineHandle {
    pub(crate) fn spawn(mut engine: Engine, observer: Box<dyn Observer>) -> Self {
        let (mailbox, commands) = sync_channel(MAILBOX_LEN);
        let first_id = engine.new_request_id().0;
        let heartbeat = Arc::clone(&engine.notes.heartbeat);
        Self::start(mailbox, heartbeat, first_id, move || {
            let outboxes = HashMap::new();
            Loop { engine, observer, commands, outboxes, num_unstarted: 0, draining: false }.run();
        })
    }

    /// Gives a loop its thread, which says by the heartbeat when it has ended.
    pub(crate) fn start(
        mailbox: SyncSender<Command>,
        heartbeat: Arc<Heartbeat>,
        first_id: u64,
        run: impl FnOnce() + Send + 'static,
    ) -> Self {
        let next_request_id = Arc::new(AtomicU64::new(first_id));
        let end = EndHeartbeat(Arc::clone(&heartbeat));
        let thread = std::thread::Builder::new()
            .name("baton-engine".to_owned())
            .spawn(move || {
                let _end = end;
                run();
            })
            .expect("the system can start one more thread");
        Self { mailbox, next_request_id, thread: Arc::new(Mutex::new(Some(thread))), heartbeat }
    }

    /// An id that no other request of this engine has.
    pub fn new_request_id(&self) -> RequestId {
        RequestId(self.next_request_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Hands a request over without waiting. A request that the engine refuses ends with an error as its only output.
    pub fn submit(&self, request: Request) -> Result<OutputReceiver, EngineError> {
        let (outbox, receiver) = outbox(request.id, request.prompt_token_ids.len());
        self.send(Command::Add(request, outbox))?;
        Ok(receiver)
    }

    pub fn abort(&self, id: RequestId) -> Result<(), EngineError> {
        self.send(Command::Abort(id))
    }

    /// Ends one of the `n` continuations, in which a stop string was found.
    pub fn abort_sequence(&self, id: RequestId, index: u32) -> Result<(), EngineError> {
        self.send(Command::AbortSequence(id, index))
    }

    /// Waits for the current step to end.
    pub fn stats(&self) -> Result<EngineStats, EngineError> {
        let (sender, receiver) = channel();
        self.send(Command::Stats(sender))?;
        receiver.recv().map_err(|_| EngineError::Stopped)
    }

    /// See [`Engine::pin_prefix`]. Waits until the prefix is computed.
    pub fn pin_prefix(&self, token_ids: Vec<TokenId>) -> Result<usize, EngineError> {
        let (sender, receiver) = channel();
        self.send(Command::Pin(token_ids, sender))?;
        receiver.recv().map_err(|_| EngineError::Stopped)?
    }

    /// See [`Engine::reset_prefix_cache`]: before the requests that are handed over after this.
    pub fn reset_prefix_cache(&self) -> Result<(), EngineError> {
        self.send(Command::ResetPrefixCache)
    }

    /// What the loop is doing and its figures after the last step, without waiting.
    pub fn heartbeat(&self) -> &Heartbeat {
        &self.heartbeat
    }

    /// Takes no more requests, finishes those it has, and waits until the thread has ended.
    pub fn shutdown(&self) {
        let _ = self.mailbox.send(Command::Drain);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        self.mailbox.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => EngineError::Busy { limit: MAILBOX_LEN },
            TrySendError::Disconnected(_) => EngineError::Stopped,
        })
    }
}

/// Says that the loop has ended, however it ended.
struct EndHeartbeat(Arc<Heartbeat>);

impl Drop for EndHeartbeat {
    fn drop(&mut self) {
        self.0.end();
    }
}

struct Loop {
    engine: Engine,
    observer: Box<dyn Observer>,
    commands: Receiver<Command>,
    outboxes: HashMap<RequestId, Outbox>,
    /// Requests that have not been part of a step.
    num_unstarted: usize,
    draining: bool,
}

impl Loop {
    fn run(mut self) {
        while self.take_commands() {
            self.abort_gone_clients();
            let outputs = self.engine.step_noted();
            self.engine.notes.enter(Phase::Deliver);
            self.note_starts();
            // Whoever sees an output sees figures that count it.
            for step in &self.engine.notes.steps {
                self.observer.step(step);
            }
            self.engine.publish();
            let events = self.engine.take_kv_events();
            if !events.is_empty() {
                self.observer.kv_events(&events);
            }
            let now = Instant::now();
            for output in outputs {
                self.deliver(output, now);
            }
            let num_steps = self.engine.stats().num_steps;
            self.engine.notes.finish(num_steps, &mut *self.observer);
        }
    }

    /// Nearly every step has only requests that were in a step before, and then there is nothing to look up.
    fn note_starts(&mut self) {
        if self.num_unstarted == 0 {
            return;
        }
        for &(id, at) in &self.engine.notes.scheduled {
            let is_first = self.outboxes.get_mut(&id).is_some_and(|outbox| outbox.start(at));
            self.num_unstarted -= usize::from(is_first);
        }
    }

    /// Sleeps only while there is nothing to do. False when the loop should end.
    fn take_commands(&mut self) -> bool {
        if self.engine.has_work() {
            self.engine.notes.enter(Phase::Commands);
        } else {
            if self.draining {
                self.engine.flush_stores(FLUSH_LIMIT);
                return false;
            }
            self.engine.notes.clear();
            self.engine.notes.enter(Phase::Idle);
            self.engine.publish();
            match self.next_command() {
                Ok(command) => {
                    self.engine.notes.clear();
                    self.engine.notes.enter(Phase::Commands);
                    self.handle(command);
                }
                Err(_) => return false,
            }
        }
        for _ in 0..COMMANDS_PER_STEP {
            match self.commands.try_recv() {
                Ok(command) => self.handle(command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.draining = true;
                    break;
                }
            }
        }
        true
    }

    /// Waits for a command, and takes in what stores have finished meanwhile.
    fn next_command(&mut self) -> Result<Command, RecvError> {
        while self.engine.is_storing() {
            match self.commands.recv_timeout(STORE_POLL) {
                Ok(command) => return Ok(command),
                Err(RecvTimeoutError::Disconnected) => return Err(RecvError),
                Err(RecvTimeoutError::Timeout) => {
                    self.engine.collect_tiers(Duration::ZERO);
                    self.engine.publish();
                }
            }
        }
        self.commands.recv()
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Add(_, outbox) if self.draining => drop(outbox.push(Err(EngineError::Stopped))),
            Command::Add(request, mut outbox) => {
                let id = request.id;
                match self.engine.add_request(request) {
                    Ok(()) => {
                        outbox.accept();
                        self.num_unstarted += 1;
                        self.outboxes.insert(id, outbox);
                    }
                    Err(error) => drop(outbox.push(Err(error))),
                }
            }
            Command::Abort(id) => self.abort(id),
            Command::AbortSequence(id, index) => {
                if let Some(output) = self.engine.abort_sequence(id, index) {
                    self.deliver(output, Instant::now());
                }
            }
            Command::Stats(reply) => drop(reply.send(self.engine.stats())),
            Command::Pin(token_ids, reply) => {
                let pinned = self.engine.pin_prefix(&token_ids);
                self.engine.publish();
                drop(reply.send(pinned));
            }
            Command::ResetPrefixCache => self.engine.reset_prefix_cache(),
            Command::Drain => self.draining = true,
        }
    }

    fn abort(&mut self, id: RequestId) {
        if let Some(output) = self.engine.abort(id) {
            self.deliver(output, Instant::now());
        }
    }

    fn abort_gone_clients(&mut self) {
        let gone: Vec<RequestId> =
            self.outboxes.iter().filter(|(_, outbox)| outbox.is_closed()).map(|(&id, _)| id).collect();
        for id in gone {
            self.abort(id);
        }
    }

    fn deliver(&mut self, output: baton_core::RequestOutput, now: Instant) {
        let (id, finished) = (output.request_id, output.finished);
        if let Some(outbox) = self.outboxes.get(&id) {
            outbox.deliver(output, now, &mut *self.observer);
        }
        if finished {
            let ended = self.outboxes.remove(&id);
            self.num_unstarted -= usize::from(ended.is_some_and(|outbox| !outbox.is_started()));
        }
    }
}
