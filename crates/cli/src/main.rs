//! The `baton` binary: flags in, the other crates wired together, text or JSON out.
//!
//! There is no engine, kernel or file format here. A command is one module of `commands`; `args` says what can be
//! typed; everything a user sees on failure goes through `errors`.
#![forbid(unsafe_code)]

mod args;
mod bench_args;
mod cache;
mod catalogue;
mod commands;
mod devices;
mod engine_args;
mod errors;
mod fetch;
mod generate;
#[cfg(feature = "hub")]
mod hub;
mod log;
mod model_path;
mod progress;
mod report;
mod sampling_args;
mod serve_args;
mod session;
mod size;
mod structured_args;
mod table;

use std::io::{BufWriter, Write};
use std::process::ExitCode;
use std::sync::LazyLock;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches};

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    errors::install_panic_hook();
    let matches = command().get_matches();
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => errors::report(&error),
    }
}

fn run(command_line: Command) -> Result<()> {
    let mut out = BufWriter::new(std::io::stdout());
    match command_line {
        Command::Pull(args) => commands::pull::run(&args, &mut out)?,
        Command::Inspect(args) => commands::inspect::run(&args, &mut out)?,
        Command::Completions { shell } => commands::shell::completions(shell, command(), &mut out)?,
        Command::Man { out: directory } => commands::shell::man(directory.as_deref(), command(), &mut out)?,
        Command::Docs(args) => commands::docs::run(&args, &command(), &mut out)?,
        Command::Plan(args) => commands::plan::run(&args, &mut out)?,
        Command::Complete(args) => commands::complete::run(&args, &mut out)?,
        Command::Chat(args) => commands::chat::run(&args, &mut out)?,
        Command::Serve(args) => commands::serve::run(&args, &mut out)?,
        Command::Bench { command } => commands::bench::run(&command, &mut out)?,
    }
    out.flush()?;
    Ok(())
}

/// The command line with what is known only at run time: the version line.
fn command() -> clap::Command {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
        format!("{} ({profile}, {} kernels)", env!("CARGO_PKG_VERSION"), baton_cpu::Isa::best())
    });
    Cli::command().version(VERSION.as_str())
}
