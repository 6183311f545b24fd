//! The side that has computed KV: keeps it until it is fetched or its time is over, and computes prompts for others.
//!
//! To its own engine it is a store that rows are written to as soon as they are full. It keeps a bounded number of bytes, the
//! newest, for a bounded time.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use baton_backend::HostBlocks;
use baton_core::{Request, SamplingParams};
use baton_engine::{BlockKey, BlockStore, EngineHandle, KvIdentity, StoreStats, StoredRow};

use super::channel::{Channel, Frame};
use super::wire::Message;
use crate::ClusterError;
use crate::counters::Counters;
use crate::entry::{HEADER_BYTES, Sealer};

/// Connections at a time of those who have the key, and of those who have not shown it yet. Each has a thread.
const MAX_CONNECTIONS: usize = 64;
const MAX_STRANGERS: usize = 32;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// A connection that says nothing for so long is closed.
const IDLE_LIMIT: Duration = Duration::from_secs(300);
/// What is asked for may take so long on the wire.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// How long rows of a prompt that is computed may be on their way.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub struct TransferOptions {
    pub listen: SocketAddr,
    /// The most bytes that are kept for others, and how long.
    pub max_bytes: u64,
    pub keep: Duration,
    pub secret: String,
}

#[derive(Debug)]
pub struct TransferServer {
    options: TransferOptions,
    address: SocketAddr,
    sealer: Sealer,
    rows: Mutex<Rows>,
    /// Told whenever a row has come.
    has_come: Condvar,
    engine: OnceLock<EngineHandle>,
    strangers: Mutex<Strangers>,
    num_connections: AtomicUsize,
    counters: Counters,
}

/// Connections whose other end has not shown the key. When there are too many, the oldest goes.
#[derive(Debug, Default)]
struct Strangers {
    sockets: VecDeque<(u64, TcpStream)>,
    next: u64,
}

impl Strangers {
    fn enter(&mut self, socket: TcpStream) -> u64 {
        if self.sockets.len() >= MAX_STRANGERS
            && let Some((_, oldest)) = self.sockets.pop_front()
        {
            // Its thread sees the end and goes.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        self.next += 1;
        self.sockets.push_back((self.next, socket));
        self.next
    }
}

#[derive(Debug, Default)]
struct Rows {
    entries: HashMap<BlockKey, (Arc<Vec<u8>>, Instant)>,
    order: VecDeque<(BlockKey, Instant)>,
    used_bytes: u64,
}

impl Rows {
    /// Gives up what is too old, and the oldest until so many bytes fit.
    fn make_room(&mut self, bytes: u64, max_bytes: u64, keep: Duration) {
        while let Some((key, since)) = self.order.front().copied() {
            if since.elapsed() < keep && self.used_bytes + bytes <= max_bytes {
                break;
            }
            self.order.pop_front();
            // It may have come a second time, later.
            if self.entries.get(&key).is_some_and(|(_, kept_since)| *kept_since == since) {
                self.remove(key);
            }
        }
    }

    fn remove(&mut self, key: BlockKey) {
        if let Some((entry, _)) = self.entries.remove(&key) {
            self.used_bytes -= entry.len() as u64;
        }
    }
}

fn is_corrupt(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

fn is_reset(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset)
}

impl TransferServer {
    /// Listens at once; requests to compute are answered when there is an engine.
    pub fn start(options: TransferOptions, identity: &KvIdentity) -> Result<Arc<Self>, ClusterError> {
        let wrong =
            |cause: io::Error| ClusterError::Transfer { cause: format!("{}: {cause}", options.listen) };
        let listener = TcpListener::bind(options.listen).map_err(wrong)?;
        let server = Arc::new(Self {
            address: listener.local_addr().map_err(wrong)?,
            sealer: Sealer::new(identity, &options.secret),
            rows: Mutex::default(),
            has_come: Condvar::new(),
            engine: OnceLock::new(),
            strangers: Mutex::default(),
            num_connections: AtomicUsize::new(0),
            counters: Counters::default(),
            options,
        });
        let accepting = Arc::downgrade(&server);
        std::thread::Builder::new()
            .name("baton-kv-accept".to_owned())
            .spawn(move || {
                for socket in listener.incoming() {
                    let Some(server) = accepting.upgrade() else { break };
                    if let Ok(socket) = socket {
                        server.admit(socket);
                    }
                }
            })
            .map_err(|cause| ClusterError::Transfer { cause: cause.to_string() })?;
        Ok(server)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whoever computes prompts for others.
    pub fn set_engine(&self, engine: EngineHandle) {
        let _ = self.engine.set(engine);
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn strangers(&self) -> MutexGuard<'_, Strangers> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admit(self: Arc<Self>, socket: TcpStream) {
        let Ok(watched) = socket.try_clone() else { return };
        let number = self.strangers().enter(watched);
        let server = Arc::clone(&self);
        let spawned = std::thread::Builder::new().name("baton-kv-serve".to_owned()).spawn(move || {
            let greeted = Channel::accept(socket, &server.options.secret, HANDSHAKE_LIMIT);
            server.forget(number);
            // Whoever sees first that the keys differ hangs up, so that the other may find the connection reset.
            let is_refused = match greeted {
                Ok(channel) => server.serve_within_limit(channel).is_err_and(|error| is_corrupt(&error)),
                Err(error) => is_corrupt(&error) || is_reset(&error),
            };
            if is_refused {
                server.counters.corrupt.add(1);
            }
        });
        if spawned.is_err() {
            self.forget(number);
        }
    }

    /// A connection is no stranger any more.
    fn forget(&self, number: u64) {
        self.strangers().sockets.retain(|(known, _)| *known != number);
    }

    fn serve_within_limit(&self, channel: Channel) -> io::Result<()> {
        if self.num_connections.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            self.num_connections.fetch_sub(1, Ordering::Relaxed);
            self.counters.skipped.add(1);
            return Ok(());
        }
        let served = self.serve(channel);
        self.num_connections.fetch_sub(1, Ordering::Relaxed);
        served
    }

