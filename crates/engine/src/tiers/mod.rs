//! Tiers beyond the host's memory: the contract of a store, and the engine's side of it.
//!
//! A store keeps rows of KV by name on a disk, in a server, on another machine. Its calls may take their time: they are made by
//! threads of their own ([`worker`]), which carry bytes between the store and blocks of the host tier. The engine's thread only
//! sends jobs and takes in what came of them. A store that is wrong, slow or gone costs a request its time limit, never more:
//! then the prompt is computed.

mod worker;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_backend::HostBlocks;
use baton_core::{RequestId, TokenId};
use baton_kv::{BlockKey, Load, StoredRow};
use baton_sched::{Scheduler, StoreQuery};
use serde::Serialize;

use worker::{Event, Job, Workers};

/// Bytes per second of a store before anything was measured.
const DEFAULT_SPEED: f64 = 1e9;
/// How much of a new measurement is taken over.
const GAIN: f64 = 0.3;
/// Time that a load takes however small it is.
const LOAD_OVERHEAD_S: f64 = 0.001;
/// A load may take so many times as long as expected, or as computing would, and its time limit.
const PATIENCE: f64 = 4.0;
/// Computing makes every other request wait, loading only the one that is loaded for: where others have work, a load may take so many
/// times as long as computing.
const WORTH_BESIDE_OTHERS: f64 = 4.0;
/// What computing takes as long as nothing was computed.
const UNKNOWN_COMPUTING_S: f64 = 0.5;
/// However slow everything is.
const LONGEST_LOAD_S: f64 = 60.0;

/// What all entries of a store have in common: entries of another identity are none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvIdentity {
    /// 64 hex digits over the model's configuration, its tensors and samples of their contents.
    pub model: String,
    /// How the bytes of a block are laid out.
    pub layout: String,
    /// Bytes of a row, by group.
    pub row_bytes: Vec<usize>,
}

/// A place beyond the host's memory that keeps rows by name.
///
/// Every call may come from any thread, and returns in bounded time: what has not come by then has not come. Nothing is an
/// error to the caller; what went wrong is counted in the store's [`StoreStats`].
pub trait BlockStore: Debug + Send + Sync {
    /// For metrics and logs: `disk`, `redis`.
    fn name(&self) -> &'static str;

    /// How long [`BlockStore::prepare`] may take for a prompt; `None` where there is nothing to prepare.
    fn prepare_limit(&self, _prompt: &Prompt) -> Option<Duration> {
        None
    }

    /// Called before the rows of a prompt are looked up: a store that can have them computed, or that knows they are on their
    /// way, sees to it.
    fn prepare(&self, _prompt: &Prompt, _keys: &[BlockKey]) {}

    /// Which of these rows it has.
    fn lookup(&self, keys: &[BlockKey]) -> Vec<bool>;

    /// Brings rows into their host blocks. True for those whose content is there, whole and checked; the blocks of the others
    /// may hold anything.
    fn fetch(&self, rows: &[StoredRow], host: &dyn HostBlocks) -> Vec<bool>;

    /// Others compute prompts for this engine, which is there to decode.
    fn computes_prompts(&self) -> bool {
        false
    }

    /// Somebody waits for what is stored.
    fn is_awaited(&self) -> bool {
        false
    }

    /// Keeps rows. What is there already need not be written again.
    fn store(&self, rows: &[StoredRow], host: &dyn HostBlocks);

    /// Forgets rows.
    fn remove(&self, keys: &[BlockKey]);

    fn stats(&self) -> StoreStats;
}

/// What rows are looked up for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    pub token_ids: Vec<TokenId>,
    pub salt: Option<Arc<str>>,
    pub num_public_tokens: u32,
    /// Tokens that have to be computed if nothing is found.
    pub num_missing_tokens: usize,
    /// `host:port` of another process that has computed it.
    pub remote: Option<Arc<str>>,
}

/// Counters of a store, from the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreStats {
    pub name: &'static str,
    /// Rows asked for, found, brought and kept.
    pub num_rows_asked: u64,
    pub num_rows_found: u64,
    pub num_rows_fetched: u64,
    pub num_rows_stored: u64,
    pub bytes_fetched: u64,
    pub bytes_stored: u64,
    /// Answers that were too late, broken (of another model, short, wrong checksum), or none at all.
    pub num_timeouts: u64,
    pub num_corrupt: u64,
    pub num_failures: u64,
    /// Calls that were not even tried, because the last ones failed.
    pub num_skipped: u64,
    /// It is not asked for the time being.
    pub is_open: bool,
    /// What it holds, where it knows.
    pub used_bytes: u64,
}

