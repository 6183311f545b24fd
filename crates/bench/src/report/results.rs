//! The parts of result files that a report needs.

use std::path::Path;

use serde_json::Value;

use crate::BenchError;
use crate::metrics::Metric;
use crate::stats::Distribution;

/// One file.
#[derive(Clone, Debug, Default)]
pub struct RunResult {
    /// Runs of one series are joined by a line: `--label`, or model and backend.
    pub series: String,
    /// What tells the runs of a series apart: concurrency or rate.
    pub name: String,
    pub output_throughput: f64,
    pub total_throughput: f64,
    pub request_throughput: f64,
    pub completed: Option<u64>,
    pub failed: Option<u64>,
    /// Medians and 99th percentiles in milliseconds, where the file has them.
    pub latencies: Vec<(Metric, f64, Option<f64>)>,
    /// Every measurement in milliseconds, of files with details.
    pub details: Vec<(Metric, Distribution)>,
}

impl RunResult {
    pub fn read(path: &Path) -> Result<Self, BenchError> {
        let text = std::fs::read_to_string(path).map_err(|cause| BenchError::file(path, cause))?;
        let json: Value = serde_json::from_str(&text).map_err(|cause| BenchError::file(path, cause))?;
        let number = |key: &str| json[key].as_f64();
        let word = |key: &str| json[key].as_str().filter(|text| !text.is_empty());
        let file_name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        let model = word("model_id").unwrap_or("model");
        let series = word("label").map_or_else(
            || match word("backend") {
                Some(backend) => format!("{model} ({backend})"),
                None => model.to_owned(),
            },
            str::to_owned,
        );
        let name = match (json["max_concurrency"].as_u64(), number("request_rate")) {
            (Some(limit), _) => format!("{limit} at a time"),
            (None, Some(rate)) => format!("{rate} req/s"),
            (None, None) => file_name,
        };
        let mut run = Self {
            series,
            name,
            completed: json["completed"].as_u64(),
            failed: json["failed"].as_u64(),
            ..Self::default()
        };
        if let Some(output) = number("output_throughput") {
            run.output_throughput = output;
            run.total_throughput = number("total_token_throughput").unwrap_or(0.0);
            run.request_throughput = number("request_throughput").unwrap_or(0.0);
        } else if let Some(total) = number("tokens_per_second") {
            run.total_throughput = total;
            run.output_throughput = number("output_tokens_per_second").unwrap_or(0.0);
            run.request_throughput = number("requests_per_second").unwrap_or(0.0);
        } else if let Some(latency) = number("avg_latency") {
            run.output_throughput = number("output_tokens_per_second").unwrap_or(0.0);
            let p99 = json["percentiles"]["99"].as_f64().map(|seconds| seconds * 1e3);
            let median = json["percentiles"]["50"].as_f64().unwrap_or(latency) * 1e3;
            run.latencies.push((Metric::E2el, median, p99));
        } else {
            let cause = "it is not a result of `bench serve`, `throughput` or `latency`";
            return Err(BenchError::file(path, cause));
        }
        for metric in Metric::ALL {
            if let Some(median) = number(&format!("median_{}_ms", metric.key())) {
                run.latencies.push((metric, median, number(&format!("p99_{}_ms", metric.key()))));
            }
        }
        run.details = details(&json);
        Ok(run)
    }

    pub fn latency(&self, metric: Metric) -> Option<(f64, Option<f64>)> {
        self.latencies.iter().find(|(of, ..)| *of == metric).map(|(_, median, p99)| (*median, *p99))
    }

    pub fn detail(&self, metric: Metric) -> Option<&Distribution> {
        self.details.iter().find(|(of, _)| *of == metric).map(|(_, values)| values)
    }
}

/// The lists of `--save-detailed`. Failed requests have no first token and are left out.
fn details(json: &Value) -> Vec<(Metric, Distribution)> {
    let numbers = |key: &str| -> Vec<f64> {
        json[key].as_array().into_iter().flatten().map(|value| value.as_f64().unwrap_or(0.0)).collect()
    };
    let ttfts = numbers("ttfts");
    let itls: Vec<Vec<f64>> = json["itls"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|list| list.as_array().into_iter().flatten().filter_map(Value::as_f64).collect())
        .collect();
    // A file without latencies still has them: the first token and all that came between chunks.
    let mut ends = numbers("latencies");
    if ends.len() != ttfts.len() {
        let sum = |(ttft, itls): (&f64, &Vec<f64>)| ttft + itls.iter().sum::<f64>();
        ends = ttfts.iter().zip(&itls).map(sum).collect();
    }
    let ms = |values: &mut dyn Iterator<Item = f64>| {
        Distribution::new(values.filter(|seconds| *seconds > 0.0).map(|seconds| seconds * 1e3).collect())
    };
    let lists = [
        (Metric::Ttft, ms(&mut ttfts.iter().copied())),
        (Metric::Itl, ms(&mut itls.iter().flatten().copied())),
        (Metric::E2el, ms(&mut ends.iter().copied())),
    ];
    lists.into_iter().filter(|(_, values)| !values.is_empty()).collect()
}

/// Columns of the comparison: a heading, and its value of a run.
pub const COLUMNS: [&str; 11] = [
    "series",
    "run",
    "done",
    "failed",
    "req/s",
    "output tok/s",
    "total tok/s",
    "ttft p50",
    "ttft p99",
    "itl p50",
    "itl p99",
];

pub fn row(run: &RunResult) -> Vec<String> {
    let show = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
    let count = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
    let (ttft, itl) = (run.latency(Metric::Ttft), run.latency(Metric::Itl));
    vec![
        run.series.clone(),
        run.name.clone(),
        count(run.completed),
        count(run.failed),
        show(Some(run.request_throughput)),
        show(Some(run.output_throughput)),
        show(Some(run.total_throughput)),
        show(ttft.map(|(median, _)| median)),
        show(ttft.and_then(|(_, p99)| p99)),
        show(itl.map(|(median, _)| median)),
        show(itl.and_then(|(_, p99)| p99)),
    ]
}

/// The comparison as text, columns aligned.
pub fn table(runs: &[RunResult]) -> String {
    let mut rows = vec![COLUMNS.map(str::to_owned).to_vec()];
    rows.extend(runs.iter().map(row));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..COLUMNS.len()).map(width).collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            // Names to the left, figures to the right.
            if column < 2 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
        if index == 0 {
            text.push_str(&"─".repeat(widths.iter().sum::<usize>() + 2 * (COLUMNS.len() - 1)));
            text.push('\n');
        }
    }
    text
}
