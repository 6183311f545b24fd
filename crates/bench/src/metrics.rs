//! Turns the record of each request into the usual figures, with vLLM's names and definitions.
//!
//! TTFT is the time to the first chunk with a token, ITL the time between two such chunks, TPOT the time after the first
//! token over the number of the other tokens, E2EL the time to the last chunk.

use serde_json::{Map, Value, json};

use crate::BenchError;
use crate::serve::Outcome;
use crate::stats::Distribution;

/// The four latencies, by their short names, in the order of reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    Ttft,
    Tpot,
    Itl,
    E2el,
}

impl Metric {
    pub const ALL: [Self; 4] = [Self::Ttft, Self::Tpot, Self::Itl, Self::E2el];

    pub fn key(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tpot => "tpot",
            Self::Itl => "itl",
            Self::E2el => "e2el",
        }
    }

    pub fn title(self) -> &'static str {
        match self {
            Self::Ttft => "Time to First Token",
            Self::Tpot => "Time per Output Token (excl. 1st token)",
            Self::Itl => "Inter-token Latency",
            Self::E2el => "End-to-end Latency",
        }
    }

    /// A comma-separated list, as `--percentile-metrics` has it.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, BenchError> {
        let parse = |name: &str| {
            let found = Self::ALL.into_iter().find(|metric| metric.key() == name.trim());
            found.ok_or_else(|| BenchError::options(format!("{name:?} is not one of ttft, tpot, itl, e2el")))
        };
        text.split(',').map(parse).collect()
    }
}

/// Limits in milliseconds that a request must keep to count as good.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Goodput {
    pub ttft_ms: Option<f64>,
    pub tpot_ms: Option<f64>,
    pub e2el_ms: Option<f64>,
}

impl Goodput {
    /// `ttft:200 tpot:50 e2el:3000`, each its own text.
    pub fn parse(pairs: &[String]) -> Result<Option<Self>, BenchError> {
        let mut goodput = Self::default();
        for pair in pairs {
            let wrong = || {
                BenchError::options(format!(
                    "--goodput {pair:?} is not understood: write ttft:MS, tpot:MS or e2el:MS"
                ))
            };
            let (name, value) = pair.split_once(':').ok_or_else(wrong)?;
            let value: f64 = value.parse().map_err(|_| wrong())?;
            if !value.is_finite() || value < 0.0 {
                return Err(wrong());
            }
            match name {
                "ttft" => goodput.ttft_ms = Some(value),
                "tpot" => goodput.tpot_ms = Some(value),
                "e2el" => goodput.e2el_ms = Some(value),
                _ => return Err(wrong()),
            }
        }
        Ok((!pairs.is_empty()).then_some(goodput))
    }

    fn is_good(&self, ttft_s: f64, tpot_s: f64, e2el_s: f64) -> bool {
        let keeps = |limit: Option<f64>, seconds: f64| limit.is_none_or(|limit| seconds * 1e3 <= limit);
        keeps(self.ttft_ms, ttft_s) && keeps(self.tpot_ms, tpot_s) && keeps(self.e2el_ms, e2el_s)
    }
}

/// The figures of a run. Latencies are in milliseconds.
#[derive(Clone, Debug, Default)]
pub struct ServeMetrics {
    pub duration_s: f64,
    pub completed: usize,
    pub failed: usize,
    pub total_input_tokens: usize,
    pub total_output_tokens: usize,
    /// Events that carried tokens: fewer than tokens where a server sends several at once.
    pub total_chunks: usize,
    pub good: Option<usize>,
    /// Output tokens in each second of the run.
    pub tokens_per_second: Vec<f64>,
    pub max_concurrent_requests: usize,
    pub ttft_ms: Distribution,
    pub tpot_ms: Distribution,
    pub itl_ms: Distribution,
    pub e2el_ms: Distribution,
}

