//! What the cache is told at start, and what it can refuse.

use baton_core::SeqId;
use serde::{Deserialize, Serialize};
use thiserror::Error;

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

/// The size and the habits of the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvConfig {
    pub num_device_blocks: usize,
    /// Blocks of the swap tier; 0 means that preempted sequences are always recomputed.
    pub num_host_blocks: usize,
    /// Tokens a block.
    pub block_size: usize,
    pub enable_prefix_caching: bool,
    pub eviction: EvictionPolicy,
    /// How many [`crate::KvEvent`]s wait for a reader; 0 switches events off.
    pub event_capacity: usize,
}

impl Default for KvConfig {
    fn default() -> Self {
        Self {
            num_device_blocks: 512,
            num_host_blocks: 0,
            block_size: 16,
            enable_prefix_caching: true,
            eviction: EvictionPolicy::Lru,
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
    #[error("{got} {tier} KV blocks are too many: at most {limit} can be numbered; raise --block-size")]
    TooManyBlocks { tier: &'static str, got: usize, limit: usize },
    #[error("sequence {seq_id} needs {needed} more KV blocks and {free} are free: preempt a sequence first")]
    OutOfBlocks { seq_id: SeqId, needed: usize, free: usize },
}

impl KvConfig {
    pub fn validate(&self) -> Result<(), KvError> {
        // The last number is the end mark of the free list.
        let limit = u32::MAX as usize - 1;
        if self.num_device_blocks == 0 {
            return Err(KvError::NoBlocks);
        }
        if self.block_size == 0 {
            return Err(KvError::BlockSize);
        }
        for (tier, got) in [("device", self.num_device_blocks), ("host", self.num_host_blocks)] {
            if got > limit {
                return Err(KvError::TooManyBlocks { tier, got, limit });
            }
        }
        Ok(())
    }

    /// How many blocks hold this many tokens.
    pub fn blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }
}
