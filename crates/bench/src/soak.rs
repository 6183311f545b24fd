//! `baton bench soak`: many badly behaved clients for some minutes, and a verdict at the end.
//!
//! Every client sends one request after another, each of a random kind: a stream that is read to its end, dropped in the
//! middle or read slowly, an answer without streaming, and bodies that are malformed, wrong or too large.
//! Meanwhile one task polls `/health` and one reads `/metrics` and, with `--pid`, the memory of the process.
//! Healthy means: every answer has the status its request deserves (429 and 503 are always allowed: the queue is
//! bounded), `/health` answers in time, and when all clients are gone no request and no KV block is left behind.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::Method;
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::BenchError;
use crate::client::{Answer, Client};
use crate::random::Random;
use crate::stats::Distribution;

const HEALTH_EVERY: Duration = Duration::from_millis(100);
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Between two reads of a slow reader.
const SLOW_READ: Duration = Duration::from_millis(300);
/// How long the server may take to be idle after the last client.
const CALM_DOWN: Duration = Duration::from_secs(60);
/// A request that takes longer than this is lost.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Clone, Debug)]
pub struct SoakOptions {
    pub base_url: String,
    pub headers: Vec<(String, String)>,
    pub num_clients: usize,
    pub duration: Duration,
    /// Bytes of a body that the server must refuse with 413.
    pub oversized_bytes: usize,
    /// Longest prompt in words, longest answer in tokens.
    pub max_input: usize,
    pub max_output: usize,
    /// Process whose resident memory is watched.
    pub pid: Option<u32>,
    pub max_health_p99: Duration,
    /// How much the resident memory may grow from the first quarter to the last.
    pub max_memory_growth: f64,
    pub seed: u64,
}

/// What a client does with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Behaviour {
    Stream,
    Whole,
    Cancel,
    Slow,
    Malformed,
    Wrong,
    Oversized,
}

impl Behaviour {
    fn draw(random: &mut Random) -> Self {
        match random.below(100) {
            0..45 => Self::Stream,
            45..55 => Self::Whole,
            55..80 => Self::Cancel,
            80..88 => Self::Slow,
            88..93 => Self::Malformed,
            93..98 => Self::Wrong,
            _ => Self::Oversized,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Stream => "streamed",
            Self::Whole => "whole",
            Self::Cancel => "cancelled",
            Self::Slow => "read slowly",
            Self::Malformed => "malformed",
            Self::Wrong => "wrong field",
            Self::Oversized => "oversized",
        }
    }

    /// The status that the request deserves, besides 429 and 503.
    fn deserves(self) -> u16 {
        match self {
            Self::Stream | Self::Whole | Self::Cancel | Self::Slow => 200,
            Self::Malformed | Self::Wrong => 400,
            Self::Oversized => 413,
        }
    }
}

/// What came of a soak; the last field says whether the server passed, and if not why.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SoakResult {
    pub duration: f64,
    pub num_requests: u64,
    /// By behaviour and status.
    pub statuses: BTreeMap<String, BTreeMap<u16, u64>>,
    pub num_output_chunks: u64,
    pub num_health_checks: usize,
    pub median_health_ms: f64,
    pub p99_health_ms: f64,
    pub max_health_ms: f64,
    pub max_requests_running: f64,
    pub max_requests_waiting: f64,
    pub max_kv_cache_usage_perc: f64,
    /// Medians of the first and the last quarter of the run.
    pub resident_mib: Option<(f64, f64)>,
    /// Seconds from the last client's end until nothing was running and no block in use.
    pub calm_after: Option<f64>,
    pub failures: Vec<String>,
}

/// Notes of one client.
#[derive(Debug, Default)]
struct Notes {
    statuses: BTreeMap<(Behaviour, u16), u64>,
    num_chunks: u64,
    failures: Vec<String>,
}

/// One sample of the server's own figures.
#[derive(Clone, Copy, Debug, Default)]
struct MetricsSample {
    running: f64,
    waiting: f64,
    kv_usage: f64,
    resident_mib: Option<f64>,
}

/// Runs the soak. The bar counts seconds.
pub fn run(options: SoakOptions, bar: &ProgressBar) -> Result<SoakResult, BenchError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|cause| BenchError::Failed(format!("the client's thread cannot be started: {cause}")))?;
    runtime.block_on(run_async(Arc::new(options), bar))
}

