//! The summary on the console, in the layout of `vllm bench`, so that two of them can be compared by eye.

use std::fmt::Write;

use crate::metrics::{Metric, ServeMetrics};
use crate::stats::Distribution;

const WIDTH: usize = 50;
/// Characters of a curve at most.
const CURVE_WIDTH: usize = WIDTH;

/// The lines of the summary above the figures.
#[derive(Clone, Copy, Debug)]
pub struct Heading {
    pub max_concurrency: Option<usize>,
    /// Infinite is not shown.
    pub request_rate: f64,
}

/// The result of `baton bench serve` as text.
pub fn serve(metrics: &ServeMetrics, heading: Heading, shown: &[Metric], percentiles: &[f64]) -> String {
    let mut text = ruled(" Serving Benchmark Result ", '=');
    let mut count = |label: &str, value: usize| push(&mut text, label, &value.to_string());
    count("Successful requests:", metrics.completed);
    count("Failed requests:", metrics.failed);
    if let Some(limit) = heading.max_concurrency {
        count("Maximum request concurrency:", limit);
    }
    if heading.request_rate.is_finite() {
        push_number(&mut text, "Request rate configured (RPS):", heading.request_rate);
    }
    push_number(&mut text, "Benchmark duration (s):", metrics.duration_s);
    push(&mut text, "Total input tokens:", &metrics.total_input_tokens.to_string());
    push(&mut text, "Total generated tokens:", &metrics.total_output_tokens.to_string());
    push_number(&mut text, "Request throughput (req/s):", metrics.request_throughput());
    if let Some(goodput) = metrics.request_goodput() {
        push_number(&mut text, "Request goodput (req/s):", goodput);
    }
    push_number(&mut text, "Output token throughput (tok/s):", metrics.output_throughput());
    push_number(&mut text, "Peak output token throughput (tok/s):", metrics.max_output_tokens_per_s());
    push_number(&mut text, "Peak concurrent requests:", metrics.max_concurrent_requests as f64);
    push_number(&mut text, "Total token throughput (tok/s):", metrics.total_token_throughput());
    if metrics.total_chunks < metrics.total_output_tokens {
        push_number(&mut text, "Streamed events (events/s):", metrics.chunk_throughput());
    }
    if metrics.tokens_per_second.len() > 2 {
        let _ =
            writeln!(text, "Output tokens per second, over the run:\n{}", curve(&metrics.tokens_per_second));
    }
    for &metric in shown {
        push_metric(&mut text, metric, metrics.of(metric), percentiles);
    }
    text.push_str(&"=".repeat(WIDTH));
    text.push('\n');
    text
}

fn push_metric(text: &mut String, metric: Metric, values: &Distribution, percentiles: &[f64]) {
    let name = metric.key().to_uppercase();
    text.push_str(&ruled(metric.title(), '-'));
    push_number(text, &format!("Mean {name} (ms):"), values.mean());
    push_number(text, &format!("Median {name} (ms):"), values.median());
    for &p in percentiles {
        push_number(text, &format!("P{p} {name} (ms):"), values.percentile(p));
    }
    if let Some(shape) = histogram(values) {
        let _ = writeln!(text, "{shape}");
    }
}

fn push(text: &mut String, label: &str, value: &str) {
    let _ = writeln!(text, "{label:<40} {value:<10}");
}

fn push_number(text: &mut String, label: &str, value: f64) {
    push(text, label, &format!("{value:.2}"));
}

/// A title in the middle of a line.
fn ruled(title: &str, rule: char) -> String {
    let left = WIDTH.saturating_sub(title.chars().count());
    let side = |count: usize| rule.to_string().repeat(count);
    format!("{}{title}{}\n", side(left / 2), side(left - left / 2))
}

/// Bars of eighths, the highest value full.
pub fn curve(values: &[f64]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    // Neighbours are averaged where there are more than fit.
    let group = values.len().div_ceil(CURVE_WIDTH).max(1);
    let points: Vec<f64> = values.chunks(group).map(crate::stats::mean).collect();
    let highest = points.iter().copied().fold(0.0, f64::max);
    let bar = |value: f64| if highest > 0.0 { (value / highest * 7.0).round() as usize } else { 0 };
    points.iter().map(|&value| BARS[bar(value).min(7)]).collect()
}

/// How the values lie between the 1st and the 99th percentile; `None` where that says nothing.
fn histogram(values: &Distribution) -> Option<String> {
    const BINS: usize = 24;
    let (low, high) = (values.percentile(1.0), values.percentile(99.0));
    if values.len() < 16 || high <= low {
        return None;
    }
    let mut bins = [0.0; BINS];
    for &value in values.sorted() {
        if (low..=high).contains(&value) {
            bins[(((value - low) / (high - low) * BINS as f64) as usize).min(BINS - 1)] += 1.0;
        }
    }
    Some(format!("{low:>10.2} {} {high:.2}", curve(&bins)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::Outcome;

    #[test]
    fn the_layout_is_the_known_one() {
        let outcome = Outcome {
            ttft_s: 0.1,
            latency_s: 0.3,
            itls_s: vec![0.1, 0.1],
            input_len: 5,
            output_len: 3,
            ..Outcome::default()
        };
        let metrics = ServeMetrics::new(&[outcome], 1.5, None);
        let heading = Heading { max_concurrency: Some(4), request_rate: f64::INFINITY };
        let text = serve(&metrics, heading, &[Metric::Ttft], &[99.0]);
        let expect = "\
============ Serving Benchmark Result ============
Successful requests:                     1         
Failed requests:                         0         
Maximum request concurrency:             4         
Benchmark duration (s):                  1.50      
Total input tokens:                      5         
Total generated tokens:                  3         
Request throughput (req/s):              0.67      
Output token throughput (tok/s):         2.00      
Peak output token throughput (tok/s):    3.00      
Peak concurrent requests:                1.00      
Total token throughput (tok/s):          5.33      
---------------Time to First Token----------------
Mean TTFT (ms):                          100.00    
Median TTFT (ms):                        100.00    
P99 TTFT (ms):                           100.00    
==================================================
";
        assert_eq!(text, expect);
    }

    #[test]
    fn curves_fit_a_line() {
        assert_eq!(curve(&[0.0, 3.5, 7.0]), "▁▅█");
        assert_eq!(curve(&[0.0, 0.0]), "▁▁");
        assert!(curve(&vec![1.0; 1000]).chars().count() <= CURVE_WIDTH);
        let values = Distribution::new((0..100).map(f64::from).collect());
        assert!(histogram(&values).is_some_and(|line| line.starts_with("      0.99 ")));
        assert!(histogram(&Distribution::new(vec![1.0; 100])).is_none());
    }
}
