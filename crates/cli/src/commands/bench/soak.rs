//! `baton bench soak`: badly behaved clients, and a verdict.

use std::io::Write;
use std::time::Duration;

use anyhow::Result;
use baton_bench::SoakOptions;
use clap::Args;

use super::{bar, write_result};
use crate::bench_args::{AddressArgs, OutputArgs};
use crate::errors::{WithHint, hinted};

#[derive(Debug, Args)]
pub struct SoakArgs {
    #[command(flatten)]
    pub address: AddressArgs,
    /// Clients at a time
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub clients: usize,
    /// Seconds that they go on
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    pub duration: u64,
    /// Process of the server, whose memory is then watched too (Linux)
    #[arg(long, value_name = "PID")]
    pub pid: Option<u32>,
    /// Words of the longest prompt
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub max_input: usize,
    /// Tokens of the longest answer
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub max_output: usize,
    /// Bytes of the bodies that must be refused as too large
    #[arg(long, value_name = "BYTES", default_value_t = 17 << 20)]
    pub oversized_bytes: usize,
    /// Fail if the 99th percentile of /health is above this
    #[arg(long, value_name = "MS", default_value_t = 100)]
    pub max_health_p99_ms: u64,
    /// Fail if the memory grows by more than this share from the first quarter of the run to the last
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    pub max_memory_growth: f64,
    /// Start of all random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub output: OutputArgs,
}

pub fn run(args: &SoakArgs, out: &mut dyn Write) -> Result<()> {
    let base_url = args.address.base_url();
    let options = SoakOptions {
        base_url: base_url.clone(),
        headers: args.address.headers(),
        num_clients: args.clients,
        duration: Duration::from_secs(args.duration),
        oversized_bytes: args.oversized_bytes,
        max_input: args.max_input.max(1),
        max_output: args.max_output.max(1),
        pid: args.pid,
        max_health_p99: Duration::from_millis(args.max_health_p99_ms),
        max_memory_growth: args.max_memory_growth,
        seed: args.seed,
    };
    let progress = bar(&args.output, args.duration as usize);
    let result = baton_bench::soak(options, &progress)
        .with_hint(|| format!("is a server running at {base_url}? try: baton serve"))?;
    write!(out, "{}", result.summary())?;
    write_result(&args.output, result.to_json().as_object().expect("a result is an object"))?;
    if result.passed() { Ok(()) } else { Err(hinted("the server did not pass", "the reasons are above")) }
}
