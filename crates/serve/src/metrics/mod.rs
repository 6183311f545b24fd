//! Figures for Prometheus, under vLLM's names and labels so that its dashboards work unchanged.
//!
//! The text is written here: it is Python's `prometheus_client` that dashboards of vLLM were made for, with `_total` in the names
//! of counters' `# TYPE` lines and `le="1.0"`. `prometheus-client` writes OpenMetrics (other `# TYPE` lines, `# EOF`) and cannot
//! observe a value several times at once, which a step with many rows needs; `prometheus` writes `le="1"`.
//!
//! What the engine knows at any moment (queues, blocks, prefix cache) is read from its heartbeat when somebody asks; what
//! happens over time is counted here, by the engine's loop ([`EngineObserver`]) or by the server at a request's end.
//! Times are the engine's: a client that reads slowly does not change them.

mod graph;
mod histogram;
mod render;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_core::FinishReason;
use baton_engine::{DeviceReport, KvEvent, Observer, OutputReport, RequestTimes, StepReport, TurnReport};
use baton_events::EventHub;

pub use histogram::Histogram;
pub use render::ServerFigures;

use crate::trace::{Row, Trace};

const TTFT_BOUNDS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// vLLM's, and finer ones below them: its first bound of 10 ms hides what a good decode step takes.
const TOKEN_BOUNDS: [f64; 25] = [
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const REQUEST_BOUNDS: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
const ITERATION_BOUNDS: [f64; 13] =
    [1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const N_BOUNDS: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];
const HTTP_BOUNDS: [f64; 3] = [0.1, 0.5, 1.0];

/// How a request can end, in vLLM's words.
const FINISH_REASONS: [(FinishReason, &str); 4] = [
    (FinishReason::Stop, "stop"),
    (FinishReason::Length, "length"),
    (FinishReason::Abort, "abort"),
    (FinishReason::Error, "error"),
];

/// The KV cache as it was set up.
#[derive(Clone, Copy, Debug)]
pub struct CacheInfo {
    pub block_size: usize,
    pub num_gpu_blocks: usize,
    pub num_cpu_blocks: usize,
}

#[derive(Debug)]
pub struct Metrics {
    /// `model_name` and `engine`, ready to be printed.
    labels: String,
    cache: CacheInfo,
    prompt_tokens: AtomicU64,
    prompt_tokens_cached: AtomicU64,
    generation_tokens: AtomicU64,
    request_success: [AtomicU64; FINISH_REASONS.len()],
    iteration_tokens: Histogram,
    time_to_first_token: Histogram,
    inter_token_latency: Histogram,
    time_per_output_token: Histogram,
    e2e_latency: Histogram,
    queue_time: Histogram,
    inference_time: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
    request_max_generation_tokens: Histogram,
    request_params_n: Histogram,
    request_params_max_tokens: Histogram,
    http: Mutex<BTreeMap<HttpLabels, u64>>,
    http_duration: Histogram,
}

/// Route pattern (never the path itself, which clients choose), method, class of the status.
type HttpLabels = (String, String, u16);

/// One request at its end.
#[derive(Clone, Copy, Debug)]
pub struct RequestEnd {
    pub reason: FinishReason,
    pub times: RequestTimes,
    pub num_prompt_tokens: usize,
    pub num_cached_tokens: usize,
    pub num_generation_tokens: usize,
    /// Of the longest continuation.
    pub max_generation_tokens: usize,
    pub n: u32,
    pub max_tokens: Option<u32>,
}

impl Metrics {
    pub fn new(model_name: &str, max_model_len: usize, cache: CacheInfo) -> Self {
        let tokens = || Histogram::of_counts(max_model_len);
        let request = || Histogram::new(&REQUEST_BOUNDS);
        Self {
            labels: format!("engine=\"0\",model_name=\"{}\"", escape(model_name)),
            cache,
            prompt_tokens: AtomicU64::new(0),
            prompt_tokens_cached: AtomicU64::new(0),
            generation_tokens: AtomicU64::new(0),
            request_success: std::array::from_fn(|_| AtomicU64::new(0)),
            iteration_tokens: Histogram::new(&ITERATION_BOUNDS),
            time_to_first_token: Histogram::new(&TTFT_BOUNDS),
            inter_token_latency: Histogram::new(&TOKEN_BOUNDS),
            time_per_output_token: Histogram::new(&TOKEN_BOUNDS),
            e2e_latency: request(),
            queue_time: request(),
            inference_time: request(),
            prefill_time: request(),
            decode_time: request(),
            request_prompt_tokens: tokens(),
            request_generation_tokens: tokens(),
            request_max_generation_tokens: tokens(),
            request_params_n: Histogram::new(&N_BOUNDS),
            request_params_max_tokens: tokens(),
            http: Mutex::new(BTreeMap::new()),
            http_duration: Histogram::new(&HTTP_BOUNDS),
        }
    }

    /// A request that was accepted has ended.
    pub fn request_ended(&self, end: &RequestEnd) {
        let index = FINISH_REASONS.iter().position(|(reason, _)| *reason == end.reason);
        self.request_success[index.expect("every reason is listed")].fetch_add(1, Ordering::Relaxed);
        self.prompt_tokens_cached.fetch_add(end.num_cached_tokens as u64, Ordering::Relaxed);
        let times = &end.times;
        let seconds = |from: Option<std::time::Instant>, to: Option<std::time::Instant>| {
            Some(to?.saturating_duration_since(from?).as_secs_f64())
        };
        self.e2e_latency.observe(times.submitted.elapsed().as_secs_f64());
        let spans = [
            (&self.queue_time, seconds(Some(times.submitted), times.started)),
            (&self.prefill_time, seconds(times.started, times.first_token)),
            (&self.decode_time, seconds(times.first_token, times.last_token)),
            (&self.inference_time, seconds(times.started, times.last_token)),
        ];
        for (histogram, value) in spans {
            if let Some(value) = value {
                histogram.observe(value);
            }
        }
        if let Some(decode) = seconds(times.first_token, times.last_token)
            && end.max_generation_tokens > 1
        {
            self.time_per_output_token.observe(decode / (end.max_generation_tokens - 1) as f64);
        }
        self.request_prompt_tokens.observe(end.num_prompt_tokens as f64);
        self.request_generation_tokens.observe(end.num_generation_tokens as f64);
        self.request_max_generation_tokens.observe(end.max_generation_tokens as f64);
        self.request_params_n.observe(f64::from(end.n));
        if let Some(max_tokens) = end.max_tokens {
            self.request_params_max_tokens.observe(f64::from(max_tokens));
        }
    }

    /// An HTTP request was answered (for a stream: begun to be answered).
    pub fn http_answered(&self, handler: &str, method: &str, status: u16, duration: Duration) {
        let labels = (handler.to_owned(), method.to_owned(), status / 100);
        *self.http.lock().unwrap_or_else(PoisonError::into_inner).entry(labels).or_default() += 1;
        self.http_duration.observe(duration.as_secs_f64());
    }
}

/// A label's value in the text format.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// The engine's loop tells of its steps.
#[derive(Debug)]
pub struct EngineObserver {
    metrics: Arc<Metrics>,
    trace: Option<Arc<Trace>>,
    kv_events: Option<Arc<EventHub>>,
}

impl EngineObserver {
    pub fn new(metrics: Arc<Metrics>, trace: Option<Arc<Trace>>, kv_events: Option<Arc<EventHub>>) -> Self {
        Self { metrics, trace, kv_events }
    }
}

impl Observer for EngineObserver {
    fn step(&mut self, report: &StepReport) {
        // A step may also only move blocks.
        if report.num_tokens > 0 {
            // As vLLM counts: prompt tokens and generated tokens.
            self.metrics.iteration_tokens.observe((report.num_tokens + report.num_first_tokens) as f64);
        }
    }

    fn turn(&mut self, report: &TurnReport<'_>) {
        if let Some(trace) = &self.trace {
            for span in report.spans {
                trace.span(
                    Row::Engine,
                    span.phase.name(),
                    span.start,
                    span.end,
                    report.num_steps,
                    report.num_tokens,
                );
            }
            for relay in report.relay {
                trace.relay(relay);
            }
            for DeviceReport { step, is_decode, span } in report.device {
                let name = if *is_decode { "decode" } else { "prefill" };
                trace.span(Row::Device, name, span.start, span.end, step.step, step.num_tokens);
            }
        }
    }

    fn kv_events(&mut self, events: &[KvEvent]) {
        if let Some(hub) = &self.kv_events {
            hub.publish(events);
        }
    }

    fn output(&mut self, report: &OutputReport) {
        let metrics = &*self.metrics;
        metrics.generation_tokens.fetch_add(report.num_tokens as u64, Ordering::Relaxed);
        if let Some(gap) = report.since_last {
            metrics.inter_token_latency.observe_many(gap.as_secs_f64(), report.num_sequences as u64);
        } else {
            metrics.prompt_tokens.fetch_add(report.num_prompt_tokens as u64, Ordering::Relaxed);
            metrics.time_to_first_token.observe(report.since_submitted.as_secs_f64());
        }
    }
}
