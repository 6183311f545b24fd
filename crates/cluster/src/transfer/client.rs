//! The side that needs KV: fetches it from prefill workers, and has them compute prompts.
//!
//! To its engine it is a store like any other. A worker that is gone, slow or wrong is one that has nothing: the prompt is then
//! computed here.

use std::collections::HashMap;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_backend::HostBlocks;
use baton_engine::{BlockKey, BlockStore, KvIdentity, Prompt, StoreStats, StoredRow};

use super::channel::{Channel, Frame};
use super::wire::Message;
use crate::breaker::Breaker;
use crate::counters::Counters;
use crate::entry::{HEADER_BYTES, Sealer};

/// Connections that one fetch uses at once.
const STREAMS: usize = 2;
const MAX_IDLE: usize = 8;
/// Rows that are asked for with one message.
const FETCH_BATCH: usize = 32;
/// How long a worker may take to have rows ready that a router says are there.
const REMOTE_WAIT: Duration = Duration::from_secs(2);
/// Fewer missing tokens than this are computed here.
const MIN_PREFILL_TOKENS: usize = 128;
/// Rows whose worker is remembered between look-up and fetch.
const MAX_HOMES: usize = 1 << 20;

#[derive(Clone, Debug)]
pub struct PeerOptions {
    /// `host:port` of the workers' transfer.
    pub workers: Vec<String>,
    /// The longest wait for an answer, and for a prompt to be computed.
    pub time_limit: Duration,
    pub prefill_limit: Duration,
    pub secret: String,
}

#[derive(Debug)]
pub struct PeerStore {
    options: PeerOptions,
    workers: Vec<Worker>,
    sealer: Sealer,
    row_bytes: Vec<usize>,
    next: AtomicUsize,
    homes: Mutex<HashMap<BlockKey, usize>>,
    counters: Counters,
}

#[derive(Debug)]
struct Worker {
    address: String,
    idle: Mutex<Vec<Channel>>,
    breaker: Breaker,
}

impl PeerStore {
    pub fn new(options: PeerOptions, identity: &KvIdentity) -> Self {
        let worker = |address: &String| Worker {
            address: address.clone(),
            idle: Mutex::default(),
            breaker: Breaker::default(),
        };
        Self {
            workers: options.workers.iter().map(worker).collect(),
            sealer: Sealer::new(identity, &options.secret),
            row_bytes: identity.row_bytes.clone(),
            next: AtomicUsize::new(0),
            homes: Mutex::default(),
            counters: Counters::default(),
            options,
        }
    }

    fn homes(&self) -> MutexGuard<'_, HashMap<BlockKey, usize>> {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(&self, worker: &Worker) -> io::Result<Channel> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in worker.address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, self.options.time_limit) {
                Ok(socket) => return Channel::connect(socket, &self.options.secret, self.options.time_limit),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Makes a call to a worker. `None` where it is left alone or the call failed, which is counted.
    fn with_worker<T>(
        &self,
        worker: &Worker,
        limit: Duration,
        call: impl Fn(&mut Channel) -> io::Result<T>,
    ) -> Option<T> {
        if !worker.breaker.lets_through() {
            self.counters.skipped.add(1);
            return None;
        }
        let lock = || worker.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = lock().pop();
        let try_one = |mut channel: Channel| {
            channel.set_limit(limit);
            call(&mut channel).map(|answer| (answer, channel))
        };
        // A connection that was idle may have been closed by a worker that has started anew.
        let result = match idle.map(&try_one) {
            Some(Ok(done)) => Ok(done),
            _ => self.connect(worker).and_then(try_one),
        };
        match result {
            Ok((answer, channel)) => {
                worker.breaker.succeeded();
                let mut idle = lock();
                if idle.len() < MAX_IDLE {
                    idle.push(channel);
                }
                Some(answer)
            }
            Err(error) => {
                match error.kind() {
                    io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => self.counters.timeouts.add(1),
                    io::ErrorKind::InvalidData => self.counters.corrupt.add(1),
                    _ => self.counters.failures.add(1),
                }
                lock().clear();
                worker.breaker.failed();
                None
            }
        }
    }

    fn ask(&self, worker: &Worker, keys: &[BlockKey], wait: Duration) -> Vec<bool> {
        let message = Message::Lookup { wait_ms: wait.as_millis() as u32, keys: keys.to_vec() };
        let found = self.with_worker(worker, self.options.time_limit + wait, |channel| {
            channel.send(&message)?;
            match channel.receive(0)? {
                Frame::Message(Message::Found(found)) if found.len() == keys.len() => Ok(found),
                _ => Err(io::ErrorKind::InvalidData.into()),
            }
        });
        found.unwrap_or_else(|| vec![false; keys.len()])
    }

