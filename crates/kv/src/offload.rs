//! Copies to the host tier ahead of need, beside the steps.
//!
//! A block that is taken for something else loses what it holds. So what is among the next few blocks to be taken is copied to
//! the host tier; and while few are left that nobody holds, rows of running sequences are, because these are overwritten soon
//! after their sequence ends, or have to be swapped out before. Both happen a few steps before the copy is needed, so that no
//! step has to wait for it, and no earlier: what the device keeps takes no place in the host tier. For the same reason what
//! was fetched from there is the first that the host tier gives up: it is copied again, if need be, before the device gives
//! it up. So the two tiers together hold nearly as much as their sizes say.

use baton_core::BlockId;

use crate::pool::Key;
use crate::table::Tier;
use crate::{BlockMove, KvCache, StorePolicy};

impl KvCache {
    /// Copies rows to the host tier, at most `max_blocks` blocks: device → host, to be made before any device block that is
    /// free now is written. They can be found once [`KvCache::confirm_saved`] was called for them. Nothing but the content of the
    /// next `spare_blocks` device blocks to be taken is copied, but for rows that are stored as soon as they are full.
    pub fn offload(&mut self, max_blocks: usize, spare_blocks: usize) -> Vec<BlockMove> {
        let mut moves = Vec::new();
        if !self.has_host_cache() {
            return moves;
        }
        if self.writes_through() {
            self.save_committed(max_blocks, &mut moves);
        }
        self.save_released(max_blocks, spare_blocks, &mut moves);
        if self.device.num_free() <= spare_blocks {
            self.save_committed(max_blocks, &mut moves);
        }
        self.num_offloaded_blocks += moves.len() as u64;
        moves
    }

    /// Whether rows are stored as soon as they are full.
    pub(crate) fn writes_through(&self) -> bool {
        self.has_stores() && self.config.store == StorePolicy::WriteThrough
    }

    /// Rows that nobody holds, the next to be evicted first.
    fn save_released(&mut self, max_blocks: usize, spare_blocks: usize, moves: &mut Vec<BlockMove>) {
        for (bundle, key) in self.device.next_evicted(spare_blocks) {
            if moves.len() >= max_blocks {
                return;
            }
            match self.host.find(key) {
                // The host tier gives up what was used least recently on either.
                Some(saved) => self.host.touch(saved),
                None if !self.copy_to_host(bundle, key, moves) => return,
                None => {}
            }
            self.device.set_offered(bundle);
        }
    }

    /// Full rows in the order in which they were computed, whether they are in use or not.
    fn save_committed(&mut self, max_blocks: usize, moves: &mut Vec<BlockMove>) {
        while moves.len() < max_blocks
            && let Some(bundle) = self.committed.pop_front()
        {
            // It may have been evicted, and hold something else, which is as good.
            if let Some(key) = self.device.key(bundle)
                && self.host.find(key).is_none()
                && !self.copy_to_host(bundle, key, moves)
            {
                return;
            }
        }
    }

    /// Appends the copies of a row that is not in the host tier, unless it is on its way there. False where all of the host
    /// tier is held.
    fn copy_to_host(&mut self, bundle: BlockId, key: Key, moves: &mut Vec<BlockMove>) -> bool {
        if self.saving_keys.contains(&key) {
            return true;
        }
        let Some(target) = self.host.take(self.config.groups[key.group].lanes) else { return false };
        self.add_moves((Tier::Device, bundle), (Tier::Host, target), moves);
        self.saving.insert(target, Some(key));
        self.saving_keys.insert(key);
        true
    }

    /// Copies to the host tier were made (or failed): what they saved can be found there (or is given up).
    pub fn confirm_saved(&mut self, moves: &[BlockMove], is_done: bool) {
        for saved in moves {
            // Only the first block of a bundle is known.
            let Some(key) = self.saving.remove(&saved.to) else { continue };
            if let Some(key) = key {
                self.saving_keys.remove(&key);
            }
            if let (Some(key), true) = (key, is_done)
                && self.host.register(saved.to, key)
            {
                self.save(saved.to, key);
            }
            self.host.release(saved.to);
        }
    }
}
