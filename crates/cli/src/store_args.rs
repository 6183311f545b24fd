//! The flags of KV stores: disks and servers that keep KV beyond the process.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use baton::{PeerOptions, RedisOptions, RedisUrl, StoreOptions, StorePolicy, TransferOptions};
use clap::{Args, ValueEnum};

use crate::errors::hinted;
use crate::size::parse_size;

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "KV stores")]
#[allow(clippy::struct_field_names, reason = "flags have vLLM's names")]
pub struct StoreArgs {
    /// Directory that keeps KV on a local disk and finds it again after a restart; one for each process
    #[arg(long, value_name = "DIR")]
    pub kv_disk_path: Option<PathBuf>,
    /// What that directory may hold, for example 20GiB; the least recently used entries are evicted first
    #[arg(long, value_name = "SIZE", default_value = "8GiB", value_parser = parse_size)]
    pub kv_disk_size: u64,
    /// Redis server that keeps KV for many processes: redis://host:port, or rediss:// for TLS. The password is in
    /// BATON_KV_STORE_PASSWORD, a private CA certificate in BATON_KV_STORE_CA
    #[arg(long, value_name = "URL")]
    pub kv_store: Option<RedisUrl>,
    /// Seconds without use after which the server may forget KV
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400)]
    pub kv_store_ttl: u64,
    /// Milliseconds that a request waits for a store before its prompt is computed
    #[arg(long, value_name = "MS", default_value_t = 100)]
    pub kv_store_timeout_ms: u64,
    /// When KV goes to the stores
    #[arg(long, value_name = "POLICY", default_value = "write-through")]
    pub kv_store_policy: StorePolicyArg,
    /// Part in prefill/decode disaggregation: a prefill worker keeps KV for others on --kv-transfer-port, a decode worker
    /// fetches it from --kv-prefill-workers. Both need the same secret in BATON_KV_KEY
    #[arg(long, value_name = "ROLE")]
    pub kv_role: Option<KvRole>,
    /// Port on which a prefill worker hands KV over
    #[arg(long, value_name = "PORT", default_value_t = 8998)]
    pub kv_transfer_port: u16,
    /// Address that it listens on, and that it names in its answers
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub kv_transfer_host: IpAddr,
    /// The most KV that it keeps for others
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size)]
    pub kv_transfer_size: u64,
    /// Seconds that it is kept
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    pub kv_transfer_keep: u64,
    /// Prefill workers of a decode worker, as host:port of their --kv-transfer-port; no other is ever asked
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    pub kv_prefill_workers: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvRole {
    /// Computes prompts for others
    Prefill,
    /// Has prompts computed by others
    Decode,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StorePolicyArg {
    /// As soon as a block is full
    WriteThrough,
    /// When a block is about to leave the device
    Eviction,
}

impl StoreArgs {
    pub fn options(&self) -> Result<StoreOptions> {
        let in_range = |flag: &str, value: u64, most: u64| {
            let is_good = (1..=most).contains(&value);
            let wrong = || hinted(format!("{flag} {value} is out of range"), format!("give 1 to {most}"));
            if is_good { Ok(value) } else { Err(wrong()) }
        };
        let time_limit =
            Duration::from_millis(in_range("--kv-store-timeout-ms", self.kv_store_timeout_ms, 60_000)?);
        let ttl = Duration::from_secs(in_range("--kv-store-ttl", self.kv_store_ttl, 10 * 365 * 86_400)?);
        let redis = self.kv_store.clone().map(|mut url| {
            if let Some(password) = environment("BATON_KV_STORE_PASSWORD") {
                url.password = Some(password);
            }
            let ca_pem = environment("BATON_KV_STORE_CA").map(|path| {
                std::fs::read(&path).map_err(|error| {
                    hinted(format!("BATON_KV_STORE_CA: {path}: {error}"), "give the path of a PEM file")
                })
            });
            Ok::<_, anyhow::Error>(RedisOptions { url, ttl, time_limit, ca_pem: ca_pem.transpose()? })
        });
        Ok(StoreOptions {
            memory: None,
            disk: self.kv_disk_path.clone().map(|path| (path, self.kv_disk_size)),
            redis: redis.transpose()?,
            serve: self.serve_options()?,
            peers: self.peer_options(time_limit)?,
            policy: match self.kv_store_policy {
                StorePolicyArg::WriteThrough => StorePolicy::WriteThrough,
                StorePolicyArg::Eviction => StorePolicy::Eviction,
            },
            time_limit,
            secret: environment("BATON_KV_KEY").unwrap_or_default(),
        })
    }
}

impl StoreArgs {
    fn serve_options(&self) -> Result<Option<TransferOptions>> {
        if !matches!(self.kv_role, Some(KvRole::Prefill | KvRole::Both)) {
            return Ok(None);
        }
        Ok(Some(TransferOptions {
            listen: SocketAddr::new(self.kv_transfer_host, self.kv_transfer_port),
            max_bytes: self.kv_transfer_size,
            keep: Duration::from_secs(self.kv_transfer_keep),
            secret: shared_secret()?,
        }))
    }

    fn peer_options(&self, time_limit: Duration) -> Result<Option<PeerOptions>> {
        let fetches = matches!(self.kv_role, Some(KvRole::Decode | KvRole::Both));
        match (fetches, self.kv_prefill_workers.is_empty()) {
            (false, true) => Ok(None),
            (false, false) => Err(hinted(
                "--kv-prefill-workers are for a decode worker",
                "add --kv-role decode, or leave them out",
            )),
            (true, true) => Err(hinted(
                "a decode worker needs prefill workers",
                "name them with --kv-prefill-workers host:port",
            )),
            (true, false) => Ok(Some(PeerOptions {
                workers: self.kv_prefill_workers.clone(),
                // Connecting and a large row take longer than a look-up.
                time_limit: time_limit.max(Duration::from_secs(1)),
                prefill_limit: Duration::from_secs(60),
                secret: shared_secret()?,
            })),
        }
    }
}

/// Nothing is handed over without a secret: KV is what a prompt says.
fn shared_secret() -> Result<String> {
    environment("BATON_KV_KEY").ok_or_else(|| {
        hinted("--kv-role needs a shared secret", "set BATON_KV_KEY to the same random text in all processes")
    })
}

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
