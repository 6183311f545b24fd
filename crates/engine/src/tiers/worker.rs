//! The threads that carry KV between stores and the host tier.
//!
//! A few threads look up and load for requests; each store has one more that stores, so that a slow one holds up no other.

use std::collections::HashMap;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_backend::HostBlocks;
use baton_core::RequestId;
use baton_kv::{BlockKey, StoredRow};

use super::{BlockStore, Prompt};
use crate::priority::lower_priority;

/// Threads that look up, some of which may wait for another machine to compute, and threads that load: more would share the
/// same wire.
const NUM_SEEKERS: usize = 8;
const NUM_LOADERS: usize = 4;
/// Rows that may wait for a store.
const SAVE_QUEUE: usize = 1024;
/// Rows that are stored with one call.
const SAVE_BATCH: usize = 32;
/// Steps of `nice`: where cores are short, computing goes before loading, and that before storing, which hardly
/// anybody waits for.
const LOADER_NICE: i32 = 10;
const SAVER_NICE: i32 = 15;

pub(crate) enum Job {
    Lookup {
        id: RequestId,
        keys: Vec<BlockKey>,
        prompt: Option<Prompt>,
    },
    /// Rows with the number of the store that has them.
    Load {
        load: u64,
        id: RequestId,
        rows: Vec<(usize, StoredRow)>,
    },
}

pub(crate) enum Event {
    /// Which rows were found, and in which store.
    Found {
        id: RequestId,
        homes: HashMap<BlockKey, usize>,
    },
    Loaded {
        load: u64,
        id: RequestId,
        is_loaded: Vec<bool>,
        bytes: usize,
        time: Duration,
    },
    /// All stores are done with a row.
    Saved(StoredRow),
}

/// A row on its way to all stores; when the last one has let it go, the engine hears of it.
struct Saving {
    row: StoredRow,
    events: Sender<Event>,
}

impl Drop for Saving {
    fn drop(&mut self) {
        let row = StoredRow { key: self.row.key, blocks: std::mem::take(&mut self.row.blocks) };
        let _ = self.events.send(Event::Saved(row));
    }
}

pub(crate) struct Workers {
    lookups: Sender<Job>,
    loads: Sender<Job>,
    savers: Vec<SyncSender<Arc<Saving>>>,
    events: Receiver<Event>,
    event_sender: Sender<Event>,
}

impl Workers {
    pub(crate) fn start(stores: &[Arc<dyn BlockStore>], host: &Arc<dyn HostBlocks>) -> io::Result<Self> {
        let (event_sender, events) = channel();
        let start = |name: &str, count: usize| -> io::Result<Sender<Job>> {
            let (jobs, queue) = channel();
            let queue = Arc::new(Mutex::new(queue));
            for index in 0..count {
                let loader = Loader {
                    queue: Arc::clone(&queue),
                    stores: stores.to_vec(),
                    host: Arc::clone(host),
                    events: event_sender.clone(),
                };
                let thread = std::thread::Builder::new().name(format!("baton-kv-{name}-{index}"));
                thread.spawn(move || loader.run())?;
            }
            Ok(jobs)
        };
        let (lookups, loads) = (start("seek", NUM_SEEKERS)?, start("load", NUM_LOADERS)?);
        let mut savers = Vec::new();
        for store in stores {
            let (saver, rows) = sync_channel(SAVE_QUEUE);
            let (store, host) = (Arc::clone(store), Arc::clone(host));
            let name = format!("baton-kv-{}", store.name());
            std::thread::Builder::new().name(name).spawn(move || save(&*store, &*host, &rows))?;
            savers.push(saver);
        }
        Ok(Self { lookups, loads, savers, events, event_sender })
    }

    pub(crate) fn give(&self, job: Job) {
        let threads = if matches!(job, Job::Lookup { .. }) { &self.lookups } else { &self.loads };
        // They live as long as this.
        let _ = threads.send(job);
    }

