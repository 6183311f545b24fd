//! Blocks that are counted and given up in an order, without hashes and sequences: for caches whose keys are not tokens.
//!
//! As in the prefix cache, the free list *is* the cache: a block that nobody holds keeps its content until it is taken for
//! something else. What the content is, the user of the pool knows: he keeps the owner of each block.

use baton_core::BlockId;

use crate::EvictionPolicy;
use crate::free_list::{FreeList, NUM_QUEUES};

/// Equal blocks with reference counts.
pub struct BlockPool {
    ref_counts: Vec<u32>,
    num_hits: Vec<u32>,
    free: FreeList,
    eviction: EvictionPolicy,
}

impl std::fmt::Debug for BlockPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlockPool({} of {} blocks free)", self.num_free(), self.num_blocks())
    }
}

impl BlockPool {
    pub fn new(num_blocks: usize, eviction: EvictionPolicy) -> Self {
        Self {
            ref_counts: vec![0; num_blocks],
            num_hits: vec![0; num_blocks],
            free: FreeList::full(num_blocks),
            eviction,
        }
    }

    pub fn num_blocks(&self) -> usize {
        self.ref_counts.len()
    }

    /// Blocks without a holder, cached ones included.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_counts[block.index()]
    }

    /// The block that is given up next, with one holder. Its content is lost.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop_front()?;
        self.ref_counts[block.index()] = 1;
        self.num_hits[block.index()] = 0;
        Some(block)
    }

    /// One more holder; a free block comes back with its content.
    pub fn share(&mut self, block: BlockId) {
        if self.free.contains(block) {
            self.free.remove(block);
        }
        self.ref_counts[block.index()] += 1;
    }

    /// Counts a use of the content (LFU).
    pub fn count_hit(&mut self, block: BlockId) {
        let hits = &mut self.num_hits[block.index()];
        *hits = hits.saturating_add(1);
    }

    /// One holder less. Without holders the block is free: the next to be taken, or where its content is worth keeping, after
    /// those that were used less recently or less often.
    pub fn release(&mut self, block: BlockId, is_worth_keeping: bool) {
        let count = &mut self.ref_counts[block.index()];
        *count = count.checked_sub(1).expect("a block is released only by its holders");
        if *count > 0 {
            return;
        }
        match self.eviction {
            _ if !is_worth_keeping => self.free.push_front(block),
            EvictionPolicy::Lru => self.free.push_back(block, 0),
            EvictionPolicy::Lfu => {
                let hits = self.num_hits[block.index()] as usize;
                self.free.push_back(block, hits.min(NUM_QUEUES - 1));
            }
        }
    }

    /// Moves a free block whose content is of no use any more to the front.
    pub fn forget(&mut self, block: BlockId) {
        if self.free.contains(block) {
            self.free.remove(block);
            self.free.push_front(block);
        }
    }

    /// The free blocks in the order in which they are given up.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.free.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_stays_until_the_block_is_taken() {
        let mut pool = BlockPool::new(3, EvictionPolicy::Lru);
        let blocks = [(); 3].map(|()| pool.take().expect("free"));
        assert_eq!(pool.take(), None);
        pool.release(blocks[1], true);
        pool.release(blocks[0], true);
        pool.share(blocks[1]);
        pool.share(blocks[1]);
        assert_eq!((pool.ref_count(blocks[1]), pool.num_free()), (2, 1));
        pool.release(blocks[1], true);
        pool.release(blocks[1], true);
        pool.release(blocks[2], false);
        let order: Vec<_> = pool.free_blocks().collect();
        assert_eq!(order, [blocks[2], blocks[0], blocks[1]]);
        pool.forget(blocks[1]);
        assert_eq!(pool.take(), Some(blocks[1]));
    }

    #[test]
    fn what_is_used_often_goes_last() {
        let mut pool = BlockPool::new(2, EvictionPolicy::Lfu);
        let (often, once) = (pool.take().expect("free"), pool.take().expect("free"));
        pool.count_hit(often);
        pool.release(often, true);
        pool.release(once, true);
        assert_eq!(pool.take(), Some(once));
    }
}
