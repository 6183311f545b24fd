//! A tier beyond the host's memory that is slow, forgets, and now and then brings only part of what it promised.
//!
//! It keeps what host blocks held when they were stored, by name. Rows that it does not bring are filled with nothing at
//! all, so that whoever reads them in spite of that is caught by the device.

use std::collections::{BTreeMap, BTreeSet};

use baton_core::RequestId;
use baton_kv::{BlockKey, Load, StoredRow};
use baton_sched::Scheduler;

use crate::device::Content;
use crate::{FakeDevice, Rng};

/// Rows that it keeps.
const CAPACITY: usize = 512;

#[derive(Debug, Default)]
pub(crate) struct FakeStore {
    rows: BTreeMap<BlockKey, Vec<Vec<Content>>>,
    queries: Vec<(RequestId, Vec<BlockKey>)>,
    loads: Vec<Load>,
    saves: Vec<StoredRow>,
    pub(crate) num_loaded_rows: usize,
    pub(crate) num_lost_rows: usize,
    pub(crate) num_saved_rows: usize,
}

impl FakeStore {
    pub(crate) fn is_busy(&self) -> bool {
        !self.queries.is_empty() || !self.loads.is_empty() || !self.saves.is_empty()
    }

    pub(crate) fn has_pending_queries(&self) -> bool {
        !self.queries.is_empty() || !self.loads.is_empty()
    }

    /// Takes in what the scheduler wants and finishes some of it: each piece with this chance.
    pub(crate) fn work(
        &mut self,
        scheduler: &mut Scheduler,
        device: &mut FakeDevice,
        rng: &mut Rng,
        per_mille: u64,
    ) {
        self.queries
            .extend(scheduler.take_store_queries().into_iter().map(|query| (query.request_id, query.keys)));
        self.saves.extend(scheduler.take_saved());
        for (id, keys) in std::mem::take(&mut self.queries) {
            if !rng.per_mille(per_mille) {
                self.queries.push((id, keys));
                continue;
            }
            let has = |key: &&BlockKey| self.rows.contains_key(key);
            let found: BTreeSet<BlockKey> = keys.iter().filter(has).copied().collect();
            if rng.per_mille(50) {
                scheduler.end_store_query(id);
            } else {
                self.loads.extend(scheduler.begin_load(id, &found));
            }
        }
        for load in std::mem::take(&mut self.loads) {
            if rng.per_mille(per_mille) {
                self.finish_load(&load, scheduler, device, rng);
            } else {
                self.loads.push(load);
            }
        }
        for row in std::mem::take(&mut self.saves) {
            if !rng.per_mille(per_mille) {
                self.saves.push(row);
                continue;
            }
            let contents = row.blocks.iter().map(|block| device.host_block(*block).to_vec()).collect();
            if self.rows.len() < CAPACITY && !rng.per_mille(100) {
                self.rows.insert(row.key, contents);
                self.num_saved_rows += 1;
            }
            scheduler.end_save(&row);
        }
        if rng.per_mille(5)
            && let Some(key) = self.rows.keys().next().copied()
        {
            self.rows.remove(&key);
        }
    }

    fn finish_load(
        &mut self,
        load: &Load,
        scheduler: &mut Scheduler,
        device: &mut FakeDevice,
        rng: &mut Rng,
    ) {
        let mut is_loaded = Vec::new();
        for row in &load.rows {
            let contents = self.rows.get(&row.key).filter(|_| !rng.per_mille(30));
            for (lane, block) in row.blocks.iter().enumerate() {
                let slots = device.host_block_mut(*block);
                match contents {
                    Some(contents) => slots.copy_from_slice(&contents[lane]),
                    None => slots.fill(None),
                }
            }
            self.num_loaded_rows += usize::from(contents.is_some());
            self.num_lost_rows += usize::from(contents.is_none());
            is_loaded.push(contents.is_some());
        }
        scheduler.end_load(load.id, &is_loaded);
    }
}
