//! KV in this process's memory: a store for programs that hold KV in their own hands, and host blocks that are plain buffers.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_backend::HostBlocks;
use baton_engine::{BlockKey, BlockStore, StoreStats, StoredRow};

use crate::counters::Counters;

/// Rows by name. It has no limit: whoever puts rows in takes them out.
#[derive(Debug, Default)]
pub struct MemoryStore {
    rows: Mutex<HashMap<BlockKey, Vec<u8>>>,
    counters: Counters,
}

impl MemoryStore {
    fn rows(&self) -> MutexGuard<'_, HashMap<BlockKey, Vec<u8>>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockStore for MemoryStore {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn lookup(&self, keys: &[BlockKey]) -> Vec<bool> {
        let rows = self.rows();
        let found: Vec<bool> = keys.iter().map(|key| rows.contains_key(key)).collect();
        self.counters.asked.add(keys.len());
        self.counters.found.add(found.iter().filter(|found| **found).count());
        found
    }

    fn fetch(&self, rows: &[StoredRow], host: &dyn HostBlocks) -> Vec<bool> {
        let own = self.rows();
        let fetch = |row: &StoredRow| {
            let content = own.get(&row.key);
            let content = content.filter(|content| content.len() == row.blocks.len() * host.block_bytes());
            let Some(content) = content else { return false };
            for (block, part) in row.blocks.iter().zip(content.chunks_exact(host.block_bytes())) {
                host.write(block.0, part);
            }
            self.counters.fetched.add(1);
            self.counters.bytes_fetched.add(content.len());
            true
        };
        rows.iter().map(fetch).collect()
    }

    fn store(&self, rows: &[StoredRow], host: &dyn HostBlocks) {
        for row in rows {
            let mut content = vec![0; row.blocks.len() * host.block_bytes()];
            for (block, part) in row.blocks.iter().zip(content.chunks_exact_mut(host.block_bytes())) {
                host.read(block.0, part);
            }
            self.counters.stored.add(1);
            self.counters.bytes_stored.add(content.len());
            self.rows().insert(row.key, content);
        }
    }

    fn remove(&self, keys: &[BlockKey]) {
        let mut rows = self.rows();
        for key in keys {
            rows.remove(key);
        }
    }

    fn stats(&self) -> StoreStats {
        let used_bytes = self.rows().values().map(|content| content.len() as u64).sum();
        StoreStats { used_bytes, ..self.counters.stats("memory") }
    }
}

/// Blocks in plain memory, for those who talk to a store without a device.
#[derive(Debug)]
pub struct BufferBlocks {
    blocks: Mutex<Vec<u8>>,
    block_bytes: usize,
}

impl BufferBlocks {
    pub fn new(num_blocks: usize, block_bytes: usize) -> Self {
        Self { blocks: Mutex::new(vec![0; num_blocks * block_bytes]), block_bytes }
    }

    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostBlocks for BufferBlocks {
    fn layout(&self) -> &'static str {
        "buffer"
    }

    fn num_blocks(&self) -> usize {
        self.bytes().len() / self.block_bytes.max(1)
    }

    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn read(&self, block: u32, to: &mut [u8]) {
        to.copy_from_slice(&self.bytes()[block as usize * self.block_bytes..][..self.block_bytes]);
    }

    fn write(&self, block: u32, from: &[u8]) {
        self.bytes()[block as usize * self.block_bytes..][..self.block_bytes].copy_from_slice(from);
    }
}
