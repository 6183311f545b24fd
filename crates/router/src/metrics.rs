//! The router's figures for Prometheus.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::fleet::Fleet;
use crate::index::PrefixIndex;
use crate::policy::Choice;

/// Seconds, for what the router itself takes.
const OVERHEAD_BOUNDS: [f64; 11] = [2e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 2e-2, 1e-1];
/// Seconds, for answers.
const LATENCY_BOUNDS: [f64; 14] =
    [1e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0];

#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    counts: Vec<AtomicU64>,
    sum_ns: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum_ns: AtomicU64::new(0) }
    }

    pub fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = self.bounds.partition_point(|&bound| bound < seconds);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    fn render(&self, name: &str, help: &str, out: &mut String) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut sum = 0;
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            sum += count.load(Ordering::Relaxed);
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound:?}\"}} {sum}");
        }
        sum += self.counts[self.bounds.len()].load(Ordering::Relaxed);
        let seconds = self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9;
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {sum}\n{name}_sum {seconds}\n{name}_count {sum}");
    }
}

/// Counters of the whole router.
#[derive(Debug)]
pub struct Metrics {
    started: Instant,
    pub retries: AtomicU64,
    pub refused: AtomicU64,
    /// Streams whose worker was lost after they had begun.
    pub broken_streams: AtomicU64,
    pub streamed_bytes: AtomicU64,
    /// Prefill legs that failed, so that the decode worker computed the prompt.
    pub local_prefills: AtomicU64,
    pub tokenize_failures: AtomicU64,
    choices: [AtomicU64; Choice::ALL.len()],
    /// From the end of a request's body to its leaving for a worker.
    pub overhead: Histogram,
    pub first_byte: Histogram,
    pub duration: Histogram,
}

impl Metrics {
    pub fn new() -> Self {
        Self {
            started: Instant::now(),
            retries: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            broken_streams: AtomicU64::new(0),
            streamed_bytes: AtomicU64::new(0),
            local_prefills: AtomicU64::new(0),
            tokenize_failures: AtomicU64::new(0),
            choices: [const { AtomicU64::new(0) }; Choice::ALL.len()],
            overhead: Histogram::new(&OVERHEAD_BOUNDS),
            first_byte: Histogram::new(&LATENCY_BOUNDS),
            duration: Histogram::new(&LATENCY_BOUNDS),
        }
    }

    pub fn chose(&self, choice: Choice) {
        self.choices[choice as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn render(&self, fleet: &Fleet, index: &PrefixIndex) -> String {
        let mut out = String::with_capacity(4 << 10);
        let totals = [
            ("retries_total", "Requests that were tried with another worker", &self.retries),
            ("refused_total", "Requests that no worker was asked for", &self.refused),
            (
                "broken_streams_total",
                "Answers whose worker was lost after they had begun",
                &self.broken_streams,
            ),
            ("streamed_bytes_total", "Bytes of answers that were passed on", &self.streamed_bytes),
            (
                "local_prefills_total",
                "Requests without the help of a prefill worker that should have had one",
                &self.local_prefills,
            ),
            (
                "tokenize_failures_total",
                "Prompts that no worker turned into tokens in time",
                &self.tokenize_failures,
            ),
        ];
        for (name, help, value) in totals {
            head(&mut out, name, help, "counter");
            let _ = writeln!(out, "baton:router_{name} {}", value.load(Ordering::Relaxed));
        }
        head(&mut out, "choices_total", "Requests by what decided where they went", "counter");
        for choice in Choice::ALL {
            let count = self.choices[choice as usize].load(Ordering::Relaxed);
            let _ = writeln!(out, "baton:router_choices_total{{by=\"{}\"}} {count}", choice.name());
        }
        self.overhead.render(
            "baton:router_overhead_seconds",
            "Time from a whole request to its leaving",
            &mut out,
        );
        self.first_byte.render(
            "baton:router_first_byte_seconds",
            "Time to the first bytes of an answer",
            &mut out,
        );
        self.duration.render("baton:router_request_seconds", "Time to the end of an answer", &mut out);
        render_workers(&mut out, fleet, index);
        head(&mut out, "indexed_blocks", "Cached blocks of all workers that are known", "gauge");
        let _ = writeln!(out, "baton:router_indexed_blocks {}", index.num_blocks());
        head(&mut out, "ignored_blocks_total", "Blocks that found no place in the index", "counter");
        let _ = writeln!(out, "baton:router_ignored_blocks_total {}", index.num_ignored);
        head(&mut out, "uptime_seconds", "Since the router was started", "gauge");
        let _ = writeln!(out, "baton:router_uptime_seconds {}", self.started.elapsed().as_secs_f64());
        out
    }
}

fn head(out: &mut String, name: &str, help: &str, kind: &str) {
    let _ = writeln!(out, "# HELP baton:router_{name} {help}\n# TYPE baton:router_{name} {kind}");
}

fn render_workers(out: &mut String, fleet: &Fleet, index: &PrefixIndex) {
    let workers = fleet.all();
    let mut rows = |name: &str, help: &str, kind: &str, value: &dyn Fn(&crate::worker::Worker) -> u64| {
        head(out, name, help, kind);
        for worker in workers.iter() {
            let label = escape(worker.url());
            let _ = writeln!(out, "baton:router_{name}{{worker=\"{label}\"}} {}", value(worker));
        }
    };
    let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
    rows("worker_up", "1 while health checks succeed", "gauge", &|worker| worker.is_healthy().into());
    rows("worker_draining", "1 while it gets no new requests", "gauge", &|worker| {
        worker.is_draining().into()
    });
    rows("worker_breaker_open", "1 while its circuit breaker is not closed", "gauge", &|worker| {
        (!worker.breaker().is_closed()).into()
    });
    rows("worker_breaker_opened_total", "Times its circuit breaker has opened", "counter", &|worker| {
        worker.breaker().num_opened
    });
    rows("worker_requests", "Requests it has now", "gauge", &|worker| worker.num_requests() as u64);
    rows("worker_load", "The same with those of others, as it says", "gauge", &|worker| worker.load() as u64);
    rows("worker_requests_total", "Requests it was given", "counter", &|worker| {
        load(&worker.counts.requests)
    });
    rows("worker_failures_total", "Requests it failed", "counter", &|worker| load(&worker.counts.failures));
    rows("worker_prompt_tokens_total", "Tokens of prompts it was given", "counter", &|worker| {
        load(&worker.counts.prompt_tokens)
    });
    rows("worker_matched_tokens_total", "Of these, those it was known to hold", "counter", &|worker| {
        load(&worker.counts.matched_tokens)
    });
    rows("worker_kv_events_total", "Batches of KV events that came from it", "counter", &|worker| {
        load(&worker.counts.kv_events)
    });
    rows("worker_kv_event_gaps_total", "Times its events were begun anew", "counter", &|worker| {
        load(&worker.counts.kv_event_gaps)
    });
    rows("worker_kv_blocks", "Cached blocks it is known to hold", "gauge", &|worker| {
        index.held(worker.id, 0).num_blocks as u64
    });
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
