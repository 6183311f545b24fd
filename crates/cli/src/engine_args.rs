//! The flags that every command with an engine shares. They carry vLLM's names wherever the thing is the same.
//!
//! What is not given stays `None` here and gets the engine's or the model's own default in [`EngineArgs::resolve`],
//! the one place where raw flags become a ready configuration.

use anyhow::Result;
use baton::{Device, GenerationConfig, OpenOptions};
use baton_backend::{KvDtype, Precision, WeightFormat};
use baton_engine::{EngineConfig, SpeculativeConfig};
use baton_kv::EvictionPolicy;
use baton_model::LoadFormat;
use baton_sched::{Policy, PreemptionMode};
use clap::{Args, ValueEnum};

use crate::args::{KvDtypeArg, parse_share};
use crate::errors::hinted;
use crate::session;
use crate::size::{parse_count, parse_size, parse_size_gib};
use crate::store_args::StoreArgs;

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// See `--kv-events-config` of `baton serve`.
    #[arg(skip)]
    pub kv_event_capacity: usize,
    /// What to run on: auto (the first GPU, if there is one), cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = parse_device)]
    pub device: Device,
    /// Threads of the CPU backend [default: one per physical core]
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// How the weights are read
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub load_format: LoadFormatArg,
    /// Model, directory or tokenizer.json whose tokenizer is used instead of the model's own, or beside dummy weights
    #[arg(long, value_name = "MODEL")]
    pub tokenizer: Option<String>,
    /// Chat template instead of the model's own: a Jinja file, or the template itself
    #[arg(long, value_name = "FILE|TEXT", alias = "chat-template-file", allow_hyphen_values = true)]
    pub chat_template: Option<String>,
    /// Sampling defaults: auto (the model's own, else the catalogue's), vllm (neutral: temperature 1), or the path of a
    /// generation_config.json
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    pub generation_config: GenerationConfig,
    /// Sampling defaults that take the place of others, for example '{"temperature": 0.3}'
    #[arg(long, value_name = "JSON")]
    pub override_generation_config: Option<String>,
    /// Branch, tag or commit of a model on the hub [default: main]
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,
    /// float32 computes without rounding, so that every device gives the same tokens, but slowly; otherwise weights are used
    /// as they are stored, whatever type is given here
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    pub dtype: String,
    /// Round the weights of an unquantised checkpoint as they are loaded: fp8 (linear layers, one scale per row), q8 or q4. The
    /// method of a quantised one (awq, gptq, compressed-tensors, ...) is found without it
    #[arg(short, long, value_name = "METHOD")]
    pub quantization: Option<String>,
    /// The longest sequence, prompt and output together, for example 4096 or 32K; auto is what the model was made for, or
    /// less where memory does not allow it
    #[arg(
        short = 'c',
        long,
        value_name = "N",
        default_value = "auto",
        alias = "ctx-size",
        alias = "ctx",
        allow_hyphen_values = true
    )]
    pub max_model_len: ModelLen,
    /// Sequences in one step [default: 64, on a GPU 256]
    #[arg(long, value_name = "N", alias = "parallel")]
    pub max_num_seqs: Option<usize>,
    /// Tokens in one step; long prompts are cut into chunks of this [default: 512, on a GPU 8192]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub max_num_batched_tokens: Option<usize>,
    /// Requests that may wait for their first step; more get a 429
    #[arg(long, value_name = "N")]
    pub max_num_queued_reqs: Option<usize>,
    /// The same for the requests of one API key [default: half of all where there are several keys]
    #[arg(long, value_name = "N")]
    pub max_num_queued_reqs_per_key: Option<usize>,
    /// By arrival (fcfs), or the lowest `priority` first. Within that, API keys take turns, by tokens
    #[arg(long, value_name = "POLICY", default_value = "fcfs")]
    pub scheduling_policy: PolicyArg,
    /// How many times longer a step may take for one API key because of the requests of others; 0 is no limit [default: 2]
    #[arg(long, value_name = "RATIO")]
    pub max_step_slowdown: Option<f64>,
    /// What happens to a running request when blocks run out
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub preemption_mode: PreemptionArg,
    /// Seed of all random numbers: the same seed gives the same output [default: random]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Tokens of a request never depend on the other requests in the batch
    #[arg(long)]
    pub deterministic: bool,
    /// Guess next tokens and check several in one step, as vLLM's JSON says, for example '{"method": "suffix"}' or
    /// '{"method": "draft_model", "model": "small.gguf", "num_speculative_tokens": 4}'
    #[arg(long, value_name = "JSON", value_parser = parse_speculative)]
    pub speculative_config: Option<SpeculativeConfig>,
    /// Do not record steps for replay (GPU only; accepted everywhere)
    #[arg(long)]
    pub enforce_eager: bool,
    /// With --load-format mock: how long a step takes, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 0.0, hide_short_help = true, value_parser = parse_step_ms)]
    pub mock_step_ms: f64,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    pub stores: StoreArgs,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "KV cache")]
