//! What the cache is told at start, and what it can refuse.

use baton_core::SeqId;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::StorePolicy;

/// Which cached block is given up when a fresh one is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EvictionPolicy {
    /// The one that has been free for the longest time.
    #[default]
    Lru,
    /// The one with the fewest prefix-cache hits, the least recently freed among equals.
    Lfu,
}

/// Layers that see the same part of a sequence and keep it in blocks of their own.
///
/// `block_size` tokens of a group are one *row* of its table. All blocks have the same number of bytes, whichever group uses
/// them, so a group with more layers than fit into a block has several blocks per row: its lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvGroup {
    /// A token sees itself and so many tokens before it, less one. `None`: all of them.
    pub window: Option<usize>,
    /// Blocks per row.
    pub lanes: usize,
}

impl Default for KvGroup {
    fn default() -> Self {
        Self { window: None, lanes: 1 }
    }
}

/// The size and the habits of the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvConfig {
    pub num_device_blocks: usize,
    /// Blocks of the host tier; 0 means that preempted sequences are always recomputed.
    pub num_host_blocks: usize,
    /// Tokens per row.
    pub block_size: usize,
    pub groups: Vec<KvGroup>,
    pub enable_prefix_caching: bool,
    /// Prefixes that left the device are kept in the host tier and found there again.
    pub enable_host_cache: bool,
    pub eviction: EvictionPolicy,
    /// Whether and when rows go to tiers beyond the host's memory, which must have blocks for it.
    #[serde(default)]
    pub store: StorePolicy,
    /// How many [`crate::KvEvent`]s wait for a reader; 0 switches events off.
    pub event_capacity: usize,
}

impl Default for KvConfig {
    fn default() -> Self {
        Self {
            num_device_blocks: 512,
            num_host_blocks: 0,
            block_size: 16,
            groups: vec![KvGroup::default()],
            enable_prefix_caching: true,
            enable_host_cache: true,
            eviction: EvictionPolicy::Lru,
            store: StorePolicy::Off,
            event_capacity: 0,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KvError {
    #[error(
        "the KV cache needs at least one device block, got 0: give it more memory (--gpu-memory-utilization)"
    )]
    NoBlocks,
    #[error("--block-size must be at least 1, got 0")]
    BlockSize,
    #[error(
        "a KV cache has 1 to {} groups of 1 to {} lanes, none with a window of 0 tokens",
        KvConfig::MAX_GROUPS,
        KvConfig::MAX_LANES
    )]
    Groups,
    #[error("{got} {tier} KV blocks are too many: at most {limit} can be numbered; raise --block-size")]
    TooManyBlocks { tier: &'static str, got: usize, limit: usize },
    #[error("sequence {seq_id} needs {needed} more KV blocks and {free} are free: preempt a sequence first")]
    OutOfBlocks { seq_id: SeqId, needed: usize, free: usize },
}

impl KvConfig {
    pub const MAX_GROUPS: usize = 16;
    pub const MAX_LANES: usize = 256;

    pub fn validate(&self) -> Result<(), KvError> {
        // The last number is the end mark of the free list.
        let limit = u32::MAX as usize - 1;
        if self.num_device_blocks == 0 {
            return Err(KvError::NoBlocks);
        }
        if self.block_size == 0 {
            return Err(KvError::BlockSize);
        }
        let is_group = |group: &KvGroup| {
            (1..=Self::MAX_LANES).contains(&group.lanes) && group.window.is_none_or(|window| window > 0)
        };
        if !(1..=Self::MAX_GROUPS).contains(&self.groups.len()) || !self.groups.iter().all(is_group) {
            return Err(KvError::Groups);
        }
        for (tier, got) in [("device", self.num_device_blocks), ("host", self.num_host_blocks)] {
            if got > limit {
                return Err(KvError::TooManyBlocks { tier, got, limit });
            }
        }
        Ok(())
    }

    /// How many rows hold this many tokens.
    pub fn rows_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// The first row of a group that a token at `position` or a later one reads.
    pub fn first_row(&self, group: usize, position: usize) -> usize {
        let window = self.groups[group].window;
        window.map_or(0, |window| (position + 1).saturating_sub(window) / self.block_size)
    }

    /// The most blocks that sequences hold at once which have `shared` rows in common and then go on for `own` rows each, when
    /// a step computes at most `max_run` tokens of one.
    pub fn peak_blocks(&self, shared: usize, own: &[usize], max_run: usize) -> usize {
        let of_group = |group: &KvGroup| {
            // The window before the first token of a run, the run, and a row that both only begin in.
            let reach = group
                .window
                .map_or(usize::MAX, |window| self.rows_for(window.saturating_add(max_run)).saturating_add(1));
            let own: usize = own.iter().map(|&rows| rows.min(reach)).sum();
            (shared.min(reach) + own).saturating_mul(group.lanes)
        };
        self.groups.iter().map(of_group).fold(0, usize::saturating_add)
    }

    /// The most blocks that one sequence of so many tokens holds at once.
    pub fn peak_blocks_of(&self, num_tokens: usize, max_run: usize) -> usize {
        self.peak_blocks(0, &[self.rows_for(num_tokens)], max_run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_bounds_what_a_sequence_holds() {
        let groups = vec![KvGroup::default(), KvGroup { window: Some(32), lanes: 5 }];
        let config = KvConfig { groups, ..KvConfig::default() };
        assert_eq!(config.peak_blocks_of(16, 64), 1 + 5);
        // 1000 rows of full attention; a window, a run and a started row of the other group: 2 + 4 + 1.
        assert_eq!(config.peak_blocks_of(16_000, 64), 1000 + 5 * 7);
        // Two sequences that share 3 rows of their prompts and have 2 of their own.
        assert_eq!(config.peak_blocks(3, &[2, 2], 64), 7 + 5 * 7);
        assert_eq!([0, 31, 32, 47, 48].map(|position| config.first_row(1, position)), [0, 0, 0, 1, 1]);
    }
}
