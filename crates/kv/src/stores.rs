//! Tiers beyond the host's memory: disks, stores and other machines that keep rows by name.
//!
//! What is found there comes into host blocks ([`KvCache::begin_load`]), and from then on it is part of the host tier like any
//! other row. What goes there leaves from host blocks ([`KvCache::take_saved`]). Nothing here waits: whoever moves the bytes
//! says when it is done, and until then the blocks are held.

use std::collections::BTreeSet;

use baton_core::{BlockId, SeqId, TokenId};
use serde::{Deserialize, Serialize};

use crate::{BlockKey, KvCache};

/// When rows go to the tiers beyond the host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StorePolicy {
    /// There are no such tiers.
    #[default]
    Off,
    /// When they are about to leave the device.
    Eviction,
    /// As soon as they are full.
    WriteThrough,
}

/// A row in host blocks, one for each lane of its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRow {
    pub key: BlockKey,
    pub blocks: Vec<BlockId>,
}

/// Rows on their way into host blocks. [`KvCache::end_load`] is due when they are there, or will never be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    pub id: u64,
    pub rows: Vec<StoredRow>,
    /// Tokens of the sequence that are there when all rows are.
    pub num_tokens: usize,
}

/// What a load holds.
#[derive(Debug)]
pub(crate) struct LoadRecord {
    /// Bundles to be filled; without a key where nobody may find them any more.
    pub(crate) rows: Vec<(BlockId, Option<BlockKey>)>,
    /// Rows of the same prefix that are in the host tier already.
    pub(crate) held: Vec<BlockId>,
}

impl KvCache {
    /// Names of the rows of the first `max_tokens` tokens that are neither on the device nor in the host tier.
    pub fn missing_rows(&mut self, seq_id: SeqId, token_ids: &[TokenId], max_tokens: usize) -> Vec<BlockKey> {
        if !self.has_stores() {
            return Vec::new();
        }
        let limit = self.extend_chain(seq_id, token_ids, max_tokens);
        let chain = &self.table(seq_id).chain[..limit];
        let keys = (0..self.config.groups.len())
            .flat_map(|group| chain.iter().map(move |&hash| BlockKey { group, hash }));
        keys.filter(|key| self.device.find(*key).is_none() && self.host.find(*key).is_none()).collect()
    }

    /// Takes host blocks for rows that a tier further away holds, as far as they make the prefix longer and there is room.
    /// `None` where nothing is gained.
    pub fn begin_load(
        &mut self,
        seq_id: SeqId,
        token_ids: &[TokenId],
        max_tokens: usize,
        found: &BTreeSet<BlockKey>,
    ) -> Option<Load> {
        if !self.has_stores() || found.is_empty() {
            return None;
        }
        self.extend_chain(seq_id, token_ids, max_tokens);
        let mut max_tokens = max_tokens;
        let (num_rows, missing, held) = loop {
            let num_rows = self.usable_rows(seq_id, token_ids, max_tokens, |key| {
                self.is_cached(key, true) || found.contains(&key)
            });
            let needed: Vec<BlockKey> = self.needed_rows(seq_id, num_rows).map(|(_, key)| key).collect();
            let missing: Vec<BlockKey> =
                needed.iter().copied().filter(|key| !self.is_cached(*key, true)).collect();
            if missing.is_empty() {
                return None;
            }
            let held: Vec<BlockId> = needed.iter().filter_map(|key| self.host.find(*key)).collect();
            // Blocks of the prefix itself are free until they are held, and must not be taken for the rest of it.
            let own: usize = held
                .iter()
                .filter(|bundle| self.host.ref_count(**bundle) == 0)
                .map(|bundle| self.host.lanes(*bundle).count())
                .sum();
            let needed: usize = missing.iter().map(|key| self.config.groups[key.group].lanes).sum();
            let free = self.host.num_free() - own;
            if needed <= free {
                break (num_rows, missing, held);
            }
            let per_row: usize = self.config.groups.iter().map(|group| group.lanes).sum();
            let num_rows = num_rows.saturating_sub((needed - free).div_ceil(per_row));
            max_tokens = num_rows * self.config.block_size;
        };
        for &bundle in &held {
            self.host.share(bundle);
        }
        let mut rows = Vec::with_capacity(missing.len());
        let mut record = LoadRecord { rows: Vec::with_capacity(missing.len()), held };
        for key in missing {
            let lanes = self.config.groups[key.group].lanes;
            let bundle = self.host.take(lanes).expect("the free host blocks were counted");
            rows.push(StoredRow { key, blocks: self.host.lanes(bundle).collect() });
            record.rows.push((bundle, Some(key)));
        }
        let id = self.next_load;
        self.next_load += 1;
        self.loads.insert(id, record);
        Some(Load { id, rows, num_tokens: num_rows * self.config.block_size })
    }

    /// The rows of a load are in their blocks, those marked `true`; the others are given up. Returns how many tokens came.
    pub fn end_load(&mut self, id: u64, is_loaded: &[bool]) -> usize {
        let Some(record) = self.loads.remove(&id) else { return 0 };
        let mut num_rows = 0;
        // The last row first: of a cached prefix the end is evicted first.
        for (index, (bundle, key)) in record.rows.iter().enumerate().rev() {
            let is_loaded = is_loaded.get(index).copied().unwrap_or(false);
            if let (Some(key), true) = (key, is_loaded) {
                self.host.register(*bundle, *key);
                num_rows += usize::from(key.group == 0);
            }
            self.host.release(*bundle);
        }
        for bundle in record.held.into_iter().rev() {
            self.host.release(bundle);
        }
        num_rows * self.config.block_size
    }

    /// Rows that have come to the host tier and are to be stored. Each is held until [`KvCache::end_save`].
    pub fn take_saved(&mut self) -> Vec<StoredRow> {
        std::mem::take(&mut self.saved)
    }

    /// A row from [`KvCache::take_saved`] was stored, or will never be.
    pub fn end_save(&mut self, row: &StoredRow) {
        let Some(bundle) = row.blocks.first() else { return };
        if self.being_stored.remove(bundle) {
            self.host.release(*bundle);
        }
    }

    /// A row has come to the host tier: it is held for the stores, unless they are too far behind.
    pub(crate) fn save(&mut self, bundle: BlockId, key: BlockKey) {
        if !self.has_stores() {
            return;
        }
        let blocks: Vec<BlockId> = self.host.lanes(bundle).collect();
        if (self.being_stored.len() + 1) * blocks.len() > self.config.num_host_blocks / 2 {
            self.num_saves_dropped += 1;
            return;
        }
        self.host.share(bundle);
        self.being_stored.insert(bundle);
        self.saved.push(StoredRow { key, blocks });
    }

    /// Whether there are tiers beyond the host's memory.
    pub fn has_stores(&self) -> bool {
        self.config.store != StorePolicy::Off && self.has_host_cache()
    }

    /// Rows that wait to be copied to the host tier because they are to be stored.
    pub fn has_unsaved_rows(&self) -> bool {
        self.writes_through() && !self.committed.is_empty()
    }
}
