//! The `baton` binary: flags in, the other crates wired together, text or JSON out.
//!
//! There is no engine, kernel or file format here. A command is one module of `commands`; `args` says what can be
//! typed; everything a user sees on failure goes through `errors`.
#![forbid(unsafe_code)]

mod args;
mod bench_args;
mod commands;
mod compat;
mod devices;
mod engine_args;
mod errors;
mod generate;
mod graph_args;
mod log;
mod model_dir;
mod progress;
mod report;
mod route_args;
mod sampling_args;
mod serve_args;
mod session;
mod size;
mod store_args;
mod structured_args;
mod table;

use std::io::{BufWriter, Write};
use std::process::ExitCode;
use std::sync::LazyLock;

use anyhow::Result;
use baton_cpu::Isa;
use clap::{CommandFactory, FromArgMatches};

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    errors::install_panic_hook();
    let typed = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let typed = compat::normalise(&command(), typed);
    let matches = match command().try_get_matches_from(typed) {
        Ok(matches) => matches,
        Err(error) => compat::without_wrong_tip(error).exit(),
    };
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    match compat::judge(&matches).and_then(|()| run(cli.command)) {
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
        Command::Quantize(args) => commands::quantize::run(&args, &mut out)?,
        Command::Plan(args) => commands::plan::run(&args, &mut out)?,
        Command::Complete(args) => commands::complete::run(&args, &mut out)?,
        Command::Chat(args) => commands::chat::run(&args, &mut out)?,
        Command::Run(args) => commands::chat::run_once(args, &mut out)?,
        Command::List(args) => commands::models::list(&args, &mut out)?,
        Command::Rm(args) => commands::models::remove(&args, &mut out)?,
        Command::Ps(args) => commands::ps::run(&args, &mut out)?,
        Command::Serve(args) => commands::serve::run(&args, &mut out)?,
        Command::Route(args) => commands::route::run(&args, &mut out)?,
        Command::Graph { command } => commands::graph::run(&command, &mut out)?,
        Command::Bench { command } => commands::bench::run(&command, &mut out)?,
    }
    out.flush()?;
    Ok(())
}

/// The command line with what is known only at run time: the version line.
fn command() -> clap::Command {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
        format!("{} ({profile}, {} kernels)", env!("CARGO_PKG_VERSION"), Isa::best())
    });
    // What `BATON_CPU_ISA` may be set to on this machine.
    static LONG_VERSION: LazyLock<String> = LazyLock::new(|| {
        let paths = Isa::ALL.into_iter().filter(|isa| isa.is_available());
        let paths: Vec<String> = paths.map(|isa| isa.to_string()).collect();
        format!("{}\nkernel paths: {}", *VERSION, paths.join(", "))
    });
    compat::add_to(Cli::command().version(VERSION.as_str()).long_version(LONG_VERSION.as_str()))
}
