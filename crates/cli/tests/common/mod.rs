//! Runs the real binary as a user would, in a cache directory of its own.
#![allow(dead_code, reason = "each test file uses its own part of this")]

pub mod hub;
pub mod worker;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

/// The default model's catalogue entry, as scripts see it.
pub const MODEL_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
pub const MODEL_BYTES: u64 = 98_362_432;

/// What a run gave.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// A `baton` with a cache directory that goes away with it.
#[derive(Debug)]
pub struct Baton {
    pub home: tempfile::TempDir,
}

impl Baton {
    pub fn new() -> Self {
        Self { home: tempfile::tempdir().expect("a temporary directory") }
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(args).env("BATON_HOME", self.home.path()).env("NO_COLOR", "1");
        // All of them at once would not fit a GPU, which has tests of its own.
        command.env("CUDA_VISIBLE_DEVICES", "");
        // No test asks the real hub, and none finds what others have fetched.
        command.env("HF_ENDPOINT", "http://127.0.0.1:9").env_remove("HF_HOME").env_remove("HF_HUB_CACHE");
        command.env_remove("HF_TOKEN").env("HF_TOKEN_PATH", "/nonexistent").env_remove("BATON_API_KEY");
        command
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        self.run_with(args, "")
    }

    /// With something on standard input.
    pub fn run_with(&self, args: &[&str], stdin: &str) -> Ran {
        finish(self.command(args), stdin)
    }

    /// Runs, expects success, gives standard output.
    pub fn ok(&self, args: &[&str]) -> String {
        let ran = self.run(args);
        assert_eq!(ran.code, 0, "{args:?} failed: {}", ran.stderr);
        ran.stdout
    }

    /// Runs with `--json` and reads the object.
    pub fn json(&self, args: &[&str]) -> Value {
        let stdout = self.ok(&[args, &["--json"]].concat());
        serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{args:?}: {error}\n{stdout}"))
    }

    /// Runs and expects an error of exit code 1: one line `error: …` that contains `expect`, at most a hint after it.
    pub fn fails(&self, args: &[&str], expect: &str) {
        let ran = self.run(args);
        assert_eq!(ran.code, 1, "{args:?}: {ran:?}");
        assert_is_error(&ran, expect);
    }
}

pub fn finish(mut command: Command, stdin: &str) -> Ran {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    // A command that does not read its input may be gone by now; that is its right.
    let _ = child.stdin.take().expect("a pipe").write_all(stdin.as_bytes());
    let output = child.wait_with_output().expect("the binary ends");
    Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).expect("UTF-8 on stdout"),
        stderr: String::from_utf8(output.stderr).expect("UTF-8 on stderr"),
    }
}

pub fn assert_is_error(ran: &Ran, expect: &str) {
    let lines: Vec<&str> = ran.stderr.lines().collect();
    let errors = lines.iter().filter(|line| line.starts_with("error: ")).count();
    assert_eq!(errors, 1, "not one line of error: {ran:?}");
    let others = lines.iter().filter(|line| !line.starts_with("error: ") && !line.starts_with("hint: "));
    assert_eq!(others.count(), 0, "more than an error and a hint: {ran:?}");
    assert!(ran.stderr.contains(expect), "{expect:?} is not in {:?}", ran.stderr);
    assert!(!ran.stderr.contains("panicked") && !ran.stderr.contains("internal"), "{ran:?}");
}

/// A fixture of this crate.
pub fn data(path: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path).display().to_string()
}

/// The default model, which is too large to be a fixture: where `BATON_TEST_MODEL` says, or in `.cache/`, where it is
/// fetched to once, with the product's own command.
pub fn model() -> PathBuf {
    static FETCH: Mutex<()> = Mutex::new(());
    if let Some(path) = std::env::var_os("BATON_TEST_MODEL").map(PathBuf::from) {
        assert!(path.is_file(), "BATON_TEST_MODEL is {}, which is no file", path.display());
        return path;
    }
    let home = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/home");
    let path = home.join("models").join(MODEL_FILE);
    let _one_at_a_time = FETCH.lock().unwrap_or_else(PoisonError::into_inner);
    if !path.is_file() {
        println!("fetching the default model into {}, once", home.display());
        let mut pull = Command::new(env!("CARGO_BIN_EXE_baton"));
        let pulled = pull.arg("pull").env("BATON_HOME", &home).output().expect("the binary starts");
        let said = String::from_utf8_lossy(&pulled.stderr);
        assert!(pulled.status.success(), "this test needs the default model, and fetching it failed: {said}");
    }
    path
}

/// The default model as an argument.
pub fn model_arg() -> String {
    model().display().to_string()
}
