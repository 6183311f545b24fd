//! The device blocks: who holds them, what they contain, and which of them can be found by hash.
//!
//! The free list *is* the prefix cache: a block that nobody holds keeps its hash until it is taken for something
//! else. So a cached block costs nothing, and "free" always means "can be had now".

use baton_core::BlockId;

use crate::EvictionPolicy;
use crate::free_list::{FreeList, NUM_QUEUES};
use crate::hash::{BlockHash, HashIndex};

#[derive(Clone, Copy, Default)]
pub(crate) struct Block {
    /// How many block tables the block stands in.
    pub(crate) ref_count: u32,
    /// Set while the block can be found by this hash.
    pub(crate) hash: Option<BlockHash>,
    /// Prefix-cache hits since it got its hash (LFU).
    num_hits: u32,
}

pub(crate) struct DevicePool {
    pub(crate) blocks: Vec<Block>,
    pub(crate) free: FreeList,
    pub(crate) index: HashIndex,
    eviction: EvictionPolicy,
    pub(crate) num_evictions: u64,
}

/// A block that was taken, and the cached content that was given up for it.
pub(crate) struct Taken {
    pub(crate) block: BlockId,
    pub(crate) evicted: Option<BlockHash>,
}

impl DevicePool {
    pub(crate) fn new(num_blocks: usize, eviction: EvictionPolicy) -> Self {
        Self {
            blocks: vec![Block::default(); num_blocks],
            free: FreeList::full(num_blocks),
            index: HashIndex::default(),
            eviction,
            num_evictions: 0,
        }
    }

    pub(crate) fn ref_count(&self, block: BlockId) -> u32 {
        self.blocks[block.index()].ref_count
    }

    /// A fresh block with one holder.
    pub(crate) fn take(&mut self) -> Option<Taken> {
        let block = self.free.pop_front()?;
        let entry = &mut self.blocks[block.index()];
        debug_assert_eq!(entry.ref_count, 0, "a free block has no holder");
        let evicted = entry.hash.take();
        *entry = Block { ref_count: 1, hash: None, num_hits: 0 };
        if let Some(hash) = evicted {
            self.index.remove(&hash);
            self.num_evictions += 1;
        }
        Some(Taken { block, evicted })
    }

    /// One more holder; a cached block comes back from the free list.
    pub(crate) fn share(&mut self, block: BlockId) {
        if self.free.contains(block) {
            self.free.remove(block);
        }
        self.blocks[block.index()].ref_count += 1;
    }

    /// Counts a prefix-cache hit.
    pub(crate) fn count_hit(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        entry.num_hits = entry.num_hits.saturating_add(1);
    }

    /// One holder less; without holders the block is free, and cached if it has a hash.
    pub(crate) fn release(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        entry.ref_count = entry.ref_count.checked_sub(1).expect("a block is released only by its holders");
        if entry.ref_count > 0 {
            return;
        }
        match (entry.hash, self.eviction) {
            (None, _) => self.free.push_front(block),
            (Some(_), EvictionPolicy::Lru) => self.free.push_back(block, 0),
            (Some(_), EvictionPolicy::Lfu) => {
                let queue = (entry.num_hits as usize).min(NUM_QUEUES - 1);
                self.free.push_back(block, queue);
            }
        }
    }

    pub(crate) fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.index.get(&hash).copied()
    }

    /// Makes a block in use findable. False where this content already has a home: the first one stays it.
    pub(crate) fn register(&mut self, block: BlockId, hash: BlockHash) -> bool {
        if self.index.contains_key(&hash) {
            return false;
        }
        let entry = &mut self.blocks[block.index()];
        debug_assert!(entry.ref_count > 0 && entry.hash.is_none(), "block {block} cannot get a hash");
        entry.hash = Some(hash);
        entry.num_hits = 0;
        self.index.insert(hash, block);
        true
    }

    /// Forgets every hash. Contents of blocks in use stay where they are.
    pub(crate) fn forget_hashes(&mut self) {
        self.index.clear();
        for block in &mut self.blocks {
            block.hash = None;
            block.num_hits = 0;
        }
    }
}