impl ServeMetrics {
    pub fn new(outcomes: &[Outcome], duration_s: f64, goodput: Option<Goodput>) -> Self {
        let done: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.error.is_none()).collect();
        let tpot_s = |outcome: &Outcome| {
            let others = outcome.output_len.saturating_sub(1);
            if others == 0 { 0.0 } else { (outcome.latency_s - outcome.ttft_s) / others as f64 }
        };
        let ms = |values: &mut dyn Iterator<Item = f64>| {
            Distribution::new(values.map(|seconds| seconds * 1e3).collect())
        };
        let good = goodput.map(|limits| {
            let is_good =
                |outcome: &&&Outcome| limits.is_good(outcome.ttft_s, tpot_s(outcome), outcome.latency_s);
            done.iter().filter(is_good).count()
        });
        let with_tpot = done.iter().filter(|outcome| outcome.output_len > 1);
        Self {
            duration_s,
            completed: done.len(),
            failed: outcomes.len() - done.len(),
            total_input_tokens: done.iter().map(|outcome| outcome.input_len).sum(),
            total_output_tokens: done.iter().map(|outcome| outcome.output_len).sum(),
            total_chunks: done.iter().map(|outcome| outcome.itls_s.len() + 1).sum(),
            good,
            tokens_per_second: tokens_per_second(&done),
            max_concurrent_requests: max_concurrent(&done),
            ttft_ms: ms(&mut done.iter().map(|outcome| outcome.ttft_s)),
            tpot_ms: ms(&mut with_tpot.map(|outcome| tpot_s(outcome))),
            itl_ms: ms(&mut done.iter().flat_map(|outcome| outcome.itls_s.iter().copied())),
            e2el_ms: ms(&mut done.iter().map(|outcome| outcome.latency_s)),
        }
    }

    pub fn of(&self, metric: Metric) -> &Distribution {
        match metric {
            Metric::Ttft => &self.ttft_ms,
            Metric::Tpot => &self.tpot_ms,
            Metric::Itl => &self.itl_ms,
            Metric::E2el => &self.e2el_ms,
        }
    }

    fn per_second(&self, count: usize) -> f64 {
        if self.duration_s > 0.0 { count as f64 / self.duration_s } else { 0.0 }
    }

    pub fn request_throughput(&self) -> f64 {
        self.per_second(self.completed)
    }

    pub fn request_goodput(&self) -> Option<f64> {
        self.good.map(|good| self.per_second(good))
    }

    pub fn output_throughput(&self) -> f64 {
        self.per_second(self.total_output_tokens)
    }

    pub fn chunk_throughput(&self) -> f64 {
        self.per_second(self.total_chunks)
    }

    pub fn total_token_throughput(&self) -> f64 {
        self.per_second(self.total_input_tokens + self.total_output_tokens)
    }

    pub fn max_output_tokens_per_s(&self) -> f64 {
        self.tokens_per_second.iter().copied().fold(0.0, f64::max)
    }

    /// All figures under vLLM's keys, in its order; the last two are our own.
    pub fn to_json(&self, metrics: &[Metric], percentiles: &[f64]) -> Map<String, Value> {
        let mut map = Map::new();
        let mut put = |key: &str, value: Value| {
            map.insert(key.to_owned(), value);
        };
        put("duration", json!(self.duration_s));
        put("completed", json!(self.completed));
        put("failed", json!(self.failed));
        put("total_input_tokens", json!(self.total_input_tokens));
        put("total_output_tokens", json!(self.total_output_tokens));
        put("request_throughput", json!(self.request_throughput()));
        put("request_goodput", json!(self.request_goodput()));
        put("output_throughput", json!(self.output_throughput()));
        put("total_token_throughput", json!(self.total_token_throughput()));
        put("max_output_tokens_per_s", json!(self.max_output_tokens_per_s()));
        put("max_concurrent_requests", json!(self.max_concurrent_requests));
        for &metric in metrics {
            let (values, key) = (self.of(metric), metric.key());
            put(&format!("mean_{key}_ms"), json!(values.mean()));
            put(&format!("median_{key}_ms"), json!(values.median()));
            put(&format!("std_{key}_ms"), json!(values.standard_deviation()));
            for &p in percentiles {
                put(&format!("p{p}_{key}_ms"), json!(values.percentile(p)));
            }
        }
        put("total_chunks", json!(self.total_chunks));
        put("chunk_throughput", json!(self.chunk_throughput()));
        map
    }
}

/// What `--save-detailed` adds: one entry per request.
pub fn details(outcomes: &[Outcome]) -> Map<String, Value> {
    let list = |of: &dyn Fn(&Outcome) -> Value| Value::Array(outcomes.iter().map(of).collect());
    let mut map = Map::new();
    let mut put = |key: &str, of: &dyn Fn(&Outcome) -> Value| {
        map.insert(key.to_owned(), list(of));
    };
    put("input_lens", &|outcome| json!(outcome.input_len));
    put("output_lens", &|outcome| json!(outcome.output_len));
    put("ttfts", &|outcome| json!(outcome.ttft_s));
    put("itls", &|outcome| json!(outcome.itls_s));
    put("latencies", &|outcome| json!(outcome.latency_s));
    put("start_times", &|outcome| json!(outcome.start_s));
    put("queue_times", &|outcome| json!(outcome.queue_s));
    put("generated_texts", &|outcome| json!(outcome.text));
    put("errors", &|outcome| json!(outcome.error.as_deref().unwrap_or_default()));
    map
}

