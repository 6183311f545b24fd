//! Runs the conformance cases of `baton_backend` and the golden models on the GPU of this machine.
//!
//! ```text
//! gpu_conformance [FILTER]… [--full] [--golden DIR] [--list]
//! ```
//! A case runs if its name contains one of the filters (`attention BF16`, `linear Q4_K`, `sample`); without any, all run.
//! `--full` computes in f32. `--golden DIR` runs the golden models of that folder, and of the cases only those that are named.
//! Prints a line for each case and a count at the end; exits with 1 if a case failed and with 2 without a device. Few cases at a
//! time run well under compute-sanitizer.
//!
//! `BATON_ENFORCE_EAGER=1` records no steps, `BATON_SKINNY_ROWS` sets up to how many tokens the skinny kernels are used.

mod golden;
#[path = "../../../model/tests/harness/mod.rs"]
#[allow(dead_code)]
mod harness;

use std::path::PathBuf;
use std::process::ExitCode;

use baton_backend::Precision;
use baton_backend::conformance::{Outcome, cases};
use baton_backend::graph::testing::check_device;
use baton_cuda::{CudaBackend, CudaGraph, CudaOptions};

/// What was run so far.
#[derive(Debug, Default)]
pub struct Report {
    passed: usize,
    failed: usize,
    unsupported: usize,
}

impl Report {
    pub fn line(&mut self, name: &str, outcome: &Outcome) {
        let (word, detail, count) = match outcome {
            Outcome::Passed { detail } => ("ok  ", detail, &mut self.passed),
            Outcome::Failed { detail } => ("FAIL", detail, &mut self.failed),
            Outcome::Unsupported { what } => ("skip", what, &mut self.unsupported),
        };
        *count += 1;
        println!("{word} {name:72} {detail}");
    }

    fn finish(&self) -> ExitCode {
        let Self { passed, failed, unsupported } = self;
        println!(
            "{} cases: {passed} passed, {failed} failed, {unsupported} not supported",
            passed + failed + unsupported
        );
        if *failed == 0 && *passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

#[derive(Debug, Default)]
struct Arguments {
    filters: Vec<String>,
    is_full: bool,
    lists: bool,
    golden: Option<PathBuf>,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut arguments = Self::default();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--full" => arguments.is_full = true,
                "--list" => arguments.lists = true,
                "--golden" => arguments.golden = Some(words.next().ok_or("--golden needs a folder")?.into()),
                flag if flag.starts_with('-') => return Err(format!("unknown flag {flag}")),
                _ => arguments.filters.push(word),
            }
        }
        Ok(arguments)
    }

    fn wants(&self, name: &str) -> bool {
        let name = name.to_lowercase();
        let is_named = self.filters.iter().any(|filter| name.contains(&filter.to_lowercase()));
        is_named || self.filters.is_empty() && self.golden.is_none()
    }
}

pub fn open(precision: Precision) -> CudaBackend {
    let mut options = CudaOptions {
        precision,
        enforce_eager: std::env::var_os("BATON_ENFORCE_EAGER").is_some(),
        ..CudaOptions::default()
    };
    let rows = std::env::var("BATON_SKINNY_ROWS").ok().and_then(|text| text.parse().ok());
    options.skinny_rows = rows.unwrap_or(options.skinny_rows);
    CudaBackend::new(options).expect("the device starts")
}

/// The layers of graph networks, against their oracle. The check panics where they differ.
fn run_graph(arguments: &Arguments, report: &mut Report) {
    let name = "graph: reductions, widths, precisions, cuts, swaps";
    if !arguments.wants(name) {
        return;
    }
    if arguments.lists {
        println!("{name}");
        return;
    }
    let check = || {
        check_device(&mut || Box::new(CudaGraph::new(&CudaOptions::default()).expect("the device starts")));
    };
    let outcome = match std::panic::catch_unwind(check) {
        Ok(()) => Outcome::Passed { detail: "as the oracle".to_owned() },
        Err(cause) => {
            let detail = cause.downcast_ref::<String>().cloned();
            Outcome::Failed { detail: detail.unwrap_or_else(|| "a panic".to_owned()) }
        }
    };
    report.line(name, &outcome);
}

fn run_cases(arguments: &Arguments, report: &mut Report) {
    let precision = if arguments.is_full { Precision::Full } else { Precision::Fast };
    for case in cases().iter().filter(|case| arguments.wants(&case.name)) {
        if arguments.lists {
            println!("{}", case.name);
            continue;
        }
        report.line(&case.name, &case.run(&mut open(precision), precision));
        if case.name.contains("of many tokens") && !arguments.is_full {
            // The kernel of product and activation also where it would not pay.
            let options = CudaOptions { gated_min_busy: 1, ..CudaOptions::default() };
            let mut device = CudaBackend::new(options).expect("the device starts");
            report.line(&format!("{}, whole", case.name), &case.run(&mut device, precision));
        }
    }
}

fn main() -> ExitCode {
    let arguments = match Arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("{error}: see the top of examples/gpu_conformance/main.rs");
            return ExitCode::FAILURE;
        }
    };
    let mut report = Report::default();
    if arguments.lists {
        run_cases(&arguments, &mut report);
        run_graph(&arguments, &mut report);
        return ExitCode::SUCCESS;
    }
    match CudaBackend::probe() {
        Err(missing) => {
            println!("no CUDA device: nothing checked ({missing})");
            return ExitCode::from(2);
        }
        Ok(devices) => devices.iter().for_each(|device| println!("{}: {}", device.name, device.description)),
    }
    run_cases(&arguments, &mut report);
    run_graph(&arguments, &mut report);
    if let Some(folder) = &arguments.golden {
        golden::check(folder, &mut report);
    }
    report.finish()
}
