//! `--parts online`: requests that arrive as a Poisson process, at several rates. Latencies in each of the three modes, and the
//! highest rate at which a given latency is kept.

use std::fmt::Write;

use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::offline::Lengths;
use super::row::RelayRow;
use super::run::{Prompt, RelayMode, RunResult, Runs};
use super::{RelayReport, RelaySetting, curves_by, interleaved};
use crate::BenchError;
use crate::random::{Random, gamma};
use crate::report::charts::{Chart, XScale, draw_scaled};
use crate::stats::Distribution;

/// Rates are these shares of what relay attention manages with all requests at once, unless they are given.
const SHARES: [f64; 5] = [0.2, 0.4, 0.6, 0.8, 1.0];

#[derive(Clone, Debug)]
pub struct OnlineOptions {
    pub lengths: Lengths,
    /// Requests per second; empty chooses some.
    pub rates: Vec<f64>,
    /// What a request must keep to count as answered in time.
    pub slo_ttft_ms: f64,
    pub slo_tpot_ms: f64,
    /// The share of requests that must keep the limits for a rate to count as kept.
    pub slo_share: f64,
}

/// Medians over the runs of one way at one rate.
#[derive(Clone, Copy, Debug)]
struct Figures {
    requests_per_second: f64,
    output_tok_s: f64,
    ttft_ms: [f64; 2],
    tpot_ms: [f64; 2],
    kept_share: f64,
}

struct Point {
    shared: usize,
    rate: f64,
    /// In the order of [`RelayMode::ALL`].
    figures: [Figures; 3],
}

pub(super) fn measure(
    runs: &mut Runs<'_>,
    setting: &RelaySetting,
    options: &OnlineOptions,
    bar: &ProgressBar,
) -> Result<RelayReport, BenchError> {
    if options.rates.iter().any(|rate| !(*rate > 0.0 && rate.is_finite())) {
        return Err(BenchError::options("--request-rates are above 0"));
    }
    let num_rates = if options.rates.is_empty() { SHARES.len() } else { options.rates.len() };
    bar.set_length((setting.shared.len() * num_rates * setting.num_iters * 3) as u64);
    let mut points = Vec::new();
    for &shared in &setting.shared {
        let Lengths { input, output } = options.lengths;
        let row = RelayRow::flat(setting.num_prompts, shared, input, output);
        let rates = match options.rates.as_slice() {
            [] => {
                bar.set_message(format!("{shared} shared, all at once"));
                let run = runs.run(&row.prompts(setting.seed, 0, setting.tokens), RelayMode::Relay)?;
                let most = setting.num_prompts as f64 / run.elapsed_s.max(1e-9);
                SHARES.map(|share| round(most * share)).to_vec()
            }
            given => given.to_vec(),
        };
        for rate in rates {
            let all = interleaved(setting.num_iters, |iteration, mode| {
                bar.set_message(format!("{shared} shared, {rate:.2} req/s, {}", mode.name()));
                let mut prompts = row.prompts(setting.seed, iteration as u64 + 1, setting.tokens);
                arrive(&mut prompts, rate, setting.seed + iteration as u64);
                let run = runs.run(&prompts, mode)?;
                bar.inc(1);
                Ok(Figures::new(&run, options))
            })?;
            points.push(Point { shared, rate, figures: all.map(|figures| Figures::median(&figures)) });
        }
    }
    bar.finish_and_clear();
    Ok(RelayReport {
        text: table(&points, setting, options),
        json: [("online".to_owned(), to_json(&points, setting, options))].into_iter().collect(),
        charts: setting.shared.iter().flat_map(|&shared| charts(&points, shared)).collect(),
    })
}

/// Three digits are enough for a rate.
fn round(rate: f64) -> f64 {
    let unit = 10_f64.powf(rate.max(1e-6).log10().floor() - 2.0);
    (rate / unit).round() * unit
}

/// Times between arrivals are exponentially distributed.
fn arrive(prompts: &mut [Prompt], rate: f64, seed: u64) {
    let mut random = Random::new(seed);
    let mut at_s = 0.0;
    for prompt in prompts {
        prompt.at_s = at_s;
        at_s += gamma(&mut random, 1.0) / rate;
    }
}