/// Tokens of every second since the first request. A chunk counts as many as the chunks of its answer have on average.
fn tokens_per_second(done: &[&Outcome]) -> Vec<f64> {
    let start_s = done.iter().map(|outcome| outcome.start_s).fold(f64::INFINITY, f64::min);
    let mut seconds = Vec::new();
    for outcome in done {
        let per_chunk = outcome.output_len as f64 / (outcome.itls_s.len() + 1) as f64;
        let mut at_s = outcome.start_s + outcome.ttft_s - start_s;
        let mut count = |at_s: f64| {
            let second = at_s.max(0.0) as usize;
            if seconds.len() <= second {
                seconds.resize(second + 1, 0.0);
            }
            seconds[second] += per_chunk;
        };
        count(at_s);
        for itl_s in &outcome.itls_s {
            at_s += itl_s;
            count(at_s);
        }
    }
    seconds
}

/// The most requests under way at one moment.
fn max_concurrent(done: &[&Outcome]) -> usize {
    let mut events: Vec<(f64, i64)> = done
        .iter()
        .flat_map(|outcome| [(outcome.start_s, 1), (outcome.start_s + outcome.latency_s, -1)])
        .collect();
    // One that ends when another begins is not beside it.
    events.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut running = 0_i64;
    events
        .iter()
        .map(|(_, change)| {
            running += change;
            running
        })
        .max()
        .unwrap_or(0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(start_s: f64, ttft_s: f64, itls_s: &[f64]) -> Outcome {
        Outcome {
            start_s,
            ttft_s,
            latency_s: ttft_s + itls_s.iter().sum::<f64>(),
            itls_s: itls_s.to_vec(),
            input_len: 10,
            output_len: itls_s.len() + 1,
            ..Outcome::default()
        }
    }

    fn outcomes() -> Vec<Outcome> {
        let failed = Outcome { error: Some("says 500".to_owned()), ..Outcome::default() };
        vec![outcome(0.0, 0.2, &[0.1, 0.3]), outcome(0.5, 0.6, &[]), failed]
    }

    #[test]
    fn figures_follow_their_definitions() {
        let goodput = Goodput::parse(&["ttft:250".to_owned(), "tpot:201".to_owned()]).unwrap();
        let metrics = ServeMetrics::new(&outcomes(), 2.0, goodput);
        assert_eq!((metrics.completed, metrics.failed), (2, 1));
        assert_eq!((metrics.total_input_tokens, metrics.total_output_tokens), (20, 4));
        assert_eq!((metrics.request_throughput(), metrics.output_throughput()), (1.0, 2.0));
        assert_eq!(metrics.total_token_throughput(), 12.0);
        assert_eq!(metrics.request_goodput(), Some(0.5));
        assert!((metrics.tpot_ms.mean() - 200.0).abs() < 1e-9, "an answer of one token has no TPOT");
        assert!((metrics.itl_ms.mean() - 200.0).abs() < 1e-9);
        assert_eq!(metrics.max_concurrent_requests, 2);
        assert_eq!(metrics.tokens_per_second, [3.0, 1.0]);
    }

    #[test]
    fn the_keys_are_vllms() {
        let map = ServeMetrics::new(&outcomes(), 2.0, None).to_json(&Metric::ALL, &[50.0, 99.0, 99.9]);
        let keys: Vec<&str> = map.keys().map(String::as_str).collect();
        let mut expect = vec![
            "duration",
            "completed",
            "failed",
            "total_input_tokens",
            "total_output_tokens",
            "request_throughput",
            "request_goodput",
            "output_throughput",
            "total_token_throughput",
            "max_output_tokens_per_s",
            "max_concurrent_requests",
        ];
        let of_metrics: Vec<String> = ["ttft", "tpot", "itl", "e2el"]
            .iter()
            .flat_map(|key| {
                ["mean", "median", "std", "p50", "p99", "p99.9"].map(|word| format!("{word}_{key}_ms"))
            })
            .collect();
        expect.extend(of_metrics.iter().map(String::as_str));
        expect.extend(["total_chunks", "chunk_throughput"]);
        assert_eq!(keys, expect);
        assert_eq!(map["request_goodput"], Value::Null);
        let details = details(&outcomes());
        assert_eq!(details["itls"][0], json!([0.1, 0.3]));
        assert_eq!(details["errors"], json!(["", "", "says 500"]));
    }

    #[test]
    fn limits_and_names_are_checked() {
        for wrong in ["ttft", "ttft:soon", "itl:5", "e2el:-1", "tpot:inf"] {
            assert!(Goodput::parse(&[wrong.to_owned()]).is_err(), "{wrong}");
        }
        assert_eq!(Goodput::parse(&[]).unwrap(), None);
        assert_eq!(Metric::parse_list("ttft, e2el").unwrap(), [Metric::Ttft, Metric::E2el]);
        assert!(Metric::parse_list("ttft,latency").is_err());
    }

    #[test]
    fn a_run_without_answers_has_figures() {
        let metrics = ServeMetrics::new(&[], 0.0, None);
        assert_eq!((metrics.output_throughput(), metrics.max_concurrent_requests), (0.0, 0));
        assert_eq!(metrics.to_json(&Metric::ALL, &[99.0])["p99_ttft_ms"], json!(0.0));
    }
}
