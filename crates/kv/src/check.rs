//! The invariants of the cache, checked in one pass. For tests and the simulator.

use crate::table::Tier;
use crate::{KvCache, NO_BLOCK};

impl KvCache {
    /// Panics with what is wrong where the books do not balance.
    pub fn check_invariants(&self) {
        let mut device = vec![0u32; self.config.num_device_blocks];
        let mut host = vec![0u32; self.config.num_host_blocks];
        for (seq_id, table) in &self.tables {
            let counts = if table.tier == Tier::Device { &mut device } else { &mut host };
            let mut seen = std::collections::BTreeSet::new();
            for (group, _, bundle) in table.bundles() {
                assert!(
                    seen.insert(bundle),
                    "block {bundle} stands twice in the tables of sequence {seq_id}"
                );
                counts[bundle.index()] += 1;
                let lanes = self.pool(table.tier).lanes(bundle).count();
                assert_eq!(lanes, self.config.groups[group].lanes, "lanes of block {bundle}");
            }
            for rows in &table.groups {
                assert_eq!(rows.len(), table.num_rows(), "sequence {seq_id}: rows of the groups differ");
                let behind = rows.iter().take_while(|bundle| **bundle == NO_BLOCK).count();
                assert!(!rows[behind..].contains(&NO_BLOCK), "sequence {seq_id}: a gap between rows");
            }
            assert!(
                table.num_registered <= table.num_rows(),
                "sequence {seq_id} registered what it does not hold"
            );
            assert!(
                table.num_registered <= table.chain.len(),
                "sequence {seq_id} registered unhashed blocks"
            );
            for bundle in &table.fetching {
                host[bundle.index()] += 1;
            }
        }
        for bundle in self.saving.keys() {
            host[bundle.index()] += 1;
        }
        for bundle in &self.being_stored {
            host[bundle.index()] += 1;
        }
        for load in self.loads.values() {
            for bundle in load.rows.iter().map(|(bundle, _)| bundle).chain(&load.held) {
                host[bundle.index()] += 1;
            }
        }
        self.device.check("device", &device);
        self.host.check("host", &host);
    }
}