impl Figures {
    fn new(run: &RunResult, options: &OnlineOptions) -> Self {
        let keeps = |times: &&super::run::RequestTimes| {
            let ttft_ms = times.first_s.map_or(f64::INFINITY, |seconds| seconds * 1e3);
            let tpot_ms = times.tpot_s().map_or(0.0, |seconds| seconds * 1e3);
            ttft_ms <= options.slo_ttft_ms && tpot_ms <= options.slo_tpot_ms
        };
        let pair = |values: &Distribution| [values.median(), values.percentile(99.0)];
        let num_requests = run.times.len() as f64;
        Self {
            requests_per_second: num_requests / run.elapsed_s.max(1e-9),
            output_tok_s: run.output_tokens_per_second(),
            ttft_ms: pair(&run.ttfts_ms()),
            tpot_ms: pair(&run.tpots_ms()),
            kept_share: run.times.iter().filter(keeps).count() as f64 / num_requests.max(1.0),
        }
    }

    fn median(all: &[Self]) -> Self {
        let of = |value: &dyn Fn(&Self) -> f64| Distribution::new(all.iter().map(value).collect()).median();
        Self {
            requests_per_second: of(&|one| one.requests_per_second),
            output_tok_s: of(&|one| one.output_tok_s),
            ttft_ms: [of(&|one| one.ttft_ms[0]), of(&|one| one.ttft_ms[1])],
            tpot_ms: [of(&|one| one.tpot_ms[0]), of(&|one| one.tpot_ms[1])],
            kept_share: of(&|one| one.kept_share),
        }
    }
}

/// The highest rate up to which the latency is kept at all measured rates.
fn highest_rate(points: &[Point], shared: usize, mode: usize, options: &OnlineOptions) -> Option<f64> {
    let mut of_shared: Vec<&Point> = points.iter().filter(|point| point.shared == shared).collect();
    of_shared.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    let keeps = |point: &&&Point| point.figures[mode].kept_share >= options.slo_share;
    of_shared.iter().take_while(keeps).last().map(|point| point.rate)
}

fn table(points: &[Point], setting: &RelaySetting, options: &OnlineOptions) -> String {
    let mut text = format!(
        "Requests as they come, {} in, {} out: latencies in milliseconds, median and 99th percentile\n\
         {:>7} {:>8} {:<9} {:>8} {:>10} {:>9} {:>9} {:>8} {:>8} {:>8}\n",
        options.lengths.input,
        options.lengths.output,
        "shared",
        "req/s",
        "",
        "done/s",
        "out tok/s",
        "TTFT",
        "p99",
        "TPOT",
        "p99",
        "in time"
    );
    for point in points {
        for (mode, one) in RelayMode::ALL.iter().zip(&point.figures) {
            let _ = writeln!(
                text,
                "{:>7} {:>8.3} {:<9} {:>8.2} {:>10.1} {:>9.1} {:>9.1} {:>8.2} {:>8.2} {:>6.0} %",
                point.shared,
                point.rate,
                mode.name(),
                one.requests_per_second,
                one.output_tok_s,
                one.ttft_ms[0],
                one.ttft_ms[1],
                one.tpot_ms[0],
                one.tpot_ms[1],
                one.kept_share * 100.0,
            );
        }
    }
    let _ = writeln!(
        text,
        "Highest rate at which {:.0} % have their first token within {} ms and {} ms per token after it",
        options.slo_share * 100.0,
        options.slo_ttft_ms,
        options.slo_tpot_ms
    );
    for &shared in &setting.shared {
        let _ = write!(text, "{shared:>7} shared:");
        for (index, mode) in RelayMode::ALL.iter().enumerate() {
            let rate = highest_rate(points, shared, index, options);
            let rate = rate.map_or_else(|| "none".to_owned(), |rate| format!("{rate:.3} req/s"));
            let _ = write!(text, "  {} {rate}", mode.name());
        }
        text.push('\n');
    }
    text
}