    /// Fetches rows from one worker over one connection.
    fn fetch_from(&self, worker: &Worker, rows: &[&StoredRow], host: &dyn HostBlocks) -> Vec<bool> {
        let is_fetched = Mutex::new(vec![false; rows.len()]);
        let max_row = HEADER_BYTES + self.row_bytes.iter().copied().max().unwrap_or(0);
        let _ = self.with_worker(worker, self.options.time_limit, |channel| {
            for (number, batch) in rows.chunks(FETCH_BATCH).enumerate() {
                let keys = batch.iter().map(|row| row.key).collect();
                channel.set_limit(self.options.time_limit);
                channel.send(&Message::Fetch { keys })?;
                for (index, row) in batch.iter().enumerate() {
                    // Each row has the whole limit: a worker that goes on sending is not cut off.
                    channel.set_limit(self.options.time_limit);
                    let entry = match channel.receive(max_row)? {
                        Frame::Row(entry) => entry,
                        Frame::Message(Message::Missing) => continue,
                        Frame::Message(_) => return Err(io::ErrorKind::InvalidData.into()),
                    };
                    let row_bytes = row.blocks.len() * host.block_bytes();
                    let content =
                        self.sealer.open(row.key, entry).filter(|content| content.len() == row_bytes);
                    let Some(content) = content else {
                        self.counters.corrupt.add(1);
                        continue;
                    };
                    for (block, part) in row.blocks.iter().zip(content.chunks_exact(host.block_bytes())) {
                        host.write(block.0, part);
                    }
                    self.counters.fetched.add(1);
                    self.counters.bytes_fetched.add(row_bytes);
                    let mut is_fetched = is_fetched.lock().unwrap_or_else(PoisonError::into_inner);
                    is_fetched[number * FETCH_BATCH + index] = true;
                }
            }
            Ok(())
        });
        is_fetched.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockStore for PeerStore {
    fn name(&self) -> &'static str {
        "peer"
    }

    fn computes_prompts(&self) -> bool {
        true
    }

    fn prepare_limit(&self, prompt: &Prompt) -> Option<Duration> {
        match &prompt.remote {
            Some(_) => Some(REMOTE_WAIT + self.options.time_limit),
            None if prompt.num_missing_tokens >= MIN_PREFILL_TOKENS => Some(self.options.prefill_limit),
            None => None,
        }
    }

    /// Where a router has had the prompt computed, waits for it; else has it computed.
    fn prepare(&self, prompt: &Prompt, keys: &[BlockKey]) {
        if let Some(remote) = &prompt.remote {
            // Only those that this process was told of are asked, whatever a request says.
            match self.workers.iter().find(|worker| worker.address == **remote) {
                Some(worker) => drop(self.ask(worker, keys, REMOTE_WAIT)),
                None => self.counters.skipped.add(1),
            }
            return;
        }
        if prompt.num_missing_tokens < MIN_PREFILL_TOKENS {
            return;
        }
        let message = Message::Prefill {
            salt: prompt.salt.as_deref().map(str::to_owned),
            num_public_tokens: prompt.num_public_tokens,
            token_ids: prompt.token_ids.clone(),
            keys: keys.to_vec(),
        };
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        for index in 0..self.workers.len() {
            let worker = &self.workers[(first + index) % self.workers.len()];
            let is_done = self.with_worker(worker, self.options.prefill_limit, |channel| {
                channel.send(&message)?;
                match channel.receive(0)? {
                    Frame::Message(Message::Done(is_done)) => Ok(is_done),
                    _ => Err(io::ErrorKind::InvalidData.into()),
                }
            });
            if is_done == Some(true) {
                return;
            }
        }
    }

    fn lookup(&self, keys: &[BlockKey]) -> Vec<bool> {
        let mut found = vec![false; keys.len()];
        for (index, worker) in self.workers.iter().enumerate() {
            if found.iter().all(|found| *found) {
                break;
            }
            let answer = self.ask(worker, keys, Duration::ZERO);
            let mut homes = self.homes();
            if homes.len() + keys.len() > MAX_HOMES {
                homes.clear();
            }
            for ((key, found), is_there) in keys.iter().zip(&mut found).zip(answer) {
                if is_there && !*found {
                    *found = true;
                    homes.insert(*key, index);
                }
            }
        }
        self.counters.asked.add(keys.len());
        self.counters.found.add(found.iter().filter(|found| **found).count());
        found
    }

    fn fetch(&self, rows: &[StoredRow], host: &dyn HostBlocks) -> Vec<bool> {
        let mut by_worker: Vec<Vec<usize>> = vec![Vec::new(); self.workers.len()];
        {
            let mut homes = self.homes();
            for (index, row) in rows.iter().enumerate() {
                if let Some(worker) = homes.remove(&row.key) {
                    by_worker[worker].push(index);
                }
            }
        }
        let mut is_fetched = vec![false; rows.len()];
        for (worker, indices) in self.workers.iter().zip(by_worker) {
            if indices.is_empty() {
                continue;
            }
            let share = indices.len().div_ceil(STREAMS);
            let parts: Vec<Vec<bool>> = std::thread::scope(|scope| {
                let fetch = |part: &[usize]| {
                    let wanted: Vec<&StoredRow> = part.iter().map(|&index| &rows[index]).collect();
                    scope.spawn(move || self.fetch_from(worker, &wanted, host))
                };
                let threads: Vec<_> = indices.chunks(share).map(fetch).collect();
                threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
            });
            for (index, is_there) in indices.iter().zip(parts.into_iter().flatten()) {
                is_fetched[*index] = is_there;
            }
        }
        is_fetched
    }

    fn store(&self, _: &[StoredRow], _: &dyn HostBlocks) {}

    fn remove(&self, _: &[BlockKey]) {}

    fn stats(&self) -> StoreStats {
        let is_open = self.workers.iter().any(|worker| worker.breaker.is_open());
        StoreStats { is_open, ..self.counters.stats("peer") }
    }
}
