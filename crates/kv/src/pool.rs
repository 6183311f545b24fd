//! The blocks of one tier: who holds them, what they contain, and which of them can be found by hash.
//!
//! The free list *is* the prefix cache: blocks that nobody holds keep their hash until they are taken for something else. So
//! cached content costs nothing, and "free" always means "can be had now". Device and host tier are two pools of this kind.
//!
//! What is taken, shared, released and found is a *bundle*: the blocks of one row of a group, one for each of its lanes. It is
//! named by its first block. The blocks of a bundle stand side by side in the free list, so that an eviction breaks up one
//! bundle after another; what is left of a broken one is free and empty.

use baton_core::BlockId;
use serde::{Deserialize, Serialize};

use crate::EvictionPolicy;
use crate::free_list::{FreeList, NUM_QUEUES};
use crate::hash::{BlockHash, HashIndex};

const NONE: u32 = u32::MAX;

/// Queues of the free list: what holds nothing is in the first, copies of what another tier has in the second, then all else.
const COPIES_QUEUE: usize = 1;
const CACHED_QUEUE: usize = 2;

/// The name of a row's content in every tier: its group and the hash of its tokens and all before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockKey {
    pub group: usize,
    pub hash: BlockHash,
}

pub(crate) use BlockKey as Key;

#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// How many block tables the bundle stands in. Of the first block, as all that follows but the links.
    pub(crate) ref_count: u32,
    /// Set while the bundle can be found.
    pub(crate) key: Option<Key>,
    /// Prefix-cache hits since it got its hash (LFU).
    num_hits: u32,
    /// The next tier was offered it since it was last held.
    is_offered: bool,
    /// The first block of the bundle, and the next one.
    first: u32,
    next: u32,
}

const EMPTY: Block =
    Block { ref_count: 0, key: None, num_hits: 0, is_offered: false, first: NONE, next: NONE };

pub(crate) struct Pool {
    pub(crate) blocks: Vec<Block>,
    pub(crate) free: FreeList,
    indices: Vec<HashIndex>,
    eviction: EvictionPolicy,
    pub(crate) num_evictions: u64,
    /// Free blocks whose content can be found.
    pub(crate) num_cached_free: usize,
    /// What was given up for new content since the list was emptied, where somebody asked to be told.
    pub(crate) evicted: Option<Vec<Key>>,
    /// Of these, blocks that the next tier was offered.
    num_offered: usize,
}

impl Pool {
    pub(crate) fn new(num_blocks: usize, num_groups: usize, eviction: EvictionPolicy) -> Self {
        Self {
            blocks: vec![EMPTY; num_blocks],
            free: FreeList::full(num_blocks),
            indices: (0..num_groups).map(|_| HashIndex::default()).collect(),
            eviction,
            num_evictions: 0,
            num_cached_free: 0,
            evicted: None,
            num_offered: 0,
        }
    }

    /// From now on, what is given up is listed in `evicted`.
    pub(crate) fn report_evictions(&mut self) {
        self.evicted = Some(Vec::new());
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Bundles that can be found.
    pub(crate) fn num_findable(&self) -> usize {
        self.indices.iter().map(HashIndex::len).sum()
    }

    pub(crate) fn ref_count(&self, bundle: BlockId) -> u32 {
        self.blocks[bundle.index()].ref_count
    }

    pub(crate) fn key(&self, bundle: BlockId) -> Option<Key> {
        self.blocks[bundle.index()].key
    }

    /// The blocks of a bundle, by lane.
    pub(crate) fn lanes(&self, bundle: BlockId) -> impl Iterator<Item = BlockId> + '_ {
        std::iter::successors(Some(bundle), |block| {
            let next = self.blocks[block.index()].next;
            (next != NONE).then_some(BlockId(next))
        })
    }

    /// A fresh bundle with one holder. `None` (and nothing changed) where too few blocks are free.
    pub(crate) fn take(&mut self, lanes: usize) -> Option<BlockId> {
        if self.free.len() < lanes {
            return None;
        }
        let mut first = NONE;
        let mut last = NONE;
        for _ in 0..lanes {
            let block = self.free.pop_front().expect("the free blocks were counted");
            self.dissolve(block);
            if first == NONE {
                first = block.0;
            } else {
                self.blocks[last as usize].next = block.0;
            }
            self.blocks[block.index()] = Block { first, ..EMPTY };
            last = block.0;
        }
        self.blocks[first as usize].ref_count = 1;
        Some(BlockId(first))
    }

