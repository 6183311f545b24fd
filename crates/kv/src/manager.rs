//! `KvCache`: the block tables of all sequences over the two pools.
//!
//! The life of a table: `add_sequence` → (`match_prefix`, `attach_prefix`) → `reserve` before each step →
//! `commit` after it → `fork` / `swap_out` / `swap_in` / `release` as the scheduler decides → `remove_sequence`.
//! The caller keeps the tokens; the cache sees them only to hash them.

use std::collections::{BTreeMap, BTreeSet};

use baton_core::{BlockId, SeqId, TokenId};
use serde::{Deserialize, Serialize};

use crate::events::EventBuffer;
use crate::host::HostPool;
use crate::pool::DevicePool;
use crate::table::{BlockTable, Tier};
use crate::{BlockMove, KvConfig, KvError, KvEvent};

/// Positions `start..end` of a sequence that a step is going to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteRange {
    pub seq_id: SeqId,
    pub start: usize,
    pub end: usize,
}

/// The longest cached prefix of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    pub num_blocks: usize,
    /// How many of them nobody holds: attaching them takes so many blocks from the free ones.
    pub num_free_blocks: usize,
}

/// Figures for metrics. Counters run from the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvStats {
    pub num_device_blocks: usize,
    pub num_device_blocks_used: usize,
    pub num_host_blocks: usize,
    pub num_host_blocks_used: usize,
    /// Device blocks that can be found by hash, in use or free.
    pub num_cached_blocks: usize,
    /// Device blocks that are never given up.
    pub num_pinned_blocks: usize,
    /// Tokens looked up in the prefix cache, and those found.
    pub prefix_cache_queries: u64,
    pub prefix_cache_hits: u64,
    /// Cached blocks given up for new content.
    pub num_evictions: u64,
    pub num_events_dropped: u64,
}

impl KvStats {
    /// The part of the device blocks that is held by sequences, 0 to 1.
    pub fn usage(&self) -> f64 {
        self.num_device_blocks_used as f64 / self.num_device_blocks.max(1) as f64
    }
}

pub struct KvCache {
    pub(crate) config: KvConfig,
    pub(crate) device: DevicePool,
    pub(crate) host: HostPool,
    pub(crate) tables: BTreeMap<SeqId, BlockTable>,
    events: EventBuffer,
    num_pinned_blocks: usize,
    prefix_cache_queries: u64,
    prefix_cache_hits: u64,
}

