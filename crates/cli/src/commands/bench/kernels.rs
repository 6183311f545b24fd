//! `baton bench kernels`: the device's products, without a model.

use std::io::Write;

use anyhow::{Context, Result};
use baton_backend::WeightFormat;
use baton_bench::BenchError;

use super::{bar, write_result};
use crate::bench_args::KernelsArgs;
use crate::engine_args::parse_dtype;
use crate::errors::hinted;
use crate::session::open_backend;

pub fn run(args: &KernelsArgs, out: &mut dyn Write) -> Result<()> {
    let format = |name: &String| -> Result<WeightFormat> {
        let unknown = || hinted("--formats auto means nothing here", "name formats, for example q8_0,bf16");
        parse_dtype(name).context("--formats")?.ok_or_else(unknown)
    };
    let formats = args.formats.iter().map(format).collect::<Result<Vec<_>>>()?;
    let device = open_backend(&args.engine)?.device();
    let threads = args.engine.threads.or_else(|| std::thread::available_parallelism().ok().map(usize::from));
    let memory = baton_bench::memory_gb_per_s(threads.unwrap_or(1));
    writeln!(out, "{}", device.description)?;
    writeln!(out, "this machine's memory is read at {memory:.1} GB/s")?;
    out.flush()?;
    let open = || open_backend(&args.engine).map_err(|error| BenchError::Failed(format!("{error:#}")));
    let figures = baton_bench::kernels(&open, &formats, &bar(&args.output, 1))?;
    write!(out, "{}", baton_bench::kernels_table(&figures))?;
    let mut json = baton_bench::kernels_json(&figures);
    json.insert("device".to_owned(), device.description.into());
    json.insert("memory_gb_per_s".to_owned(), memory.into());
    write_result(&args.output, &json)
}
