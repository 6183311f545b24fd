//! Rules that the compiler does not know: who may depend on whom, how long a file may be, where `unsafe` may stand.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Each crate and the crates of ours it may use. Data flows one way; `docs/ARCHITECTURE.md` draws the same graph.
const CRATE_GRAPH: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("kv", &["core"]),
    ("sched", &["core", "kv"]),
    ("backend", &["core"]),
    ("cpu", &["core", "backend"]),
    ("cuda", &["core", "backend"]),
    ("model", &["core", "backend"]),
    ("engine", &["core", "kv", "sched", "backend", "model"]),
    ("cluster", &["core", "kv", "backend", "engine"]),
    ("graph", &["core", "kv", "backend", "model"]),
    ("text", &["core"]),
    ("grammar", &["core", "text"]),
    ("serve", &["core", "engine", "events", "graph", "text", "grammar"]),
    ("grpc", &["core", "events", "serve"]),
    ("bench", &["core", "backend", "engine"]),
    ("hub", &[]),
    ("events", &["core", "kv"]),
    ("router", &["events"]),
    ("baton", &["core", "backend", "cpu", "cuda", "model", "engine", "cluster", "text", "grammar", "hub"]),
    (
        "cli",
        &[
            "bench", "hub", "events", "router", "core", "kv", "sched", "backend", "cpu", "cuda", "model",
            "engine", "cluster", "graph", "text", "grammar", "serve", "grpc",
        ],
    ),
    ("sim", &["core", "kv", "sched"]),
];
/// Crates that may contain `unsafe`; in `model` only the memory-mapped loader.
const UNSAFE_CRATES: &[&str] = &["cpu", "cuda", "model"];
/// Kernels may be longer when splitting hurts.
const MAX_FILE_LINES: usize = 600;

pub fn run(root: &Path) -> Result<()> {
    let mut complaints = Vec::new();
    check_crates(root, &mut complaints)?;
    for file in rust_files(&root.join("crates"))?.into_iter().chain(rust_files(&root.join("xtask"))?) {
        check_file(root, &file, &mut complaints)?;
    }
    check_request_path(root, &mut complaints)?;
    if let Err(error) = crate::results::check(root) {
        complaints.push(format!("{error:#}"));
    }
    if !complaints.is_empty() {
        bail!("{} tidy complaints:\n  {}", complaints.len(), complaints.join("\n  "));
    }
    println!("tidy: ok");
    Ok(())
}

fn check_crates(root: &Path, complaints: &mut Vec<String>) -> Result<()> {
    for entry in std::fs::read_dir(root.join("crates"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let Some((_, allowed)) = CRATE_GRAPH.iter().find(|(known, _)| *known == name) else {
            complaints.push(format!("crates/{name} is not in the crate graph of xtask/src/tidy.rs"));
            continue;
        };
        let manifest = read(&root.join("crates").join(&name).join("Cargo.toml"))?;
        let dependencies = section(&manifest, "[dependencies]");
        for line in dependencies.lines() {
            if let Some(rest) = line.strip_prefix("baton-") {
                let dependency = rest.split(['.', ' ', '=']).next().unwrap_or_default();
                if !allowed.contains(&dependency) {
                    complaints.push(format!(
                        "crates/{name} may not depend on {dependency}: data flows the other way"
                    ));
                }
            }
        }
        let library = root.join("crates").join(&name).join("src/lib.rs");
        if library.is_file()
            && !UNSAFE_CRATES.contains(&name.as_str())
            && !read(&library)?.contains("#![forbid(unsafe_code)]")
        {
            complaints.push(format!("crates/{name}/src/lib.rs lacks #![forbid(unsafe_code)]"));
        }
    }
    Ok(())
}

/// The lines of a manifest from a header to the next one.
/// The way of a request through the code, as `docs/ARCHITECTURE.md` writes it down: at most a dozen hops, all of which are there.
fn check_request_path(root: &Path, complaints: &mut Vec<String>) -> Result<()> {
    let text = read(&root.join("docs/ARCHITECTURE.md"))?;
    let hops = text.split_once("In code, from the route to the kernel").map_or("", |(_, rest)| rest);
    let hops = hops.split_once("\n## ").map_or(hops, |(hops, _)| hops);
    let hops: Vec<&str> =
        hops.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit())).collect();
    if !(5..=12).contains(&hops.len()) {
        complaints.push(format!("docs/ARCHITECTURE.md: the way of a request has {} hops", hops.len()));
    }
    for hop in hops {
        // Files and functions stand before the colon, in backticks.
        let names: Vec<&str> = hop.split(": ").next().unwrap_or(hop).split('`').skip(1).step_by(2).collect();
        let (files, functions): (Vec<&str>, Vec<&str>) =
            names.into_iter().partition(|name| name.contains('/'));
        let mut code = String::new();
        for file in files {
            match read(&root.join("crates").join(file)) {
                Ok(text) => code.push_str(&text),
                Err(_) => complaints.push(format!("docs/ARCHITECTURE.md: there is no crates/{file}")),
            }
        }
        for function in functions.iter().filter_map(|name| name.rsplit("::").next()) {
            if !code.contains(&format!("fn {function}(")) {
                complaints
                    .push(format!("docs/ARCHITECTURE.md: no function {function} in the files of {hop:?}"));
            }
        }
    }
    Ok(())
}

fn section<'a>(manifest: &'a str, header: &str) -> &'a str {
    let Some(start) = manifest.find(header) else { return "" };
    let body = &manifest[start + header.len()..];
    &body[..body.find("\n[").unwrap_or(body.len())]
}

fn check_file(root: &Path, file: &Path, complaints: &mut Vec<String>) -> Result<()> {
    let text = read(file)?;
    let name = file.strip_prefix(root).unwrap_or(file).display();
    let lines = text.lines().count();
    if lines > MAX_FILE_LINES && !text.contains("tidy: long file, because") {
        complaints
            .push(format!("{name} has {lines} lines; at most {MAX_FILE_LINES} (split it along a real seam)"));
    }
    let is_module = file.components().any(|part| part.as_os_str() == "src");
    if is_module && !text.starts_with("//!") && !text.starts_with("#!") {
        complaints.push(format!("{name} does not open with `//!` prose"));
    }
    for mark in
        [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("todo", "!("), concat!("unimplemented", "!(")]
    {
        if text.contains(mark) {
            complaints.push(format!("{name} contains {mark}"));
        }
    }
    Ok(())
}

fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in
            std::fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?
        {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}