    /// Breaks up the free bundle that `block`, which has just left the free list, belongs to.
    fn dissolve(&mut self, block: BlockId) {
        let first = self.blocks[block.index()].first;
        if first == NONE {
            return;
        }
        if let Some(key) = self.blocks[first as usize].key.take() {
            self.indices[key.group].remove(&key.hash);
            self.num_evictions += 1;
            let lanes = self.lanes(BlockId(first)).count();
            self.num_cached_free -= lanes;
            self.num_offered -= if self.blocks[first as usize].is_offered { lanes } else { 0 };
            if let Some(evicted) = &mut self.evicted {
                evicted.push(key);
            }
        }
        let mut next = first;
        while next != NONE {
            let entry = &mut self.blocks[next as usize];
            next = entry.next;
            *entry = EMPTY;
        }
    }

    /// One more holder; cached content comes back from the free list.
    pub(crate) fn share(&mut self, bundle: BlockId) {
        if self.blocks[bundle.index()].ref_count == 0 {
            let was_offered = std::mem::take(&mut self.blocks[bundle.index()].is_offered);
            let mut next = bundle.0;
            while next != NONE {
                self.free.remove(BlockId(next));
                self.num_cached_free -= 1;
                self.num_offered -= usize::from(was_offered);
                next = self.blocks[next as usize].next;
            }
        }
        self.blocks[bundle.index()].ref_count += 1;
    }

    /// A use of content elsewhere: a free bundle is given up as late as if it were released now.
    pub(crate) fn touch(&mut self, bundle: BlockId) {
        if self.blocks[bundle.index()].ref_count == 0 {
            self.share(bundle);
            self.release(bundle);
        }
    }

    /// Counts a prefix-cache hit.
    pub(crate) fn count_hit(&mut self, bundle: BlockId) {
        let entry = &mut self.blocks[bundle.index()];
        entry.num_hits = entry.num_hits.saturating_add(1);
    }

    /// One holder less; without holders the blocks are free, and cached if they have a hash.
    pub(crate) fn release(&mut self, bundle: BlockId) {
        let entry = &self.blocks[bundle.index()];
        let queue = match self.eviction {
            EvictionPolicy::Lru => CACHED_QUEUE,
            EvictionPolicy::Lfu => (CACHED_QUEUE + entry.num_hits as usize).min(NUM_QUEUES - 1),
        };
        self.release_to(bundle, queue);
    }

    /// The same for content that another tier has as well, and that comes back from there: it goes before all else.
    pub(crate) fn release_copy(&mut self, bundle: BlockId) {
        match self.eviction {
            EvictionPolicy::Lru => self.release_to(bundle, COPIES_QUEUE),
            // What is used often is not to lose its count.
            EvictionPolicy::Lfu => self.release(bundle),
        }
    }

    fn release_to(&mut self, bundle: BlockId, queue: usize) {
        let entry = &mut self.blocks[bundle.index()];
        entry.ref_count = entry.ref_count.checked_sub(1).expect("a block is released only by its holders");
        if entry.ref_count > 0 {
            return;
        }
        let is_cached = entry.key.is_some();
        let mut next = bundle.0;
        while next != NONE {
            let block = BlockId(next);
            next = self.blocks[block.index()].next;
            if is_cached {
                self.free.push_back(block, queue);
                self.num_cached_free += 1;
            } else {
                self.blocks[block.index()] = EMPTY;
                self.free.push_front(block);
            }
        }
    }

    /// The findable bundles among the next `num_blocks` blocks to be taken that the next tier has not been offered, in this order.
    pub(crate) fn next_evicted(&self, num_blocks: usize) -> Vec<(BlockId, Key)> {
        let num_empty = self.free.len() - self.num_cached_free;
        // Without anything new at the front, the front was offered.
        if num_empty + self.num_offered >= num_blocks.min(self.free.len()) {
            return Vec::new();
        }
        let unoffered = |block: BlockId| {
            let entry = &self.blocks[block.index()];
            entry.key.filter(|_| !entry.is_offered).map(|key| (block, key))
        };
        self.free.iter().take(num_blocks).filter_map(unoffered).collect()
    }

