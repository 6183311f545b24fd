//! The flags of `baton serve`, under vLLM's names wherever the thing is the same.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;

use baton_events::KvEventsConfig;
use baton_serve::{OtlpEndpoint, ParserChoice};
use baton_text::{ReasoningFormat, ToolFormat};
use clap::{Args, ValueEnum};
use tracing_subscriber::filter::LevelFilter;

use crate::engine_args::EngineArgs;
use crate::graph_args::GraphServeArgs;
use crate::size::parse_size;

pub const SERVE_EXAMPLES: &str = "\
Examples:
  baton serve                                     the default model on http://127.0.0.1:8000
  baton serve model.gguf --port 9000 --served-model-name gpt-4o-mini
  baton serve --host 0.0.0.0 --api-key \"$KEY\"     for other machines, with a key
  curl http://127.0.0.1:8000/v1/models";

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// File, directory or name; without one, the default model
    pub model: Option<String>,
    #[command(flatten)]
    pub listen: ListenArgs,
    #[command(flatten)]
    pub chat_format: ChatFormatArgs,
    #[command(flatten)]
    pub models: ModelDirArgs,
    #[command(flatten)]
    pub graph: GraphServeArgs,
    #[command(flatten)]
    pub log: LogArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Models that are loaded when a request names them.
#[derive(Debug, Args)]
#[command(next_help_heading = "Several models")]
pub struct ModelDirArgs {
    /// Directory of models (.gguf files, and directories with a config.json) that requests may name; each is loaded when it is
    /// first asked for. Without MODEL, the first by name is loaded at the start and stays
    #[arg(long, value_name = "DIR", alias = "models-dir")]
    pub model_dir: Option<PathBuf>,
    /// The most models in memory at a time, the one that stays included; the one that was idle for longest is unloaded first
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..), alias = "models-max")]
    pub max_loaded_models: u16,
    /// Seconds without a request after which a model that was loaded on demand is unloaded
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, value_parser = parse_seconds)]
    pub model_idle_timeout: f64,
    /// Seconds that a request may wait for its model to load
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, value_parser = parse_seconds)]
    pub model_load_timeout: f64,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ListenArgs {
    /// Address to listen on; 0.0.0.0 for every machine that can reach this one
    #[arg(long, value_name = "IP", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), value_parser = parse_host)]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,
    /// Port of vLLM's gRPC services (vllm.Inference, vllm.Control), for Dynamo's sidecar; 0 takes a free one. Without TLS
    #[cfg(feature = "grpc")]
    #[arg(long, value_name = "PORT")]
    pub grpc_port: Option<u16>,
    /// Name of the model in the API (repeatable); without it, the name it was opened by
    #[arg(long, value_name = "NAME", num_args = 1.., alias = "alias")]
    pub served_model_name: Vec<String>,
    /// Key that requests must carry (repeatable). BATON_API_KEY may hold several, separated by commas
    #[arg(long, value_name = "KEY")]
    pub api_key: Vec<String>,
    /// TLS certificate (PEM, followed by its intermediate certificates): serves https
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile", alias = "ssl-cert-file")]
    pub ssl_certfile: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "ssl_certfile", alias = "ssl-key-file")]
    pub ssl_keyfile: Option<PathBuf>,
    /// Beginning of prompts that all keys may share in the prefix cache (repeatable): a text, or a .json list of messages
    #[arg(long, value_name = "FILE")]
    pub public_prefix: Vec<PathBuf>,
    /// System prompt that is computed before the server is ready, kept in the prefix cache for good and put before every chat
    /// that brings none (repeatable: NAME=FILE is for one --served-model-name)
    #[arg(long, value_name = "[NAME=]FILE")]
    pub system_prompt_file: Vec<PathBuf>,
    /// Keep the system prompt in the cache, but leave it to clients to send it
    #[arg(long, requires = "system_prompt_file")]
    pub no_inject_system_prompt: bool,
    /// Web pages that may call the server from a browser (repeatable; * allows all, localhost those of this machine)
    #[arg(long, value_name = "ORIGIN", num_args = 1.., alias = "cors-origins")]
    allowed_origins: Vec<String>,
    /// Host names that the server answers to besides localhost, 127.0.0.1 and [::1] (repeatable; * is every name). On
    /// loopback without keys, requests for any other name are refused
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub allowed_hosts: Vec<String>,
    /// Path under which a proxy shows the server, such as /llm; it is removed from the paths of requests
    #[arg(long, value_name = "PATH", value_parser = parse_root_path, alias = "api-prefix")]
    pub root_path: Option<String>,
    /// Write tokens in log-probabilities as token_id:ID, unless a request asks for their text
    #[arg(long)]
    pub return_tokens_as_token_ids: bool,
    /// End every stream with its usage, whether or not stream_options asks for it
    #[arg(long)]
    pub enable_force_include_usage: bool,
    /// Do not show the web console at /
    #[arg(long, alias = "no-ui", alias = "no-webui")]
    pub disable_console: bool,
    /// The largest request body
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = parse_size)]
    pub max_body_size: u64,
    /// The most objects, arrays and texts in a request body
    #[arg(long, value_name = "N", default_value_t = 1 << 18)]
    pub max_body_items: usize,
    /// Memory for all request bodies that are being read and parsed; with several keys, one may have half
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_size)]
    pub max_bodies_size: u64,
    /// The most connections at a time; past it, the oldest idle one is closed
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub max_connections: usize,
    /// The most alternatives that logprobs may ask for
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub max_logprobs: u32,
    /// The most continuations of one request: prompts times n
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub max_choices: usize,
    /// Publish KV cache events, as vLLM does: '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'. Also
    /// has publisher (zmq, or null for /kv_events alone), replay_endpoint, buffer_steps and topic
    #[arg(long, value_name = "JSON", value_parser = parse_kv_events)]
    pub kv_events_config: Option<KvEventsConfig>,
    /// How long a client may take to send a request's head, and then its body
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = parse_seconds)]
    pub read_timeout: f64,
    /// How long a client that has closed its sending side may wait for an answer that has not begun
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = parse_seconds)]
    pub half_close_timeout: f64,
    /// How long a request may wait for its schema to be compiled
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = parse_seconds)]
    pub compile_timeout: f64,
    /// How long accepted requests may take to finish after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = parse_seconds)]
    pub shutdown_timeout: f64,
    /// A step longer than this makes /health fail
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = parse_seconds)]
    pub engine_stall_timeout: f64,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Tools, reasoning and responses")]