async fn run_async(options: Arc<SoakOptions>, bar: &ProgressBar) -> Result<SoakResult, BenchError> {
    let client = Arc::new(Client::new(&options.base_url, &options.headers).await?);
    // The server must be there before two hundred clients say that it is not.
    read_metrics(&client, options.pid).await?;
    let started = Instant::now();
    let end = started + options.duration;
    let mut clients = JoinSet::new();
    for number in 0..options.num_clients {
        clients.spawn(behave_badly(Arc::clone(&client), Arc::clone(&options), number as u64, end));
    }
    let health = tokio::spawn(watch_health(Arc::clone(&client), end));
    let samples = watch_metrics(&client, options.pid, started, end, bar).await;
    let mut notes = Notes::default();
    while let Some(joined) = clients.join_next().await {
        let one = joined.map_err(|cause| BenchError::Failed(format!("a client broke: {cause}")))?;
        for (key, count) in one.statuses {
            *notes.statuses.entry(key).or_default() += count;
        }
        notes.num_chunks += one.num_chunks;
        notes.failures.extend(one.failures);
    }
    let calm_after = calm_down(&client).await?;
    let (latencies, unhealthy) =
        health.await.map_err(|cause| BenchError::Failed(format!("the watcher broke: {cause}")))?;
    notes.failures.extend(unhealthy);
    Ok(judge(&options, started.elapsed(), notes, &Distribution::new(latencies), &samples, calm_after))
}

async fn behave_badly(client: Arc<Client>, options: Arc<SoakOptions>, number: u64, end: Instant) -> Notes {
    let mut random = Random::new(options.seed.wrapping_mul(1 << 20).wrapping_add(number));
    let mut notes = Notes::default();
    while Instant::now() < end {
        let behaviour = Behaviour::draw(&mut random);
        let body = body(behaviour, &options, &mut random);
        let outcome =
            tokio::time::timeout(PATIENCE, one_request(&client, behaviour, body, &mut random, &mut notes))
                .await;
        let failure = match outcome {
            Ok(Ok(status)) => {
                *notes.statuses.entry((behaviour, status)).or_default() += 1;
                let allowed = status == behaviour.deserves() || status == 429 || status == 503;
                (!allowed).then(|| format!("a {} request was answered with {status}", behaviour.name()))
            }
            Ok(Err(cause)) => Some(format!("a {} request: {cause}", behaviour.name())),
            Err(_) => Some(format!("a {} request took over {} s", behaviour.name(), PATIENCE.as_secs())),
        };
        notes.failures.extend(failure);
        // A turned-away client comes back later, as `Retry-After` asks.
        tokio::time::sleep(Duration::from_millis(random.below(50))).await;
    }
    notes
}

fn body(behaviour: Behaviour, options: &SoakOptions, random: &mut Random) -> Bytes {
    match behaviour {
        Behaviour::Malformed => return Bytes::from_static(b"{\"prompt\": \"never closed"),
        Behaviour::Oversized => {
            let filler = "x".repeat(options.oversized_bytes);
            return Bytes::from(json!({"prompt": filler, "max_tokens": 1}).to_string());
        }
        _ => {}
    }
    let words = random.between(1, options.max_input);
    let prompt: Vec<String> = (0..words).map(|_| random.below(1000).to_string()).collect();
    let mut body = json!({
        "prompt": prompt.join(" "),
        "max_tokens": random.between(1, options.max_output),
        "temperature": if random.below(2) == 0 { 0.0 } else { 1.0 },
        "ignore_eos": true,
        "stream": behaviour != Behaviour::Whole,
    });
    if behaviour == Behaviour::Wrong {
        let (field, value) = match random.below(4) {
            0 => ("temperature", json!(-1)),
            1 => ("max_tokens", json!("many")),
            2 => ("top_p", json!(0)),
            _ => ("n", json!(100_000)),
        };
        body[field] = value;
    }
    Bytes::from(body.to_string())
}

/// The status of the answer, which is read, or not, as the behaviour says.
async fn one_request(
    client: &Client,
    behaviour: Behaviour,
    body: Bytes,
    random: &mut Random,
    notes: &mut Notes,
) -> Result<u16, String> {
    let sent = client.send(Method::POST, "/v1/completions", body).await;
    // A server may close the connection on a client that goes on sending what is too large.
    if behaviour == Behaviour::Oversized && sent.is_err() {
        return Ok(413);
    }
    let mut answer = sent?;
    let status = answer.status().as_u16();
    let read_at_most = if behaviour == Behaviour::Cancel { random.below(12) } else { u64::MAX };
    for _ in 0..read_at_most {
        let Some(data) = answer.next().await else {
            finish(answer);
            return Ok(status);
        };
        data?;
        notes.num_chunks += 1;
        if behaviour == Behaviour::Slow {
            tokio::time::sleep(SLOW_READ).await;
        }
    }
    // Dropping the answer closes its connection, as a client does that goes away.
    Ok(status)
}

/// An answer to a body that was not read to its end leaves the connection in no state to be used again.
fn finish(answer: Answer<'_>) {
    if answer.status().is_success() {
        answer.finish();
    }
}