    /// The next tier has had a look at a free bundle, and need not be offered it again until it was held.
    pub(crate) fn set_offered(&mut self, bundle: BlockId) {
        debug_assert!(self.blocks[bundle.index()].key.is_some() && self.ref_count(bundle) == 0);
        if !std::mem::replace(&mut self.blocks[bundle.index()].is_offered, true) {
            self.num_offered += self.lanes(bundle).count();
        }
    }

    pub(crate) fn find(&self, key: Key) -> Option<BlockId> {
        self.indices[key.group].get(&key.hash).copied()
    }

    /// Makes a bundle in use findable. False where this content already has a home: the first one stays it.
    pub(crate) fn register(&mut self, bundle: BlockId, key: Key) -> bool {
        if self.indices[key.group].contains_key(&key.hash) {
            return false;
        }
        let entry = &mut self.blocks[bundle.index()];
        debug_assert!(entry.ref_count > 0 && entry.key.is_none(), "block {bundle} cannot get a hash");
        entry.key = Some(key);
        entry.num_hits = 0;
        self.indices[key.group].insert(key.hash, bundle);
        true
    }

    /// Forgets every hash. Contents of blocks in use stay where they are.
    pub(crate) fn forget_hashes(&mut self) {
        // Blocks that were used are taken before those that never were: their memory is there already.
        let used: Vec<BlockId> =
            self.free.iter().filter(|block| self.blocks[block.index()].first != NONE).collect();
        for block in used.into_iter().rev() {
            self.free.remove(block);
            self.free.push_front(block);
        }
        self.indices.iter_mut().for_each(HashIndex::clear);
        for block in &mut self.blocks {
            block.key = None;
            block.num_hits = 0;
            block.is_offered = false;
        }
        self.num_cached_free = 0;
        self.num_offered = 0;
    }

    /// Panics with what is wrong where the books do not balance. `held` counts the tables that hold each bundle.
    pub(crate) fn check(&self, tier: &str, held: &[u32]) {
        let mut is_free = vec![false; self.blocks.len()];
        for block in self.free.iter() {
            assert!(!is_free[block.index()], "{tier} block {block} is free twice");
            is_free[block.index()] = true;
        }
        let num_free = is_free.iter().filter(|free| **free).count();
        assert_eq!(num_free, self.free.len(), "the {tier} free list does not count its blocks right");
        let mut num_keys = 0;
        let (mut num_cached_free, mut num_offered) = (0, 0);
        for (index, block) in self.blocks.iter().enumerate() {
            assert_eq!(block.ref_count, held[index], "{tier} block {index}: ref count and tables differ");
            assert_eq!(
                is_free[index],
                self.free.contains(BlockId(index as u32)),
                "{tier} block {index}: free mark"
            );
            let is_held = block.first != NONE && self.blocks[block.first as usize].ref_count > 0;
            assert_eq!(is_free[index], !is_held, "{tier} block {index}: free and held differ");
            if block.first == index as u32 {
                let lanes: Vec<BlockId> = self.lanes(BlockId(index as u32)).collect();
                assert!(
                    lanes.iter().all(|lane| self.blocks[lane.index()].first == block.first),
                    "{tier} block {index}: a lane belongs to another bundle"
                );
                if let Some(key) = block.key {
                    num_keys += 1;
                    num_cached_free += if is_held { 0 } else { lanes.len() };
                    num_offered += if block.is_offered { lanes.len() } else { 0 };
                    let found = self.find(key);
                    assert_eq!(
                        found,
                        Some(BlockId(index as u32)),
                        "{tier} block {index} is not found by its hash"
                    );
                }
            } else {
                assert!(block.key.is_none() && block.ref_count == 0, "{tier} block {index} is no first one");
            }
        }
        assert_eq!(
            num_keys,
            self.num_findable(),
            "{tier} blocks with a hash and entries of the index differ"
        );
        assert_eq!(num_cached_free, self.num_cached_free, "{tier} blocks that are free and cached");
        assert_eq!(num_offered, self.num_offered, "{tier} blocks that the next tier was offered");
    }
}