pub struct ChatFormatArgs {
    /// How the model calls functions: auto (as its chat template shows), hermes, llama3_json, mistral, openai (gpt-oss), json or none
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = parse_parser::<ToolFormat>)]
    pub tool_call_parser: ParserChoice<ToolFormat>,
    /// How the model writes its reasoning: auto (as its chat template shows), deepseek_r1, qwen3, mistral, openai_gptoss or none
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = parse_parser::<ReasoningFormat>)]
    pub reasoning_parser: ParserChoice<ReasoningFormat>,
    /// Variables for the chat template that a request does not set: '{"enable_thinking": false}'
    #[arg(long, value_name = "JSON", value_parser = parse_template_kwargs, alias = "chat-template-kwargs")]
    pub default_chat_template_kwargs: Option<TemplateKwargs>,
    /// Accepted for vLLM's users: functions can always be called
    #[arg(long)]
    pub enable_auto_tool_choice: bool,
    /// The most responses kept for /v1/responses
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub max_stored_responses: usize,
    /// The most memory for stored responses
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_size)]
    pub max_stored_size: u64,
    /// How long responses are kept
    #[arg(long, value_name = "SECONDS", default_value_t = 3600.0, value_parser = parse_seconds)]
    pub stored_response_ttl: f64,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Logs")]
pub struct LogArgs {
    /// How the log (on stderr) is written
    #[arg(long, value_name = "FORMAT", default_value = "human")]
    pub log_format: LogFormat,
    /// error, warn, info, debug, trace or off
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: LogLevel,
    /// The most log lines that wait to be written to stderr; more are dropped and counted
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub max_queued_log_lines: u32,
    /// Send a span of every request to this OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318
    #[arg(long, value_name = "URL")]
    pub otlp_traces_endpoint: Option<OtlpEndpoint>,
    /// Write a Chrome trace of the step loop to this file (for Perfetto)
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Human,
    Json,
}

