//! `KvCache`: the block tables of all sequences over the two pools.
//!
//! The life of a table: `add_sequence` → (`match_prefix`, `attach_prefix`) → `reserve` before each step →
//! `commit` after it → `fork` / `swap_out` / `swap_in` / `release` as the scheduler decides → `remove_sequence`.
//! The caller keeps the tokens; the cache sees them only to hash them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use baton_core::{BlockId, SeqId, TokenId};
use serde::{Deserialize, Serialize};

use crate::events::EventBuffer;
use crate::pool::{Key, Pool};
use crate::stores::LoadRecord;
use crate::table::{SequenceTable, Tier};
use crate::{BlockMove, KvConfig, KvError, KvEvent, NO_BLOCK, StoredRow};

/// Positions `start..end` of a sequence that a step is going to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteRange {
    pub seq_id: SeqId,
    pub start: usize,
    pub end: usize,
}

/// Figures for metrics. Counters run from the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvStats {
    pub num_device_blocks: usize,
    pub num_device_blocks_used: usize,
    pub num_host_blocks: usize,
    /// Held by swapped sequences and transfers. The others may be cached prefixes.
    pub num_host_blocks_used: usize,
    /// Rows of a group that can be found by hash on the device, in use or free.
    pub num_cached_blocks: usize,
    /// The same in the host tier.
    pub num_host_cached_blocks: usize,
    /// Device blocks that are never given up.
    pub num_pinned_blocks: usize,
    /// Tokens looked up in the prefix cache, and those found.
    pub prefix_cache_queries: u64,
    pub prefix_cache_hits: u64,
    /// Of those found, the tokens that had to be copied back from the host tier.
    pub host_cache_hits: u64,
    /// Cached rows given up for new content.
    pub num_evictions: u64,
    /// Blocks copied to the host tier so that their prefixes can be found again.
    pub num_offloaded_blocks: u64,
    /// Tokens looked up in tiers beyond the host's memory, and those that came from there.
    pub external_cache_queries: u64,
    pub external_cache_hits: u64,
    /// Rows that were not stored because the stores were too far behind.
    pub num_saves_dropped: u64,
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
    pub(crate) device: Pool,
    pub(crate) host: Pool,
    pub(crate) tables: BTreeMap<SeqId, SequenceTable>,
    pub(crate) events: EventBuffer,
    num_pinned_blocks: usize,
    prefix_cache_queries: u64,
    prefix_cache_hits: u64,
    pub(crate) host_cache_hits: u64,
    pub(crate) num_offloaded_blocks: u64,
    /// Bundles of the host tier that copies in flight are going to fill, with a hold on each; without a key where nobody may
    /// find them any more.
    pub(crate) saving: BTreeMap<BlockId, Option<Key>>,
    /// The keys of these.
    pub(crate) saving_keys: BTreeSet<Key>,
    /// Full rows that were not copied to the host tier when they were computed, oldest first: see `offload`.
    pub(crate) committed: VecDeque<BlockId>,
    /// Rows that are to be stored, and the bundles that are held for it.
    pub(crate) saved: Vec<StoredRow>,
    pub(crate) being_stored: BTreeSet<BlockId>,
    pub(crate) loads: BTreeMap<u64, LoadRecord>,
    pub(crate) next_load: u64,
    pub(crate) num_saves_dropped: u64,
    external_cache_queries: u64,
    external_cache_hits: u64,
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
        let num_groups = config.groups.len();
        let mut cache = Self {
            device: Pool::new(config.num_device_blocks, num_groups, config.eviction),
            host: Pool::new(config.num_host_blocks, num_groups, config.eviction),
            tables: BTreeMap::new(),
            events: EventBuffer::new(config.event_capacity),
            num_pinned_blocks: 0,
            prefix_cache_queries: 0,
            prefix_cache_hits: 0,
            host_cache_hits: 0,
            num_offloaded_blocks: 0,
            saving: BTreeMap::new(),
            saving_keys: BTreeSet::new(),
            committed: VecDeque::new(),
            saved: Vec::new(),
            being_stored: BTreeSet::new(),
            loads: BTreeMap::new(),
            next_load: 0,
            num_saves_dropped: 0,
            external_cache_queries: 0,
            external_cache_hits: 0,
            config,
        };
        if cache.events.is_on() {
            cache.device.report_evictions();
        }
        Ok(cache)
    }

    pub fn config(&self) -> &KvConfig {
        &self.config
    }

    /// Whether prefixes that left the device are looked for in the host tier.
    pub fn has_host_cache(&self) -> bool {
        self.config.enable_prefix_caching && self.config.enable_host_cache && self.config.num_host_blocks > 0
    }

    /// Device blocks that can be had now (cached ones included).
    pub fn num_free_blocks(&self) -> usize {
        self.device.num_free()
    }

    pub fn num_free_host_blocks(&self) -> usize {
        self.host.num_free()
    }

    /// A sequence without KV. The salt separates its prefixes from those of other salts, all but the rows that lie
    /// whole within its first `num_public_tokens` tokens.
    pub fn add_sequence(&mut self, seq_id: SeqId, salt: Option<&str>, num_public_tokens: usize) {
        let num_public_rows = num_public_tokens / self.config.block_size;
        let table = SequenceTable::new(salt, num_public_rows, self.config.groups.len());
        let before = self.tables.insert(seq_id, table);
        assert!(before.is_none(), "sequence {seq_id} is already known to the KV cache");
    }

    pub fn contains(&self, seq_id: SeqId) -> bool {
        self.tables.contains_key(&seq_id)
    }

    /// How many rows the tables of a sequence have.
    pub fn num_rows(&self, seq_id: SeqId) -> usize {
        self.table(seq_id).num_rows()
    }

    /// The physical blocks of positions 0.. of a sequence, for each lane of each group. Rows behind a window are
    /// [`NO_BLOCK`].
    pub fn block_tables(&self, seq_id: SeqId) -> Vec<Vec<BlockId>> {
        let table = self.table(seq_id);
        let pool = self.pool(table.tier);
        let mut lanes = Vec::new();
        for (group, rows) in self.config.groups.iter().zip(&table.groups) {
            if group.lanes == 1 {
                lanes.push(rows.clone());
                continue;
            }
            let first = lanes.len();
            lanes.extend((0..group.lanes).map(|_| Vec::with_capacity(rows.len())));
            for &bundle in rows {
                let mut blocks = (bundle != NO_BLOCK).then(|| pool.lanes(bundle)).into_iter().flatten();
                for lane in &mut lanes[first..] {
                    lane.push(blocks.next().unwrap_or(NO_BLOCK));
                }
            }
        }
        lanes
    }

    /// Whether the blocks of the sequence lie in the host tier.
    pub fn is_swapped(&self, seq_id: SeqId) -> bool {
        self.table(seq_id).tier == Tier::Host
    }

    /// Counts one look into the prefix cache for the figures.
    pub fn record_query(&mut self, num_tokens: usize, num_hits: usize) {
        self.prefix_cache_queries += num_tokens as u64;
        self.prefix_cache_hits += num_hits as u64;
    }

    /// The same for the tiers beyond the host's memory.
    pub fn record_external_query(&mut self, num_tokens: usize, num_hits: usize) {
        self.external_cache_queries += num_tokens as u64;
        self.external_cache_hits += num_hits as u64;
    }

    /// How many free blocks it takes to write all these ranges in one step: new blocks, and a copy of every shared
    /// bundle for each writer but (where nobody else holds it) the last.
    pub fn blocks_needed(&self, writes: &[WriteRange]) -> usize {
        let mut needed = 0;
        let mut shared: Vec<(usize, BlockId, Tier, u32)> = Vec::new();
        for write in writes {
            let table = self.table(write.seq_id);
            let num_new = self.config.rows_for(write.end).saturating_sub(table.num_rows());
            for (group, rows) in table.groups.iter().enumerate() {
                needed += num_new * self.config.groups[group].lanes;
                for row in self.written_rows(table, write) {
                    let bundle = rows[row];
                    if self.pool(table.tier).ref_count(bundle) < 2 {
                        continue;
                    }
                    let entry =
                        shared.iter_mut().find(|(_, other, tier, _)| (*other, *tier) == (bundle, table.tier));
                    match entry {
                        Some((_, _, _, writers)) => *writers += 1,
                        None => shared.push((group, bundle, table.tier, 1)),
                    }
                }
            }
        }
        let copies = shared.iter().map(|&(group, bundle, tier, writers)| {
            writers.min(self.pool(tier).ref_count(bundle) - 1) as usize * self.config.groups[group].lanes
        });
        needed + copies.sum::<usize>()
    }

    /// Makes `write` possible: adds rows up to its end and replaces shared bundles by copies, which are appended
    /// to `copies` and must be made before the step writes. Changes nothing where the free blocks do not suffice.
    pub fn reserve(&mut self, write: WriteRange, copies: &mut Vec<BlockMove>) -> Result<(), KvError> {
        let (needed, free) = (self.blocks_needed(&[write]), self.num_free_blocks());
        if needed > free {
            return Err(KvError::OutOfBlocks { seq_id: write.seq_id, needed, free });
        }
        let table = self.table(write.seq_id);
        assert!(table.tier == Tier::Device, "sequence {} is swapped out", write.seq_id);
        debug_assert!(write.start <= table.num_rows() * self.config.block_size, "a gap before the write");
        let written = self.written_rows(table, &write);
        let num_rows = self.config.rows_for(write.end);
        for group in 0..self.config.groups.len() {
            let lanes = self.config.groups[group].lanes;
            for row in written.clone() {
                let from = self.table(write.seq_id).groups[group][row];
                if self.device.ref_count(from) < 2 {
                    debug_assert!(self.device.key(from).is_none(), "cached content is never written");
                    continue;
                }
                let to = self.take_device(lanes);
                self.add_moves((Tier::Device, from), (Tier::Device, to), copies);
                self.device.release(from);
                table_mut(&mut self.tables, write.seq_id).groups[group][row] = to;
            }
            while self.table(write.seq_id).groups[group].len() < num_rows {
                let bundle = self.take_device(lanes);
                table_mut(&mut self.tables, write.seq_id).groups[group].push(bundle);
            }
        }
        Ok(())
    }

    /// Gives back what no token at `position` or later reads: the rows behind every window.
    pub fn trim(&mut self, seq_id: SeqId, position: usize) {
        let table = table_mut(&mut self.tables, seq_id);
        if table.tier == Tier::Host || table.is_pinned {
            return;
        }
        for (group, rows) in table.groups.iter_mut().enumerate() {
            let behind = self.config.first_row(group, position).min(rows.len());
            // The last row first: of a cached prefix the end is evicted first.
            for bundle in rows[..behind].iter_mut().rev() {
                if *bundle == NO_BLOCK {
                    break;
                }
                self.device.release(*bundle);
                *bundle = NO_BLOCK;
            }
        }
    }

    /// Gives back the rows after the first `num_tokens` tokens: what was reserved for tokens that did not come.
    pub fn truncate(&mut self, seq_id: SeqId, num_tokens: usize) {
        let num_rows = self.config.rows_for(num_tokens);
        let table = table_mut(&mut self.tables, seq_id);
        assert!(table.tier == Tier::Device, "sequence {seq_id} is swapped out");
        for rows in &mut table.groups {
            for bundle in rows.drain(num_rows.min(rows.len())..).rev() {
                self.device.release(bundle);
            }
        }
    }

    /// The KV of the first `num_computed` of `token_ids` is in the blocks: its full rows can now be found by hash.
    pub fn commit(&mut self, seq_id: SeqId, token_ids: &[TokenId], num_computed: usize) {
        if !self.config.enable_prefix_caching {
            return;
        }
        let block_size = self.config.block_size;
        let (has_host_cache, writes_through) = (self.has_host_cache(), self.writes_through());
        let table = table_mut(&mut self.tables, seq_id);
        let num_full = num_computed.min(token_ids.len()) / block_size;
        if table.stale || table.tier == Tier::Host || num_full <= table.num_registered {
            return;
        }
        table.extend_chain(token_ids, num_full, block_size);
        for (group, rows) in table.groups.iter().enumerate() {
            // Runs of rows that were new to the cache, each of which becomes one event.
            let mut run_start = table.num_registered;
            for row in table.num_registered..=num_full {
                if row < num_full && rows[row] != NO_BLOCK {
                    let key = Key { group, hash: table.chain[row] };
                    if self.device.register(rows[row], key) {
                        if has_host_cache {
                            self.committed.push_back(rows[row]);
                            if self.committed.len() > self.config.num_device_blocks {
                                self.committed.pop_front();
                                self.num_saves_dropped += u64::from(writes_through);
                            }
                        }
                        continue;
                    }
                }
                if run_start < row && self.events.is_on() {
                    self.events.push(KvEvent::BlockStored {
                        hashes: table.chain[run_start..row].to_vec(),
                        parent: table.parent_of(run_start),
                        token_ids: token_ids[run_start * block_size..row * block_size].to_vec(),
                        block_size,
                        group,
                    });
                }
                run_start = row + 1;
            }
        }
        table.num_registered = num_full;
    }

    /// `child` becomes a second reader of everything `parent` holds.
    pub fn fork(&mut self, parent: SeqId, child: SeqId) {
        let table = self.table(parent).clone();
        assert!(table.tier == Tier::Device, "sequence {parent} is swapped out");
        debug_assert!(table.fetching.is_empty(), "a sequence that waits for KV is not forked");
        for (_, _, bundle) in table.bundles() {
            self.device.share(bundle);
        }
        let before = self.tables.insert(child, table);
        assert!(before.is_none(), "sequence {child} is already known to the KV cache");
    }

    /// `child`, which holds nothing yet, shares the first `num_rows` rows of `parent`; their tokens are the same. Of groups
    /// with a window it needs the last ones only, which `parent` must still hold.
    pub fn fork_prefix(&mut self, parent: SeqId, child: SeqId, num_rows: usize) {
        let source = self.table(parent);
        assert!(source.tier == Tier::Device, "sequence {parent} is swapped out");
        let position = num_rows * self.config.block_size;
        let rows_of = |(group, rows): (usize, &Vec<BlockId>)| -> Vec<BlockId> {
            let first = self.config.first_row(group, position);
            let row = |(row, bundle): (usize, &BlockId)| if row < first { NO_BLOCK } else { *bundle };
            rows[..num_rows].iter().enumerate().map(row).collect()
        };
        let groups: Vec<Vec<BlockId>> = source.groups.iter().enumerate().map(rows_of).collect();
        let (stale, num_registered) = (source.stale, source.num_registered.min(num_rows));
        for (group, rows) in groups.iter().enumerate() {
            for &bundle in &rows[self.config.first_row(group, position)..] {
                assert!(bundle != NO_BLOCK, "sequence {parent} has given up what {child} needs");
                self.device.share(bundle);
            }
        }
        let table = table_mut(&mut self.tables, child);
        assert!(table.num_rows() == 0, "sequence {child} already holds KV");
        // Only rows whose hash is known may count as registered.
        table.num_registered = num_registered.min(table.chain.len());
        table.stale = stale;
        table.groups = groups;
    }

    /// Gives up all KV of a sequence; the table stays. Tail first, so that of a cached prefix the end is evicted first.
    pub fn release(&mut self, seq_id: SeqId) {
        self.end_fetch(seq_id);
        let table = table_mut(&mut self.tables, seq_id);
        let pool = match table.tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
        };
        for rows in &mut table.groups {
            for bundle in rows.drain(..).rev().filter(|bundle| *bundle != NO_BLOCK) {
                pool.release(bundle);
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

    /// Keeps the cached blocks of a prefix for good: they are never evicted and outlive a reset. The sequence is a new one that
    /// exists for this alone. Returns how many rows are kept, which is fewer than the whole ones of the prefix where some are
    /// not cached.
    pub fn pin_prefix(&mut self, seq_id: SeqId, token_ids: &[TokenId]) -> usize {
        self.add_sequence(seq_id, None, 0);
        let found = self.match_device_prefix(seq_id, token_ids, token_ids.len());
        self.attach_prefix(seq_id, found.num_rows);
        table_mut(&mut self.tables, seq_id).is_pinned = true;
        let pinned = self.tables.values().filter(|table| table.is_pinned);
        let bundles: BTreeSet<BlockId> =
            pinned.flat_map(SequenceTable::bundles).map(|(_, _, bundle)| bundle).collect();
        self.num_pinned_blocks = bundles.into_iter().map(|bundle| self.device.lanes(bundle).count()).sum();
        found.num_rows
    }

    /// Device blocks that sequences which share nothing can have.
    pub fn num_unpinned_blocks(&self) -> usize {
        self.config.num_device_blocks - self.num_pinned_blocks
    }

    /// Forgets every cached prefix that is not pinned, in all tiers. Running sequences keep their KV, but it is not offered to
    /// others any more.
    pub fn reset_prefix_cache(&mut self) {
        self.device.forget_hashes();
        self.host.forget_hashes();
        // What is on its way to the host tier was computed before.
        self.saving.values_mut().for_each(|key| *key = None);
        self.saving_keys.clear();
        self.loads.values_mut().flat_map(|load| &mut load.rows).for_each(|(_, key)| *key = None);
        self.committed.clear();
        for table in self.tables.values_mut() {
            if table.is_pinned {
                for (group, row, bundle) in table.bundles() {
                    // Another pinned prefix may begin with the same row.
                    self.device.register(bundle, Key { group, hash: table.chain[row] });
                }
            } else {
                table.stale |= table.num_rows() > 0;
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
            num_device_blocks_used: self.config.num_device_blocks - self.device.num_free(),
            num_host_blocks: self.config.num_host_blocks,
            num_host_blocks_used: self.config.num_host_blocks - self.host.num_free(),
            num_cached_blocks: self.device.num_findable(),
            num_host_cached_blocks: self.host.num_findable(),
            num_pinned_blocks: self.num_pinned_blocks,
            prefix_cache_queries: self.prefix_cache_queries,
            prefix_cache_hits: self.prefix_cache_hits,
            host_cache_hits: self.host_cache_hits,
            num_evictions: self.device.num_evictions,
            num_offloaded_blocks: self.num_offloaded_blocks,
            external_cache_queries: self.external_cache_queries,
            external_cache_hits: self.external_cache_hits,
            num_saves_dropped: self.num_saves_dropped,
            num_events_dropped: self.events.num_dropped,
        }
    }

    pub(crate) fn table(&self, seq_id: SeqId) -> &SequenceTable {
        self.tables.get(&seq_id).unwrap_or_else(|| panic!("sequence {seq_id} is not known to the KV cache"))
    }

    pub(crate) fn pool(&self, tier: Tier) -> &Pool {
        match tier {
            Tier::Device => &self.device,
            Tier::Host => &self.host,
        }
    }

    /// The caller has made sure that so many blocks are free.
    pub(crate) fn take_device(&mut self, lanes: usize) -> BlockId {
        let bundle = self.device.take(lanes).expect("the number of free blocks was checked");
        for key in self.device.evicted.iter_mut().flat_map(|evicted| evicted.drain(..)) {
            self.events.push(KvEvent::BlockRemoved { hashes: vec![key.hash], group: key.group });
        }
        bundle
    }

    /// Appends the copies of a bundle's blocks, lane by lane.
    pub(crate) fn add_moves(&self, from: (Tier, BlockId), to: (Tier, BlockId), moves: &mut Vec<BlockMove>) {
        let from = self.pool(from.0).lanes(from.1);
        let to = self.pool(to.0).lanes(to.1);
        moves.extend(from.zip(to).map(|(from, to)| BlockMove { from, to }));
    }

    /// Rows of the table that a write touches, new ones not counted.
    fn written_rows(&self, table: &SequenceTable, write: &WriteRange) -> std::ops::Range<usize> {
        let end = self.config.rows_for(write.end).min(table.num_rows());
        (write.start / self.config.block_size).min(end)..end
    }
}

pub(crate) fn table_mut(tables: &mut BTreeMap<SeqId, SequenceTable>, seq_id: SeqId) -> &mut SequenceTable {
    tables.get_mut(&seq_id).unwrap_or_else(|| panic!("sequence {seq_id} is not known to the KV cache"))
}
