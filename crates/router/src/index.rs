//! Who holds what: the blocks that workers say they have cached, found by the tokens of a prompt.
//!
//! Workers name blocks by hashes of their own, which nobody else can compute. The index follows their events and gives
//! every block a name made of the tokens from the start of the prompt to its end, so that equal prefixes have equal names on
//! all workers. It is a guess about the workers: a wrong entry costs a worse choice, never a wrong answer.

use std::collections::{BTreeMap, HashMap};

use crate::hashing;

/// The hashes in an event, as the worker made them.
pub type BlockHashes = Vec<u64>;

/// A run of blocks that a worker has cached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored<'a> {
    pub hashes: &'a [u64],
    /// The block before the first one; `None` at the start of a prompt.
    pub parent: Option<u64>,
    pub token_ids: &'a [u32],
    pub block_size: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    /// The block's name in the index.
    name: u64,
    /// That of the first block of its prompts.
    first: u64,
}

#[derive(Debug, Default)]
struct Holdings {
    /// By the worker's own hash.
    places: HashMap<u64, Place>,
    /// Blocks below each first block.
    by_first: HashMap<u64, usize>,
    num_tokens: usize,
}

/// A name's holders: worker and how many of its blocks have this content (of several tenants).
type Holders = Vec<(u32, u32)>;

#[derive(Debug)]
pub struct PrefixIndex {
    holders: HashMap<u64, Holders>,
    workers: BTreeMap<u32, Holdings>,
    /// How many blocks of each size there are.
    block_sizes: BTreeMap<usize, usize>,
    sizes: HashMap<u64, usize>,
    max_blocks: usize,
    num_blocks: usize,
    /// Blocks that found no room or whose parent was unknown.
    pub num_ignored: u64,
}

/// What a worker holds, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub num_blocks: usize,
    pub num_tokens: usize,
    /// The prompts with the most blocks: the name of their first block, and how many blocks.
    pub largest: Vec<(u64, usize)>,
}