impl std::fmt::Debug for KvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvCache")
            .field("config", &self.config)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl KvCache {
    pub fn new(config: KvConfig) -> Result<Self, KvError> {
        config.validate()?;
        Ok(Self {
            device: DevicePool::new(config.num_device_blocks, config.eviction),
            host: HostPool::new(config.num_host_blocks),
            tables: BTreeMap::new(),
            events: EventBuffer::new(config.event_capacity),
            num_pinned_blocks: 0,
            prefix_cache_queries: 0,
            prefix_cache_hits: 0,
            config,
        })
    }

    pub fn config(&self) -> &KvConfig {
        &self.config
    }

    /// Device blocks that can be had now (cached ones included).
    pub fn num_free_blocks(&self) -> usize {
        self.device.free.len()
    }

    pub fn num_free_host_blocks(&self) -> usize {
        self.host.free.len()
    }

    /// A sequence without KV. The salt separates its prefixes from those of other salts, all but the blocks that lie
    /// whole within its first `num_public_tokens` tokens.
    pub fn add_sequence(&mut self, seq_id: SeqId, salt: Option<&str>, num_public_tokens: usize) {
        let table = BlockTable::new(salt, num_public_tokens / self.config.block_size);
        let before = self.tables.insert(seq_id, table);
        assert!(before.is_none(), "sequence {seq_id} is already known to the KV cache");
    }

    pub fn contains(&self, seq_id: SeqId) -> bool {
        self.tables.contains_key(&seq_id)
    }

    /// The physical blocks of positions 0.. of a sequence.
    pub fn block_table(&self, seq_id: SeqId) -> &[BlockId] {
        &self.table(seq_id).blocks
    }

    /// Whether the blocks of the sequence lie in the host tier.
    pub fn is_swapped(&self, seq_id: SeqId) -> bool {
        self.table(seq_id).tier == Tier::Host
    }

    /// The longest prefix of `token_ids` that is cached, at most `max_tokens` of it. The sequence must hold no KV.
    pub fn match_prefix(&mut self, seq_id: SeqId, token_ids: &[TokenId], max_tokens: usize) -> PrefixMatch {
        if !self.config.enable_prefix_caching {
            return PrefixMatch::default();
        }
        let block_size = self.config.block_size;
        let limit = max_tokens.min(token_ids.len()) / block_size;
        let table = table_mut(&mut self.tables, seq_id);
        debug_assert!(table.blocks.is_empty(), "a prefix is looked up before anything is computed");
        table.extend_chain(token_ids, limit, block_size);
        let mut found = PrefixMatch::default();
        for hash in &table.chain[..limit] {
            let Some(block) = self.device.find(*hash) else { break };
            found.num_blocks += 1;
            found.num_free_blocks += usize::from(self.device.ref_count(block) == 0);
        }
        found
    }

    /// Takes the first `num_blocks` of what `match_prefix` has just found. Returns how many tokens that is.
    pub fn attach_prefix(&mut self, seq_id: SeqId, num_blocks: usize) -> usize {
        let table = table_mut(&mut self.tables, seq_id);
        debug_assert!(table.blocks.is_empty());
        for hash in &table.chain[..num_blocks] {
            let block = self.device.find(*hash).expect("match_prefix has found this block");
            self.device.share(block);
            self.device.count_hit(block);
            table.blocks.push(block);
        }
        table.num_registered = num_blocks;
        num_blocks * self.config.block_size
    }

    /// Keeps the cached blocks of a prefix for good: they are never evicted and outlive a reset. The sequence is a new one that
    /// exists for this alone. Returns how many blocks are kept, which is fewer than the whole ones of the prefix where some are
    /// not cached.
    pub fn pin_prefix(&mut self, seq_id: SeqId, token_ids: &[TokenId]) -> usize {
        self.add_sequence(seq_id, None, 0);
        let found = self.match_prefix(seq_id, token_ids, token_ids.len());
        self.attach_prefix(seq_id, found.num_blocks);
        table_mut(&mut self.tables, seq_id).is_pinned = true;
        let pinned = self.tables.values().filter(|table| table.is_pinned).flat_map(|table| &table.blocks);
        self.num_pinned_blocks = pinned.collect::<BTreeSet<_>>().len();
        found.num_blocks
    }

    /// Device blocks that sequences which share nothing can have.
    pub fn num_unpinned_blocks(&self) -> usize {
        self.config.num_device_blocks - self.num_pinned_blocks
    }

    /// Counts one look into the prefix cache for the figures.
    pub fn record_query(&mut self, num_tokens: usize, num_hits: usize) {
        self.prefix_cache_queries += num_tokens as u64;
        self.prefix_cache_hits += num_hits as u64;
    }

    /// How many free blocks it takes to write all these ranges in one step: new blocks, and a copy of every shared
    /// block for each writer but (where nobody else holds it) the last.
    pub fn blocks_needed(&self, writes: &[WriteRange]) -> usize {
        let mut needed = 0;
        let mut shared: Vec<(BlockId, Tier, u32)> = Vec::new();
        for write in writes {
            let table = self.table(write.seq_id);
            needed += self.config.blocks_for(write.end).saturating_sub(table.blocks.len());
            for index in self.written_blocks(table, write) {
                let block = table.blocks[index];
                if self.holders(table.tier, block) < 2 {
                    continue;
                }
                match shared.iter_mut().find(|(other, tier, _)| (*other, *tier) == (block, table.tier)) {
                    Some((_, _, writers)) => *writers += 1,
                    None => shared.push((block, table.tier, 1)),
                }
            }
        }
        let copies: u32 =
            shared.iter().map(|&(block, tier, writers)| writers.min(self.holders(tier, block) - 1)).sum();
        needed + copies as usize
    }

    /// Makes `write` possible: adds blocks up to its end and replaces shared blocks by copies, which are appended
    /// to `copies` and must be made before the step writes. Changes nothing where the free blocks do not suffice.
    pub fn reserve(&mut self, write: WriteRange, copies: &mut Vec<BlockMove>) -> Result<(), KvError> {
        let (needed, free) = (self.blocks_needed(&[write]), self.num_free_blocks());
        if needed > free {
            return Err(KvError::OutOfBlocks { seq_id: write.seq_id, needed, free });
        }
        let table = self.table(write.seq_id);
        assert!(table.tier == Tier::Device, "sequence {} is swapped out", write.seq_id);
        debug_assert!(write.start <= table.blocks.len() * self.config.block_size, "a gap before the write");
        for index in self.written_blocks(table, &write) {
            let from = self.table(write.seq_id).blocks[index];
            if self.device.ref_count(from) < 2 {
                debug_assert!(
                    self.device.blocks[from.index()].hash.is_none(),
                    "a cached block is never written"
                );
                continue;
            }
            let to = self.take_device_block();
            copies.push(BlockMove { from, to });
            self.device.release(from);
            table_mut(&mut self.tables, write.seq_id).blocks[index] = to;
        }
        while self.table(write.seq_id).blocks.len() < self.config.blocks_for(write.end) {
            let block = self.take_device_block();
            table_mut(&mut self.tables, write.seq_id).blocks.push(block);
        }
        Ok(())
    }

    /// The KV of the first `num_computed` of `token_ids` is in the blocks: its full blocks can now be found by hash.
    pub fn commit(&mut self, seq_id: SeqId, token_ids: &[TokenId], num_computed: usize) {
        if !self.config.enable_prefix_caching {
            return;
        }
        let block_size = self.config.block_size;
        let table = table_mut(&mut self.tables, seq_id);
        let num_full = num_computed.min(token_ids.len()) / block_size;
        if table.stale || table.tier == Tier::Host || num_full <= table.num_registered {
            return;
        }
        table.extend_chain(token_ids, num_full, block_size);
        // Runs of blocks that were new to the cache, each of which becomes one event.
        let mut run_start = table.num_registered;
        for index in table.num_registered..=num_full {
            if index < num_full && self.device.register(table.blocks[index], table.chain[index]) {
                continue;
            }
            if run_start < index && self.events.is_on() {
                self.events.push(KvEvent::BlockStored {
                    hashes: table.chain[run_start..index].to_vec(),
                    parent: table.parent_of(run_start),
                    token_ids: token_ids[run_start * block_size..index * block_size].to_vec(),
                    block_size,
                });
            }
            run_start = index + 1;
        }
        table.num_registered = num_full;
    }

    /// `child` becomes a second reader of everything `parent` holds.
    pub fn fork(&mut self, parent: SeqId, child: SeqId) {
        let table = self.table(parent).clone();
        assert!(table.tier == Tier::Device, "sequence {parent} is swapped out");
        for block in &table.blocks {
            self.device.share(*block);
        }
        let before = self.tables.insert(child, table);
        assert!(before.is_none(), "sequence {child} is already known to the KV cache");
    }

    /// `child`, which holds nothing yet, shares the first `num_blocks` blocks of `parent`; their tokens are the same.
    pub fn fork_prefix(&mut self, parent: SeqId, child: SeqId, num_blocks: usize) {
        let source = self.table(parent);
        assert!(source.tier == Tier::Device, "sequence {parent} is swapped out");
        let (blocks, stale) = (source.blocks[..num_blocks].to_vec(), source.stale);
        let num_registered = source.num_registered.min(num_blocks);
        for block in &blocks {
            self.device.share(*block);
        }
        let table = table_mut(&mut self.tables, child);
        assert!(table.blocks.is_empty(), "sequence {child} already holds KV");
        let chain_len = table.chain.len();
        // `num_registered` may only count blocks whose hash is known.
        table.num_registered = num_registered.min(chain_len);
        table.stale = stale;
        table.blocks = blocks;
    }

    /// Gives up all KV of a sequence; the table stays. Tail first, so that of a cached prefix the end is evicted first.
    pub fn release(&mut self, seq_id: SeqId) {
        let table = table_mut(&mut self.tables, seq_id);
        for block in table.blocks.drain(..).rev() {
            match table.tier {
                Tier::Device => self.device.release(block),
                Tier::Host => self.host.release(block),
            }
        }
        table.tier = Tier::Device;
        table.num_registered = 0;
        table.stale = false;
    }

    /// Gives up all KV of a sequence and forgets it.
    pub fn remove_sequence(&mut self, seq_id: SeqId) {
        self.release(seq_id);
        self.tables.remove(&seq_id);
    }

    /// Forgets every cached prefix that is not pinned. Running sequences keep their KV, but it is not offered to others any
    /// more.
    pub fn reset_prefix_cache(&mut self) {
        self.device.forget_hashes();
        for table in self.tables.values_mut() {
            if table.is_pinned {
                for (&block, &hash) in table.blocks.iter().zip(&table.chain) {
                    // Another pinned prefix may begin with the same block.
                    self.device.register(block, hash);
                }
            } else {
                table.stale |= !table.blocks.is_empty();
            }
        }
        self.events.push(KvEvent::AllCleared);
    }

    /// What has happened to the prefix cache since the last call.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.events.drain()
    }

    pub fn stats(&self) -> KvStats {
        KvStats {
            num_device_blocks: self.config.num_device_blocks,
            num_device_blocks_used: self.config.num_device_blocks - self.device.free.len(),
            num_host_blocks: self.config.num_host_blocks,
            num_host_blocks_used: self.config.num_host_blocks - self.host.free.len(),
            num_cached_blocks: self.device.index.len(),
            num_pinned_blocks: self.num_pinned_blocks,
            prefix_cache_queries: self.prefix_cache_queries,
            prefix_cache_hits: self.prefix_cache_hits,
            num_evictions: self.device.num_evictions,
            num_events_dropped: self.events.num_dropped,
        }
    }

    pub(crate) fn table(&self, seq_id: SeqId) -> &BlockTable {
        self.tables.get(&seq_id).unwrap_or_else(|| panic!("sequence {seq_id} is not known to the KV cache"))
    }

    /// The caller has made sure that a block is free.
    pub(crate) fn take_device_block(&mut self) -> BlockId {
        let taken = self.device.take().expect("the number of free blocks was checked");
        if let (Some(hash), true) = (taken.evicted, self.events.is_on()) {
            self.events.push(KvEvent::BlockRemoved { hashes: vec![hash] });
        }
        taken.block
    }

    /// Blocks of the table that a write touches, new ones not counted.
    fn written_blocks(&self, table: &BlockTable, write: &WriteRange) -> std::ops::Range<usize> {
        let end = self.config.blocks_for(write.end).min(table.blocks.len());
        (write.start / self.config.block_size).min(end)..end
    }

    pub(crate) fn holders(&self, tier: Tier, block: BlockId) -> u32 {
        match tier {
            Tier::Device => self.device.ref_count(block),
            Tier::Host => self.host.ref_counts[block.index()],
        }
    }
}

pub(crate) fn table_mut(tables: &mut BTreeMap<SeqId, BlockTable>, seq_id: SeqId) -> &mut BlockTable {
    tables.get_mut(&seq_id).unwrap_or_else(|| panic!("sequence {seq_id} is not known to the KV cache"))
}
