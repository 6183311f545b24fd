//! The memory plan: weights, workspace, recorded steps, then KV from what remains. Made once at start, never exceeded.
//!
//! The same arithmetic serves the running engine and the calculator `baton plan`, which has no device at hand.

use std::fmt;

use baton_backend::{DeviceInfo, KvGroupSpec, KvSpec};
use baton_kv::KvConfig;
use serde::Serialize;

use crate::EngineError;
use crate::engine::kv_groups;

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
    /// Nobody asked for that length: the longest that fits will do.
    pub may_shrink: bool,
    pub max_num_seqs: usize,
    /// The most tokens of a sequence that are computed at once.
    pub max_run: usize,
}

/// A context below this is of no use, so that a cache which holds no more is an error.
const LEAST_CONTEXT: usize = 128;

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
    /// The longest sequence, prompt and output together.
    pub max_model_len: usize,
    /// What it would have been if more memory were there; the same as `max_model_len` unless that was lowered.
    pub wanted_model_len: usize,
    pub max_num_seqs: usize,
    /// Layers that see the same part of a sequence have blocks of their own.
    pub groups: Vec<GroupPlan>,
    #[serde(skip)]
    kv: KvConfig,
    #[serde(skip)]
    max_run: usize,
}

/// What a group of layers keeps of each sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupPlan {
    pub num_layers: usize,
    /// `None`: the whole sequence.
    pub window: Option<u32>,
    /// Blocks for the same tokens.
    pub lanes: usize,
}

impl MemoryPlan {
    /// Of an encoder, which has no cache.
    pub(crate) fn without_cache(
        device: &DeviceInfo,
        weight_bytes: u64,
        max_model_len: usize,
        max_num_seqs: usize,
    ) -> Self {
        Self {
            device: device.description.clone(),
            total_bytes: device.total_bytes,
            weight_bytes,
            workspace_bytes: 0,
            graph_bytes: 0,
            kv_bytes: 0,
            swap_bytes: 0,
            kv_bytes_per_token: 0,
            block_size: 0,
            num_device_blocks: 0,
            num_host_blocks: 0,
            max_model_len,
            wanted_model_len: max_model_len,
            max_num_seqs,
            groups: Vec::new(),
            kv: KvConfig::default(),
            max_run: 0,
        }
    }