/// Figures of all tiers beyond the host's memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TierStats {
    pub stores: Vec<StoreStats>,
    /// Requests that went on without an answer.
    pub num_late: u64,
    /// Loads that were not made because computing was expected to be faster.
    pub num_not_worth: u64,
    /// Loads that brought something.
    pub num_loads: u64,
    /// As measured.
    pub load_bytes_per_second: f64,
}

/// A request that waits for an answer.
struct PendingQuery {
    query: StoreQuery,
    /// When it goes on without one.
    deadline: Instant,
}

/// The engine's side.
pub(crate) struct Tiers {
    workers: Workers,
    stores: Vec<Arc<dyn BlockStore>>,
    row_bytes: Vec<usize>,
    block_size: usize,
    time_limit: Duration,
    pending: HashMap<RequestId, PendingQuery>,
    /// Requests whose first missing row another one is asking for.
    followers: HashMap<BlockKey, Vec<RequestId>>,
    num_saving: usize,
    /// Seconds that a prompt token takes to compute, as measured.
    token_s: Option<f64>,
    stats: TierStats,
}

impl Debug for Tiers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tiers").field("stores", &self.stores).finish_non_exhaustive()
    }
}

impl Tiers {
    pub(crate) fn start(
        stores: Vec<Arc<dyn BlockStore>>,
        host: &Arc<dyn HostBlocks>,
        row_bytes: Vec<usize>,
        block_size: usize,
        time_limit: Duration,
    ) -> std::io::Result<Self> {
        Ok(Self {
            workers: Workers::start(&stores, host)?,
            stores,
            row_bytes,
            block_size,
            time_limit,
            pending: HashMap::new(),
            followers: HashMap::new(),
            num_saving: 0,
            token_s: None,
            stats: TierStats { load_bytes_per_second: DEFAULT_SPEED, ..TierStats::default() },
        })
    }

    pub(crate) fn stats(&self) -> TierStats {
        TierStats { stores: self.stores.iter().map(|store| store.stats()).collect(), ..self.stats.clone() }
    }

