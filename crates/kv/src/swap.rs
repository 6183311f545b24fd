//! Moving the KV of whole sequences between the tiers.
//!
//! The sequences of one request are moved together, so that what they share is moved once and stays shared. A block
//! that a sequence outside the list holds as well is copied out but not taken away from it. Device blocks that were
//! saved go back to the free list with their hash: until somebody needs them they can be taken again without a copy.

use std::collections::{BTreeMap, BTreeSet};

use baton_core::{BlockId, SeqId};
use serde::{Deserialize, Serialize};

use crate::KvCache;
use crate::manager::table_mut;
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
        let mut blocks: Vec<BlockId> =
            seq_ids.iter().flat_map(|&seq_id| self.table(seq_id).blocks.iter().copied()).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.len()
    }

    /// Moves sequences to the host tier. `None` (and nothing changed) where it has not enough free blocks.
    /// The copies must be made before any device block that is free after this call is written.
    pub fn swap_out(&mut self, seq_ids: &[SeqId]) -> Option<Vec<BlockMove>> {
        if self.num_distinct_blocks(seq_ids) > self.num_free_host_blocks() {
            return None;
        }
        let mut moves = Vec::new();
        let mut saved: BTreeMap<BlockId, BlockId> = BTreeMap::new();
        for &seq_id in seq_ids {
            let table = table_mut(&mut self.tables, seq_id);
            assert!(table.tier == Tier::Device, "sequence {seq_id} is swapped out already");
            for block in &table.blocks {
                if let Some(&to) = saved.get(block) {
                    self.host.share(to);
                } else {
                    let to = self.host.take().expect("the number of free host blocks was checked");
                    saved.insert(*block, to);
                    moves.push(BlockMove { from: *block, to });
                }
            }
        }
        for &seq_id in seq_ids {
            let table = table_mut(&mut self.tables, seq_id);
            for block in table.blocks.iter_mut().rev() {
                self.device.release(*block);
                *block = saved[block];
            }
            table.tier = Tier::Host;
        }
        Some(moves)
    }

    /// How many free device blocks `swap_in` would take.
    pub fn swap_in_cost(&self, seq_ids: &[SeqId]) -> usize {
        let mut counted: BTreeMap<BlockId, bool> = BTreeMap::new();
        for &seq_id in seq_ids {
            let table = self.table(seq_id);
            for (index, block) in table.blocks.iter().enumerate() {
                let held =
                    self.cached_home(seq_id, index).is_some_and(|home| self.device.ref_count(home) > 0);
                counted.insert(*block, !held);
            }
        }
        counted.values().filter(|takes_one| **takes_one).count()
    }

    /// Brings sequences back to the device. `None` (and nothing changed) where it has not enough free blocks.
    /// A block whose content is still cached on the device is taken from there and needs no copy.
    pub fn swap_in(&mut self, seq_ids: &[SeqId]) -> Option<Vec<BlockMove>> {
        if self.swap_in_cost(seq_ids) > self.num_free_blocks() {
            return None;
        }
        let mut homes: BTreeMap<BlockId, BlockId> = BTreeMap::new();
        // The cached blocks first: taking a fresh one may evict what is found here.
        for &seq_id in seq_ids {
            for index in 0..self.table(seq_id).blocks.len() {
                let block = self.table(seq_id).blocks[index];
                if let (false, Some(home)) = (homes.contains_key(&block), self.cached_home(seq_id, index)) {
                    self.device.share(home);
                    homes.insert(block, home);
                }
            }
        }
        let mut moves = Vec::new();
        let mut taken: BTreeSet<BlockId> = BTreeSet::new();
        for &seq_id in seq_ids {
            for index in 0..self.table(seq_id).blocks.len() {
                let from = self.table(seq_id).blocks[index];
                let home = if let Some(&home) = homes.get(&from) {
                    home
                } else {
                    let to = self.take_device_block();
                    moves.push(BlockMove { from, to });
                    homes.insert(from, to);
                    to
                };
                // The first table of the list that holds a block got its share when the block was taken.
                if !taken.insert(from) {
                    self.device.share(home);
                }
                self.host.release(from);
                table_mut(&mut self.tables, seq_id).blocks[index] = home;
            }
            let table = table_mut(&mut self.tables, seq_id);
            table.tier = Tier::Device;
            // The content is only there once the step has run: the next commit offers it to the prefix cache again.
            table.num_registered = 0;
        }
        Some(moves)
    }

    /// Where the content of a swapped-out block can be found on the device.
    fn cached_home(&self, seq_id: SeqId, index: usize) -> Option<BlockId> {
        let table = self.table(seq_id);
        if table.stale || index >= table.num_registered {
            return None;
        }
        self.device.find(table.chain[index])
    }
}