/// Latencies of `/health` in milliseconds, and what was wrong with its answers.
async fn watch_health(client: Arc<Client>, end: Instant) -> (Vec<f64>, Vec<String>) {
    let (mut latencies, mut failures) = (Vec::new(), Vec::new());
    while Instant::now() < end {
        let asked = Instant::now();
        let answer = match client.send(Method::GET, "/health", Bytes::new()).await {
            Ok(answer) => answer.whole().await,
            Err(cause) => Err(cause),
        };
        match answer {
            Ok((status, _)) if status.is_success() => latencies.push(asked.elapsed().as_secs_f64() * 1e3),
            Ok((status, _)) => failures.push(format!("/health said {status}")),
            Err(cause) => failures.push(format!("/health: {cause}")),
        }
        tokio::time::sleep(HEALTH_EVERY).await;
    }
    (latencies, failures)
}

async fn watch_metrics(
    client: &Client,
    pid: Option<u32>,
    started: Instant,
    end: Instant,
    bar: &ProgressBar,
) -> Vec<MetricsSample> {
    let mut samples = Vec::new();
    while Instant::now() < end {
        if let Ok(sample) = read_metrics(client, pid).await {
            bar.set_message(format!("{} running, {} waiting", sample.running, sample.waiting));
            samples.push(sample);
        }
        bar.set_position(started.elapsed().as_secs());
        tokio::time::sleep(LOOK_EVERY).await;
    }
    bar.finish_and_clear();
    samples
}

async fn read_metrics(client: &Client, pid: Option<u32>) -> Result<MetricsSample, BenchError> {
    let failed = |cause: String| BenchError::server("/metrics", cause);
    let answer = client.send(Method::GET, "/metrics", Bytes::new()).await.map_err(failed)?;
    let (status, body) = answer.whole().await.map_err(failed)?;
    if !status.is_success() {
        return Err(failed(format!("says {status}; a soak needs vLLM's metrics")));
    }
    let text = String::from_utf8_lossy(&body);
    let gauge = |name: &str| {
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
    };
    Ok(MetricsSample {
        running: gauge("vllm:num_requests_running"),
        waiting: gauge("vllm:num_requests_waiting"),
        kv_usage: gauge("vllm:kv_cache_usage_perc"),
        resident_mib: pid.and_then(resident_mib),
    })
}

/// Resident memory of a process, where the system tells (Linux).
pub(crate) fn resident_mib(pid: u32) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024.0)
}

