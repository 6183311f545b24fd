//! How far each block of the cache holds the draft model's keys and values.
//!
//! The draft's layers lie in the same blocks as the target's, so that a prefix that is cached, forked, swapped or copied takes
//! them along. But the draft computes only what it drafts from: requests that do not speculate, and steps in which guesses
//! do not pay, leave its part of their blocks empty. What is there is therefore counted by block, and follows the moves of the Plans.

use std::ops::Range;

use baton_backend::KvSpec;
use baton_core::BlockId;
use baton_sched::{BlockMove, NO_BLOCK, Plan, PlannedSeq};

#[derive(Debug)]
pub(crate) struct Filled {
    block_size: u32,
    /// The block tables of a sequence that hold layers of the draft.
    lanes: Vec<usize>,
    /// Of all block tables.
    windows: Vec<Option<u32>>,
    /// Tokens from the beginning of each block.
    device: Vec<u32>,
    host: Vec<u32>,
}

impl Filled {
    /// The draft's layers are those from `first_layer` on.
    pub(crate) fn new(cache: &KvSpec, first_layer: usize, [num_device, num_host]: [usize; 2]) -> Self {
        let mut lanes: Vec<usize> =
            (first_layer..cache.layers.len()).map(|layer| cache.lane_of(layer)).collect();
        lanes.sort_unstable();
        lanes.dedup();
        Self {
            block_size: cache.block_size as u32,
            lanes,
            windows: cache.lane_windows().collect(),
            device: vec![0; num_device],
            host: vec![0; num_host],
        }
    }

    /// The blocks of a Plan are moved. What `fetches` bring is not trusted where others fill the host's blocks too.
    pub(crate) fn moved(&mut self, plan: &Plan, trusts_host: bool) {
        let Self { device, host, .. } = self;
        let index = |block: BlockId| block.0 as usize;
        for BlockMove { from, to } in &plan.swap_out {
            host[index(*to)] = device[index(*from)];
        }
        for BlockMove { from, to } in &plan.swap_in {
            device[index(*to)] = host[index(*from)];
        }
        for BlockMove { from, to } in &plan.copies {
            device[index(*to)] = device[index(*from)];
        }
        for BlockMove { from, to } in plan.fetches.iter().flat_map(|fetch| &fetch.moves) {
            device[index(*to)] = if trusts_host { host[index(*from)] } else { 0 };
        }
    }

    /// A pass failed: nobody knows what it has written.
    pub(crate) fn forget(&mut self) {
        self.device.fill(0);
    }

    /// Other tokens come to stand where a Plan writes: what the draft had there is of no use.
    pub(crate) fn overwritten(&mut self, seq: &PlannedSeq) {
        let size = self.block_size;
        let mut overwrite = |positions| {
            self.each_block(&seq.block_tables, positions, |filled, tokens| {
                *filled = (*filled).min(tokens.start);
            });
        };
        overwrite(seq.start..seq.end());
        for branch in &seq.branches {
            overwrite(branch.row * size..(branch.row + 1) * size);
        }
    }

    /// The draft computes these positions, which follow what is there.
    pub(crate) fn computed(&mut self, tables: &[Vec<BlockId>], positions: Range<u32>) {
        self.each_block(tables, positions, |filled, tokens| {
            if *filled >= tokens.start {
                *filled = (*filled).max(tokens.end);
            }
        });
    }

    /// Tokens from the beginning of a sequence of which the draft has everything, up to `most`. Behind a window nothing is needed.
    pub(crate) fn len_of(&self, tables: &[Vec<BlockId>], most: u32) -> u32 {
        for row in 0..most.div_ceil(self.block_size) {
            let blocks = self.lanes.iter().map(|&lane| tables[lane][row as usize]);
            let filled = blocks.filter(|&block| block != NO_BLOCK).map(|block| self.device[block.0 as usize]);
            let filled = filled.min().unwrap_or(self.block_size);
            if filled < self.block_size {
                return most.min(row * self.block_size + filled);
            }
        }
        most
    }

    /// Whether there are blocks for all of these positions, and for what they see: some may lie behind a window by now.
    pub(crate) fn has_blocks(&self, tables: &[Vec<BlockId>], positions: Range<u32>) -> bool {
        let end = positions.end.div_ceil(self.block_size) as usize;
        tables.iter().zip(&self.windows).all(|(table, window)| {
            let seen = window.map_or(positions.start, |window| (positions.start + 1).saturating_sub(window));
            !table[(seen / self.block_size) as usize..end].contains(&NO_BLOCK)
        })
    }

