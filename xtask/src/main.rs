//! The chores of the repository, in Rust instead of scripts: `cargo xtask test` is what CI runs.
#![forbid(unsafe_code)]

mod browser;
mod clients;
mod dist;
mod setup;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail};

const HELP: &str = "\
Chores of the Baton repository.

Usage: cargo xtask <COMMAND>

Commands:
  test     Fetch what the tests need, check style and crate graph, run all tests (this is what CI runs)
  browser  Only the web console, in a real browser (needs Node and npm)
  dist     Build the release tarball under target/dist and try it
  setup    Only fetch: the default model and the tokeniser test files, into .cache/
  tidy     Only check: crate graph, file lengths, unsafe code, leftover marks
  clients  Only run the public client libraries (Python, Node) against a server with the default model
  fuzz     Run every fuzz target for a while (needs cargo-fuzz and a nightly toolchain): cargo xtask fuzz [SECONDS]
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        ["test"] => test(),
        ["browser"] => with_data(browser::test),
        ["dist"] => dist::build("release"),
        ["dist", profile] => dist::build(profile),
        ["setup"] => with_data(|_, _| Ok(())),
        ["tidy"] => tidy::run(&root()),
        ["clients"] => with_data(clients::test),
        ["fuzz"] => fuzz("60"),
        ["fuzz", seconds] => fuzz(seconds),
        [] | ["help" | "-h" | "--help"] => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(anyhow::anyhow!("unknown command {other:?}\n\n{HELP}")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The repository's root, wherever cargo was called from.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root").to_owned()
}

/// Where cargo builds.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

fn test() -> Result<()> {
    let start = Instant::now();
    tidy::run(&root())?;
    cargo(&["fmt", "--all", "--check"], &[])?;
    cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"], &[])?;
    let binary = build_tests()?;
    let data = setup::fetch(&binary)?;
    let environment = [
        ("BATON_TEST_MODEL", &data.model),
        ("BATON_TOKENIZER_DATA", &data.tokenizers),
        ("LD_LIBRARY_PATH", &data.nvrtc),
        ("BATON_REQUIRE_NVRTC", &data.nvrtc),
    ];
    let environment = environment.map(|(name, path)| (name, path.display().to_string()));
    let environment: Vec<(&str, &str)> =
        environment.iter().map(|(name, path)| (*name, path.as_str())).collect();
    cargo(&["test", "--workspace", "--locked"], &environment)?;
    browser::test(&binary, &data.model)?;
    clients::test(&binary, &data.model)?;
    println!("all tests passed in {} s", start.elapsed().as_secs());
    Ok(())
}

/// Builds all tests, and with them the binary that some of them run. Everything else that needs the binary takes this one:
/// built on its own, its dependencies would have other features, and all of them would be compiled a second time.
fn build_tests() -> Result<PathBuf> {
    cargo(&["test", "--workspace", "--locked", "--no-run"], &[])?;
    Ok(binary())
}

/// The binary of a debug build.
fn binary() -> PathBuf {
    target().join("debug").join(format!("baton{}", std::env::consts::EXE_SUFFIX))
}

/// Runs a single chore with the binary and the model.
fn with_data(chore: fn(&Path, &Path) -> Result<()>) -> Result<()> {
    cargo(&["build", "--locked", "--package", "baton-cli"], &[])?;
    let data = setup::fetch(&binary())?;
    chore(&binary(), &data.model)
}

fn fuzz(seconds: &str) -> Result<()> {
    let targets =
        std::fs::read_dir(root().join("fuzz/fuzz_targets")).context("cannot list fuzz/fuzz_targets")?;
    for target in targets {
        let path = target?.path();
        let name = path
            .file_stem()
            .and_then(|name| name.to_str())
            .context("a fuzz target has a plain name")?
            .to_owned();
        cargo(&["+nightly", "fuzz", "run", &name, "--", &format!("-max_total_time={seconds}")], &[])?;
    }
    Ok(())
}

/// Runs cargo in the root and fails if it fails.
fn cargo(arguments: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    println!("$ cargo {}", arguments.join(" "));
    run(Command::new("cargo").args(arguments).envs(environment.iter().copied()).current_dir(root()))
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot start {program}: is it installed?"))?;
    if !status.success() {
        bail!("{program} failed ({status})");
    }
    Ok(())
}
