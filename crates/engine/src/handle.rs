//! The loop thread, and the handle that any number of threads may hold to it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use baton_core::{Request, RequestId};

use crate::outbox::{Outbox, outbox};
use crate::{Engine, EngineError, EngineStats, OutputReceiver};

/// Commands that may wait between two steps.
const MAILBOX_LEN: usize = 8192;

enum Command {
    Add(Request, Outbox),
    Abort(RequestId),
    /// One continuation of a request.
    AbortSequence(RequestId, u32),
    Stats(Sender<EngineStats>),
    /// Finish what is running, then stop.
    Drain,
}

/// A way to the engine's loop thread. Cheap to clone; the last one dropped lets the thread finish its work and end.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    mailbox: SyncSender<Command>,
    next_request_id: Arc<AtomicU64>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl EngineHandle {
    pub(crate) fn spawn(mut engine: Engine) -> Self {
        let (mailbox, commands) = sync_channel(MAILBOX_LEN);
        let next_request_id = Arc::new(AtomicU64::new(engine.new_request_id().0));
        let thread = std::thread::Builder::new()
            .name("baton-engine".to_owned())
            .spawn(move || Loop { engine, commands, outboxes: HashMap::new(), draining: false }.run())
            .expect("the system can start one more thread");
        Self { mailbox, next_request_id, thread: Arc::new(Mutex::new(Some(thread))) }
    }

    /// An id that no other request of this engine has.
    pub fn new_request_id(&self) -> RequestId {
        RequestId(self.next_request_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Hands a request over without waiting. A request that the engine refuses ends with an error as its only output.
    pub fn submit(&self, request: Request) -> Result<OutputReceiver, EngineError> {
        let (outbox, receiver) = outbox(request.id);
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

struct Loop {
    engine: Engine,
    commands: Receiver<Command>,
    outboxes: HashMap<RequestId, Outbox>,
    draining: bool,
}

impl Loop {
    fn run(mut self) {
        while self.take_commands() {
            self.abort_gone_clients();
            for output in self.engine.step() {
                self.deliver(output);
            }
        }
    }

    /// Sleeps only while there is nothing to do. False when the loop should end.
    fn take_commands(&mut self) -> bool {
        if !self.engine.has_unfinished() {
            if self.draining {
                return false;
            }
            match self.commands.recv() {
                Ok(command) => self.handle(command),
                Err(_) => return false,
            }
        }
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.handle(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => {
                    self.draining = true;
                    return true;
                }
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Add(_, outbox) if self.draining => drop(outbox.push(Err(EngineError::Stopped))),
            Command::Add(request, outbox) => {
                let id = request.id;
                match self.engine.add_request(request) {
                    Ok(()) => drop(self.outboxes.insert(id, outbox)),
                    Err(error) => drop(outbox.push(Err(error))),
                }
            }
            Command::Abort(id) => self.abort(id),
            Command::AbortSequence(id, index) => {
                if let Some(output) = self.engine.abort_sequence(id, index) {
                    self.deliver(output);
                }
            }
            Command::Stats(reply) => drop(reply.send(self.engine.stats())),
            Command::Drain => self.draining = true,
        }
    }

    fn abort(&mut self, id: RequestId) {
        if let Some(output) = self.engine.abort(id) {
            self.deliver(output);
        }
    }

    fn abort_gone_clients(&mut self) {
        let gone: Vec<RequestId> =
            self.outboxes.iter().filter(|(_, outbox)| outbox.is_closed()).map(|(&id, _)| id).collect();
        for id in gone {
            self.abort(id);
        }
    }

    fn deliver(&mut self, output: baton_core::RequestOutput) {
        let (id, finished) = (output.request_id, output.finished);
        if let Some(outbox) = self.outboxes.get(&id) {
            outbox.push(Ok(output));
        }
        if finished {
            self.outboxes.remove(&id);
        }
    }
}
