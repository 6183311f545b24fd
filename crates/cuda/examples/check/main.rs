//! Checks the CUDA backend on the device of this machine against the reference backend and the golden models, and times it.
//!
//! ```text
//! check ops [bf16|formats|FORMAT|attention|attention-CACHE|wide|full] | sampling | swap [STEPS] | golden GOLDEN_DIR
//! check bench MODEL_DIR BATCH,… [CONTEXT] [SPLIT,…] | attention MODEL_DIR BATCHxCONTEXT,…
//! check throughput MODEL_DIR REQUESTSx[SHARED+]INPUT/OUTPUT,…
//! ```
//! `BATON_KV_DTYPE=fp8` (or f16) times with that cache instead of bf16, `BATON_ENFORCE_EAGER=1` without recorded steps,
//! `BATON_SKINNY_ROWS` sets up to how many tokens the skinny kernels are used.
//! Prints a line a check and exits non-zero if any failed.

mod attention;
mod bench;
mod golden;
#[path = "../../../model/tests/harness/mod.rs"]
#[allow(dead_code)]
mod harness;
mod ops;
mod sampling;
mod swap;
mod table;
mod throughput;

use std::path::Path;
use std::process::ExitCode;

use baton_backend::{KvDtype, Precision};
use baton_cuda::{CudaBackend, CudaOptions};
use table::Table;

fn options() -> CudaOptions {
    let mut options = CudaOptions {
        enforce_eager: std::env::var_os("BATON_ENFORCE_EAGER").is_some(),
        ..CudaOptions::default()
    };
    let rows = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    options.skinny_rows = rows("BATON_SKINNY_ROWS").unwrap_or(options.skinny_rows);
    options.gated_min_busy = rows("BATON_GATED_MIN_BUSY").unwrap_or(options.gated_min_busy);
    options
}

/// The cache that is timed.
fn kv_dtype() -> KvDtype {
    match std::env::var("BATON_KV_DTYPE").as_deref() {
        Ok("fp8") => KvDtype::F8E4M3,
        Ok("f16") => KvDtype::F16,
        _ => KvDtype::BF16,
    }
}

fn backend(precision: Precision) -> CudaBackend {
    CudaBackend::new(CudaOptions { precision, ..options() }).expect("the device starts")
}

fn main() -> ExitCode {
    match CudaBackend::probe() {
        Err(missing) => {
            println!("no CUDA device: nothing checked ({missing})");
            return ExitCode::from(2);
        }
        Ok(devices) => devices.iter().for_each(|device| println!("{}: {}", device.name, device.description)),
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut table = Table::default();
    match arguments.as_slice() {
        ["ops", rest @ ..] => ops::check(rest.first().copied(), &mut table),
        ["sampling"] => sampling::check(&mut table),
        ["swap", rest @ ..] => {
            let steps = rest.first().map_or(2000, |text| text.parse().expect("a number"));
            swap::check(steps, &mut table);
        }
        ["golden", folder] => golden::check(Path::new(folder), &mut table),
        ["bench", model, batches, rest @ ..] => {
            let numbers = |text: &str| -> Vec<usize> {
                text.split(',').map(|number| number.parse().expect("a number")).collect()
            };
            let context = rest.first().map_or(256, |text| text.parse().expect("a number"));
            let splits = numbers(rest.get(1).copied().unwrap_or("256"));
            bench::run(Path::new(model), &numbers(batches), context, &splits);
        }
        ["attention", model, shapes] => {
            let shape = |text: &str| {
                let (batch, context) = text.split_once('x')?;
                Some((batch.parse().ok()?, context.parse().ok()?))
            };
            let shapes: Option<Vec<_>> = shapes.split(',').map(shape).collect();
            bench::attention(Path::new(model), &shapes.expect("shapes are BATCHxCONTEXT"));
        }
        ["throughput", model, work] => {
            let work: Option<Vec<_>> = work.split(',').map(throughput::Work::parse).collect();
            throughput::run(Path::new(model), &work.expect("work is REQUESTSx[SHARED+]INPUT/OUTPUT"));
        }
        other => {
            eprintln!("unknown arguments {other:?}: see the top of examples/check/main.rs");
            return ExitCode::FAILURE;
        }
    }
    table.finish()
}
