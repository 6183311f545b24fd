//! An engine on a thread of its own: requests in by a mailbox, each answered by a call.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use baton_core::RequestId;

use crate::{Embeddings, GraphEngine, GraphError, GraphRequest, GraphStats};

/// What is done with the result of a request, on the engine's thread: it must not wait for anything.
pub type Reply = Box<dyn FnOnce(Result<Embeddings, GraphError>) + Send>;

enum Message {
    Add { ticket: u64, request: GraphRequest, reply: Reply },
    Abort { ticket: u64 },
    RemoveGraph { id: String },
}

/// What stays the same of the model that runs.
#[derive(Clone, Debug)]
pub struct ServiceInfo {
    pub model: String,
    pub num_features: usize,
    pub num_outputs: usize,
    pub num_layers: usize,
    pub device: String,
}

#[derive(Debug)]
struct Shared {
    sender: Mutex<(Sender<Message>, u64)>,
    stats: Arc<Mutex<GraphStats>>,
    info: ServiceInfo,
}

/// A way to the engine; the engine ends when the last one is gone.
#[derive(Clone, Debug)]
pub struct GraphService(Arc<Shared>);

/// A request that was handed in. Dropping it before its reply ends the request.
#[derive(Debug)]
pub struct Ticket {
    number: u64,
    service: GraphService,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Message")
    }
}

impl GraphService {
    pub fn start(engine: GraphEngine) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (sender, mailbox) = channel();
        let stats = Arc::new(Mutex::new(engine.stats()));
        let model = engine.model();
        let info = ServiceInfo {
            model: model.name().to_owned(),
            num_features: model.num_features(),
            num_outputs: model.num_outputs(),
            num_layers: model.num_layers(),
            device: engine.device().description,
        };
        let shown = Arc::clone(&stats);
        let thread = std::thread::Builder::new()
            .name("baton-graph".to_owned())
            .spawn(move || Loop { engine, mailbox, stats: shown, replies: Vec::new() }.run())?;
        Ok((Self(Arc::new(Shared { sender: Mutex::new((sender, 0)), stats, info })), thread))
    }

    pub fn info(&self) -> &ServiceInfo {
        &self.0.info
    }

    /// As of the last step.
    pub fn stats(&self) -> GraphStats {
        *self.0.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a request in. `reply` is called once, unless the ticket is dropped first or the engine is gone.
    pub fn submit(&self, request: GraphRequest, reply: Reply) -> Ticket {
        let mut sender = self.0.sender.lock().unwrap_or_else(PoisonError::into_inner);
        sender.1 += 1;
        let number = sender.1;
        // Without an engine the reply is dropped, which its owner sees.
        let _ = sender.0.send(Message::Add { ticket: number, request, reply });
        drop(sender);
        Ticket { number, service: self.clone() }
    }

    /// Forgets a graph; its requests are dropped without a reply.
    pub fn remove_graph(&self, id: &str) {
        self.send(Message::RemoveGraph { id: id.to_owned() });
    }

    fn send(&self, message: Message) {
        let sender = self.0.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = sender.0.send(message);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.service.send(Message::Abort { ticket: self.number });
    }
}

struct Loop {
    engine: GraphEngine,
    mailbox: Receiver<Message>,
    stats: Arc<Mutex<GraphStats>>,
    replies: Vec<(u64, RequestId, Reply)>,
}

impl Loop {
    fn run(mut self) {
        loop {
            // Sleeps while there is nothing to do.
            if !self.engine.has_work() {
                match self.mailbox.recv() {
                    Ok(message) => self.take(message),
                    Err(_) => return,
                }
            }
            loop {
                match self.mailbox.try_recv() {
                    Ok(message) => self.take(message),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            self.step();
            *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = self.engine.stats();
        }
    }

    fn step(&mut self) {
        if !self.engine.has_work() {
            return;
        }
        match self.engine.step() {
            Ok(outputs) => {
                for output in outputs {
                    if let Some(place) = self.replies.iter().position(|(_, id, _)| *id == output.request_id) {
                        (self.replies.swap_remove(place).2)(output.result);
                    }
                }
            }
            Err(error) => {
                // The device has failed: nobody's request can go on.
                let cause = error.to_string();
                for (_, id, reply) in self.replies.drain(..) {
                    self.engine.abort(id);
                    reply(Err(GraphError::Failed { cause: cause.clone() }));
                }
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Add { ticket, request, reply } => match self.engine.add_graph(request) {
                Ok(id) => self.replies.push((ticket, id, reply)),
                Err(error) => reply(Err(error)),
            },
            Message::Abort { ticket } => {
                if let Some(place) = self.replies.iter().position(|(number, _, _)| *number == ticket) {
                    let (_, id, _) = self.replies.swap_remove(place);
                    self.engine.abort(id);
                }
            }
            Message::RemoveGraph { id } => {
                let gone = self.engine.remove_graph(&id);
                self.replies.retain(|(_, id, _)| !gone.contains(id));
            }
        }
    }
}
