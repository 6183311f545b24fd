//! The flags that every command with an engine shares. They carry vLLM's names wherever the thing is the same.
//!
//! What is not given stays `None` here and gets the engine's or the model's own default in [`EngineArgs::resolve`],
//! the one place where raw flags become a ready configuration.

use clap::{Args, ValueEnum};

use crate::args::{KvDtypeArg, parse_share};
use crate::size::{parse_size, parse_size_gib};

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// What to run on
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceArg,
    /// Threads of the CPU backend; without it, one a core
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// How the weights are read
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub load_format: LoadFormatArg,
    /// Precision of the weights: auto keeps the file's own; float types convert dummy weights only
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    pub dtype: String,
    /// The longest sequence, prompt and output together; without it, what the model was made for and memory allows
    #[arg(long, value_name = "N")]
    pub max_model_len: Option<usize>,
    /// Sequences in one step
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<usize>,
    /// Tokens in one step; long prompts are cut into chunks of this
    #[arg(long, value_name = "N")]
    pub max_num_batched_tokens: Option<usize>,
    /// Under `priority` the request with the lowest --priority runs first
    #[arg(long, value_name = "POLICY", default_value = "fcfs")]
    pub scheduling_policy: PolicyArg,
    /// What happens to a running request when blocks run out
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub preemption_mode: PreemptionArg,
    /// Start of all random numbers: the same seed gives the same output
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Tokens of a request never depend on the other requests in the batch
    #[arg(long)]
    pub deterministic: bool,
    /// Do not record steps for replay (GPU only; accepted everywhere)
    #[arg(long)]
    pub enforce_eager: bool,
    #[command(flatten)]
    pub cache: CacheArgs,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "KV cache")]
pub struct CacheArgs {
    /// Storage of cached keys and values
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    pub kv_cache_dtype: KvDtypeArg,
    /// Memory of the KV cache, for example 2GiB; without it, what the utilisation leaves
    #[arg(long, value_name = "SIZE", alias = "kv-cache-memory-bytes", value_parser = parse_size)]
    pub kv_cache_memory: Option<u64>,
    /// Host memory for preempted sequences; a bare number is GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size_gib)]
    pub swap_space: Option<u64>,
    /// Tokens in a KV block; without it, what the device likes best
    #[arg(long, value_name = "N")]
    pub block_size: Option<usize>,
    /// The share of the device's memory that Baton may use
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub gpu_memory_utilization: Option<f64>,
    /// Reuse the KV of prompts that begin alike (the default)
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    pub enable_prefix_caching: bool,
    /// Compute every prompt anew
    #[arg(long)]
    pub no_enable_prefix_caching: bool,
    /// Which cached blocks go first
    #[arg(long, value_name = "POLICY", default_value = "lru")]
    pub prefix_cache_eviction: EvictionArg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    Auto,
    Cpu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoadFormatArg {
    /// By what the file is
    Auto,
    Gguf,
    Safetensors,
    /// Random weights of the right shapes: measures speed without a checkpoint
    Dummy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PolicyArg {
    /// First come, first served
    Fcfs,
    Priority,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PreemptionArg {
    /// Whichever costs less
    Auto,
    /// Keep its KV in host memory
    Swap,
    /// Free its KV and compute it again later
    Recompute,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EvictionArg {
    /// Least recently used
    Lru,
    /// Least frequently used
    Lfu,
}
