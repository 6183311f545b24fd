//! Measuring: workloads, a load generator for servers, runs of the engine in this process, statistics and reports.
//!
//! Data flows one way: a `dataset` makes [`Sample`]s, `arrival` says when they are sent, `serve` (over HTTP) or `offline`
//! (through the engine) runs them and records times, `metrics` turns the records into figures with vLLM's names, `summary`
//! prints them and `report` draws them. Not here: flags (`cli`), the server (`serve` of the workspace), any model.
#![forbid(unsafe_code)]

mod arrival;
mod client;
mod clock;
mod dataset;
mod error;
mod kernels;
mod kernels_attention;
mod kernels_report;
mod kernels_small;
mod metrics;
mod offline;
mod random;
mod relay;
mod report;
mod serve;
mod soak;
mod startup;
mod stats;
mod storm;
mod summary;

pub use arrival::{Arrivals, RampUp};
pub use clock::stamp;
pub use dataset::{
    CountTokens, DatasetKind, DatasetOptions, PrefixRepetitionOptions, Prompt, RandomOptions, Sample,
    Segment, TokenRange, TraceOptions, Workload, prompt_tokens,
};
pub use error::BenchError;
pub use kernels::{KernelFigures, KernelLimits, KernelSizes, KernelsOptions, KernelsResult, Open, kernels};
pub use kernels_attention::AttentionFigures;
pub use kernels_report::{kernels_json, kernels_table};
pub use kernels_small::SmallFigures;
pub use metrics::{Goodput, Metric, ServeMetrics, details};
pub use offline::{LatencyOptions, LatencyResult, OfflineRequest, ThroughputResult, latency, throughput};
pub use relay::{
    Lengths, OnlineOptions, OpenRecorded, OperatorOptions, RelayMode, RelayReport, RelayRow, RelaySetting,
    RelayWork, relay, relay_operator,
};
pub use report::Report;
pub use serve::{Outcome, ServeOptions, ServeRun, run as run_serve};
pub use soak::{SoakOptions, SoakResult, run as soak};
pub use startup::{StartupOptions, StartupResult, run as startup};
pub use stats::{Distribution, mean, percentile};
pub use storm::{Attack, StormOptions, StormResult, run as storm};
pub use summary::{Heading, serve as serve_summary};
