//! The flags of `baton route`, under the names of vLLM's router wherever the thing is the same.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use baton_router::{Policy, WorkerSpec};
use clap::Args;

use crate::serve_args::{LogFormat, LogLevel, parse_host, parse_seconds};
use crate::size::parse_size;

pub const ROUTE_EXAMPLES: &str = "\
Examples:
  baton route --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000
  baton route --workers-file workers.txt --policy longest_prefix     the file is read again when it changes
  baton route --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000
  curl http://127.0.0.1:8080/workers";

#[derive(Debug, Args)]
pub struct RouteArgs {
    /// Workers: http://host:port, or http://host:port,events=tcp://host:5557 for vLLM's KV events
    #[arg(long, value_name = "URL", num_args = 1..)]
    pub worker_urls: Vec<WorkerSpec>,
    /// File of workers, one URL per line or JSON; read again when it changes
    #[arg(long, value_name = "FILE")]
    pub workers_file: Option<PathBuf>,
    /// Workers that compute prompts and hand their KV over (repeatable)
    #[arg(long, value_name = "URL", num_args = 1.., requires = "decode")]
    pub prefill: Vec<WorkerSpec>,
    /// Workers that decode what prefill workers have computed (repeatable)
    #[arg(long, value_name = "URL", num_args = 1.., requires = "prefill")]
    pub decode: Vec<WorkerSpec>,
    /// round_robin, least_load, session, prefix_hash or longest_prefix
    #[arg(long, value_name = "NAME", default_value = "prefix_hash")]
    pub policy: Policy,
    #[command(flatten)]
    pub placing: PlacingArgs,
    #[command(flatten)]
    pub listen: RouteListenArgs,
    #[command(flatten)]
    pub health: HealthArgs,
    #[command(flatten)]
    pub log: RouteLogArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Placing")]
pub struct PlacingArgs {
    /// Header that names the session [default: the body's user field]
    #[arg(long, value_name = "NAME", default_value = "x-session-id")]
    pub session_header: String,
    /// Bytes at the beginning of a prompt that prefix_hash looks at
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub prefix_bytes: u32,
    /// How much busier than the average a worker may be and still get what it has cached
    #[arg(long, value_name = "FACTOR", default_value_t = 1.2, value_parser = parse_factor)]
    pub load_factor: f64,
    /// Cached blocks of all workers that are remembered
    #[arg(long, value_name = "N", default_value_t = 4 << 20)]
    pub max_indexed_blocks: usize,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Router")]
pub struct RouteListenArgs {
    /// Address to listen on; 0.0.0.0 for every machine that can reach this one
    #[arg(long, value_name = "IP", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), value_parser = parse_host)]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    pub port: u16,
    /// Key for the router's own questions to workers; clients' keys are passed through
    #[arg(long, value_name = "KEY", env = "BATON_WORKER_API_KEY", hide_env_values = true)]
    pub worker_api_key: Option<String>,
    /// Key for /metrics and /workers
    #[arg(long, value_name = "KEY", env = "BATON_ROUTER_API_KEY", hide_env_values = true)]
    pub admin_api_key: Option<String>,
    /// The largest request body
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = parse_size)]
    pub max_body_size: u64,
    /// The most connections at a time; more wait
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub max_connections: usize,
    /// The most requests at a time; more are answered with 429
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub max_concurrent_requests: usize,
    /// The most requests of one worker
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub max_requests_per_worker: usize,
    /// How long requests may go on after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = parse_seconds)]
    pub shutdown_timeout: f64,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Health and retries")]
pub struct HealthArgs {
    /// Route of the workers that health checks ask for
    #[arg(long, value_name = "PATH", default_value = "/health", value_parser = parse_path)]
    pub health_path: String,
    /// Seconds between two health checks
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = parse_seconds)]
    pub health_interval: f64,
    /// How long a health check may take
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = parse_seconds)]
    pub health_timeout: f64,
    /// Failed checks in a row after which a worker gets no more requests
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub health_failures: u32,
    /// How long a connection to a worker may take
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = parse_seconds)]
    pub connect_timeout: f64,
    /// How long a worker may take to begin its answer
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, value_parser = parse_seconds)]
    pub request_timeout: f64,
    /// How long an answer may pause
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, value_parser = parse_seconds)]
    pub stream_timeout: f64,
    /// Workers that a request is tried with before its answer has begun
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub max_attempts: usize,
    /// Failures in a row that open a worker's circuit breaker
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub breaker_failures: u32,
    /// How long it stays open
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = parse_seconds)]
    pub breaker_cooldown: f64,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Logs")]
pub struct RouteLogArgs {
    /// How the log (on stderr) is written
    #[arg(long, value_name = "FORMAT", default_value = "human")]
    pub log_format: LogFormat,
    /// error, warn, info, debug, trace or off
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: LogLevel,
}

fn parse_factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if (1.0..=100.0).contains(&factor) => Ok(factor),
        _ => Err(format!("{text:?} is not a factor: write a number from 1 to 100, such as 1.2")),
    }
}

fn parse_path(text: &str) -> Result<String, String> {
    if text.starts_with('/') && text.chars().all(|c| c.is_ascii_graphic()) {
        return Ok(text.to_owned());
    }
    Err(format!("{text:?} is not a path: write for example /health"))
}
