//! The memory plan: weights, workspace, recorded steps, then KV from what remains. Made once at start, never exceeded.
//!
//! The same arithmetic serves the running engine and the calculator `baton plan`, which has no device at hand.

use std::fmt;

use baton_backend::KvSpec;
use serde::Serialize;

use crate::EngineError;

/// What the plan is made from.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryRequest {
    pub device: String,
    pub total_bytes: u64,
    /// What may be used in all.
    pub usable_bytes: u64,
    pub weight_bytes: u64,
    pub workspace_bytes: u64,
    pub graph_bytes: u64,
    /// The most KV to take unasked.
    pub kv_cap_bytes: Option<u64>,
    /// Takes the place of what is left of the usable bytes.
    pub kv_cache_memory: Option<u64>,
    pub swap_space: u64,
    pub max_model_len: usize,
    pub max_num_seqs: usize,
}

impl MemoryRequest {
    /// What the other parts leave of the usable bytes.
    pub fn left_bytes(&self) -> u64 {
        let parts = [self.weight_bytes, self.workspace_bytes, self.graph_bytes];
        parts.into_iter().fold(self.usable_bytes, u64::saturating_sub)
    }

    /// What of it KV may take when nobody said how much.
    pub fn kv_budget_bytes(&self) -> u64 {
        self.left_bytes().min(self.kv_cap_bytes.unwrap_or(u64::MAX))
    }
}

/// Where the memory goes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    pub device: String,
    pub total_bytes: u64,
    pub weight_bytes: u64,
    pub workspace_bytes: u64,
    pub graph_bytes: u64,
    pub kv_bytes: u64,
    pub swap_bytes: u64,
    pub kv_bytes_per_token: u64,
    pub block_size: usize,
    pub num_device_blocks: usize,
    pub num_host_blocks: usize,
    pub max_model_len: usize,
    pub max_num_seqs: usize,
}

impl MemoryPlan {
    /// Fits as many blocks as the budget allows and the largest possible load could use.
    pub fn new(request: &MemoryRequest, kv: &KvSpec) -> Result<Self, EngineError> {
        let block_bytes = kv.bytes_per_block() as u64;
        let blocks_per_seq = request.max_model_len.div_ceil(kv.block_size);
        let useful = (blocks_per_seq as u64).saturating_mul(request.max_num_seqs as u64);
        let affordable = request.kv_cache_memory.unwrap_or(request.kv_budget_bytes()) / block_bytes;
        // Asked for outright, the memory is used as asked: more blocks than a full batch needs still cache prefixes.
        let num_device_blocks =
            if request.kv_cache_memory.is_some() { affordable } else { affordable.min(useful) };
        // Slots are numbered in 32 bits on every device.
        let num_device_blocks = num_device_blocks.min(u64::from(u32::MAX) / kv.block_size as u64) as usize;
        if num_device_blocks < blocks_per_seq {
            return Err(EngineError::KvTooSmall {
                kv_tokens: num_device_blocks * kv.block_size,
                max_model_len: request.max_model_len,
                needed: blocks_per_seq * kv.block_size,
                needed_memory: format!("{}MiB", (blocks_per_seq as u64 * block_bytes).div_ceil(1 << 20)),
            });
        }
        let num_host_blocks = ((request.swap_space / block_bytes) as usize).min(num_device_blocks);
        Ok(Self {
            device: request.device.clone(),
            total_bytes: request.total_bytes,
            weight_bytes: request.weight_bytes,
            workspace_bytes: request.workspace_bytes,
            graph_bytes: request.graph_bytes,
            kv_bytes: num_device_blocks as u64 * block_bytes,
            swap_bytes: num_host_blocks as u64 * block_bytes,
            kv_bytes_per_token: kv.bytes_per_token() as u64,
            block_size: kv.block_size,
            num_device_blocks,
            num_host_blocks,
            max_model_len: request.max_model_len,
            max_num_seqs: request.max_num_seqs,
        })
    }

    /// Tokens that the device's KV holds.
    pub fn kv_tokens(&self) -> usize {
        self.num_device_blocks * self.block_size
    }