    /// Layers see only so far back, so that blocks are given back soon: a prompt must be followed chunk by chunk.
    pub(crate) fn has_windows(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }

    /// Calls with each block of the positions, and with which of its tokens they are.
    fn each_block(
        &mut self,
        tables: &[Vec<BlockId>],
        positions: Range<u32>,
        mut change: impl FnMut(&mut u32, Range<u32>),
    ) {
        let size = self.block_size;
        for row in positions.start / size..positions.end.div_ceil(size) {
            let first = row * size;
            let tokens = positions.start.max(first) - first..positions.end.min(first + size) - first;
            for &lane in &self.lanes {
                let block = tables[lane][row as usize];
                if block != NO_BLOCK {
                    change(&mut self.device[block.0 as usize], tokens.clone());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_backend::{KvDtype, KvLayerSpec};
    use baton_sched::Fetch;

    use super::*;

    fn filled() -> Filled {
        // Two layers of a target, two of a draft, all with full attention: one lane.
        let cache = KvSpec::full(KvLayerSpec { num_kv_heads: 1, head_dim: 8 }, 4, KvDtype::F16, 4);
        Filled::new(&cache, 2, [8, 4])
    }

    fn table(blocks: &[u32]) -> Vec<Vec<BlockId>> {
        vec![blocks.iter().map(|&block| BlockId(block)).collect()]
    }

    fn moves(from: u32, to: u32) -> Vec<BlockMove> {
        vec![BlockMove { from: BlockId(from), to: BlockId(to) }]
    }

    #[test]
    fn what_was_computed_is_known_until_it_is_written_over() {
        let mut filled = filled();
        let seq = table(&[3, 5, 1]);
        assert_eq!(filled.len_of(&seq, 9), 0);
        filled.computed(&seq, 0..6);
        assert_eq!((filled.len_of(&seq, 9), filled.len_of(&seq, 5)), (6, 5));
        // Not what follows nothing.
        filled.computed(&seq, 7..9);
        assert_eq!(filled.len_of(&seq, 9), 6);
        filled.computed(&seq, 6..9);
        assert_eq!(filled.len_of(&seq, 9), 9);
        filled.each_block(&seq, 5..7, |filled, tokens| *filled = (*filled).min(tokens.start));
        assert_eq!(filled.len_of(&seq, 9), 5);
        // Another sequence that shares the first block.
        assert_eq!(filled.len_of(&table(&[3, 7]), 8), 4);
    }

    #[test]
    fn blocks_take_it_along() {
        let mut filled = filled();
        filled.computed(&table(&[0, 1]), 0..7);
        let copied = Plan { copies: moves(1, 6), ..Plan::default() };
        filled.moved(&copied, true);
        assert_eq!(filled.len_of(&table(&[0, 6]), 8), 7);
        let out = Plan { swap_out: moves(1, 2), ..Plan::default() };
        let back = Plan { swap_in: moves(2, 7), ..Plan::default() };
        filled.moved(&out, true);
        filled.moved(&back, true);
        assert_eq!(filled.len_of(&table(&[0, 7]), 8), 7);
        let fetch = Plan { fetches: vec![Fetch { id: 0, moves: moves(2, 5) }], ..Plan::default() };
        for (trusts_host, expect) in [(true, 7), (false, 4)] {
            filled.moved(&fetch, trusts_host);
            assert_eq!(filled.len_of(&table(&[0, 5]), 8), expect);
        }
    }

    #[test]
    fn behind_a_window_nothing_is_needed_or_computed() {
        let layer = KvLayerSpec { num_kv_heads: 1, head_dim: 8 };
        let cache = KvSpec::new(vec![layer; 2], &[None, Some(4)], KvDtype::F16, 4);
        let mut filled = Filled::new(&cache, 1, [8, 0]);
        let tables = vec![vec![BlockId(0), BlockId(1)], vec![NO_BLOCK, BlockId(2)]];
        assert_eq!(filled.lanes, [cache.lane_of(1)]);
        assert_eq!(filled.len_of(&tables, 8), 4);
        // The first position sees the last three keys before it, the eighth only its own block.
        assert!(filled.has_blocks(&tables, 7..8) && !filled.has_blocks(&tables, 4..8));
        filled.computed(&tables, 4..8);
        assert_eq!(filled.len_of(&tables, 8), 8);
    }
}
