//! The flags that every command with an engine shares. They carry vLLM's names wherever the thing is the same.
//!
//! What is not given stays `None` here and gets the engine's or the model's own default in [`EngineArgs::resolve`],
//! the one place where raw flags become a ready configuration.

use std::path::Path;

use anyhow::Result;
use baton_backend::{DeviceInfo, KvDtype, Precision, WeightFormat};
use baton_engine::EngineConfig;
use baton_kv::EvictionPolicy;
use baton_model::LoadFormat;
use baton_sched::{Policy, PreemptionMode};
use clap::{Args, ValueEnum};

use crate::args::{KvDtypeArg, parse_share};
use crate::errors::hinted;
use crate::size::{parse_size, parse_size_gib};

/// Sequences and tokens of a step on a GPU, unless said otherwise.
const GPU_SEQS: usize = 256;
const GPU_STEP_TOKENS: usize = 8192;

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// What to run on: auto (the first GPU, if there is one), cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = parse_device)]
    pub device: DeviceArg,
    /// Threads of the CPU backend; without it, one a physical core
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// How the weights are read
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub load_format: LoadFormatArg,
    /// Model, directory or tokenizer.json whose tokenizer is used instead of the model's own, or beside dummy weights
    #[arg(long, value_name = "MODEL")]
    pub tokenizer: Option<String>,
    /// float32 rounds nothing, so that every device gives the same tokens, but slowly; weights are used as they are stored,
    /// so that any other type is only a check of theirs
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    pub dtype: String,
    /// The longest sequence, prompt and output together; without it, what the model was made for and memory allows
    #[arg(long, value_name = "N")]
    pub max_model_len: Option<usize>,
    /// Sequences in one step [default: 64, on a GPU 256]
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<usize>,
    /// Tokens in one step; long prompts are cut into chunks of this [default: 512, on a GPU 8192]
    #[arg(long, value_name = "N")]
    pub max_num_batched_tokens: Option<usize>,
    /// Requests that may wait for their first step; more are turned away
    #[arg(long, value_name = "N")]
    pub max_num_queued_reqs: Option<usize>,
    /// The same for the requests of one API key [default: half of all where there are several keys]
    #[arg(long, value_name = "N")]
    pub max_num_queued_reqs_per_key: Option<usize>,
    /// By arrival (fcfs), or the lowest `priority` first. Within that, API keys take turns, by tokens
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
    /// With --load-format mock: how long a step takes, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 0.0, hide_short_help = true, value_parser = parse_step_ms)]
    pub mock_step_ms: f64,
    #[command(flatten)]
    pub cache: CacheArgs,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "KV cache")]