/// Seconds until the server has nothing left of its clients.
async fn calm_down(client: &Client) -> Result<Option<f64>, BenchError> {
    let since = Instant::now();
    while since.elapsed() < CALM_DOWN {
        let sample = read_metrics(client, None).await?;
        if sample.running == 0.0 && sample.waiting == 0.0 && sample.kv_usage == 0.0 {
            return Ok(Some(since.elapsed().as_secs_f64()));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(None)
}

fn judge(
    options: &SoakOptions,
    duration: Duration,
    notes: Notes,
    health: &Distribution,
    samples: &[MetricsSample],
    calm_after: Option<f64>,
) -> SoakResult {
    let mut failures = count_equal(notes.failures);
    let p99 = if health.is_empty() { f64::INFINITY } else { health.percentile(99.0) };
    let allowed = options.max_health_p99.as_secs_f64() * 1e3;
    if p99 > allowed {
        failures.push(format!("the 99th percentile of /health is {p99:.1} ms, above {allowed:.0} ms"));
    }
    if calm_after.is_none() {
        failures.push(format!("{} s after the last client something is still in use", CALM_DOWN.as_secs()));
    }
    let resident = growth(samples);
    if let Some((first, last)) = resident
        && last > first * (1.0 + options.max_memory_growth)
    {
        failures.push(format!("resident memory grew from {first:.0} to {last:.0} MiB"));
    }
    let largest = |of: fn(&MetricsSample) -> f64| samples.iter().map(of).fold(0.0, f64::max);
    let mut statuses: BTreeMap<String, BTreeMap<u16, u64>> = BTreeMap::new();
    for (&(behaviour, status), &count) in &notes.statuses {
        statuses.entry(behaviour.name().to_owned()).or_default().insert(status, count);
    }
    SoakResult {
        duration: duration.as_secs_f64(),
        num_requests: notes.statuses.values().sum(),
        statuses,
        num_output_chunks: notes.num_chunks,
        num_health_checks: health.len(),
        median_health_ms: if health.is_empty() { 0.0 } else { health.median() },
        p99_health_ms: p99,
        max_health_ms: health.sorted().last().copied().unwrap_or(0.0),
        max_requests_running: largest(|sample| sample.running),
        max_requests_waiting: largest(|sample| sample.waiting),
        max_kv_cache_usage_perc: largest(|sample| sample.kv_usage),
        resident_mib: resident,
        calm_after,
        failures,
    }
}

/// Median resident memory of the first and the last quarter.
fn growth(samples: &[MetricsSample]) -> Option<(f64, f64)> {
    let sizes: Vec<f64> = samples.iter().filter_map(|sample| sample.resident_mib).collect();
    let quarter = sizes.len() / 4;
    (quarter > 0).then(|| {
        let median = |part: &[f64]| Distribution::new(part.to_vec()).median();
        (median(&sizes[..quarter]), median(&sizes[sizes.len() - quarter..]))
    })
}

/// Each different failure once, with how often it happened.
fn count_equal(failures: Vec<String>) -> Vec<String> {
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for failure in failures {
        *counts.entry(failure).or_default() += 1;
    }
    counts.into_iter().map(|(failure, count)| format!("{failure} ({count} times)")).collect()
}

impl SoakResult {
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// For the console.
    pub fn summary(&self) -> String {
        let mut lines = vec![format!("{} requests in {:.0} s", self.num_requests, self.duration)];
        for (behaviour, statuses) in &self.statuses {
            let counts: Vec<String> =
                statuses.iter().map(|(status, count)| format!("{status}: {count}")).collect();
            lines.push(format!("  {behaviour:<12} {}", counts.join(", ")));
        }
        lines.push(format!(
            "/health: median {:.1} ms, 99th percentile {:.1} ms, largest {:.1} ms ({} asked)",
            self.median_health_ms, self.p99_health_ms, self.max_health_ms, self.num_health_checks
        ));
        lines.push(format!(
            "at most {} running, {} waiting, {:.1} % of the KV blocks in use",
            self.max_requests_running,
            self.max_requests_waiting,
            self.max_kv_cache_usage_perc * 100.0
        ));
        if let Some((first, last)) = self.resident_mib {
            lines.push(format!(
                "resident memory: {first:.0} MiB in the first quarter, {last:.0} MiB in the last"
            ));
        }
        lines.push(match self.calm_after {
            Some(seconds) => format!("idle {seconds:.2} s after the last client, all blocks free"),
            None => "not idle after the last client".to_owned(),
        });
        lines.extend(self.failures.iter().map(|failure| format!("FAILED: {failure}")));
        lines.push(if self.passed() { "passed" } else { "did not pass" }.to_owned());
        lines.join("\n") + "\n"
    }

    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).expect("plain numbers and texts")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> SoakOptions {
        SoakOptions {
            base_url: String::new(),
            headers: Vec::new(),
            num_clients: 1,
            duration: Duration::from_secs(1),
            oversized_bytes: 10,
            max_input: 5,
            max_output: 5,
            pid: None,
            max_health_p99: Duration::from_millis(100),
            max_memory_growth: 0.1,
            seed: 0,
        }
    }

    fn judged(
        notes: Notes,
        health: Vec<f64>,
        samples: &[MetricsSample],
        calm_after: Option<f64>,
    ) -> SoakResult {
        judge(&options(), Duration::from_secs(1), notes, &Distribution::new(health), samples, calm_after)
    }

    #[test]
    fn every_promise_can_be_broken() {
        assert!(judged(Notes::default(), vec![1.0], &[], Some(0.1)).passed());
        assert!(!judged(Notes::default(), vec![101.0], &[], Some(0.1)).passed());
        assert!(!judged(Notes::default(), Vec::new(), &[], Some(0.1)).passed());
        assert!(!judged(Notes::default(), vec![1.0], &[], None).passed());
        let failing = Notes { failures: vec!["x".to_owned(), "x".to_owned()], ..Notes::default() };
        assert_eq!(judged(failing, vec![1.0], &[], Some(0.1)).failures, ["x (2 times)"]);
        let sizes = [100.0, 100.0, 120.0, 120.0];
        let samples =
            sizes.map(|size| MetricsSample { resident_mib: Some(size), ..MetricsSample::default() });
        let result = judged(Notes::default(), vec![1.0], &samples, Some(0.1));
        assert_eq!(result.failures, ["resident memory grew from 100 to 120 MiB"]);
    }

    #[test]
    fn behaviours_are_all_drawn() {
        let mut random = Random::new(1);
        let drawn: std::collections::BTreeSet<Behaviour> =
            (0..1000).map(|_| Behaviour::draw(&mut random)).collect();
        assert_eq!(drawn.len(), 7);
    }

    #[test]
    fn only_the_malformed_body_is_malformed() {
        let mut random = Random::new(2);
        for behaviour in [Behaviour::Stream, Behaviour::Wrong, Behaviour::Oversized, Behaviour::Malformed] {
            let body = body(behaviour, &options(), &mut random);
            let parsed = serde_json::from_slice::<Value>(&body);
            assert_eq!(parsed.is_err(), behaviour == Behaviour::Malformed, "{behaviour:?}");
        }
    }
}