    /// Hands a row to all stores. Those whose queue is full do without; the row comes back where all are.
    pub(crate) fn save(&self, row: StoredRow) -> Result<(), StoredRow> {
        if self.savers.is_empty() {
            return Err(row);
        }
        let saving = Arc::new(Saving { row, events: self.event_sender.clone() });
        for saver in &self.savers {
            let _ = saver.try_send(Arc::clone(&saving));
        }
        Ok(())
    }

    pub(crate) fn next_event(&self, wait: Duration) -> Option<Event> {
        self.events.recv_timeout(wait).ok()
    }
}

struct Loader {
    queue: Arc<Mutex<Receiver<Job>>>,
    stores: Vec<Arc<dyn BlockStore>>,
    host: Arc<dyn HostBlocks>,
    events: Sender<Event>,
}

impl Loader {
    fn run(&self) {
        lower_priority(LOADER_NICE);
        loop {
            let job = self.queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let event = match job {
                Ok(Job::Lookup { id, keys, prompt }) => {
                    Event::Found { id, homes: self.lookup(&keys, prompt.as_ref()) }
                }
                Ok(Job::Load { load, id, rows }) => self.load(load, id, &rows),
                Err(_) => return,
            };
            if self.events.send(event).is_err() {
                return;
            }
        }
    }

    /// The nearest store that has a row is its home; the next one is asked for what is left.
    fn lookup(&self, keys: &[BlockKey], prompt: Option<&Prompt>) -> HashMap<BlockKey, usize> {
        let mut homes = HashMap::new();
        let mut left: Vec<BlockKey> = keys.to_vec();
        for (index, store) in self.stores.iter().enumerate() {
            if left.is_empty() {
                break;
            }
            if let Some(prompt) = prompt.filter(|prompt| store.prepare_limit(prompt).is_some()) {
                let _ = guarded(|| store.prepare(prompt, &left));
            }
            let found = guarded(|| store.lookup(&left)).unwrap_or_default();
            let mut found = found.into_iter();
            left.retain(|key| {
                let is_found = found.next().unwrap_or(false);
                if is_found {
                    homes.insert(*key, index);
                }
                !is_found
            });
        }
        homes
    }

    fn load(&self, load: u64, id: RequestId, rows: &[(usize, StoredRow)]) -> Event {
        let start = Instant::now();
        let mut is_loaded = vec![false; rows.len()];
        for (index, store) in self.stores.iter().enumerate() {
            let own: Vec<usize> = (0..rows.len()).filter(|&row| rows[row].0 == index).collect();
            if own.is_empty() {
                continue;
            }
            let wanted: Vec<StoredRow> = own.iter().map(|&row| rows[row].1.clone()).collect();
            let fetched = guarded(|| store.fetch(&wanted, &*self.host)).unwrap_or_default();
            for (row, is_fetched) in own.into_iter().zip(fetched) {
                is_loaded[row] = is_fetched;
            }
        }
        let loaded = rows.iter().zip(&is_loaded).filter(|(_, is_loaded)| **is_loaded);
        let num_blocks: usize = loaded.map(|((_, row), _)| row.blocks.len()).sum();
        let bytes = num_blocks * self.host.block_bytes();
        Event::Loaded { load, id, is_loaded, bytes, time: start.elapsed() }
    }
}

/// Stores rows until the engine is gone.
fn save(store: &dyn BlockStore, host: &dyn HostBlocks, rows: &Receiver<Arc<Saving>>) {
    lower_priority(if store.is_awaited() { 0 } else { SAVER_NICE });
    while let Ok(first) = rows.recv() {
        let mut batch = vec![first];
        while batch.len() < SAVE_BATCH
            && let Ok(next) = rows.try_recv()
        {
            batch.push(next);
        }
        let wanted: Vec<StoredRow> = batch.iter().map(|saving| saving.row.clone()).collect();
        let _ = guarded(|| store.store(&wanted, host));
    }
}

/// A store that panics has not answered.
fn guarded<T>(call: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(AssertUnwindSafe(call)).ok()
}