pub struct CacheArgs {
    /// Storage of cached keys and values; int8 takes about half of f16 and is for the CPU
    #[arg(long, value_name = "TYPE", default_value = "auto", alias = "cache-type-k")]
    pub kv_cache_dtype: KvDtypeArg,
    /// Memory of the KV cache, for example 2GiB [default: what weights and workspace leave of the utilisation; on a CPU a
    /// quarter of what is free]
    #[arg(long, value_name = "SIZE", alias = "kv-cache-memory-bytes", value_parser = parse_size)]
    pub kv_cache_memory: Option<u64>,
    /// Host memory for preempted sequences and for prefixes that leave the device; a bare number is GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size_gib, alias = "kv-offloading-size")]
    pub swap_space: Option<u64>,
    /// Tokens per KV block [default: chosen for the device]
    #[arg(long, value_name = "N")]
    pub block_size: Option<usize>,
    /// The share of the device's memory that Baton may use
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub gpu_memory_utilization: Option<f64>,
    /// Reuse the KV of prompts that share a prefix (the default)
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    pub enable_prefix_caching: bool,
    /// Compute every prompt from scratch
    #[arg(long, overrides_with = "enable_prefix_caching", alias = "no-cache-prompt")]
    pub no_enable_prefix_caching: bool,
    /// Read the KV of a prefix that requests in a batch share once for all of them (the default)
    #[arg(long, overrides_with = "no_enable_relay_attention")]
    pub enable_relay_attention: bool,
    /// Let each request read the KV of its whole prompt, even where others in the batch share its prefix
    #[arg(long, alias = "disable-cascade-attn", overrides_with = "enable_relay_attention")]
    pub no_enable_relay_attention: bool,
    /// Which cached blocks are evicted first
    #[arg(long, value_name = "POLICY", default_value = "lru")]
    pub prefix_cache_eviction: EvictionArg,
}

/// `--max-model-len`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelLen(pub Option<usize>);

impl std::str::FromStr for ModelLen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" | "-1" => Ok(Self(None)),
            _ => parse_count(text).map(|count| Self(Some(count))),
        }
    }
}

fn parse_device(text: &str) -> Result<Device, String> {
    let number = |text: &str| text.parse().map_err(|_| format!("cuda:{text}: not the number of a GPU"));
    match text.split_once(':') {
        None if text == "auto" => Ok(Device::Auto),
        // llama.cpp has `none` and `CUDA0`.
        None if ["cpu", "none"].contains(&text) => Ok(Device::Cpu),
        None if text == "cuda" => Ok(Device::Cuda(0)),
        None if text.starts_with("CUDA") => number(&text[4..]).map(Device::Cuda),
        Some(("cuda", ordinal)) => number(ordinal).map(Device::Cuda),
        _ => Err("use auto, cpu, cuda or cuda:N".to_owned()),
    }
}