fn to_json(points: &[Point], setting: &RelaySetting, options: &OnlineOptions) -> Value {
    let one = |point: &Point| {
        let mut json = json!({"shared_len": point.shared, "request_rate": point.rate});
        for (mode, one) in RelayMode::ALL.iter().zip(&point.figures) {
            json[mode.key()] = json!({
                "request_throughput": one.requests_per_second,
                "output_tok_s": one.output_tok_s,
                "median_ttft_ms": one.ttft_ms[0],
                "p99_ttft_ms": one.ttft_ms[1],
                "median_tpot_ms": one.tpot_ms[0],
                "p99_tpot_ms": one.tpot_ms[1],
                "kept_share": one.kept_share,
            });
        }
        json
    };
    let highest = |&shared: &usize| {
        let mut json = json!({"shared_len": shared});
        for (index, mode) in RelayMode::ALL.iter().enumerate() {
            json[mode.key()] = json!(highest_rate(points, shared, index, options));
        }
        json
    };
    json!({
        "input_len": options.lengths.input,
        "output_len": options.lengths.output,
        "num_requests": setting.num_prompts,
        "slo_ttft_ms": options.slo_ttft_ms,
        "slo_tpot_ms": options.slo_tpot_ms,
        "slo_share": options.slo_share,
        "points": points.iter().map(one).collect::<Vec<_>>(),
        "highest_rates": setting.shared.iter().map(highest).collect::<Vec<_>>(),
    })
}

fn charts(points: &[Point], shared: usize) -> Vec<Chart> {
    let chart = |title: &str, y_title: &str, of: &dyn Fn(&Figures) -> f64| {
        let of_shared = points.iter().filter(|point| point.shared == shared);
        let curves = curves_by(of_shared.flat_map(|point| {
            let one =
                |(mode, figures): (&RelayMode, &Figures)| (mode.name().to_owned(), (point.rate, of(figures)));
            RelayMode::ALL.iter().zip(&point.figures).map(one).collect::<Vec<_>>()
        }));
        draw_scaled(&format!("{title}, {shared} shared"), ("requests/s", XScale::Linear), y_title, &curves)
    };
    vec![
        chart("First token", "median TTFT (ms)", &|figures| figures.ttft_ms[0]),
        chart("Later tokens", "median TPOT (ms)", &|figures| figures.tpot_ms[0]),
        chart("Throughput", "output tokens/s", &|figures| figures.output_tok_s),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_have_their_rate() {
        let prompt = Prompt { token_ids: vec![1], num_shared: 0, output_len: 1, at_s: 9.0 };
        let mut prompts = vec![prompt; 20_000];
        arrive(&mut prompts, 4.0, 1);
        assert_eq!(prompts[0].at_s, 0.0);
        assert!(prompts.windows(2).all(|pair| pair[0].at_s <= pair[1].at_s));
        let last_s = prompts[prompts.len() - 1].at_s;
        assert!((last_s / 5000.0 - 1.0).abs() < 0.05, "20,000 requests took {last_s} s");
        assert_eq!((round(0.123_456), round(1234.0)), (0.123, 1230.0));
    }

    #[test]
    fn the_highest_rate_has_none_below_it_that_fails() {
        let options = OnlineOptions {
            lengths: Lengths { input: 1, output: 1 },
            rates: Vec::new(),
            slo_ttft_ms: 1.0,
            slo_tpot_ms: 1.0,
            slo_share: 0.9,
        };
        let figures = |kept_share| Figures {
            requests_per_second: 0.0,
            output_tok_s: 0.0,
            ttft_ms: [0.0; 2],
            tpot_ms: [0.0; 2],
            kept_share,
        };
        let point = |rate, shares: [f64; 3]| Point { shared: 64, rate, figures: shares.map(figures) };
        let points = [point(4.0, [0.0, 1.0, 0.95]), point(1.0, [0.5, 1.0, 1.0]), point(2.0, [1.0, 0.8, 0.9])];
        let rates = [0, 1, 2].map(|mode| highest_rate(&points, 64, mode, &options));
        assert_eq!(rates, [None, Some(1.0), Some(4.0)]);
    }
}
