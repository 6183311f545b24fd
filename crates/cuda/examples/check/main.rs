//! Checks the CUDA backend on the device of this machine against the reference backend and the golden models, and times it.
//!
//! ```text
//! check ops | sampling | golden GOLDEN_DIR | bench MODEL_DIR BATCH,BATCH,… [CONTEXT] [SPLIT]
//! ```
//! Prints a line a check and exits non-zero if any failed.

mod bench;
mod golden;
#[path = "../../../model/tests/harness/mod.rs"]
#[allow(dead_code)]
mod harness;
mod ops;
mod sampling;
mod table;

use std::path::Path;
use std::process::ExitCode;

use baton_cuda::{CudaBackend, CudaOptions};
use table::Table;

fn options() -> CudaOptions {
    CudaOptions { enforce_eager: std::env::var_os("BATON_ENFORCE_EAGER").is_some(), ..CudaOptions::default() }
}

fn backend() -> CudaBackend {
    CudaBackend::new(options()).expect("the device starts")
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
        ["ops"] => ops::check(&mut table),
        ["sampling"] => sampling::check(&mut table),
        ["golden", folder] => golden::check(Path::new(folder), &mut table),
        ["bench", model, batches, rest @ ..] => {
            let batches: Vec<usize> = batches.split(',').map(|batch| batch.parse().expect("a number")).collect();
            let number = |index: usize, default: usize| {
                rest.get(index).map_or(default, |text| text.parse().expect("a number"))
            };
            bench::run(Path::new(model), &batches, number(0, 128), number(1, 256));
        }
        other => {
            eprintln!("unknown arguments {other:?}: see the top of examples/check/main.rs");
            return ExitCode::FAILURE;
        }
    }
    table.finish()
}
