//! The prefix cache: which beginning of a sequence is there already, on the device or in the host tier.
//!
//! A prefix of `n` rows can be used where every group has what the next token reads: a group with full attention all `n`
//! rows, one with a window the last ones. Rows of the host tier are copied to fresh device blocks while the sequence waits.

use baton_core::{BlockId, SeqId, TokenId};

use crate::manager::table_mut;
use crate::pool::Key;
use crate::table::Tier;
use crate::{BlockMove, KvCache, NO_BLOCK};

/// The longest cached prefix of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    pub num_rows: usize,
    /// Attaching it takes so many of the free device blocks.
    pub num_free_blocks: usize,
    /// Device blocks that the sequence holds afterwards.
    pub num_blocks: usize,
    /// Rows of any group that have to be copied from the host tier.
    pub num_host_rows: usize,
}

/// What a sequence got from the prefix cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attached {
    pub num_tokens: usize,
    /// Host → device. Until these are done the sequence has to wait; then [`KvCache::end_fetch`] is due.
    pub fetches: Vec<BlockMove>,
}

impl KvCache {
    /// The longest prefix of `token_ids` that is cached, at most `max_tokens` of it. The sequence must hold no KV.
    pub fn match_prefix(&mut self, seq_id: SeqId, token_ids: &[TokenId], max_tokens: usize) -> PrefixMatch {
        self.find_prefix(seq_id, token_ids, max_tokens, self.has_host_cache())
    }

    /// The same without the host tier: nothing has to be copied.
    pub fn match_device_prefix(
        &mut self,
        seq_id: SeqId,
        token_ids: &[TokenId],
        max_tokens: usize,
    ) -> PrefixMatch {
        self.find_prefix(seq_id, token_ids, max_tokens, false)
    }

    fn find_prefix(
        &mut self,
        seq_id: SeqId,
        token_ids: &[TokenId],
        max_tokens: usize,
        asks_host: bool,
    ) -> PrefixMatch {
        if !self.config.enable_prefix_caching {
            return PrefixMatch::default();
        }
        self.extend_chain(seq_id, token_ids, max_tokens);
        let num_rows = self.usable_rows(seq_id, token_ids, max_tokens, |key| self.is_cached(key, asks_host));
        self.count_prefix(seq_id, num_rows)
    }

    /// Hashes the full rows of the first `max_tokens` tokens. Returns how many there are.
    pub(crate) fn extend_chain(&mut self, seq_id: SeqId, token_ids: &[TokenId], max_tokens: usize) -> usize {
        let block_size = self.config.block_size;
        let limit = max_tokens.min(token_ids.len()) / block_size;
        let table = table_mut(&mut self.tables, seq_id);
        debug_assert!(table.num_rows() == 0, "a prefix is looked up before anything is computed");
        table.extend_chain(token_ids, limit, block_size);
        limit
    }

    pub(crate) fn is_cached(&self, key: Key, asks_host: bool) -> bool {
        self.device.find(key).is_some() || (asks_host && self.host.find(key).is_some())
    }

    /// The longest prefix whose needed rows are all there. Its rows are in the chain.
    pub(crate) fn usable_rows(
        &self,
        seq_id: SeqId,
        token_ids: &[TokenId],
        max_tokens: usize,
        has_row: impl Fn(Key) -> bool,
    ) -> usize {
        let block_size = self.config.block_size;
        let limit = max_tokens.min(token_ids.len()) / block_size;
        let chain = &self.table(seq_id).chain[..limit];
        let is_there = |group: usize, row: usize| has_row(Key { group, hash: chain[row] });
        let is_full = |group: &usize| self.config.groups[*group].window.is_none();
        let (full, windowed): (Vec<usize>, Vec<usize>) = (0..self.config.groups.len()).partition(is_full);
        let has_all = |row: &usize| full.iter().all(|&group| is_there(group, *row));
        let longest = (0..limit).take_while(has_all).count();
        // For each windowed group, how many rows up to this one are there without a gap.
        let runs: Vec<Vec<usize>> = windowed
            .iter()
            .map(|&group| {
                let mut run = 0;
                let ends = (0..longest).map(|row| {
                    run = if is_there(group, row) { run + 1 } else { 0 };
                    run
                });
                ends.collect()
            })
            .collect();
        let is_usable = |num_rows: &usize| {
            windowed.iter().zip(&runs).all(|(&group, runs)| {
                let first = self.config.first_row(group, num_rows * block_size);
                runs[num_rows - 1] >= num_rows - first
            })
        };
        (1..=longest).rev().find(is_usable).unwrap_or(0)
    }

