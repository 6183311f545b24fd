//! `baton bench relay`: its flags, and the parts that were asked for.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use baton_bench::{
    BenchError, DatasetKind, DatasetOptions, KernelSizes, Lengths, OnlineOptions, OperatorOptions,
    RelayReport, RelayRow, RelaySetting, RelayWork, TokenRange,
};
use clap::{Args, ValueEnum};
use serde_json::Map;

use super::kernels::limits;
use super::offline::describe;
use super::{bar, write_result};
use crate::bench_args::{BenchSampling, OutputArgs};
use crate::engine_args::{EngineArgs, kv_dtype};
use crate::session::{Session, TextModel, open_backend};

/// Lengths of real conversations, one `input output` a line.
const SHAREGPT_LENGTHS: &str = include_str!("sharegpt-lengths.txt");

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RelayPart {
    /// Attention alone, without a model
    Operator,
    /// Requests of equal lengths, all at once
    Offline,
    /// Requests of the lengths of ShareGPT, all at once
    Sharegpt,
    /// Requests that come as a Poisson process
    Online,
    /// Workloads given by --row, relay attention off and on
    Rows,
}

const ALL_PARTS: [RelayPart; 4] =
    [RelayPart::Operator, RelayPart::Offline, RelayPart::Sharegpt, RelayPart::Online];

#[derive(Debug, Args)]
pub struct RelayArgs {
    /// File, directory or name; without one, the default model
    pub model: Option<String>,
    /// What is measured [default: all but rows, or rows where there is a --row]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub parts: Vec<RelayPart>,
    /// REQUESTSxSHARED+OWN/OUTPUT in tokens, or a tree of prefixes: tree:8x1024,4x2048,8x64/128 (repeatable)
    #[arg(long, value_name = "ROW")]
    pub row: Vec<RelayRow>,
    /// Runs of each workload in each way; medians are reported
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub num_iters: usize,
    /// Lengths of the shared prefix [default: up to 2048, for the operator 4096; on a GPU up to 8192 and 32768]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub shared_lens: Vec<usize>,
    /// operator: requests of a step [default: 1,16,64; on a GPU 1,4,16,64,256]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub batch_sizes: Vec<usize>,
    /// operator: tokens that each request has alone [default: 128; on a GPU 128,256]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub own_lens: Vec<usize>,
    /// offline: tokens of a request's own prompt and of its answer; online takes the first [default: 64/32; on a GPU
    /// 64/128,128/256,256/512]
    #[arg(long, value_name = "IN/OUT,…", value_delimiter = ',')]
    pub lengths: Vec<Lengths>,
    /// Requests of a workload [default: 32; on a GPU 64]
    #[arg(long, value_name = "N")]
    pub num_prompts: Option<usize>,
    /// sharegpt: a ShareGPT file instead of the lengths that are built in
    #[arg(long, value_name = "FILE")]
    pub dataset_path: Option<PathBuf>,
    /// online: requests per second [default: shares of what can be had at most]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub request_rates: Vec<f64>,
    /// online: the first token within this time counts as in time [default: 5000; on a GPU 500]
    #[arg(long, value_name = "MS")]
    pub slo_ttft_ms: Option<f64>,
    /// online: and so does this time for each token after it [default: 500; on a GPU 50]
    #[arg(long, value_name = "MS")]
    pub slo_tpot_ms: Option<f64>,
    /// online: the share of requests that must be in time
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, value_parser = crate::args::parse_share)]
    pub slo_share: f64,
    /// Write a page with the charts, and a picture of the same name with .png
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    #[command(flatten)]
    pub sampling: BenchSampling,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// What is measured where nothing is said: little on a CPU, the paper's sizes on a GPU.
struct Defaults {
    operator_shared: &'static [usize],
    batches: &'static [usize],
    own: &'static [usize],
    shared: &'static [usize],
    online_shared: &'static [usize],
    lengths: &'static [Lengths],
    num_prompts: usize,
    slo_ttft_ms: f64,
    slo_tpot_ms: f64,
}

const fn lengths(input: usize, output: usize) -> Lengths {
    Lengths { input, output }
}

