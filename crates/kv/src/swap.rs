//! Moving the KV of whole sequences between the tiers.
//!
//! The sequences of one request are moved together, so that what they share is moved once and stays shared. A bundle
//! that a sequence outside the list holds as well is copied out but not taken away from it. Device blocks that were
//! saved go back to the free list with their hash: until somebody needs them they can be taken again without a copy.

use std::collections::{BTreeMap, BTreeSet};

use baton_core::{BlockId, SeqId};
use serde::{Deserialize, Serialize};

use crate::KvCache;
use crate::manager::table_mut;
use crate::pool::Key;
use crate::table::Tier;

/// A whole-block copy. Source and destination live in the tiers that the list it stands in names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockMove {
    pub from: BlockId,
    pub to: BlockId,
}

impl KvCache {
    /// Different blocks that these sequences hold, all in one tier.
    pub fn num_distinct_blocks(&self, seq_ids: &[SeqId]) -> usize {
        let mut bundles: BTreeMap<BlockId, usize> = BTreeMap::new();
        for &seq_id in seq_ids {
            let held = self.table(seq_id).bundles();
            bundles.extend(held.map(|(group, _, bundle)| (bundle, self.config.groups[group].lanes)));
        }
        bundles.values().sum()
    }

    /// Moves sequences to the host tier. `None` (and nothing changed) where it has not enough free blocks. What was copied
    /// there ahead of need is not copied again.
    /// The copies must be made before any device block that is free after this call is written.
    pub fn swap_out(&mut self, seq_ids: &[SeqId]) -> Option<Vec<BlockMove>> {
        if self.num_distinct_blocks(seq_ids) > self.num_free_host_blocks() {
            return None;
        }
        let mut moves = Vec::new();
        let mut held = Vec::new();
        for &seq_id in seq_ids {
            let table = self.table(seq_id);
            assert!(table.tier == Tier::Device, "sequence {seq_id} is swapped out already");
            debug_assert!(table.fetching.is_empty(), "sequence {seq_id} waits for KV");
            held.extend(table.bundles().map(|(group, _, bundle)| (group, bundle)));
        }
        let mut saved: BTreeMap<BlockId, BlockId> = BTreeMap::new();
        // What is there already first: taking a fresh block may evict it.
        for &(_, bundle) in &held {
            let home = self.device.key(bundle).and_then(|key| self.host.find(key));
            if let (false, Some(home)) = (saved.contains_key(&bundle), home) {
                self.host.share(home);
                saved.insert(bundle, home);
            }
        }
        let mut counted: BTreeSet<BlockId> = BTreeSet::new();
        for (group, bundle) in held {
            let to = if let Some(&to) = saved.get(&bundle) {
                to
            } else {
                let lanes = self.config.groups[group].lanes;
                let to = self.host.take(lanes).expect("the number of free host blocks was checked");
                self.add_moves((Tier::Device, bundle), (Tier::Host, to), &mut moves);
                saved.insert(bundle, to);
                to
            };
            // The first table that holds a bundle got its share when the bundle was taken.
            if !counted.insert(bundle) {
                self.host.share(to);
            }
        }
        for &seq_id in seq_ids {
            let table = table_mut(&mut self.tables, seq_id);
            for bundle in table.groups.iter_mut().flat_map(|rows| rows.iter_mut().rev()) {
                if let Some(&to) = saved.get(bundle) {
                    self.device.release(*bundle);
                    *bundle = to;
                }
            }
            table.tier = Tier::Host;
        }
        Some(moves)
    }

    /// How many free device blocks `swap_in` would take.
    pub fn swap_in_cost(&self, seq_ids: &[SeqId]) -> usize {
        let mut counted: BTreeMap<BlockId, usize> = BTreeMap::new();
        for &seq_id in seq_ids {
            for (group, row, bundle) in self.table(seq_id).bundles() {
                let home = self.cached_home(seq_id, group, row);
                let is_held = home.is_some_and(|home| self.device.ref_count(home) > 0);
                counted.insert(bundle, if is_held { 0 } else { self.config.groups[group].lanes });
            }
        }
        counted.values().sum()
    }

    /// Brings sequences back to the device. `None` (and nothing changed) where it has not enough free blocks.
    /// What is still cached on the device is taken from there and needs no copy.
    pub fn swap_in(&mut self, seq_ids: &[SeqId]) -> Option<Vec<BlockMove>> {
        if self.swap_in_cost(seq_ids) > self.num_free_blocks() {
            return None;
        }
        let held = |cache: &Self, seq_id| cache.table(seq_id).bundles().collect::<Vec<_>>();
        let mut homes: BTreeMap<BlockId, BlockId> = BTreeMap::new();
        // What is cached first: taking a fresh block may evict it.
        for &seq_id in seq_ids {
            for (group, row, bundle) in held(self, seq_id) {
                if let (false, Some(home)) =
                    (homes.contains_key(&bundle), self.cached_home(seq_id, group, row))
                {
                    self.device.share(home);
                    homes.insert(bundle, home);
                }
            }
        }
        let mut moves = Vec::new();
        let mut left: Vec<BlockId> = Vec::new();
        let mut taken: BTreeSet<BlockId> = BTreeSet::new();
        for &seq_id in seq_ids {
            for (group, row, from) in held(self, seq_id) {
                let home = if let Some(&home) = homes.get(&from) {
                    home
                } else {
                    let to = self.take_device(self.config.groups[group].lanes);
                    self.add_moves((Tier::Host, from), (Tier::Device, to), &mut moves);
                    homes.insert(from, to);
                    to
                };
                // The first table of the list that holds a bundle got its share when the bundle was taken.
                if !taken.insert(from) {
                    self.device.share(home);
                }
                left.push(from);
                table_mut(&mut self.tables, seq_id).groups[group][row] = home;
            }
            let table = table_mut(&mut self.tables, seq_id);
            table.tier = Tier::Device;
            // The content is only there once the step has run: the next commit offers it to the prefix cache again.
            table.num_registered = 0;
        }
        // The last row first: of a cached prefix the end is evicted first.
        for bundle in left.into_iter().rev() {
            self.host.release(bundle);
        }
        Some(moves)
    }

    /// Where the content of a swapped-out bundle can be found on the device.
    fn cached_home(&self, seq_id: SeqId, group: usize, row: usize) -> Option<BlockId> {
        let table = self.table(seq_id);
        if table.stale || row >= table.num_registered {
            return None;
        }
        self.device.find(Key { group, hash: table.chain[row] })
    }
}
