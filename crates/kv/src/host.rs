//! The host blocks: room for the KV of sequences that were swapped out. Not a cache: a block is held or it is free.

use baton_core::BlockId;

pub(crate) struct HostPool {
    pub(crate) ref_counts: Vec<u32>,
    pub(crate) free: Vec<BlockId>,
}

impl HostPool {
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self { ref_counts: vec![0; num_blocks], free: (0..num_blocks as u32).rev().map(BlockId).collect() }
    }

    pub(crate) fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.ref_counts[block.index()] = 1;
        Some(block)
    }

    pub(crate) fn share(&mut self, block: BlockId) {
        self.ref_counts[block.index()] += 1;
    }

    pub(crate) fn release(&mut self, block: BlockId) {
        let count = &mut self.ref_counts[block.index()];
        *count = count.checked_sub(1).expect("a host block is released only by its holders");
        if *count == 0 {
            self.free.push(block);
        }
    }
}