    /// Fits as many blocks as the budget allows and the largest possible load could use.
    pub fn new(request: &MemoryRequest, kv: &KvSpec) -> Result<Self, EngineError> {
        let block_bytes = kv.bytes_per_block() as u64;
        let config = KvConfig { block_size: kv.block_size, groups: kv_groups(kv), ..KvConfig::default() };
        let blocks_per_seq = config.peak_blocks_of(request.max_model_len, request.max_run);
        let useful = (blocks_per_seq as u64).saturating_mul(request.max_num_seqs as u64);
        let affordable = request.kv_cache_memory.unwrap_or(request.kv_budget_bytes()) / block_bytes;
        // Asked for outright, the memory is used as asked: more blocks than a full batch needs still cache prefixes.
        let num_device_blocks =
            if request.kv_cache_memory.is_some() { affordable } else { affordable.min(useful) };
        // Slots are numbered in 32 bits on every device.
        let num_device_blocks = num_device_blocks.min(u64::from(u32::MAX) / kv.block_size as u64) as usize;
        let mut max_model_len = request.max_model_len;
        if num_device_blocks < blocks_per_seq {
            let fits = |rows: usize| {
                config.peak_blocks_of(rows * kv.block_size, request.max_run) <= num_device_blocks
            };
            let rows = (0..=request.max_model_len.div_ceil(kv.block_size)).rev().find(|&rows| fits(rows));
            max_model_len = request.max_model_len.min(rows.unwrap_or(0) * kv.block_size);
        }
        if max_model_len < request.max_model_len && !(request.may_shrink && max_model_len >= LEAST_CONTEXT) {
            return Err(EngineError::KvTooSmall {
                kv_tokens: max_model_len,
                max_model_len: request.max_model_len,
                needed: request.max_model_len.next_multiple_of(kv.block_size),
                needed_memory: format!("{}MiB", (blocks_per_seq as u64 * block_bytes).div_ceil(1 << 20)),
            });
        }
        // More than on the device are of use: prefixes that left it are found there again.
        let num_host_blocks = (request.swap_space / block_bytes).min(u64::from(u32::MAX) / 2) as usize;
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
            max_model_len,
            wanted_model_len: request.max_model_len,
            max_num_seqs: request.max_num_seqs,
            groups: kv.groups.iter().map(GroupPlan::of).collect(),
            kv: config,
            max_run: request.max_run,
        })
    }

    /// One line for the user where the context is shorter than the model's, with the flags that change it.
    pub fn shrink_note(&self) -> Option<String> {
        (self.max_model_len < self.wanted_model_len).then(|| {
            let block_bytes = self.kv_bytes / (self.num_device_blocks.max(1) as u64);
            let needed = self.kv.peak_blocks_of(self.wanted_model_len, self.max_run) as u64 * block_bytes;
            format!(
                "the context is {} tokens, not the {} that the model was made for, because the KV cache has {} MiB: \
                 --kv-cache-memory {}MiB makes it fit, --max-model-len sets another length",
                self.max_model_len,
                self.wanted_model_len,
                self.kv_bytes >> 20,
                needed.div_ceil(1 << 20)
            )
        })
    }

    /// Tokens that the device's KV holds, in sequences of the longest length.
    pub fn kv_tokens(&self) -> usize {
        match self.groups.as_slice() {
            [GroupPlan { window: None, lanes: 1, .. }] => self.num_device_blocks * self.block_size,
            _ => self.sequences_of(self.max_model_len) * self.max_model_len,
        }
    }

    /// Bytes of KV that one sequence of so many tokens holds while it is decoded.
    pub fn sequence_bytes(&self, len: usize) -> u64 {
        let block_bytes = self.kv_bytes / (self.num_device_blocks.max(1) as u64);
        self.kv.peak_blocks_of(len, 1) as u64 * block_bytes
    }

    /// Sequences of `len` tokens that the device's KV holds at once.
    pub fn sequences_of(&self, len: usize) -> usize {
        self.num_device_blocks / self.kv.peak_blocks_of(len, 1).max(1)
    }
}

impl GroupPlan {
    fn of(group: &KvGroupSpec) -> Self {
        let num_layers = group.lanes.iter().map(Vec::len).sum();
        Self { num_layers, window: group.window, lanes: group.lanes.len() }
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
        if self.groups.len() > 1 {
            for group in &self.groups {
                let reach = group
                    .window
                    .map_or("whole sequence".to_owned(), |window| format!("last {window} tokens"));
                writeln!(f, "             {} layers keep the {reach}", group.num_layers)?;
            }
            let per_sequence = self.sequence_bytes(self.max_model_len);
            writeln!(
                f,
                "             {} per sequence of {}",
                mib(per_sequence).trim_start(),
                self.max_model_len
            )?;
        }
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
        // 2 layers × 2 (K and V) × 4 heads × 8 × 2 bytes = 256 bytes per token, 4096 a block.
        KvSpec::full(KvLayerSpec { num_kv_heads: 4, head_dim: 8 }, 2, KvDtype::F16, 16)
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
            may_shrink: false,
            max_model_len: 100,
            max_num_seqs: 3,
            max_run: 64,
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
    fn a_length_that_nobody_asked_for_shrinks_to_what_fits() {
        let shrinking =
            |blocks: u64| MemoryRequest { may_shrink: true, max_model_len: 1000, ..request(4096 * blocks) };
        let plan = MemoryPlan::new(&shrinking(9), &spec()).unwrap();
        assert_eq!((plan.max_model_len, plan.wanted_model_len, plan.sequences_of(144)), (144, 1000, 1));
        let note = plan.shrink_note().unwrap();
        assert!(
            note.contains("144 tokens, not the 1000") && note.contains("--kv-cache-memory 1MiB"),
            "{note}"
        );
        assert!(MemoryPlan::new(&shrinking(7), &spec()).is_err(), "112 tokens are of no use");
        assert_eq!(MemoryPlan::new(&shrinking(900), &spec()).unwrap().shrink_note(), None);
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