    fn serve(&self, mut channel: Channel) -> io::Result<()> {
        loop {
            channel.set_limit(IDLE_LIMIT);
            let Frame::Message(message) = channel.receive(0)? else { return Ok(()) };
            channel.set_limit(ANSWER_LIMIT);
            match message {
                Message::Lookup { wait_ms, keys } => {
                    self.wait_for(&keys, Duration::from_millis(u64::from(wait_ms)).min(ANSWER_LIMIT / 2));
                    let found = self.find(&keys);
                    channel.send(&Message::Found(found))?;
                }
                Message::Fetch { keys } => {
                    for key in keys {
                        let entry = self.rows().entries.get(&key).map(|(entry, _)| Arc::clone(entry));
                        match entry {
                            Some(entry) => {
                                channel.send_row(&entry)?;
                                self.counters.fetched.add(1);
                                self.counters.bytes_fetched.add(entry.len());
                            }
                            None => channel.send(&Message::Missing)?,
                        }
                    }
                }
                Message::Prefill { salt, num_public_tokens, token_ids, keys } => {
                    let mut request = Request::new(
                        baton_core::RequestId(0),
                        token_ids,
                        SamplingParams { max_tokens: Some(1), ignore_eos: true, ..SamplingParams::default() },
                    );
                    request.cache_salt = salt.map(Arc::from);
                    request.num_public_tokens = num_public_tokens;
                    let is_done = self.prefill(request, &keys);
                    channel.set_limit(ANSWER_LIMIT);
                    channel.send(&Message::Done(is_done))?;
                }
                Message::Found(_) | Message::Missing | Message::Done(_) => return Ok(()),
            }
        }
    }

    fn find(&self, keys: &[BlockKey]) -> Vec<bool> {
        let rows = self.rows();
        let found: Vec<bool> = keys.iter().map(|key| rows.entries.contains_key(key)).collect();
        self.counters.asked.add(keys.len());
        self.counters.found.add(found.iter().filter(|found| **found).count());
        found
    }

    /// Until all rows are there, at most this long.
    fn wait_for(&self, keys: &[BlockKey], limit: Duration) {
        let is_missing = |rows: &mut Rows| !keys.iter().all(|key| rows.entries.contains_key(key));
        let _ = self.has_come.wait_timeout_while(self.rows(), limit, is_missing);
    }

    /// Has the engine compute a prompt. A client that goes away meanwhile costs one prompt.
    fn prefill(&self, mut request: Request, keys: &[BlockKey]) -> bool {
        if self.find(keys).iter().all(|found| *found) {
            return true;
        }
        let Some(engine) = self.engine.get() else { return false };
        request.id = engine.new_request_id();
        let Ok(mut outputs) = engine.submit(request) else { return false };
        loop {
            match outputs.recv() {
                Some(Ok(output)) if output.finished => break,
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return false,
            }
        }
        self.wait_for(keys, SETTLE_LIMIT);
        true
    }
}

impl BlockStore for TransferServer {
    fn name(&self) -> &'static str {
        "transfer"
    }

    /// The decode worker whose prompt it is.
    fn is_awaited(&self) -> bool {
        true
    }

    /// The engine that computed them has no use for them.
    fn lookup(&self, keys: &[BlockKey]) -> Vec<bool> {
        vec![false; keys.len()]
    }

    fn fetch(&self, rows: &[StoredRow], _: &dyn HostBlocks) -> Vec<bool> {
        vec![false; rows.len()]
    }

    fn store(&self, rows: &[StoredRow], host: &dyn HostBlocks) {
        for row in rows {
            let mut entry = vec![0; HEADER_BYTES + row.blocks.len() * host.block_bytes()];
            let (header, content) = entry.split_at_mut(HEADER_BYTES);
            for (block, part) in row.blocks.iter().zip(content.chunks_exact_mut(host.block_bytes())) {
                host.read(block.0, part);
            }
            header.copy_from_slice(&self.sealer.seal(row.key, content));
            let (bytes, now) = (entry.len() as u64, Instant::now());
            self.counters.stored.add(1);
            self.counters.bytes_stored.add(entry.len());
            let mut rows = self.rows();
            rows.remove(row.key);
            rows.make_room(bytes, self.options.max_bytes, self.options.keep);
            if bytes <= self.options.max_bytes {
                rows.entries.insert(row.key, (Arc::new(entry), now));
                rows.order.push_back((row.key, now));
                rows.used_bytes += bytes;
            }
        }
        self.has_come.notify_all();
    }

    fn remove(&self, keys: &[BlockKey]) {
        let mut rows = self.rows();
        for key in keys {
            rows.remove(*key);
        }
    }

    fn stats(&self) -> StoreStats {
        let mut rows = self.rows();
        rows.make_room(0, self.options.max_bytes, self.options.keep);
        StoreStats { used_bytes: rows.used_bytes, ..self.counters.stats("transfer") }
    }
}