impl PrefixIndex {
    pub fn new(max_blocks: usize) -> Self {
        Self {
            holders: HashMap::new(),
            workers: BTreeMap::new(),
            block_sizes: BTreeMap::new(),
            sizes: HashMap::new(),
            max_blocks,
            num_blocks: 0,
            num_ignored: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.num_blocks == 0
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// A worker has cached a run of blocks. What does not fit together is ignored.
    pub fn stored(&mut self, worker: u32, stored: &Stored<'_>) {
        let Stored { hashes, parent, token_ids, block_size } = *stored;
        let needed = hashes.len().checked_mul(block_size);
        if block_size == 0 || needed.is_none_or(|needed| needed > token_ids.len()) {
            self.num_ignored += hashes.len() as u64;
            return;
        }
        let holdings = self.workers.entry(worker).or_default();
        let before = parent.map(|parent| holdings.places.get(&parent).copied());
        if before == Some(None) {
            self.num_ignored += hashes.len() as u64;
            return;
        }
        let before = before.flatten();
        let mut name = before.map_or_else(|| root(block_size), |place| place.name);
        let mut first = before.map(|place| place.first);
        for (&hash, tokens) in hashes.iter().zip(token_ids.chunks_exact(block_size)) {
            name = hashing::of_tokens(name, tokens);
            let place = Place { name, first: *first.get_or_insert(name) };
            if !self.add(worker, hash, place, block_size) {
                return;
            }
        }
    }

    fn add(&mut self, worker: u32, hash: u64, place: Place, block_size: usize) -> bool {
        let holdings = self.workers.entry(worker).or_default();
        if holdings.places.contains_key(&hash) {
            return true;
        }
        if self.num_blocks >= self.max_blocks {
            self.num_ignored += 1;
            return false;
        }
        holdings.places.insert(hash, place);
        *holdings.by_first.entry(place.first).or_default() += 1;
        holdings.num_tokens += block_size;
        self.num_blocks += 1;
        let holders = self.holders.entry(place.name).or_default();
        match holders.iter_mut().find(|(holder, _)| *holder == worker) {
            Some((_, count)) => *count += 1,
            None => holders.push((worker, 1)),
        }
        self.sizes.insert(place.name, block_size);
        *self.block_sizes.entry(block_size).or_default() += 1;
        true
    }

    pub fn removed(&mut self, worker: u32, hashes: &[u64]) {
        for hash in hashes {
            let place = self.workers.get_mut(&worker).and_then(|holdings| holdings.places.remove(hash));
            if let Some(place) = place {
                self.forget(worker, place);
            }
        }
    }

    /// The worker has dropped everything, or is gone.
    pub fn cleared(&mut self, worker: u32) {
        let Some(holdings) = self.workers.remove(&worker) else { return };
        for place in holdings.places.into_values() {
            self.forget(worker, place);
        }
    }

    fn forget(&mut self, worker: u32, place: Place) {
        self.num_blocks -= 1;
        let size = self.sizes.get(&place.name).copied().unwrap_or(0);
        if let Some(count) = self.block_sizes.get_mut(&size) {
            *count -= 1;
            if *count == 0 {
                self.block_sizes.remove(&size);
            }
        }
        if let Some(holdings) = self.workers.get_mut(&worker) {
            holdings.num_tokens -= size;
            if let Some(count) = holdings.by_first.get_mut(&place.first) {
                *count -= 1;
                if *count == 0 {
                    holdings.by_first.remove(&place.first);
                }
            }
        }
        if let Some(holders) = self.holders.get_mut(&place.name) {
            if let Some(at) = holders.iter().position(|(holder, _)| *holder == worker) {
                holders[at].1 -= 1;
                if holders[at].1 == 0 {
                    holders.swap_remove(at);
                }
            }
            if holders.is_empty() {
                self.holders.remove(&place.name);
                self.sizes.remove(&place.name);
            }
        }
    }

    /// How many tokens of a prompt each worker has cached, for those that have any.
    pub fn matches(&self, token_ids: &[u32]) -> Vec<(u32, usize)> {
        let mut found: Vec<(u32, usize)> = Vec::new();
        for &block_size in self.block_sizes.keys() {
            let mut name = root(block_size);
            let mut num_tokens = 0;
            // The last token is always computed, so a block that ends with it is of no use.
            for tokens in token_ids[..token_ids.len().saturating_sub(1)].chunks_exact(block_size) {
                name = hashing::of_tokens(name, tokens);
                let Some(holders) = self.holders.get(&name) else { break };
                for &(worker, _) in holders {
                    // A worker that lacks a block in between has no use for the ones after it.
                    match found.iter_mut().find(|(holder, _)| *holder == worker) {
                        Some((_, matched)) if *matched == num_tokens => *matched += block_size,
                        None if num_tokens == 0 => found.push((worker, block_size)),
                        _ => {}
                    }
                }
                num_tokens += block_size;
            }
        }
        found
    }

    pub fn held(&self, worker: u32, num_largest: usize) -> Held {
        let Some(holdings) = self.workers.get(&worker) else { return Held::default() };
        let mut largest: Vec<(u64, usize)> = holdings.by_first.iter().map(|(&k, &v)| (k, v)).collect();
        largest.sort_by_key(|&(first, count)| (std::cmp::Reverse(count), first));
        largest.truncate(num_largest);
        Held { num_blocks: holdings.places.len(), num_tokens: holdings.num_tokens, largest }
    }

    /// Blocks of a worker below a first block.
    pub fn held_of(&self, worker: u32, first: u64) -> usize {
        self.workers.get(&worker).and_then(|held| held.by_first.get(&first)).copied().unwrap_or(0)
    }
}

/// The name before every first block of this size.
fn root(block_size: usize) -> u64 {
    hashing::mix(hashing::secret(), block_size as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn store(index: &mut PrefixIndex, worker: u32, parent: Option<u64>, hashes: &[u64], tokens: &[u32]) {
        index.stored(worker, &Stored { hashes, parent, token_ids: tokens, block_size: 4 });
    }

    fn tokens(numbers: std::ops::Range<u32>) -> Vec<u32> {
        numbers.collect()
    }

    #[test]
    fn equal_prefixes_meet_whatever_workers_call_them() {
        let mut index = PrefixIndex::new(100);
        store(&mut index, 1, None, &[11, 12], &tokens(0..8));
        store(&mut index, 2, None, &[91], &tokens(0..4));
        store(&mut index, 2, Some(91), &[92], &tokens(4..8));
        store(&mut index, 2, Some(92), &[93], &tokens(8..12));
        let mut matches = index.matches(&tokens(0..13));
        matches.sort_unstable();
        assert_eq!(matches, [(1, 8), (2, 12)]);
        assert_eq!(index.matches(&tokens(0..12)), [(1, 8), (2, 8)], "the last token is always computed");
        assert_eq!(index.matches(&tokens(1..13)), []);
        index.removed(2, &[93, 92]);
        assert_eq!(index.matches(&tokens(0..13)), [(1, 8), (2, 4)]);
        index.cleared(1);
        assert_eq!((index.matches(&tokens(0..13)), index.num_blocks()), (vec![(2, 4)], 1));
    }

    #[test]
    fn blocks_without_a_known_parent_are_ignored() {
        let mut index = PrefixIndex::new(100);
        store(&mut index, 1, Some(5), &[6], &tokens(0..4));
        store(&mut index, 1, None, &[6, 7], &tokens(0..7));
        index.stored(1, &Stored { hashes: &[8], parent: None, token_ids: &[], block_size: 0 });
        index.stored(1, &Stored { hashes: &[8, 9], parent: None, token_ids: &[1], block_size: usize::MAX });
        assert_eq!((index.num_blocks(), index.num_ignored), (0, 6));
    }

    #[test]
    fn there_is_a_limit() {
        let mut index = PrefixIndex::new(3);
        store(&mut index, 1, None, &[1, 2, 3, 4], &tokens(0..16));
        assert_eq!((index.num_blocks(), index.num_ignored), (3, 1));
        assert_eq!(index.matches(&tokens(0..17)), [(1, 12)]);
    }

    #[test]
    fn the_same_content_of_two_tenants_counts_once_and_goes_with_the_last() {
        let mut index = PrefixIndex::new(10);
        store(&mut index, 1, None, &[1], &tokens(0..4));
        store(&mut index, 1, None, &[2], &tokens(0..4));
        index.removed(1, &[1]);
        assert_eq!(index.matches(&tokens(0..5)), [(1, 4)]);
        index.removed(1, &[2]);
        assert!(index.matches(&tokens(0..5)).is_empty() && index.is_empty());
    }

    #[test]
    fn it_tells_who_holds_what() {
        let mut index = PrefixIndex::new(10);
        store(&mut index, 1, None, &[1, 2], &tokens(0..8));
        store(&mut index, 1, None, &[3], &tokens(100..104));
        store(&mut index, 2, None, &[7], &tokens(0..4));
        let held = index.held(1, 1);
        assert_eq!((held.num_blocks, held.num_tokens, held.largest.len()), (3, 12, 1));
        let (first, count) = held.largest[0];
        assert_eq!((count, index.held_of(2, first)), (2, 1));
    }

    proptest! {
        /// Whatever events come, in whatever order, the counts fit and nothing is left when all are cleared.
        #[test]
        fn nothing_is_left_over(events in prop::collection::vec((0u32..3, 0u8..3, 0u64..12, 0u64..12, 0u32..3), 0..200)) {
            let mut index = PrefixIndex::new(8);
            for (worker, kind, hash, parent, token) in events {
                match kind {
                    0 => index.stored(worker, &Stored {
                        hashes: &[hash, hash + 1],
                        parent: (parent < 8).then_some(parent),
                        token_ids: &[token; 4],
                        block_size: 2,
                    }),
                    1 => index.removed(worker, &[hash, parent]),
                    _ => index.cleared(worker),
                }
                let held: usize = (0..3).map(|worker| index.held(worker, 4).num_blocks).sum();
                prop_assert_eq!(held, index.num_blocks());
                let names: usize = index.holders.values().flatten().map(|&(_, count)| count as usize).sum();
                prop_assert_eq!(names, held);
                index.matches(&[token; 9]);
            }
            for worker in 0..3 {
                index.cleared(worker);
            }
            prop_assert!(index.is_empty() && index.holders.is_empty() && index.sizes.is_empty());
            prop_assert!(index.block_sizes.is_empty());
        }
    }
}