    /// What attaching the first rows would take.
    fn count_prefix(&self, seq_id: SeqId, num_rows: usize) -> PrefixMatch {
        let mut found = PrefixMatch { num_rows, ..PrefixMatch::default() };
        for (group, key) in self.needed_rows(seq_id, num_rows) {
            let lanes = self.config.groups[group].lanes;
            let home = self.device.find(key);
            found.num_blocks += lanes;
            found.num_host_rows += usize::from(home.is_none());
            if home.is_none_or(|home| self.device.ref_count(home) == 0) {
                found.num_free_blocks += lanes;
            }
        }
        found
    }

    /// The rows that a sequence with a prefix of `num_rows` rows holds.
    pub(crate) fn needed_rows(
        &self,
        seq_id: SeqId,
        num_rows: usize,
    ) -> impl Iterator<Item = (usize, Key)> + '_ {
        let chain = &self.table(seq_id).chain;
        (0..self.config.groups.len()).flat_map(move |group| {
            let first = self.config.first_row(group, num_rows * self.config.block_size);
            (first..num_rows).map(move |row| (group, Key { group, hash: chain[row] }))
        })
    }

    /// Takes the first `num_rows` of what `match_prefix` has just found. As many blocks as it said must be free.
    pub fn attach_prefix(&mut self, seq_id: SeqId, num_rows: usize) -> Attached {
        let needed: Vec<(usize, Key)> = self.needed_rows(seq_id, num_rows).collect();
        // What is there first: taking a fresh block may evict it.
        let mut homes: Vec<Option<BlockId>> = Vec::with_capacity(needed.len());
        for &(_, key) in &needed {
            let home = self.device.find(key);
            if let Some(home) = home {
                self.device.share(home);
                self.device.count_hit(home);
            }
            homes.push(home);
        }
        let mut attached = Attached { num_tokens: num_rows * self.config.block_size, fetches: Vec::new() };
        let mut fetching = Vec::new();
        let mut groups = vec![vec![NO_BLOCK; num_rows]; self.config.groups.len()];
        let mut next_row: Vec<usize> = (0..groups.len())
            .map(|group| self.config.first_row(group, num_rows * self.config.block_size))
            .collect();
        let mut num_registered = num_rows;
        for ((group, key), home) in needed.into_iter().zip(homes) {
            let row = next_row[group];
            next_row[group] += 1;
            groups[group][row] = home.unwrap_or_else(|| {
                let source = self.host.find(key).expect("match_prefix has found this row");
                self.host.share(source);
                self.host.count_hit(source);
                fetching.push(source);
                let target = self.take_device(self.config.groups[group].lanes);
                self.add_moves((Tier::Host, source), (Tier::Device, target), &mut attached.fetches);
                // The content is only there when the copy is done: the next commit offers it to others.
                num_registered = num_registered.min(row);
                target
            });
        }
        let table = table_mut(&mut self.tables, seq_id);
        debug_assert!(table.num_rows() == 0 && table.fetching.is_empty());
        table.groups = groups;
        table.num_registered = num_registered;
        table.fetching = fetching;
        attached
    }

    /// The copies from the host tier are done, or will never be used.
    pub fn end_fetch(&mut self, seq_id: SeqId) {
        // The last row first: of a cached prefix the end is evicted first.
        for bundle in std::mem::take(&mut table_mut(&mut self.tables, seq_id).fetching).into_iter().rev() {
            self.host.release_copy(bundle);
        }
    }

    /// Counts tokens that were found in the host tier for the figures.
    pub fn record_host_hits(&mut self, num_tokens: usize) {
        self.host_cache_hits += num_tokens as u64;
    }
}
