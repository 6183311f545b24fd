//! `baton bench soak`: badly behaved clients, and a verdict.

use std::io::Write;
use std::time::Duration;

use anyhow::Result;
use baton_bench::{Attack, SoakOptions, StormOptions};
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
    /// A second key, whose clients attack: --api-key is then that of one well-behaved client, whose tokens are timed
    #[arg(long, value_name = "KEY")]
    pub attack_api_key: Option<String>,
    /// Attackers at a time
    #[arg(long, value_name = "N", default_value_t = 24)]
    pub attackers: usize,
    /// What they do: hard-schema, large-schema, tiny-messages, declared-body, flood, penalties; all unless given
    #[arg(long, value_name = "ATTACK", value_delimiter = ',', requires = "attack_api_key")]
    pub attacks: Vec<Attack>,
    /// Seconds that the well-behaved client is alone first
    #[arg(long, value_name = "SECONDS", default_value_t = 15)]
    pub calm: u64,
    /// Fail if the 99th percentile between its tokens is more than so many times what it is alone
    #[arg(long, value_name = "RATIO", default_value_t = 3.0)]
    pub max_token_ratio: f64,
    /// Fail if the server ever holds more memory than this, in MiB
    #[arg(long, value_name = "MIB")]
    pub max_resident_mib: Option<f64>,
    /// Start of all random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub output: OutputArgs,
}

pub fn run(args: &SoakArgs, out: &mut dyn Write) -> Result<()> {
    let base_url = args.address.base_url();
    if let Some(key) = &args.attack_api_key {
        return storm(args, key, out);
    }
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

fn storm(args: &SoakArgs, attack_key: &str, out: &mut dyn Write) -> Result<()> {
    let base_url = args.address.base_url();
    let options = StormOptions {
        base_url: base_url.clone(),
        headers: args.address.headers(),
        attack_headers: vec![("authorization".to_owned(), format!("Bearer {attack_key}"))],
        num_attackers: args.attackers,
        attacks: if args.attacks.is_empty() { Attack::ALL.to_vec() } else { args.attacks.clone() },
        calm: Duration::from_secs(args.calm),
        duration: Duration::from_secs(args.duration),
        pid: args.pid,
        max_token_ratio: args.max_token_ratio,
        max_resident_mib: args.max_resident_mib,
        seed: args.seed,
    };
    let progress = bar(&args.output, (args.calm + args.duration) as usize);
    let result = baton_bench::storm(options, &progress)
        .with_hint(|| format!("is a server running at {base_url}? try: baton serve"))?;
    write!(out, "{}", result.summary())?;
    write_result(&args.output, result.to_json().as_object().expect("a result is an object"))?;
    if result.passed() { Ok(()) } else { Err(hinted("the server did not pass", "the reasons are above")) }
}