pub(crate) fn parse_speculative(text: &str) -> Result<SpeculativeConfig, String> {
    serde_json::from_str(text).map_err(|cause| {
        format!("{cause}: write a JSON object with a \"method\" (ngram, suffix, draft_model), see docs/speculation.md")
    })
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

impl EngineArgs {
    /// The ready configuration: every flag that was given, over the engine's own defaults.
    pub fn resolve(&self) -> EngineConfig {
        let defaults = EngineConfig::default();
        let cache = &self.cache;
        EngineConfig {
            max_num_seqs: self.max_num_seqs.unwrap_or(defaults.max_num_seqs),
            max_num_batched_tokens: self.max_num_batched_tokens.unwrap_or(defaults.max_num_batched_tokens),
            max_model_len: self.max_model_len.0,
            block_size: cache.block_size,
            kv_event_capacity: self.kv_event_capacity,
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
            seed: self.seed.unwrap_or_else(random_seed),
            max_num_queued_reqs: self.max_num_queued_reqs.unwrap_or(defaults.max_num_queued_reqs),
            max_num_queued_reqs_per_key: self.max_num_queued_reqs_per_key,
            max_step_slowdown: self.max_step_slowdown.unwrap_or(defaults.max_step_slowdown),
            speculative: self.speculative_config.clone(),
            ..defaults
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

    /// How the files are to be opened; a mock reads none of them.
    pub fn load_format(&self) -> LoadFormat {
        match self.load_format {
            LoadFormatArg::Auto | LoadFormatArg::Mock => LoadFormat::Auto,
            LoadFormatArg::Gguf => LoadFormat::Gguf,
            LoadFormatArg::Safetensors => LoadFormat::Safetensors,
            LoadFormatArg::Dummy => LoadFormat::Dummy,
        }
    }

    /// Guesses of a given acceptance make outputs that mean nothing: they are for `baton bench`.
    pub fn refuse_synthetic(&self) -> Result<()> {
        if self.speculative_config.as_ref().is_some_and(SpeculativeConfig::is_forced) {
            let what = "the method synthetic, and an acceptance, are for measurements: outputs mean nothing";
            return Err(hinted(what, "use ngram or suffix, or `baton bench latency`"));
        }
        Ok(())
    }

    /// What the library needs to open a model.
    pub fn options(&self) -> Result<OpenOptions> {
        session::options(self)
    }
}

/// The standard library seeds its hash maps from the system; a hasher without input gives that seed away.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
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
        let seed = EngineConfig::default().seed;
        assert_eq!(EngineConfig { seed, ..resolve(&[]) }, EngineConfig::default());
        assert_ne!(resolve(&[]).seed, resolve(&[]).seed, "unseeded sampling is random");
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
    fn speculation_is_read_as_vllm_writes_it() {
        let config =
            resolve(&["--speculative-config", r#"{"method": "ngram", "num_speculative_tokens": 3}"#]);
        assert_eq!(config.speculative.expect("given").num_speculative_tokens, Some(3));
        let error =
            Line::try_parse_from(["test", "--speculative-config", "{\"k\": 1}"]).unwrap_err().to_string();
        assert!(error.contains("unknown field `k`"), "{error}");
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
    fn lengths_are_read_as_people_write_them() {
        for (text, expect) in [
            ("auto", None),
            ("-1", None),
            ("4096", Some(4096)),
            ("4k", Some(4000)),
            ("128K", Some(131_072)),
            ("1.5k", Some(1500)),
        ] {
            assert_eq!(resolve(&["--max-model-len", text]).max_model_len, expect, "{text}");
        }
        assert_eq!(resolve(&["-c", "2K"]).max_model_len, Some(2048));
        assert!("4x".parse::<ModelLen>().is_err() && "1.0001k".parse::<ModelLen>().is_err());
    }

    #[test]
    fn devices_are_parsed() {
        assert_eq!(parse_device("auto"), Ok(Device::Auto));
        assert_eq!(parse_device("cpu"), Ok(Device::Cpu));
        assert_eq!(parse_device("cuda"), Ok(Device::Cuda(0)));
        assert_eq!(parse_device("cuda:3"), Ok(Device::Cuda(3)));
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
