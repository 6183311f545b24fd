//! Events over ZeroMQ: a PUB socket with three frames a batch (topic, number, MessagePack), and a ROUTER socket that sends what
//! a subscriber has missed. Both as vLLM has them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use crate::config::{KvEventsConfig, bind_address};
use crate::hub::EventHub;
use crate::msgpack::{decode, encode};
use crate::wire::EventBatch;

/// Batches that are taken from the history at once.
const AT_ONCE: usize = 256;
/// The number after the last batch of a replay.
const END: [u8; 8] = [0xff; 8];
/// A larger message is no batch of events.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

#[derive(Debug, thiserror::Error)]
pub enum ZmqError {
    #[error("KV events cannot be published on {endpoint}: {cause}")]
    Bind { endpoint: String, cause: String },
    #[error("{0}")]
    Config(String),
    #[error("no connection to {endpoint}: {cause}")]
    Connect { endpoint: String, cause: String },
}

/// Sockets that are bound and not yet served.
pub struct Publisher {
    publish: PubSocket,
    replay: Option<RouterSocket>,
    topic: Bytes,
    /// Where the events are, with a real port.
    pub endpoint: String,
    pub replay_endpoint: Option<String>,
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl Publisher {
    pub async fn bind(config: &KvEventsConfig) -> Result<Self, ZmqError> {
        let mut publish = PubSocket::new();
        let endpoint = bind(&mut publish, &config.endpoint).await?;
        let mut replay = None;
        let mut replay_endpoint = None;
        if let Some(wanted) = &config.replay_endpoint {
            let mut socket = RouterSocket::new();
            replay_endpoint = Some(bind(&mut socket, wanted).await?);
            replay = Some(socket);
        }
        let topic = Bytes::copy_from_slice(config.topic.as_bytes());
        Ok(Self { publish, replay, topic, endpoint, replay_endpoint })
    }

    /// Publishes everything from now on, until dropped.
    pub async fn run(self, hub: Arc<EventHub>) {
        let Self { mut publish, replay, topic, .. } = self;
        let replays = async {
            match replay {
                Some(socket) => serve_replays(socket, &hub).await,
                None => std::future::pending().await,
            }
        };
        let publishing = async {
            let mut more = hub.watch();
            let mut next = hub.next();
            while more.wait_for(|end| *end > next).await.is_ok() {
                let read = hub.read(next, AT_ONCE);
                for (number, batch) in &read.batches {
                    // A socket without subscribers, or with slow ones, drops messages: they see a gap in the numbers.
                    let _ = publish.send(message(&topic, *number, batch)).await;
                }
                next = read.next;
            }
        };
        tokio::join!(replays, publishing);
    }
}

async fn bind(socket: &mut impl Socket, endpoint: &str) -> Result<String, ZmqError> {
    let address = bind_address(endpoint).map_err(ZmqError::Config)?;
    let failed = |cause: String| ZmqError::Bind { endpoint: endpoint.to_owned(), cause };
    socket.bind(&address).await.map(|bound| bound.to_string()).map_err(|cause| failed(cause.to_string()))
}

fn message(topic: &Bytes, number: u64, batch: &EventBatch) -> ZmqMessage {
    let frames =
        vec![topic.clone(), Bytes::copy_from_slice(&number.to_be_bytes()), Bytes::from(encode(batch))];
    ZmqMessage::try_from(frames).expect("a message with frames")
}

/// Answers `[identity, empty, first number]` with every batch from there on, and with an end.
async fn serve_replays(mut socket: RouterSocket, hub: &EventHub) {
    loop {
        let Ok(request) = socket.recv().await.map(ZmqMessage::into_vec) else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let [identity, empty, from] = &request[..] else { continue };
        let Ok(from) = <[u8; 8]>::try_from(&from[..]) else { continue };
        if !empty.is_empty() {
            continue;
        }
        let reply = |number: [u8; 8], payload: Bytes| {
            let frames = vec![identity.clone(), Bytes::new(), Bytes::copy_from_slice(&number), payload];
            ZmqMessage::try_from(frames).expect("a message with frames")
        };
        let mut next = u64::from_be_bytes(from);
        let end = hub.next();
        while next < end {
            let read = hub.read(next, AT_ONCE);
            for (number, batch) in &read.batches {
                if socket.send(reply(number.to_be_bytes(), Bytes::from(encode(batch)))).await.is_err() {
                    break;
                }
            }
            if read.batches.is_empty() {
                break;
            }
            next = read.next;
        }
        let _ = socket.send(reply(END, Bytes::new())).await;
    }
}

/// Follows a PUB socket.
pub struct Subscriber {
    socket: SubSocket,
    /// The last number of each rank.
    last: HashMap<u32, u64>,
}

impl std::fmt::Debug for Subscriber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subscriber").field("last", &self.last).finish_non_exhaustive()
    }
}

/// A batch, and whether others were missed before it.
#[derive(Debug)]
pub struct Received {
    pub batch: EventBatch,
    pub missed: bool,
}

impl Subscriber {
    pub async fn connect(endpoint: &str) -> Result<Self, ZmqError> {
        let failed = |cause: String| ZmqError::Connect { endpoint: endpoint.to_owned(), cause };
        let mut socket = SubSocket::new();
        socket.connect(endpoint).await.map_err(|cause| failed(cause.to_string()))?;
        socket.subscribe("").await.map_err(|cause| failed(cause.to_string()))?;
        Ok(Self { socket, last: HashMap::new() })
    }

    /// The next batch; what is no batch is passed over. `None` when the socket has failed.
    pub async fn next(&mut self) -> Option<Received> {
        loop {
            let message = self.socket.recv().await.ok()?;
            let frames = message.into_vec();
            if let Some((number, batch)) = parse(&frames) {
                let rank = batch.data_parallel_rank.unwrap_or(0);
                let last = self.last.insert(rank, number);
                let missed = last.is_some_and(|last| number != last.wrapping_add(1));
                return Some(Received { batch, missed });
            }
        }
    }
}

/// Number and batch of a message, where it is one.
fn parse(frames: &[Bytes]) -> Option<(u64, EventBatch)> {
    let [_, number, payload] = frames else { return None };
    let number = u64::from_be_bytes(<[u8; 8]>::try_from(&number[..]).ok()?);
    let payload = Some(payload).filter(|payload| payload.len() <= MAX_MESSAGE_BYTES)?;
    Some((number, decode(payload).ok()?))
}
