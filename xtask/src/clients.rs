//! The public client libraries against a running server: `tests/clients/`.
//!
//! Pinned packages come through `pip` and `npm`, once, into `.cache/clients/`. The server is a debug build with the
//! default model and a key; it is stopped when the scripts are done, whatever they said.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use crate::{NO_GPU, root, run};

const PYTHON_PACKAGES: [&str; 9] = [
    "openai==3.49.0",
    "anthropic==2.8.0",
    "ollama==0.6.3",
    "schemathesis==4.32.5",
    "pyzmq==27.3.0",
    "msgspec==0.22.0",
    "smg==1.13.0",
    "vllm-router==0.1.16",
    "kubernetes-validate==1.37.0",
];
const NODE_PACKAGE: &str = "openai@7.53.0";
const PYTHON_SCRIPTS: [&str; 4] = ["openai_sdk.py", "anthropic_sdk.py", "ollama_client.py", "contract.py"];
/// Starts servers of its own.
const CLUSTER_SCRIPT: &str = "cluster.py";
const NODE_SCRIPT: &str = "openai_sdk.mjs";
const KEY: &str = "key-of-the-client-tests";

/// Fetches the libraries. Gives their folder and its Python.
pub fn fetch() -> Result<(PathBuf, PathBuf)> {
    let folder = root().join(".cache/clients");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let python = python(&folder)?;
    node_modules(&folder)?;
    Ok((folder, python))
}

/// Starts a server with this model and runs every script.
pub fn test(binary: &Path, model: &Path) -> Result<()> {
    let (folder, python) = fetch()?;
    manifests(&folder)?;
    let server = Server::start(binary, model)?;
    for script in PYTHON_SCRIPTS {
        println!("$ {script}");
        server.run(Command::new(&python).arg(scripts().join(script)))?;
    }
    println!("$ {CLUSTER_SCRIPT}");
    let mut cluster = Command::new(&python);
    cluster.arg(scripts().join(CLUSTER_SCRIPT)).env("BATON_BIN", binary).env("BATON_TEST_MODEL", model);
    run(cluster.env(NO_GPU.0, NO_GPU.1))?;
    // Node looks for packages beside the script.
    let script = folder.join(NODE_SCRIPT);
    std::fs::copy(scripts().join(NODE_SCRIPT), &script)?;
    println!("$ {NODE_SCRIPT}");
    server.run(Command::new("node").arg(&script))
}

/// The manifests of `packaging/kubernetes` against Kubernetes' own schemas: no unknown field, no wrong type.
fn manifests(folder: &Path) -> Result<()> {
    let mut files = Vec::new();
    for file in std::fs::read_dir(root().join("packaging/kubernetes"))? {
        files.push(file?.path());
    }
    anyhow::ensure!(!files.is_empty(), "there are no manifests");
    run(Command::new(folder.join("venv/bin/kubernetes-validate")).arg("--strict").args(files))
}

fn scripts() -> PathBuf {
    root().join("tests/clients")
}

/// True where these packages were fetched before; otherwise notes it once `fetch` has succeeded.
fn once(mark: &Path, packages: &str, fetch: impl FnOnce() -> Result<()>) -> Result<()> {
    if std::fs::read_to_string(mark).is_ok_and(|fetched| fetched == packages) {
        return Ok(());
    }
    println!("fetching {packages}");
    fetch()?;
    std::fs::write(mark, packages).with_context(|| format!("cannot write {}", mark.display()))
}

fn python(folder: &Path) -> Result<PathBuf> {
    let environment = folder.join("venv");
    let python = environment.join("bin/python");
    once(&folder.join("python-packages"), &PYTHON_PACKAGES.join(" "), || {
        run(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PYTHON_PACKAGES))
    })?;
    Ok(python)
}

fn node_modules(folder: &Path) -> Result<()> {
    once(&folder.join("node-packages"), NODE_PACKAGE, || {
        run(Command::new("npm")
            .args(["install", "--silent", "--no-audit", "--no-fund", "--prefix"])
            .arg(folder)
            .arg(NODE_PACKAGE))
    })
}

/// A server that ends with this value.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(binary: &Path, model: &Path) -> Result<Self> {
        let mut child = Command::new(binary)
            .arg("serve")
            .arg(model)
            .args(["--port", "0", "--api-key", KEY, "--max-model-len", "4096", "--log-level", "warn"])
            .env_remove("BATON_API_KEY")
            .env(NO_GPU.0, NO_GPU.1)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("the server cannot be started")?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("the server has a pipe")?;
        let mut server = Self { child, url: String::new() };
        BufReader::new(stdout).read_line(&mut line)?;
        let address = line.split_whitespace().find(|word| word.starts_with("http://"));
        server.url = address.with_context(|| format!("the server said {line:?} and no address"))?.into();
        Ok(server)
    }

    fn run(&self, command: &mut Command) -> Result<()> {
        run(command.env("BATON_URL", &self.url).env("BATON_API_KEY", KEY).current_dir(root()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