const CPU: Defaults = Defaults {
    operator_shared: &[64, 256, 1024, 4096],
    batches: &[1, 16, 64],
    own: &[128],
    shared: &[64, 512, 2048],
    online_shared: &[512],
    lengths: &[lengths(64, 32)],
    num_prompts: 32,
    slo_ttft_ms: 5000.0,
    slo_tpot_ms: 500.0,
};
const GPU: Defaults = Defaults {
    operator_shared: &[64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768],
    batches: &[1, 4, 16, 64, 256],
    own: &[128, 256],
    shared: &[64, 128, 256, 512, 1024, 2048, 4096, 8192],
    online_shared: &[512, 1024, 2048, 8192],
    lengths: &[lengths(64, 128), lengths(128, 256), lengths(256, 512)],
    num_prompts: 64,
    slo_ttft_ms: 500.0,
    slo_tpot_ms: 50.0,
};

/// What was given, or the default.
fn or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

pub fn run(args: &RelayArgs, out: &mut dyn Write) -> Result<()> {
    args.sampling.params(args.engine.seed).validate(u32::MAX)?;
    let parts = match (args.parts.as_slice(), args.row.as_slice()) {
        ([], []) => ALL_PARTS.to_vec(),
        ([], _) => vec![RelayPart::Rows],
        (parts, _) => parts.to_vec(),
    };
    let mut report = RelayReport::default();
    let mut take = |part: RelayReport, json: Option<Map<String, serde_json::Value>>| -> Result<()> {
        writeln!(out, "{}", part.text)?;
        out.flush()?;
        report.json.extend(json.unwrap_or_default());
        report.extend(part);
        // What was measured so far is kept, should a later part fail.
        write_result(&args.output, &report.json)?;
        args.plot.as_deref().map_or(Ok(()), |path| plot(path, &report))
    };
    // First, before a model takes the device's memory.
    if parts.contains(&RelayPart::Operator) {
        take(operator(args)?, None)?;
    }
    if parts.iter().all(|part| *part == RelayPart::Operator) {
        return Ok(());
    }
    let defaults = if opens_gpu(&args.engine)? { &GPU } else { &CPU };
    let mut session = Session::open(args.model.as_deref(), &args.engine)?;
    for part in parts.into_iter().filter(|part| *part != RelayPart::Operator) {
        let (setting, work) = work(args, part, defaults, &session)?;
        let measured = baton_bench::relay(&mut session.engine, &setting, &work, &bar(&args.output, 1))?;
        let mut json = Map::new();
        describe(&mut json, &session, &args.engine);
        take(measured, Some(json))?;
    }
    Ok(())
}

fn opens_gpu(args: &EngineArgs) -> Result<bool> {
    Ok(open_backend(args, None)?.device().wants_large_steps)
}

fn work(
    args: &RelayArgs,
    part: RelayPart,
    defaults: &Defaults,
    session: &Session,
) -> Result<(RelaySetting, RelayWork)> {
    let is_online = part == RelayPart::Online;
    let setting = RelaySetting {
        shared: or(&args.shared_lens, if is_online { defaults.online_shared } else { defaults.shared }),
        num_prompts: args.num_prompts.unwrap_or(defaults.num_prompts),
        num_iters: args.num_iters,
        params: args.sampling.params(args.engine.seed),
        tokens: TokenRange::of_vocabulary(session.engine.model_config().vocab_size.min(10_000)),
        seed: args.engine.seed.unwrap_or(0),
    };
    let lengths = or(&args.lengths, defaults.lengths);
    let work = match part {
        RelayPart::Operator => unreachable!("it is measured without an engine"),
        RelayPart::Rows => RelayWork::Rows(rows(args)?),
        RelayPart::Offline => RelayWork::Offline(lengths),
        RelayPart::Sharegpt => RelayWork::ShareGpt(conversations(args, &setting, &session.text)?),
        RelayPart::Online => RelayWork::Online(OnlineOptions {
            lengths: lengths[0],
            rates: args.request_rates.clone(),
            slo_ttft_ms: args.slo_ttft_ms.unwrap_or(defaults.slo_ttft_ms),
            slo_tpot_ms: args.slo_tpot_ms.unwrap_or(defaults.slo_tpot_ms),
            slo_share: args.slo_share,
        }),
    };
    Ok((setting, work))
}

