//! The engine's settings. Each field is a flag of the same name; defaults are those of the command line.

use baton_backend::{KvDtype, StepLimits};
use baton_kv::{EvictionPolicy, StorePolicy};
use baton_sched::{Policy, PreemptionMode};

use crate::{EngineError, SpeculativeConfig};

/// Rows of logits beyond one per sequence, for `prompt_logprobs`.
const MIN_LOGIT_ROWS: usize = 64;
/// Sequences that can have all their guesses checked in one step. Larger batches gain little from guesses.
const MAX_SPECULATING: usize = 32;

#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    /// `None`: what the checkpoint was made for.
    pub max_model_len: Option<usize>,
    /// `None`: what the device likes.
    pub block_size: Option<usize>,
    pub kv_dtype: KvDtype,
    /// Bytes of device KV; `None`: what remains after weights and workspace.
    pub kv_cache_memory: Option<u64>,
    /// Bytes of the host tier that preempted sequences are swapped to.
    pub swap_space: u64,
    /// How much of the free device memory may be used when `kv_cache_memory` is not given.
    pub gpu_memory_utilization: f64,
    pub enable_prefix_caching: bool,
    /// What sequences have in common is read once for all of them.
    pub enable_relay_attention: bool,
    pub eviction: EvictionPolicy,
    /// When KV goes to the stores that are attached later; `Off` where there are none.
    pub store: StorePolicy,
    /// News of the prefix cache that may wait for the end of a step; 0 switches them off.
    pub kv_event_capacity: usize,
    pub policy: Policy,
    pub preemption_mode: PreemptionMode,
    /// The tokens of a request do not depend on what else is in the batch.
    pub deterministic: bool,
    /// Seeds requests that bring none.
    pub seed: u64,
    pub max_num_queued_reqs: usize,
    /// Of one key; `None` is no limit but that of all.
    pub max_num_queued_reqs_per_key: Option<usize>,
    /// How many times longer than for itself alone a step may be for a key because of other keys; 0 is no limit.
    pub max_step_slowdown: f64,
    /// Guesses of next tokens that steps check; `None`: there are none.
    pub speculative: Option<SpeculativeConfig>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            max_model_len: None,
            block_size: None,
            kv_dtype: KvDtype::F16,
            kv_cache_memory: None,
            swap_space: 1 << 30,
            gpu_memory_utilization: 0.92,
            enable_prefix_caching: true,
            enable_relay_attention: true,
            eviction: EvictionPolicy::Lru,
            store: StorePolicy::Off,
            kv_event_capacity: 0,
            policy: Policy::Fcfs,
            preemption_mode: PreemptionMode::Auto,
            deterministic: false,
            seed: 0,
            max_num_queued_reqs: 4096,
            max_num_queued_reqs_per_key: None,
            max_step_slowdown: 2.0,
            speculative: None,
        }
    }
}

impl EngineConfig {
    /// The tokens of a request must not depend on who shares its beginning where they are to be deterministic.
    pub(crate) fn relays(&self) -> bool {
        self.enable_relay_attention && !self.deterministic
    }

    /// The largest step there will be.
    pub fn step_limits(&self, max_model_len: usize, vocab_size: usize) -> StepLimits {
        let max_rows = self.speculative.as_ref().map_or(1, |config| config.max_rows().unwrap_or(1));
        let max_speculating = self.max_num_seqs.min(MAX_SPECULATING);
        let max_logit_rows = (max_speculating * max_rows)
            .min(self.max_num_batched_tokens)
            .max(self.max_num_seqs)
            .max(MIN_LOGIT_ROWS);
        StepLimits {
            max_tokens: self.max_num_batched_tokens,
            max_seqs: self.max_num_seqs,
            max_logit_rows,
            max_samples: max_logit_rows + self.max_num_seqs,
            max_model_len,
            vocab_size,
        }
    }

    /// Checks what can be checked without a model.
    pub fn validate(&self) -> Result<(), EngineError> {
        let positive = |flag, value: usize, most: usize| {
            if (1..=most).contains(&value) {
                return Ok(());
            }
            Err(EngineError::Flag { flag, allowed: format!("in 1..={most}"), got: value.to_string() })
        };
        positive("--max-num-seqs", self.max_num_seqs, 65_536)?;
        positive("--max-num-batched-tokens", self.max_num_batched_tokens, 1 << 20)?;
        positive("--max-num-queued-reqs", self.max_num_queued_reqs, 1 << 24)?;
        if let Some(limit) = self.max_num_queued_reqs_per_key {
            positive("--max-num-queued-reqs-per-key", limit, 1 << 24)?;
        }
        if let Some(block_size) = self.block_size
            && !(1..=1024).contains(&block_size)
        {
            return Err(EngineError::Flag {
                flag: "--block-size",
                allowed: "in 1..=1024".to_owned(),
                got: block_size.to_string(),
            });
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(EngineError::Flag {
                flag: "--max-num-batched-tokens",
                allowed: format!("at least --max-num-seqs ({})", self.max_num_seqs),
                got: self.max_num_batched_tokens.to_string(),
            });
        }
        if !(self.gpu_memory_utilization > 0.0 && self.gpu_memory_utilization <= 1.0) {
            return Err(EngineError::Flag {
                flag: "--gpu-memory-utilization",
                allowed: "in (0, 1]".to_owned(),
                got: self.gpu_memory_utilization.to_string(),
            });
        }
        if let Some(speculative) = &self.speculative {
            speculative.settings()?;
        }
        let slowdown = self.max_step_slowdown;
        if slowdown != 0.0 && !(slowdown.is_finite() && slowdown >= 1.0) {
            return Err(EngineError::Flag {
                flag: "--max-step-slowdown",
                allowed: "0 or at least 1".to_owned(),
                got: slowdown.to_string(),
            });
        }
        Ok(())
    }
}
