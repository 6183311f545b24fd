//! `baton bench`: flags into options, results onto the console and into files. What is measured and how is
//! `baton-bench`.

mod kernels;
mod offline;
pub mod relay;
mod report;
mod serve;
pub mod soak;
mod startup;

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use indicatif::ProgressBar;
use serde_json::{Map, Value};

use crate::bench_args::{BenchCommand, OutputArgs};
use crate::progress;

pub fn run(command: &BenchCommand, out: &mut dyn Write) -> Result<()> {
    match command {
        BenchCommand::Latency(args) => offline::latency(args, out),
        BenchCommand::Throughput(args) => offline::throughput(args, out),
        BenchCommand::Serve(args) => serve::run(args, out),
        BenchCommand::Soak(args) => soak::run(args, out),
        BenchCommand::Startup(args) => startup::run(args, out),
        BenchCommand::Kernels(args) => kernels::run(args, out),
        BenchCommand::Relay(args) => relay::run(args, out),
        BenchCommand::Report(args) => report::run(args, out),
    }
}

/// A bar over `total` things, unless none is wanted.
fn bar(output: &OutputArgs, total: usize) -> ProgressBar {
    if output.no_progress { ProgressBar::hidden() } else { progress::count(total as u64) }
}

/// Writes `--output-json`, if asked for.
fn write_result(output: &OutputArgs, result: &Map<String, Value>) -> Result<()> {
    output.output_json.as_deref().map_or(Ok(()), |path| write_json(path, result))
}

fn write_json(path: &Path, result: &Map<String, Value>) -> Result<()> {
    let mut text = serde_json::to_string_pretty(result)?;
    text.push('\n');
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