fn rows(args: &RelayArgs) -> Result<Vec<RelayRow>> {
    let missing = || {
        crate::errors::hinted(
            "--parts rows needs at least one --row",
            "for example --row 32x1024+64/64, or --row tree:8x1024,4x2048,8x64/128",
        )
    };
    if args.row.is_empty() { Err(missing()) } else { Ok(args.row.clone()) }
}

/// Of a file, counted with the model's tokenizer, or those that are built in.
fn conversations(args: &RelayArgs, setting: &RelaySetting, text: &TextModel) -> Result<Vec<Lengths>> {
    let Some(path) = &args.dataset_path else {
        return Ok(built_in());
    };
    let count = |prompt: &str| text.encode(prompt).map(|ids| ids.len()).map_err(|error| format!("{error:#}"));
    let options = DatasetOptions {
        kind: DatasetKind::ShareGpt,
        path: Some(path.clone()),
        num_prompts: setting.num_prompts,
        seed: setting.seed,
        shuffle: true,
        output_len: None,
        random: baton_bench::RandomOptions::default(),
        prefix_repetition: baton_bench::PrefixRepetitionOptions::default(),
        trace: baton_bench::TraceOptions::default(),
    };
    let workload = options.load(Some(&count))?;
    let of = |sample: &baton_bench::Sample| {
        sample.input_len.map(|input| Lengths { input, output: sample.output_len })
    };
    Ok(workload.samples.iter().filter_map(of).collect())
}

fn built_in() -> Vec<Lengths> {
    let pair = |line: &str| {
        let (input, output) = line.split_once(' ')?;
        Some(Lengths { input: input.parse().ok()?, output: output.parse().ok()? })
    };
    SHAREGPT_LENGTHS.lines().filter_map(pair).collect()
}

fn operator(args: &RelayArgs) -> Result<RelayReport> {
    let device = open_backend(&args.engine, None)?.device();
    let is_gpu = device.wants_large_steps;
    let defaults = if is_gpu { &GPU } else { &CPU };
    let limits = || limits(&args.engine, &device);
    let options = OperatorOptions {
        sizes: if is_gpu { KernelSizes::Large } else { KernelSizes::Small },
        limits: limits()?,
        kv_dtype: kv_dtype(args.engine.cache.kv_cache_dtype, baton_engine::EngineConfig::default().kv_dtype),
        shared: or(&args.shared_lens, defaults.operator_shared),
        batches: or(&args.batch_sizes, defaults.batches),
        own: or(&args.own_lens, defaults.own),
        num_iters: args.num_iters.max(5),
    };
    let open = |is_recorded: bool| {
        let engine = EngineArgs { enforce_eager: !is_recorded, ..args.engine.clone() };
        open_backend(&engine, None).map_err(|error| BenchError::Failed(format!("{error:#}")))
    };
    // Only a GPU records steps.
    let records: &[bool] = if !is_gpu || args.engine.enforce_eager { &[false] } else { &[true, false] };
    let bar = bar(&args.output, 1);
    let mut report = baton_bench::relay_operator(&open, records, &options, &bar)?;
    report.json.insert("operator_device".to_owned(), device.description.into());
    Ok(report)
}

/// The page, and the picture beside it.
fn plot(path: &Path, report: &RelayReport) -> Result<()> {
    const TITLE: &str = "Relay attention";
    let picture = path.with_extension("png");
    let write = |path: &Path, bytes: &[u8]| {
        std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
    };
    write(path, report.to_html(TITLE).as_bytes())?;
    write(&picture, &report.to_png(TITLE)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lengths_that_are_built_in_are_read() {
        let lengths = built_in();
        assert_eq!(lengths.len(), SHAREGPT_LENGTHS.lines().filter(|line| !line.starts_with('#')).count());
        assert!(lengths.len() >= 200);
        assert!(lengths.iter().all(|one| one.input >= 4 && one.input + one.output <= 2048));
    }
}