    /// Sequences of `len` tokens that the device's KV holds at once.
    pub fn sequences_of(&self, len: usize) -> usize {
        self.num_device_blocks / len.div_ceil(self.block_size).max(1)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| format!("{:>12.1} MiB", bytes as f64 / f64::from(1 << 20));
        writeln!(f, "memory on {}", self.device)?;
        writeln!(f, "  weights    {}", mib(self.weight_bytes))?;
        writeln!(f, "  workspace  {}", mib(self.workspace_bytes))?;
        if self.graph_bytes > 0 {
            writeln!(f, "  graphs     {}", mib(self.graph_bytes))?;
        }
        writeln!(
            f,
            "  KV cache   {}   {} blocks of {} tokens = {} tokens, {} sequences of {}",
            mib(self.kv_bytes),
            self.num_device_blocks,
            self.block_size,
            self.kv_tokens(),
            self.sequences_of(self.max_model_len),
            self.max_model_len,
        )?;
        let used = self.weight_bytes + self.workspace_bytes + self.graph_bytes + self.kv_bytes;
        writeln!(f, "  total      {} of {:.1} GiB", mib(used), self.total_bytes as f64 / f64::from(1 << 30))?;
        write!(
            f,
            "  swap space {}   {} blocks in the host's memory",
            mib(self.swap_bytes),
            self.num_host_blocks
        )
    }
}

#[cfg(test)]
mod tests {
    use baton_backend::{KvDtype, KvLayerSpec};

    use super::*;

    fn spec() -> KvSpec {
        // 2 layers × 2 (K and V) × 4 heads × 8 × 2 bytes = 256 bytes a token, 4096 a block.
        KvSpec {
            layers: vec![KvLayerSpec { num_kv_heads: 4, head_dim: 8 }; 2],
            dtype: KvDtype::F16,
            block_size: 16,
        }
    }

    fn request(left_bytes: u64) -> MemoryRequest {
        MemoryRequest {
            device: "cpu".to_owned(),
            total_bytes: 1 << 30,
            usable_bytes: left_bytes + 3000,
            weight_bytes: 1000,
            workspace_bytes: 1000,
            graph_bytes: 1000,
            kv_cap_bytes: None,
            kv_cache_memory: None,
            swap_space: 8192,
            max_model_len: 100,
            max_num_seqs: 3,
        }
    }

    #[test]
    fn takes_no_more_than_a_full_batch_can_use() {
        let plan = MemoryPlan::new(&request(1 << 30), &spec()).unwrap();
        assert_eq!((plan.num_device_blocks, plan.num_host_blocks), (21, 2)); // 7 blocks × 3 sequences
        assert_eq!(plan.sequences_of(100), 3);
        assert_eq!(plan.sequences_of(16), 21);
    }

    #[test]
    fn takes_no_more_than_the_cap_unasked() {
        let capped = MemoryRequest { kv_cap_bytes: Some(4096 * 9), ..request(1 << 30) };
        assert_eq!(MemoryPlan::new(&capped, &spec()).unwrap().num_device_blocks, 9);
    }

    #[test]
    fn parts_larger_than_all_leave_nothing() {
        assert_eq!(MemoryRequest { usable_bytes: 2999, ..request(0) }.left_bytes(), 0);
        assert_eq!(request(4096 * 8 - 1).left_bytes(), 4096 * 8 - 1);
        assert_eq!(MemoryPlan::new(&request(4096 * 8 - 1), &spec()).unwrap().num_device_blocks, 7);
    }

    #[test]
    fn shows_where_the_memory_goes() {
        let shown = MemoryPlan::new(&request(1 << 20), &spec()).unwrap().to_string();
        let rows: Vec<&str> = shown.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(rows, ["memory", "weights", "workspace", "graphs", "KV", "total", "swap"]);
    }

    #[test]
    fn takes_what_is_asked_for() {
        let asked =
            MemoryRequest { kv_cap_bytes: Some(1), kv_cache_memory: Some(4096 * 50 + 1), ..request(0) };
        assert_eq!(MemoryPlan::new(&asked, &spec()).unwrap().num_device_blocks, 50);
    }

    #[test]
    fn says_what_would_fit() {
        assert_eq!(
            MemoryPlan::new(&request(4096 * 3), &spec()).unwrap_err().to_string(),
            "the KV cache has room for 48 tokens, but one sequence of --max-model-len 100 needs 112: lower \
             --max-model-len to 48, or raise --kv-cache-memory to at least 1MiB"
        );
    }
}
