//! The free blocks in the order in which they will be given up.
//!
//! An intrusive doubly linked list over block numbers, so that taking the next block, giving one back and taking a
//! certain one out of the middle (a prefix-cache hit) are all O(1). There are a few queues behind each other:
//! LRU uses the first only, LFU one for each number of hits. It knows nothing of hashes and reference counts.

use baton_core::BlockId;

const NONE: u32 = u32::MAX;
/// Hits beyond this count alike.
pub(crate) const NUM_QUEUES: usize = 16;

#[derive(Clone, Copy)]
struct Link {
    previous: u32,
    next: u32,
    /// The queue the block stands in; `NONE` while it is in use.
    queue: u32,
}

#[derive(Clone, Copy)]
struct Ends {
    first: u32,
    last: u32,
}

pub(crate) struct FreeList {
    links: Vec<Link>,
    queues: [Ends; NUM_QUEUES],
    len: usize,
}

impl FreeList {
    /// All blocks free, the lowest number first.
    pub(crate) fn full(num_blocks: usize) -> Self {
        let mut list = Self {
            links: vec![Link { previous: NONE, next: NONE, queue: NONE }; num_blocks],
            queues: [Ends { first: NONE, last: NONE }; NUM_QUEUES],
            len: 0,
        };
        for block in 0..num_blocks {
            list.push_back(BlockId(block as u32), 0);
        }
        list
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.links[block.index()].queue != NONE
    }

    pub(crate) fn push_back(&mut self, block: BlockId, queue: usize) {
        debug_assert!(!self.contains(block), "block {block} is given back twice");
        let last = self.queues[queue].last;
        self.links[block.index()] = Link { previous: last, next: NONE, queue: queue as u32 };
        match last {
            NONE => self.queues[queue].first = block.0,
            last => self.links[last as usize].next = block.0,
        }
        self.queues[queue].last = block.0;
        self.len += 1;
    }

    /// For blocks that are of no use to anybody: they are the next to be taken.
    pub(crate) fn push_front(&mut self, block: BlockId) {
        debug_assert!(!self.contains(block), "block {block} is given back twice");
        let first = self.queues[0].first;
        self.links[block.index()] = Link { previous: NONE, next: first, queue: 0 };
        match first {
            NONE => self.queues[0].last = block.0,
            first => self.links[first as usize].previous = block.0,
        }
        self.queues[0].first = block.0;
        self.len += 1;
    }

    pub(crate) fn pop_front(&mut self) -> Option<BlockId> {
        let first = self.queues.iter().map(|queue| queue.first).find(|&first| first != NONE)?;
        self.remove(BlockId(first));
        Some(BlockId(first))
    }

    pub(crate) fn remove(&mut self, block: BlockId) {
        let Link { previous, next, queue } = self.links[block.index()];
        debug_assert!(queue != NONE, "block {block} is not free");
        match previous {
            NONE => self.queues[queue as usize].first = next,
            previous => self.links[previous as usize].next = next,
        }
        match next {
            NONE => self.queues[queue as usize].last = previous,
            next => self.links[next as usize].previous = previous,
        }
        self.links[block.index()].queue = NONE;
        self.len -= 1;
    }

    /// Every free block in the order of eviction.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.queues.iter().flat_map(|queue| {
            let start = (queue.first != NONE).then_some(BlockId(queue.first));
            std::iter::successors(start, |block| {
                let next = self.links[block.index()].next;
                (next != NONE).then_some(BlockId(next))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(list: &FreeList) -> Vec<u32> {
        list.iter().map(|block| block.0).collect()
    }

    #[test]
    fn takes_from_the_front_the_middle_and_the_back() {
        let mut list = FreeList::full(5);
        assert_eq!(list.pop_front(), Some(BlockId(0)));
        list.remove(BlockId(2));
        list.remove(BlockId(4));
        assert_eq!(order(&list), [1, 3]);
        list.push_back(BlockId(4), 0);
        list.push_front(BlockId(0));
        assert_eq!(order(&list), [0, 1, 3, 4]);
        assert!(list.contains(BlockId(4)) && !list.contains(BlockId(2)));
        assert_eq!(list.len(), 4);
    }

    #[test]
    fn later_queues_are_taken_last() {
        let mut list = FreeList::full(3);
        list.remove(BlockId(0));
        list.push_back(BlockId(0), 3);
        assert_eq!(order(&list), [1, 2, 0]);
        assert_eq!(
            [list.pop_front(), list.pop_front(), list.pop_front(), list.pop_front()].map(|b| b.map(|b| b.0)),
            [Some(1), Some(2), Some(0), None]
        );
        list.push_back(BlockId(2), 3);
        assert_eq!(order(&list), [2]);
    }
}
