//! `baton bench startup`: the time from starting a server, as a child process, until it is ready.
//!
//! Cold: the model's file is not in the page cache, and there are no compiled kernels. Warm: right after another start. The page
//! cache is dropped for that one file with `dd`, which needs no privileges; without `dd` there is no cold start.

use std::fmt::Write;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use crate::BenchError;
use crate::stats::Distribution;

#[derive(Clone, Debug)]
pub struct StartupOptions {
    /// The program and the arguments that start a server.
    pub program: PathBuf,
    pub args: Vec<String>,
    /// Files whose cached contents a cold start must not find.
    pub files: Vec<PathBuf>,
    /// A folder that is removed before and after a cold start, and the environment that makes it the cache of one.
    pub cold_folder: PathBuf,
    pub cold_environment: Vec<(&'static str, PathBuf)>,
    pub num_iters_cold: usize,
    pub num_iters_warm: usize,
}

#[derive(Clone, Debug, Default)]
pub struct StartupResult {
    pub cold_s: Vec<f64>,
    pub warm_s: Vec<f64>,
}

/// Ends the child, whatever happens.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn run(options: &StartupOptions, bar: &ProgressBar) -> Result<StartupResult, BenchError> {
    bar.set_length((options.num_iters_cold + options.num_iters_warm + 1) as u64);
    let mut result = StartupResult::default();
    let can_be_cold = options.files.iter().all(|file| forget(file));
    for _ in 0..options.num_iters_cold {
        bar.set_message("cold");
        if can_be_cold {
            options.files.iter().for_each(|file| {
                forget(file);
            });
            let _ = std::fs::remove_dir_all(&options.cold_folder);
            let started = start(options, &options.cold_environment);
            let _ = std::fs::remove_dir_all(&options.cold_folder);
            result.cold_s.push(started?);
        }
        bar.inc(1);
    }
    bar.set_message("warm");
    start(options, &[])?;
    bar.inc(1);
    for _ in 0..options.num_iters_warm {
        result.warm_s.push(start(options, &[])?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(result)
}

/// Drops a file from the system's cache. False where that cannot be done.
fn forget(file: &Path) -> bool {
    let status = Command::new("dd")
        .arg(format!("if={}", file.display()))
        .args(["iflag=nocache", "count=0", "status=none"])
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

/// Seconds from the start of the process to the line that says it is ready.
fn start(options: &StartupOptions, environment: &[(&str, PathBuf)]) -> Result<f64, BenchError> {
    let failed = |cause: String| BenchError::Failed(format!("the server did not start: {cause}"));
    let started = Instant::now();
    let child = Command::new(&options.program)
        .args(&options.args)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|cause| failed(cause.to_string()))?;
    let mut server = Server(child);
    let mut line = String::new();
    if let Some(stdout) = server.0.stdout.take() {
        BufReader::new(stdout).read_line(&mut line).map_err(|cause| failed(cause.to_string()))?;
    }
    let elapsed_s = started.elapsed().as_secs_f64();
    if !line.contains("http://") {
        let mut message = String::new();
        if let Some(stderr) = server.0.stderr.take() {
            let lines = BufReader::new(stderr).lines().map_while(Result::ok);
            message = lines.filter(|line| line.starts_with("error: ")).collect::<Vec<_>>().join(" ");
        }
        return Err(failed(message.trim_start_matches("error: ").to_owned()));
    }
    Ok(elapsed_s)
}

impl StartupResult {
    /// vLLM's keys.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut map = Map::new();
        for (name, times) in [("cold", &self.cold_s), ("warm", &self.warm_s)] {
            let values = Distribution::new(times.clone());
            let percentiles: Map<String, Value> = [10, 25, 50, 75, 90, 99]
                .iter()
                .map(|p| (p.to_string(), json!(values.percentile(f64::from(*p)))))
                .collect();
            map.insert(format!("avg_{name}_startup_time"), json!(values.mean()));
            map.insert(format!("{name}_startup_times"), json!(times));
            map.insert(format!("{name}_startup_percentiles"), json!(percentiles));
        }
        map
    }

    pub fn summary(&self) -> String {
        let mut text = String::new();
        for (name, times) in [("Cold", &self.cold_s), ("Warm", &self.warm_s)] {
            let values = Distribution::new(times.clone());
            if values.is_empty() {
                let _ = writeln!(text, "{name} startup: not measured");
            } else {
                let _ = writeln!(
                    text,
                    "{name} startup: {:.3} s on average, {:.3} s median, {:.3} to {:.3} s over {} starts",
                    values.mean(),
                    values.median(),
                    values.percentile(0.0),
                    values.percentile(100.0),
                    values.len()
                );
            }
        }
        text
    }
}
