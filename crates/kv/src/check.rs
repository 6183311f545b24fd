//! The invariants of the cache, checked in one pass. For tests and the simulator.

use baton_core::BlockId;

use crate::KvCache;
use crate::table::Tier;

impl KvCache {
    /// Panics with what is wrong where the books do not balance.
    pub fn check_invariants(&self) {
        self.check_reference_counts();
        self.check_free_lists();
        self.check_index();
    }

    fn check_reference_counts(&self) {
        let mut device = vec![0u32; self.config.num_device_blocks];
        let mut host = vec![0u32; self.config.num_host_blocks];
        for (seq_id, table) in &self.tables {
            let counts = if table.tier == Tier::Device { &mut device } else { &mut host };
            let mut seen = std::collections::BTreeSet::new();
            for block in &table.blocks {
                assert!(seen.insert(*block), "block {block} stands twice in the table of sequence {seq_id}");
                counts[block.index()] += 1;
            }
            assert!(
                table.num_registered <= table.blocks.len(),
                "sequence {seq_id} registered what it does not hold"
            );
            assert!(
                table.num_registered <= table.chain.len(),
                "sequence {seq_id} registered unhashed blocks"
            );
        }
        for (index, &held) in device.iter().enumerate() {
            let counted = self.device.blocks[index].ref_count;
            assert_eq!(counted, held, "device block {index}: ref count {counted}, held by {held} tables");
        }
        for (index, &held) in host.iter().enumerate() {
            let counted = self.host.ref_counts[index];
            assert_eq!(counted, held, "host block {index}: ref count {counted}, held by {held} tables");
        }
    }

    fn check_free_lists(&self) {
        let mut free = vec![false; self.config.num_device_blocks];
        for block in self.device.free.iter() {
            assert!(!free[block.index()], "device block {block} is free twice");
            free[block.index()] = true;
        }
        let num_free = free.iter().filter(|free| **free).count();
        assert_eq!(num_free, self.device.free.len(), "the free list does not count its blocks right");
        for (index, &is_free) in free.iter().enumerate() {
            assert_eq!(
                is_free,
                self.device.blocks[index].ref_count == 0,
                "device block {index}: free and held differ"
            );
            assert_eq!(
                is_free,
                self.device.free.contains(BlockId(index as u32)),
                "device block {index}: free mark"
            );
        }
        let mut free = vec![false; self.config.num_host_blocks];
        for block in &self.host.free {
            assert!(!free[block.index()], "host block {block} is free twice");
            free[block.index()] = true;
        }
        for (index, &is_free) in free.iter().enumerate() {
            assert_eq!(is_free, self.host.ref_counts[index] == 0, "host block {index}: free and held differ");
        }
    }

    fn check_index(&self) {
        let num_hashed = self.device.blocks.iter().filter(|block| block.hash.is_some()).count();
        assert_eq!(num_hashed, self.device.index.len(), "blocks with a hash and entries of the index differ");
        for (index, block) in self.device.blocks.iter().enumerate() {
            if let Some(hash) = block.hash {
                let found = self.device.find(hash);
                assert_eq!(
                    found,
                    Some(BlockId(index as u32)),
                    "device block {index} is not found by its hash"
                );
            }
        }
    }
}
