//! The flags of `baton bench`, under vLLM's names wherever the thing is the same.

use std::path::PathBuf;

use baton_bench::{
    DatasetKind, DatasetOptions, PrefixRepetitionOptions, RandomOptions, TokenRange, TraceOptions,
};
use baton_core::SamplingParams;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Map, Value, json};

use crate::args::KvDtypeArg;
use crate::commands::bench::relay::RelayArgs;
use crate::commands::bench::soak::SoakArgs;
use crate::engine_args::EngineArgs;

pub const BENCH_EXAMPLES: &str = "\
Examples:
  baton bench latency --batch-size 1 --input-len 32 --output-len 128
  baton bench throughput --num-prompts 64 --input-len 256 --output-len 64
  baton bench serve --max-concurrency 16 --num-prompts 200        against a server on port 8000
  baton bench serve --dataset-name trace --dataset-path trace.jsonl --trace-speed 10
  baton bench soak --clients 200 --duration 120                   badly behaved clients, and a verdict
  baton bench relay --row 32x4096+64/128                          a shared prefix, relay attention off and on
  baton bench relay --plot relay.html                             everything about relay attention, with charts
  baton bench report results/*.json --output report.html";

/// Token ids below this exist in nearly every vocabulary.
const COMMON_VOCABULARY: usize = 10_000;

#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Latency of one batch from prompt to last token, in this process
    Latency(Box<LatencyArgs>),
    /// Throughput on a whole workload, in this process
    Throughput(Box<ThroughputArgs>),
    /// Latency and throughput of a server over HTTP: Baton or any other with OpenAI's API
    Serve(Box<BenchServeArgs>),
    /// Many badly behaved clients at once: does the server stay healthy and lose nothing?
    Soak(Box<SoakArgs>),
    /// Time from starting a server until it is ready
    Startup(Box<StartupArgs>),
    /// Speed of the device's kernels for each weight format, and of its memory
    Kernels(Box<KernelsArgs>),
    /// What relay attention is worth: shared prefixes read once, only cached, or neither
    Relay(Box<RelayArgs>),
    /// Turn result files into a page with charts, and a picture
    Report(ReportArgs),
}

#[derive(Debug, Args)]
pub struct LatencyArgs {
    /// File, directory or name; without one, the default model
    pub model: Option<String>,
    /// Tokens per prompt
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub input_len: usize,
    /// Tokens per answer
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub output_len: usize,
    /// Prompts per batch
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub batch_size: usize,
    /// Warm-up batches, which are not measured
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub num_iters_warmup: usize,
    /// Batches that are measured
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub num_iters: usize,
    /// Continuations per prompt
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub n: u32,
    #[command(flatten)]
    pub sampling: BenchSampling,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
pub struct ThroughputArgs {
    /// File, directory or name; without one, the default model
    pub model: Option<String>,
    #[command(flatten)]
    pub dataset: DatasetArgs,
    #[command(flatten)]
    pub sampling: BenchSampling,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
pub struct StartupArgs {
    /// File, directory or name; without one, the default model
    pub model: Option<String>,
    /// Cold starts: the model's file not in the page cache, and no kernels of earlier starts
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub num_iters_cold: usize,
    /// Warm starts
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub num_iters_warm: usize,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
pub struct KernelsArgs {
    /// Weight formats: f32, f16, bf16, q8_0, q4_k, …
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "q4_1,q8_0,q4_k,q6_k,bf16")]
    pub formats: Vec<String>,
    /// Storage of cached keys and values that attention is measured with
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "auto")]
    pub kv_cache_dtypes: Vec<KvDtypeArg>,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Result files of `baton bench` or `vllm bench serve`
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// The page; a picture of the same name with .png is written beside it
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    pub output: PathBuf,
    /// Headline of the page
    #[arg(long, value_name = "TEXT", default_value = "Benchmark report")]
    pub title: String,
}

/// Where results go besides the console.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Write the result to this file
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
    /// Show no progress bar
    #[arg(long, alias = "disable-tqdm")]
    pub no_progress: bool,
}

#[derive(Debug, Args)]
pub struct BenchServeArgs {
    #[command(flatten)]
    pub server: TargetArgs,
    #[command(flatten)]
    pub traffic: TrafficArgs,
    #[command(flatten)]
    pub dataset: DatasetArgs,
    #[command(flatten)]
    pub sampling: BenchSampling,
    #[command(flatten)]
    pub result: ResultArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    /// Seed of all random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// /v1/completions
    #[value(alias = "vllm")]
    Openai,
    /// /v1/chat/completions
    OpenaiChat,
}

/// Where a server is, and what lets one in.
#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct AddressArgs {
    /// Address of the server, instead of --host and --port
    #[arg(long, value_name = "URL")]
    pub base_url: Option<String>,
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,
    /// Key for the server
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// More headers (repeatable)
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = parse_pair)]
    pub header: Vec<(String, String)>,
}

impl AddressArgs {
    /// Without the version that clients of OpenAI write into the address: the routes name it again.
    pub fn base_url(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let url = self.base_url.clone().unwrap_or_else(|| format!("http://{host}:{}", self.port));
        url.trim_end_matches('/').trim_end_matches("/v1").to_owned()
    }

    pub fn headers(&self) -> Vec<(String, String)> {
        let key = self.api_key.iter().map(|key| ("authorization".to_owned(), format!("Bearer {key}")));
        self.header.iter().cloned().chain(key).collect()
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct TargetArgs {
    /// Which API to use [default: what --endpoint implies]
    #[arg(long, value_name = "API", alias = "endpoint-type")]
    pub backend: Option<BackendArg>,
    #[command(flatten)]
    pub address: AddressArgs,
    /// Route of the requests [default: the API's]
    #[arg(long, value_name = "PATH")]
    pub endpoint: Option<String>,
    /// Name of the model [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Model whose tokenizer counts the tokens of texts: a file, a directory or a name
    #[arg(long, value_name = "MODEL")]
    pub tokenizer: Option<String>,
    /// More fields of every request, as a JSON object
    #[arg(long, value_name = "JSON", value_parser = parse_object)]
    pub extra_body: Option<Map<String, Value>>,
    /// Send synthetic prompts as text, for servers that do not accept token ids
    #[arg(long)]
    pub text_prompts: bool,
    /// How long to wait for the server to come up
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub ready_check_timeout_sec: u32,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Traffic")]
pub struct TrafficArgs {
    /// Requests per second; inf sends all at once
    #[arg(long, value_name = "RPS", default_value_t = f64::INFINITY)]
    pub request_rate: f64,
    /// 1 is a Poisson process; less comes in bursts, more comes evenly
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub burstiness: f64,
    /// The most requests in flight
    #[arg(long, value_name = "N")]
    pub max_concurrency: Option<usize>,
    /// A rate that grows over the run
    #[arg(long, value_name = "HOW", requires_all = ["ramp_up_start_rps", "ramp_up_end_rps"])]
    pub ramp_up_strategy: Option<RampUpArg>,
    #[arg(long, value_name = "RPS")]
    pub ramp_up_start_rps: Option<f64>,
    #[arg(long, value_name = "RPS")]
    pub ramp_up_end_rps: Option<f64>,
    /// Requests before the run that are not counted
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub num_warmups: usize,
    /// Generate the full length of every answer
    #[arg(long)]
    pub ignore_eos: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RampUpArg {
    Linear,
    Exponential,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Result")]
pub struct ResultArgs {
    /// Limits that make a request good: ttft:MS, tpot:MS, e2el:MS
    #[arg(long, value_name = "KEY:MS", num_args = 1..)]
    pub goodput: Vec<String>,
    /// Which latencies are shown: ttft, tpot, itl, e2el
    #[arg(long, value_name = "LIST", default_value = "ttft,tpot,itl,e2el")]
    pub percentile_metrics: String,
    /// Which percentiles of them
    #[arg(long, value_name = "LIST", default_value = "99")]
    pub metric_percentiles: String,
    /// Write the result to a file in --result-dir
    #[arg(long)]
    pub save_result: bool,
    /// Include every measurement of each request in the result
    #[arg(long)]
    pub save_detailed: bool,
    #[arg(long, value_name = "DIR")]
    pub result_dir: Option<PathBuf>,
    #[arg(long, value_name = "NAME")]
    pub result_filename: Option<PathBuf>,
    /// Name of this series in reports
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
    /// Key and value to store with the result (repeatable)
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = parse_pair)]
    pub metadata: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DatasetArg {
    /// Random tokens of given lengths
    Random,
    /// A ShareGPT file
    Sharegpt,
    /// Random tokens behind a few shared prefixes
    #[value(name = "prefix_repetition", alias = "prefix-repetition")]
    PrefixRepetition,
    /// Lengths and times of a real service: Mooncake's JSON lines, or CSV as Azure's
    #[value(alias = "timed_trace", alias = "mooncake", alias = "azure")]
    Trace,
    /// JSON lines with "prompt" and perhaps "output_tokens"
    Custom,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Dataset")]
pub struct DatasetArgs {
    #[arg(long, value_name = "NAME", default_value = "random")]
    pub dataset_name: DatasetArg,
    /// The file of sharegpt, trace and custom
    #[arg(long, value_name = "FILE")]
    pub dataset_path: Option<PathBuf>,
    /// How many requests
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub num_prompts: usize,
    /// Keep the order of the file
    #[arg(long)]
    pub disable_shuffle: bool,
    /// Tokens per prompt, for random and prefix_repetition
    #[arg(long, value_name = "N")]
    pub input_len: Option<usize>,
    /// Tokens per answer, for all but trace
    #[arg(long, value_name = "N", alias = "sharegpt-output-len", alias = "custom-output-len")]
    pub output_len: Option<usize>,
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub random_input_len: usize,
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub random_output_len: usize,
    /// Lengths vary uniformly by up to this share
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub random_range_ratio: f64,
    /// Tokens that all prompts begin with, added to the input length
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub random_prefix_len: usize,
    /// Synthetic prompts use token ids below this
    #[arg(long, value_name = "N")]
    pub random_vocab_size: Option<usize>,
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub prefix_repetition_prefix_len: usize,
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub prefix_repetition_suffix_len: usize,
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub prefix_repetition_num_prefixes: usize,
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub prefix_repetition_output_len: usize,
    /// Play a trace faster: 2 takes half the time
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub trace_speed: f64,
    /// Make the prompts and answers of a trace shorter: 0.1 is a tenth
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub trace_length_scale: f64,
    /// Tokens per hashed block in the trace
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub trace_block_size: usize,
    /// Send a trace's requests at --request-rate instead of at its own times
    #[arg(long)]
    pub no_self_timed: bool,
}

impl DatasetArgs {
    pub fn options(&self, seed: u64) -> DatasetOptions {
        let kind = match self.dataset_name {
            DatasetArg::Random => DatasetKind::Random,
            DatasetArg::Sharegpt => DatasetKind::ShareGpt,
            DatasetArg::PrefixRepetition => DatasetKind::PrefixRepetition,
            DatasetArg::Trace => DatasetKind::Trace,
            DatasetArg::Custom => DatasetKind::Custom,
        };
        let suffix_len = self.prefix_repetition_suffix_len;
        let of_input = |len: usize| len.saturating_sub(self.prefix_repetition_prefix_len);
        DatasetOptions {
            kind,
            path: self.dataset_path.clone(),
            num_prompts: self.num_prompts,
            seed,
            shuffle: !self.disable_shuffle,
            output_len: self.output_len,
            random: RandomOptions {
                input_len: self.input_len.unwrap_or(self.random_input_len),
                output_len: self.output_len.unwrap_or(self.random_output_len),
                range_ratio: self.random_range_ratio,
                prefix_len: self.random_prefix_len,
            },
            prefix_repetition: PrefixRepetitionOptions {
                prefix_len: self.prefix_repetition_prefix_len,
                suffix_len: self.input_len.map_or(suffix_len, of_input),
                num_prefixes: self.prefix_repetition_num_prefixes,
                output_len: self.output_len.unwrap_or(self.prefix_repetition_output_len),
            },
            trace: TraceOptions {
                block_len: self.trace_block_size,
                speed: self.trace_speed,
                length_scale: self.trace_length_scale,
            },
        }
    }

    /// Ids of made-up tokens; `vocab_size` where the model is known.
    pub fn tokens(&self, vocab_size: Option<usize>) -> TokenRange {
        let known = vocab_size.unwrap_or(COMMON_VOCABULARY).min(COMMON_VOCABULARY);
        TokenRange::of_vocabulary(self.random_vocab_size.unwrap_or(known))
    }
}

/// What is sampled; greedy unless asked otherwise.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct BenchSampling {
    /// 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    #[arg(long, value_name = "FACTOR")]
    pub repetition_penalty: Option<f32>,
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub presence_penalty: Option<f32>,
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub frequency_penalty: Option<f32>,
    /// Ask for the log-probabilities of this many tokens
    #[arg(long, value_name = "N")]
    pub logprobs: Option<u32>,
}

impl BenchSampling {
    pub fn params(&self, seed: Option<u64>) -> SamplingParams {
        let defaults = SamplingParams::default();
        SamplingParams {
            temperature: self.temperature,
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            logprobs: self.logprobs,
            seed,
            ..defaults
        }
    }

    /// The fields that a request over HTTP carries: the temperature and what was asked for.
    pub fn fields(&self, chat: bool) -> Map<String, Value> {
        let mut fields = Map::new();
        let mut put = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                fields.insert(name.to_owned(), value);
            }
        };
        put("temperature", Some(number(self.temperature)));
        put("top_p", self.top_p.map(number));
        put("top_k", self.top_k.map(|top| json!(top)));
        put("min_p", self.min_p.map(number));
        put("repetition_penalty", self.repetition_penalty.map(number));
        put("presence_penalty", self.presence_penalty.map(number));
        put("frequency_penalty", self.frequency_penalty.map(number));
        if chat {
            put("logprobs", self.logprobs.map(|_| json!(true)));
            put("top_logprobs", self.logprobs.map(|top| json!(top)));
        } else {
            put("logprobs", self.logprobs.map(|top| json!(top)));
        }
        fields
    }
}

/// As it was typed: 0.9, not 0.8999999761581421.
fn number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, |value| json!(value))
}

fn parse_pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

fn parse_object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|cause| format!("{text:?} is not a JSON object: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        serve: BenchServeArgs,
    }

    fn parse(flags: &[&str]) -> BenchServeArgs {
        Line::parse_from(std::iter::once(&"test").chain(flags)).serve
    }

    #[test]
    fn lengths_reach_the_dataset() {
        let options =
            parse(&["--input-len=7", "--output-len=9", "--random-range-ratio=0.5"]).dataset.options(3);
        assert_eq!((options.random.input_len, options.random.output_len, options.seed), (7, 9, 3));
        assert_eq!(options.random.range_ratio, 0.5);
        let options = parse(&["--dataset-name=prefix_repetition", "--input-len=300"]).dataset.options(0);
        assert_eq!((options.kind, options.prefix_repetition.suffix_len), (DatasetKind::PrefixRepetition, 44));
        let plain = parse(&[]).dataset.options(0);
        assert_eq!((plain.random.input_len, plain.random.output_len), (1024, 128));
    }

    #[test]
    fn requests_are_greedy_unless_asked() {
        assert_eq!(Value::Object(parse(&[]).sampling.fields(false)), json!({"temperature": 0.0}));
        let sampling = parse(&["--temperature=0.9", "--top-k=5", "--logprobs=2"]).sampling;
        assert_eq!(
            Value::Object(sampling.fields(true)),
            json!({"temperature": 0.9, "top_k": 5, "logprobs": true, "top_logprobs": 2})
        );
        assert_eq!(sampling.params(Some(1)).temperature, 0.9);
    }

    #[test]
    fn pairs_and_objects_are_read() {
        let args = parse(&["--header", "x-a=1", "x-b=2=3", "--goodput", "ttft:200", "tpot:50", "--seed=5"]);
        assert_eq!(args.server.address.header[1], ("x-b".to_owned(), "2=3".to_owned()));
        assert_eq!((args.result.goodput.len(), args.seed), (2, 5));
        assert!(parse_pair("x").is_err() && parse_object("[1]").is_err());
    }
}