    /// Requests wait for an answer.
    pub(crate) fn has_pending_queries(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Rows are being stored.
    pub(crate) fn is_saving(&self) -> bool {
        self.num_saving > 0
    }

    /// A step with this many prompt tokens took so long.
    pub(crate) fn computed(&mut self, num_tokens: usize, time: Duration) {
        let token_s = time.as_secs_f64() / num_tokens as f64;
        self.token_s = Some(self.token_s.map_or(token_s, |known| known + GAIN * (token_s - known)));
    }

    /// Begins what the scheduler asks for.
    pub(crate) fn begin(&mut self, scheduler: &mut Scheduler) {
        for row in scheduler.take_saved() {
            match self.workers.save(row) {
                Ok(()) => self.num_saving += 1,
                Err(row) => scheduler.end_save(&row),
            }
        }
        for query in scheduler.take_store_queries() {
            scheduler.record_external_query(query.num_tokens);
            let (id, first) = (query.request_id, query.keys[0]);
            let prompt = scheduler.request(id).map(|request| Prompt {
                token_ids: request.prompt_token_ids.clone(),
                salt: request.cache_salt.clone(),
                num_public_tokens: request.num_public_tokens,
                num_missing_tokens: query.num_tokens,
                remote: request.kv_remote.clone(),
            });
            let limits = prompt
                .iter()
                .flat_map(|prompt| self.stores.iter().filter_map(|store| store.prepare_limit(prompt)));
            let deadline = Instant::now() + self.time_limit + limits.max().unwrap_or_default();
            let keys = query.keys.clone();
            self.pending.insert(id, PendingQuery { query, deadline });
            if let Some(followers) = self.followers.get_mut(&first) {
                followers.push(id);
                continue;
            }
            self.followers.insert(first, Vec::new());
            self.workers.give(Job::Lookup { id, keys, prompt });
        }
    }

    /// Takes in what the threads have done, waiting for something up to this long.
    pub(crate) fn collect(&mut self, scheduler: &mut Scheduler, wait: Duration) {
        let mut wait = wait;
        while let Some(event) = self.workers.next_event(wait) {
            wait = Duration::ZERO;
            match event {
                Event::Found { id, homes } => self.begin_load(scheduler, id, &homes),
                Event::Loaded { load, id, is_loaded, bytes, time } => {
                    self.measure(bytes, time);
                    self.stats.num_loads += u64::from(bytes > 0);
                    scheduler.end_load(load, &is_loaded);
                    self.end(scheduler, id, bytes > 0);
                }
                Event::Saved(row) => {
                    self.num_saving -= 1;
                    scheduler.end_save(&row);
                }
            }
        }
        let now = Instant::now();
        let is_late = |pending: &PendingQuery| pending.deadline <= now;
        let late: Vec<RequestId> =
            self.pending.iter().filter(|(_, pending)| is_late(pending)).map(|(&id, _)| id).collect();
        for id in late {
            self.stats.num_late += 1;
            scheduler.end_store_query(id);
            self.end(scheduler, id, false);
        }
    }

    fn begin_load(&mut self, scheduler: &mut Scheduler, id: RequestId, homes: &HashMap<BlockKey, usize>) {
        if !self.pending.contains_key(&id) {
            return;
        }
        let bytes: usize = homes.keys().map(|key| self.row_bytes[key.group]).sum();
        let num_tokens = homes.keys().filter(|key| key.group == 0).count() * self.block_size;
        let expected_s = LOAD_OVERHEAD_S + bytes as f64 / self.stats.load_bytes_per_second;
        let worth = if scheduler.num_decodes() > 0 { WORTH_BESIDE_OTHERS } else { 1.0 };
        let computing_s = self.token_s.map(|token_s| num_tokens as f64 * token_s);
        let pays = computing_s.is_none_or(|computing_s| expected_s < worth * computing_s);
        self.stats.num_not_worth += u64::from(!pays && !homes.is_empty());
        let found: BTreeSet<BlockKey> = if pays { homes.keys().copied().collect() } else { BTreeSet::new() };
        // Without anything of use the scheduler lets the request go on.
        let Some(Load { id: load, rows, .. }) = scheduler.begin_load(id, &found) else {
            self.end(scheduler, id, false);
            return;
        };
        if let Some(pending) = self.pending.get_mut(&id) {
            // Speeds were measured when the machine was more or less busy than now.
            let patience_s = PATIENCE * expected_s.max(computing_s.unwrap_or(UNKNOWN_COMPUTING_S));
            let patience = Duration::from_secs_f64(patience_s.min(LONGEST_LOAD_S));
            pending.deadline = Instant::now() + self.time_limit + patience;
        }
        let rows: Vec<(usize, StoredRow)> =
            rows.into_iter().filter_map(|row| Some((*homes.get(&row.key)?, row))).collect();
        self.workers.give(Job::Load { load, id, rows });
    }

    fn measure(&mut self, bytes: usize, time: Duration) {
        if bytes > 0 {
            let speed = bytes as f64 / time.as_secs_f64().max(1e-6);
            self.stats.load_bytes_per_second += GAIN * (speed - self.stats.load_bytes_per_second);
        }
    }

    /// A request has its answer. Those that waited for the same rows ask for the rest, or go on where nothing came.
    fn end(&mut self, scheduler: &mut Scheduler, id: RequestId, has_come: bool) {
        let Some(pending) = self.pending.remove(&id) else { return };
        let first = pending.query.keys[0];
        if let Some(followers) = self.followers.get_mut(&first) {
            // A follower that has become late is only one less; the leader ends the rest.
            if let Some(position) = followers.iter().position(|follower| *follower == id) {
                followers.remove(position);
                return;
            }
        }
        for follower in self.followers.remove(&first).unwrap_or_default() {
            if self.pending.remove(&follower).is_none() {
                continue;
            }
            if has_come {
                scheduler.query_stores_again(follower);
            } else {
                scheduler.end_store_query(follower);
            }
        }
    }

    /// Waits until all rows are stored that were given to the stores.
    pub(crate) fn flush(&mut self, scheduler: &mut Scheduler, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.num_saving > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.collect(scheduler, left.min(Duration::from_millis(50)));
        }
    }
}
