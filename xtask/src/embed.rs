//! `cargo xtask embed`: the library as others use it. The examples of `crates/baton` run, and so does `tests/embed`, a
//! program outside of the workspace with one dependency.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::dist::output;
use crate::{cargo, root, target};

/// An example, and what its output has to hold with the default model at hand.
const EXAMPLES: [(&str, &str); 7] = [
    ("chat", ""),
    ("generate", "The capital of France is"),
    ("stream", ""),
    ("stream_async", ""),
    ("json", " in "),
    ("kv_store", "same token as computed anew: true"),
    ("embed", "How to bake a cake: 0."),
];
const MAX_LINES: usize = 20;

/// The examples, which are built with the tests.
pub fn examples(model: &Path) -> Result<()> {
    for (name, expect) in EXAMPLES {
        println!("$ example {name}");
        check(Command::new(target().join("debug/examples").join(name)).arg(model), expect)?;
    }
    Ok(())
}

pub fn test(_: &Path, model: &Path) -> Result<()> {
    cargo(&["build", "--locked", "--workspace", "--examples"], &[])?;
    examples(model)?;
    let program = root().join("tests/embed");
    let source = std::fs::read_to_string(program.join("src/main.rs")).context("tests/embed/src/main.rs")?;
    let lines = source.lines().filter(|line| !line.trim().is_empty()).count();
    if lines > MAX_LINES {
        bail!("tests/embed has {lines} lines: embedding takes at most {MAX_LINES}");
    }
    // The same lock file and target: what has the same features is not compiled again.
    std::fs::copy(root().join("Cargo.lock"), program.join("Cargo.lock"))?;
    println!("$ tests/embed");
    let mut build = Command::new("cargo");
    build.args(["build", "--quiet"]).env("CARGO_TARGET_DIR", target()).current_dir(&program);
    crate::run(&mut build)?;
    check(Command::new(target().join("debug/embed-baton")).arg(model), " ")
}

fn check(command: &mut Command, expect: &str) -> Result<()> {
    let said = output(command)?;
    if said.trim().is_empty() || !said.contains(expect) {
        bail!("expected {expect:?} in what it says: {said}");
    }
    Ok(())
}