pub struct CacheArgs {
    /// Storage of cached keys and values; int8 takes about half of f16 and is for the CPU
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
    #[arg(long, overrides_with = "enable_prefix_caching")]
    pub no_enable_prefix_caching: bool,
    /// Read the KV of a prefix that requests of a batch share once for all of them (the default)
    #[arg(long, overrides_with = "no_enable_relay_attention")]
    pub enable_relay_attention: bool,
    /// Let each request read the KV of its whole prompt, even where others of the batch begin alike
    #[arg(long, alias = "disable-cascade-attn", overrides_with = "enable_relay_attention")]
    pub no_enable_relay_attention: bool,
    /// Which cached blocks go first
    #[arg(long, value_name = "POLICY", default_value = "lru")]
    pub prefix_cache_eviction: EvictionArg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    Auto,
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

fn parse_device(text: &str) -> Result<DeviceArg, String> {
    let number = |text: &str| text.parse().map_err(|_| format!("cuda:{text}: not the number of a GPU"));
    match text.split_once(':') {
        None if text == "auto" => Ok(DeviceArg::Auto),
        None if text == "cpu" => Ok(DeviceArg::Cpu),
        None if text == "cuda" => Ok(DeviceArg::Cuda(0)),
        Some(("cuda", ordinal)) => number(ordinal).map(DeviceArg::Cuda),
        _ => Err("use auto, cpu, cuda or cuda:N".to_owned()),
    }
}

fn parse_step_ms(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(time_ms) if (0.0..=60_000.0).contains(&time_ms) => Ok(time_ms),
        _ => Err(format!("{text:?} is not a time: write milliseconds from 0 to 60000")),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoadFormatArg {
    /// By what the file is
    Auto,
    Gguf,
    Safetensors,
    /// Random weights of the right shapes: measures speed without a checkpoint
    Dummy,
    /// No weights and no computing, one token over and over: measures everything around the model
    Mock,
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

/// Sequences and tokens of a step on a GPU, where they are not given.
pub fn gpu_steps(max_num_seqs: Option<usize>, max_num_batched_tokens: Option<usize>) -> (usize, usize) {
    let seqs = max_num_seqs.unwrap_or(GPU_SEQS);
    (seqs, max_num_batched_tokens.unwrap_or(GPU_STEP_TOKENS.max(seqs)))
}

impl EngineArgs {
    /// The ready configuration: every flag that was given, over the engine's own defaults.
    pub fn resolve(&self) -> EngineConfig {
        let defaults = EngineConfig::default();
        let cache = &self.cache;
        EngineConfig {
            max_num_seqs: self.max_num_seqs.unwrap_or(defaults.max_num_seqs),
            max_num_batched_tokens: self.max_num_batched_tokens.unwrap_or(defaults.max_num_batched_tokens),
            max_model_len: self.max_model_len,
            block_size: cache.block_size,
            kv_dtype: kv_dtype(cache.kv_cache_dtype, self.default_kv_dtype()),
            kv_cache_memory: cache.kv_cache_memory,
            swap_space: cache.swap_space.unwrap_or(defaults.swap_space),
            gpu_memory_utilization: cache.gpu_memory_utilization.unwrap_or(defaults.gpu_memory_utilization),
            enable_prefix_caching: !cache.no_enable_prefix_caching,
            enable_relay_attention: !cache.no_enable_relay_attention,
            eviction: match cache.prefix_cache_eviction {
                EvictionArg::Lru => EvictionPolicy::Lru,
                EvictionArg::Lfu => EvictionPolicy::Lfu,
            },
            policy: match self.scheduling_policy {
                PolicyArg::Fcfs => Policy::Fcfs,
                PolicyArg::Priority => Policy::Priority,
            },
            preemption_mode: match self.preemption_mode {
                PreemptionArg::Auto => PreemptionMode::Auto,
                PreemptionArg::Swap => PreemptionMode::Swap,
                PreemptionArg::Recompute => PreemptionMode::Recompute,
            },
            deterministic: self.deterministic,
            seed: self.seed.unwrap_or(defaults.seed),
            max_num_queued_reqs: self.max_num_queued_reqs.unwrap_or(defaults.max_num_queued_reqs),
            max_num_queued_reqs_per_key: self.max_num_queued_reqs_per_key,
        }
    }

    /// The engine's defaults suit a CPU; a device that works on many things at once wants larger steps.
    pub fn fit_to(&self, device: &DeviceInfo, config: &mut EngineConfig) {
        if device.attention_units > 0 {
            (config.max_num_seqs, config.max_num_batched_tokens) =
                gpu_steps(self.max_num_seqs, self.max_num_batched_tokens);
        }
    }

    /// `--dtype float32`.
    pub fn precision(&self) -> Precision {
        match parse_dtype(&self.dtype) {
            Ok(Some(WeightFormat::F32)) => Precision::Full,
            _ => Precision::Fast,
        }
    }

    fn default_kv_dtype(&self) -> KvDtype {
        match self.precision() {
            Precision::Fast => EngineConfig::default().kv_dtype,
            Precision::Full => KvDtype::F32,
        }
    }

    pub fn is_mock(&self) -> bool {
        self.load_format == LoadFormatArg::Mock
    }

    /// How the files at `path` are to be opened.
    pub fn load_format(&self, path: &Path) -> LoadFormat {
        match self.load_format {
            // Nothing is read: a GGUF file is only mapped, and beside a configuration dummy weights are never made.
            LoadFormatArg::Mock if path.is_dir() || path.extension().is_some_and(|end| end == "json") => {
                LoadFormat::Dummy
            }
            LoadFormatArg::Auto | LoadFormatArg::Mock => LoadFormat::Auto,
            LoadFormatArg::Gguf => LoadFormat::Gguf,
            LoadFormatArg::Safetensors => LoadFormat::Safetensors,
            LoadFormatArg::Dummy => LoadFormat::Dummy,
        }
    }
}

/// The storage of keys and values that a flag means.
pub fn kv_dtype(arg: KvDtypeArg, default: KvDtype) -> KvDtype {
    match arg {
        KvDtypeArg::Auto => default,
        KvDtypeArg::F32 => KvDtype::F32,
        KvDtypeArg::F16 => KvDtype::F16,
        KvDtypeArg::Bf16 => KvDtype::BF16,
        KvDtypeArg::Fp8 => KvDtype::F8E4M3,
        KvDtypeArg::Int8 => KvDtype::Int8,
    }
}

/// `--dtype`: a weight format by its own or vLLM's name; `None` for `auto`.
pub fn parse_dtype(text: &str) -> Result<Option<WeightFormat>> {
    let name = match text.to_ascii_lowercase().as_str() {
        "auto" => return Ok(None),
        "float32" | "float" => "f32".to_owned(),
        "float16" | "half" | "fp16" => "f16".to_owned(),
        "bfloat16" => "bf16".to_owned(),
        other => other.to_owned(),
    };
    let found = WeightFormat::ALL.into_iter().find(|format| format.to_string().eq_ignore_ascii_case(&name));
    found.map(Some).ok_or_else(|| {
        let all: Vec<String> =
            WeightFormat::ALL.iter().map(|format| format.to_string().to_lowercase()).collect();
        hinted(format!("--dtype {text:?} is not known"), format!("it can be auto, {}", all.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn resolve(flags: &[&str]) -> EngineConfig {
        Line::parse_from(std::iter::once(&"test").chain(flags)).engine.resolve()
    }

    #[test]
    fn no_flags_are_the_engines_defaults() {
        assert_eq!(resolve(&[]), EngineConfig::default());
    }

    #[test]
    fn flags_reach_the_configuration() {
        let config = resolve(&[
            "--max-num-seqs=7",
            "--max-num-batched-tokens=99",
            "--max-model-len=1000",
            "--block-size=8",
            "--kv-cache-dtype=bf16",
            "--kv-cache-memory=2GiB",
            "--swap-space=0.5",
            "--gpu-memory-utilization=0.5",
            "--no-enable-prefix-caching",
            "--prefix-cache-eviction=lfu",
            "--scheduling-policy=priority",
            "--preemption-mode=swap",
            "--deterministic",
            "--seed=42",
        ]);
        let expect = EngineConfig {
            max_num_seqs: 7,
            max_num_batched_tokens: 99,
            max_model_len: Some(1000),
            block_size: Some(8),
            kv_dtype: KvDtype::BF16,
            kv_cache_memory: Some(2 << 30),
            swap_space: 1 << 29,
            gpu_memory_utilization: 0.5,
            enable_prefix_caching: false,
            eviction: EvictionPolicy::Lfu,
            policy: Policy::Priority,
            preemption_mode: PreemptionMode::Swap,
            deterministic: true,
            seed: 42,
            ..EngineConfig::default()
        };
        assert_eq!(config, expect);
    }

    #[test]
    fn the_last_of_two_contradicting_flags_counts() {
        assert!(!resolve(&["--enable-prefix-caching", "--no-enable-prefix-caching"]).enable_prefix_caching);
        assert!(resolve(&["--no-enable-prefix-caching", "--enable-prefix-caching"]).enable_prefix_caching);
        let relays = |flags: &[&str]| resolve(flags).enable_relay_attention;
        assert!(!relays(&["--enable-relay-attention", "--no-enable-relay-attention"]));
        assert!(relays(&["--no-enable-relay-attention", "--enable-relay-attention"]));
        assert!(!relays(&["--disable-cascade-attn"]) && relays(&["--enable-relay-attention"]));
    }

    #[test]
    fn devices_are_parsed() {
        assert_eq!(parse_device("auto"), Ok(DeviceArg::Auto));
        assert_eq!(parse_device("cpu"), Ok(DeviceArg::Cpu));
        assert_eq!(parse_device("cuda"), Ok(DeviceArg::Cuda(0)));
        assert_eq!(parse_device("cuda:3"), Ok(DeviceArg::Cuda(3)));
        assert_eq!(parse_device("cuda:x").unwrap_err(), "cuda:x: not the number of a GPU");
        assert_eq!(parse_device("tpu").unwrap_err(), "use auto, cpu, cuda or cuda:N");
    }

    #[test]
    fn dtypes_have_several_names() {
        assert_eq!(parse_dtype("auto").unwrap(), None);
        assert_eq!(parse_dtype("bfloat16").unwrap(), Some(WeightFormat::BF16));
        assert_eq!(parse_dtype("q4_k").unwrap(), Some(WeightFormat::Q4_K));
        assert!(parse_dtype("int3").is_err());
    }
}
