//! The chores of the repository, in Rust instead of scripts: `cargo xtask test` is what CI runs.
#![forbid(unsafe_code)]

mod browser;
mod clients;
mod deb;
mod dist;
mod embed;
mod hook;
mod results;
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
  dist     Build tarball, Debian package and Homebrew formula under target/dist and try them: cargo xtask dist [PROFILE [TARGET]]
  embed    Only run the library's examples and a program that embeds it
  walk     Only run every command of README.md and docs/ and look at what it says
  hook     Have the quick checks run before every commit (git's pre-commit hook)
  setup    Only fetch: the default model and the tokeniser test files, into .cache/
  tidy     Only check: crate graph, file lengths, unsafe code, leftover marks, bench/RESULTS.md
  results  Write bench/RESULTS.md from the baselines under bench/runs
  clients  Only run the public client libraries (Python, Node) against a server with the default model
  fuzz     Run every fuzz target for a while (needs cargo-fuzz and a nightly toolchain): cargo xtask fuzz [SECONDS]
";

/// For the many servers of the scripts, which would not fit a GPU at once.
const NO_GPU: (&str, &str) = ("CUDA_VISIBLE_DEVICES", "");

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        ["test"] => test(),
        ["browser"] => with_data(browser::test),
        ["dist"] => dist::build("release", None),
        ["dist", profile] => dist::build(profile, None),
        ["dist", profile, triple] => dist::build(profile, Some(triple)),
        ["embed"] => with_data(embed::test),
        ["walk"] => with_data(walk),
        ["hook"] => hook::install(),
        ["setup"] => with_data(|_, _| Ok(())),
        ["tidy"] => tidy::run(&root()),
        ["results"] => results::write(&root()),
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
    stage("style", || {
        tidy::run(&root())?;
        cargo(&["fmt", "--all", "--check"], &[])
    })?;
    // What comes from registries comes while the compiler runs.
    let (binary, fetched) = std::thread::scope(|scope| {
        let fetching = scope.spawn(fetch);
        let built = stage("clippy", || {
            cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"], &[])
        })
        .and_then(|()| stage("building", build_tests));
        (built, fetching.join().unwrap_or_else(|_| bail!("fetching test data panicked")))
    });
    let (binary, has_redis) = (binary?, fetched?);
    let data = setup::fetch(&binary)?;
    let environment = [
        ("BATON_TEST_MODEL", &data.model),
        ("BATON_TOKENIZER_DATA", &data.tokenizers),
        ("LD_LIBRARY_PATH", &data.nvrtc),
        ("BATON_REQUIRE_NVRTC", &data.nvrtc),
    ];
    let environment = environment.map(|(name, path)| (name, path.display().to_string()));
    let mut environment: Vec<(&str, &str)> =
        environment.iter().map(|(name, path)| (*name, path.as_str())).collect();
    if has_redis {
        environment.push(("BATON_REQUIRE_REDIS", "1"));
    }
    stage("tests", || cargo(&["test", "--workspace", "--locked"], &environment))?;
    stage("other kernel paths", || other_kernel_paths(&binary, &environment))?;
    stage("examples", || embed::examples(&data.model))?;
    stage("documentation", || walk(&binary, &data.model))?;
    stage("browser", || browser::test(&binary, &data.model))?;
    stage("clients", || clients::test(&binary, &data.model))?;
    println!("all tests passed in {} s", start.elapsed().as_secs());
    Ok(())
}

/// Runs a part of the tests, and says how long it took.
fn stage<T>(name: &str, part: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let result = part()?;
    println!("[{name}: {} s]", start.elapsed().as_secs());
    Ok(result)
}

/// Fetches what the tests need and no binary of ours is needed for. Says whether there is a Redis server.
fn fetch() -> Result<bool> {
    setup::fetch_packages()?;
    browser::fetch()?;
    clients::fetch()?;
    Ok(setup::redis())
}

/// Builds all tests, and with them the binary that some of them run. Everything else that needs the binary takes this one:
/// built on its own, its dependencies would have other features, and all of them would be compiled a second time.
fn build_tests() -> Result<PathBuf> {
    cargo(&["test", "--workspace", "--locked", "--no-run"], &[])?;
    Ok(binary())
}

/// Tests of the command line that compute something, under each set of kernels of this machine but the one it takes unasked.
fn other_kernel_paths(binary: &Path, environment: &[(&str, &str)]) -> Result<()> {
    let ran = Command::new(binary).arg("--version").output().context("the binary does not start")?;
    let version = String::from_utf8_lossy(&ran.stdout).into_owned();
    let paths = version.lines().find_map(|line| line.strip_prefix("kernel paths: "));
    for path in paths.context("the version names no kernel paths")?.split(", ") {
        if version.contains(&format!(" {path} kernels)")) {
            continue;
        }
        println!("BATON_CPU_ISA={path}");
        let environment = [environment, &[("BATON_CPU_ISA", path)]].concat();
        // Of the whole workspace, as above: a package alone has other features, and would be built a second time.
        // One test runs a model a dozen times to show that settings change no text: minutes on the portable path.
        let arguments = ["test", "--workspace", "--locked", "--test", "help", "--test", "complete"];
        let arguments = [&arguments[..], &["--", "--skip", "of_any_size_give_the_same_text"]].concat();
        cargo(&arguments, &environment)?;
    }
    Ok(())
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

/// The commands of the documentation, by `tests/walk`.
fn walk(binary: &Path, model: &Path) -> Result<()> {
    println!("$ tests/walk");
    let script = root().join("tests/walk/walk.py");
    let mut walk = Command::new("python3");
    walk.arg(script).env("BATON_BIN", binary).env("BATON_TEST_MODEL", model);
    run(walk.env(NO_GPU.0, NO_GPU.1))
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
    let mut command = Command::new("cargo");
    // What cargo has told this program about itself. Some build scripts look at these names, and all that depends on them would be
    // compiled again whenever a plain `cargo test` follows this, or the other way round.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|start| text.starts_with(start)) {
            command.env_remove(&name);
        }
    }
    // Nobody builds twice in CI: what incremental builds keep would only cost time and disk.
    if std::env::var_os("CI").is_some() && std::env::var_os("CARGO_INCREMENTAL").is_none() {
        command.env("CARGO_INCREMENTAL", "0");
    }
    run(command.args(arguments).envs(environment.iter().copied()).current_dir(root()))
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot start {program}: is it installed?"))?;
    if !status.success() {
        bail!("{program} failed ({status})");
    }
    Ok(())
}