#[derive(Clone, Copy, Debug)]
pub struct LogLevel(pub LevelFilter);

impl FromStr for LogLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A number would also be taken, which nobody means.
        let known = ["error", "warn", "info", "debug", "trace", "off"].contains(&text);
        let level = known.then(|| text.parse().ok()).flatten();
        level
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not a level: write error, warn, info, debug, trace or off"))
    }
}

impl ServeArgs {
    /// Those of the flags and those of the environment.
    pub fn api_keys(&self) -> Vec<String> {
        let of_environment = std::env::var("BATON_API_KEY").unwrap_or_default();
        let of_environment = of_environment.split(',').map(str::trim).filter(|key| !key.is_empty());
        self.listen.api_key.iter().cloned().chain(of_environment.map(str::to_owned)).collect()
    }
}

impl ListenArgs {
    /// The origins, one by one or as vLLM takes them, in a list: `["*"]`.
    pub fn allowed_origins(&self) -> Vec<String> {
        let list = |text: &String| match serde_json::from_str::<Vec<String>>(text) {
            Ok(origins) => origins,
            Err(_) => vec![text.clone()],
        };
        self.allowed_origins.iter().flat_map(list).collect()
    }
}

fn parse_kv_events(text: &str) -> Result<KvEventsConfig, String> {
    let config: KvEventsConfig = serde_json::from_str(text).map_err(|cause| cause.to_string())?;
    config.check().map(|()| config)
}

/// Variables of a chat template.
#[derive(Clone, Debug, PartialEq)]
pub struct TemplateKwargs(pub serde_json::Map<String, serde_json::Value>);

fn parse_template_kwargs(text: &str) -> Result<TemplateKwargs, String> {
    serde_json::from_str(text)
        .map(TemplateKwargs)
        .map_err(|cause| format!("it must be a JSON object of variables: {cause}"))
}

fn parse_root_path(text: &str) -> Result<String, String> {
    let path = text.trim_end_matches('/');
    let sound = |c: char| c.is_ascii_alphanumeric() || "/-_.~".contains(c);
    if path.is_empty() || path.starts_with('/') && path.chars().all(sound) {
        return Ok(path.to_owned());
    }
    Err(format!("{text:?} is no path: write for example /llm"))
}

fn parse_parser<F: FromStr<Err: std::fmt::Display>>(name: &str) -> Result<ParserChoice<F>, String> {
    match name {
        "auto" => Ok(ParserChoice::Auto),
        "none" => Ok(ParserChoice::Off),
        _ => name.parse().map(ParserChoice::Fixed).map_err(|error: F::Err| error.to_string()),
    }
}

pub fn parse_host(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        _ => text
            .parse()
            .map_err(|_| format!("{text:?} is not an address: write for example 127.0.0.1 or 0.0.0.0")),
    }
}

pub fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=1e6).contains(&seconds) => Ok(seconds),
        _ => Err(format!("{text:?} is not a time in seconds: write a number from 0 to a million")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read() {
        assert_eq!(parse_host("localhost"), Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        assert_eq!(parse_host("::1"), Ok("::1".parse().unwrap()));
        assert!(parse_host("example").is_err());
        assert_eq!(parse_seconds("1.5"), Ok(1.5));
        for wrong in ["-1", "nan", "1e9", "soon"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_parser("auto"), Ok(ParserChoice::<ToolFormat>::Auto));
        assert_eq!(parse_parser("hermes"), Ok(ParserChoice::Fixed(ToolFormat::Hermes)));
        assert_eq!(parse_parser("none"), Ok(ParserChoice::<ReasoningFormat>::Off));
        assert!(parse_parser::<ReasoningFormat>("hermes").is_err_and(|error| error.contains("qwen3")));
        assert!(
            parse_template_kwargs(r#"{"enable_thinking": false}"#).is_ok_and(|kwargs| kwargs.0.len() == 1)
        );
        assert!(parse_template_kwargs("[1]").is_err_and(|error| error.contains("JSON object")));
        assert!("info".parse::<LogLevel>().is_ok());
        assert_eq!(parse_root_path("/llm/"), Ok("/llm".to_owned()));
        assert!(parse_root_path("llm").is_err() && parse_root_path("/{x}").is_err());
        assert!("loud".parse::<LogLevel>().is_err());
    }
}
