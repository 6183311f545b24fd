//! KV that comes from beyond the host's memory: from a disk, a store, another machine.
//!
//! When it would be a waiting request's turn, and part of its prompt is neither on the device nor in the host tier, the engine
//! is asked to look further away ([`Scheduler::take_store_queries`]). The request keeps its place in the queue and others go before it
//! until there is an answer. What is found is loaded into the host tier, where admission finds it like anything else. A
//! request asks once; without an answer, or with a bad one, its prompt is computed.

use std::collections::BTreeSet;

use baton_core::{Request, RequestId};
use baton_kv::{BlockKey, Load, StoredRow};

use crate::group::Place;
use crate::{Scheduler, Wait};

/// Requests that may wait for an answer at a time. Those behind them are asked for when their turn comes.
const MAX_STORE_QUERIES: usize = 64;

/// What is to be looked for. [`Scheduler::begin_load`] or [`Scheduler::end_store_query`] is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreQuery {
    pub request_id: RequestId,
    /// Rows that are missing, of one group after another, each from the first row on.
    pub keys: Vec<BlockKey>,
    /// Tokens that would have to be computed without.
    pub num_tokens: usize,
}

impl Scheduler {
    /// Has the tiers beyond the host's memory asked for a waiting request's prefix. True where it has to wait for that.
    pub(crate) fn query_stores(&mut self, id: RequestId) -> bool {
        let block_size = self.kv.config().block_size;
        let group = &self.groups[&id];
        let has_queried_stores = group.has_queried_stores || group.place != Place::Waiting;
        if has_queried_stores || !self.kv.has_stores() || self.num_waiting_for_stores() >= MAX_STORE_QUERIES {
            return false;
        }
        let Some(leader) = group.live().next() else { return false };
        let (seq_id, may_be_cached) = (group.seqs[leader].id, group.num_cacheable_tokens(block_size));
        let keys = self.kv.missing_rows(seq_id, &group.seqs[leader].token_ids, may_be_cached);
        let num_rows = keys.iter().filter(|key| key.group == keys[0].group).count();
        let num_tokens = num_rows * block_size;
        let group = self.groups.get_mut(&id).expect("a waiting request is here");
        group.has_queried_stores = true;
        if keys.is_empty() || num_tokens < self.config.min_store_tokens {
            return false;
        }
        self.store_queries.push(StoreQuery { request_id: id, keys, num_tokens });
        self.wait(seq_id, Wait::Store);
        true
    }

    fn num_waiting_for_stores(&self) -> usize {
        self.waiting
            .values()
            .take(2 * MAX_STORE_QUERIES)
            .filter(|id| self.groups[id].waits_for_stores())
            .count()
    }

    /// What the engine should look for since the last call.
    pub fn take_store_queries(&mut self) -> Vec<StoreQuery> {
        std::mem::take(&mut self.store_queries)
    }

    /// A request that has not ended.
    pub fn request(&self, id: RequestId) -> Option<&Request> {
        self.groups.get(&id).map(|group| &group.request)
    }

    /// Some of what was asked for was found: host blocks for it, which hold nothing yet. `None` where it is of no use: then
    /// the request goes on.
    pub fn begin_load(&mut self, id: RequestId, found: &BTreeSet<BlockKey>) -> Option<Load> {
        let block_size = self.kv.config().block_size;
        let group = self.groups.get(&id).filter(|group| group.waits_for_stores())?;
        let leader = group.live().next()?;
        let max_tokens = group.num_cacheable_tokens(block_size);
        let (seq_id, token_ids) = (group.seqs[leader].id, &group.seqs[leader].token_ids);
        let load = self.kv.begin_load(seq_id, token_ids, max_tokens, found);
        match &load {
            Some(load) => drop(self.loads.insert(load.id, id)),
            None => self.end_store_query(id),
        }
        load
    }

    /// The rows of a load are there, those marked `true`. Its request goes on.
    pub fn end_load(&mut self, load: u64, is_loaded: &[bool]) {
        let num_tokens = self.kv.end_load(load, is_loaded);
        self.kv.record_external_query(0, num_tokens);
        if let Some(id) = self.loads.remove(&load) {
            self.end_store_query(id);
        }
    }

    /// Nothing is going to come for a request: it goes on.
    pub fn end_store_query(&mut self, id: RequestId) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.seqs.iter_mut().for_each(|seq| seq.set_wait(Wait::Store, false));
        }
    }

    /// Part of what a request asked for has come on behalf of another: it asks for the rest when its turn comes.
    pub fn query_stores_again(&mut self, id: RequestId) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.has_queried_stores = false;
        }
        self.end_store_query(id);
    }

    /// Counts tokens that were looked for beyond the host's memory.
    pub fn record_external_query(&mut self, num_tokens: usize) {
        self.kv.record_external_query(num_tokens, 0);
    }

    /// Rows in host blocks that are to be stored; see [`baton_kv::KvCache::take_saved`].
    pub fn take_saved(&mut self) -> Vec<StoredRow> {
        self.kv.take_saved()
    }

    /// A row was stored, or will never be.
    pub fn end_save(&mut self, row: &StoredRow) {
        self.kv.end_save(row);
    }

    /// Whether there are tiers beyond the host's memory.
    pub fn has_stores(&self) -> bool {
        self.kv.has_stores()
    }

    /// Whether rows still have to be copied to the host tier to be stored: there is something to schedule without a request.
    pub fn has_unsaved_rows(&self) -> bool {
        self.kv.has_unsaved_rows()
    }
}
