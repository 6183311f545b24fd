//! `--parts offline` and `sharegpt`: a whole workload at once, in each of the three modes, by length of the shared prefix.

use std::fmt::Write;

use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::row::RelayRow;
use super::run::{Prompt, RelayMode, Runs};
use super::{RelayReport, RelaySetting, curves_by, interleaved};
use crate::BenchError;
use crate::dataset::synthetic_tokens;
use crate::random::Random;
use crate::report::charts::{XScale, draw_scaled};
use crate::stats::Distribution;

/// Tokens of a request's own prompt and of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    pub input: usize,
    pub output: usize,
}

impl std::str::FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text
            .split_once('/')
            .and_then(|(input, output)| Some((input.parse().ok()?, output.parse().ok()?)));
        match parts {
            Some((input, output)) if input > 0 && output > 0 => Ok(Self { input, output }),
            _ => Err(format!("{text:?} is not INPUT/OUTPUT in tokens, such as 64/128")),
        }
    }
}

/// A workload with a shared prefix of one length.
struct Point {
    series: String,
    shared: usize,
    num_requests: usize,
    /// Output tokens per second of each run, in the order of [`RelayMode::ALL`].
    tok_s: [Distribution; 3],
}

/// Requests of equal lengths, for each of some lengths and shared prefixes.
pub(super) fn synthetic(
    runs: &mut Runs<'_>,
    setting: &RelaySetting,
    lengths: &[Lengths],
    bar: &ProgressBar,
) -> Result<RelayReport, BenchError> {
    let mut points = Vec::new();
    bar.set_length((lengths.len() * setting.shared.len() * setting.num_iters * 3) as u64);
    for &Lengths { input, output } in lengths {
        for &shared in &setting.shared {
            let row = RelayRow::flat(setting.num_prompts, shared, input, output);
            let prompts = |own: u64| row.prompts(setting.seed, own, setting.tokens);
            let series = format!("{input} in, {output} out");
            points.push(measure(runs, setting, (series, shared), &prompts, bar)?);
        }
    }
    bar.finish_and_clear();
    Ok(report("offline", "All requests at once", &points))
}

/// Requests of the lengths of real conversations behind shared prefixes.
pub(super) fn sharegpt(
    runs: &mut Runs<'_>,
    setting: &RelaySetting,
    lengths: &[Lengths],
    bar: &ProgressBar,
) -> Result<RelayReport, BenchError> {
    let limit = runs.engine.memory_plan().max_model_len;
    let longest = setting.shared.iter().max().copied().unwrap_or(0);
    let fits = |one: &&Lengths| longest + one.input + one.output <= limit;
    let lengths: Vec<Lengths> = lengths.iter().filter(fits).copied().collect();
    if lengths.is_empty() {
        return Err(BenchError::options(format!(
            "no conversation fits behind {longest} shared tokens into the longest sequence, {limit}: lower --shared-lens"
        )));
    }
    bar.set_length((setting.shared.len() * setting.num_iters * 3) as u64);
    let mut points = Vec::new();
    for &shared in &setting.shared {
        let prompts = |own: u64| conversations(setting, shared, &lengths, own);
        points.push(measure(runs, setting, ("ShareGPT".to_owned(), shared), &prompts, bar)?);
    }
    bar.finish_and_clear();
    Ok(report("sharegpt", "Lengths of ShareGPT, all requests at once", &points))
}

fn conversations(setting: &RelaySetting, shared: usize, lengths: &[Lengths], own: u64) -> Vec<Prompt> {
    let prefix = synthetic_tokens(setting.seed, shared, setting.tokens);
    let mut random = Random::new(setting.seed ^ own.rotate_left(32) ^ 1);
    let prompt = |one: &Lengths| Prompt {
        token_ids: [prefix.clone(), synthetic_tokens(random.next_u64(), one.input, setting.tokens)].concat(),
        num_shared: shared,
        output_len: one.output,
        at_s: 0.0,
    };
    lengths.iter().cycle().take(setting.num_prompts).map(prompt).collect()
}

fn measure(
    runs: &mut Runs<'_>,
    setting: &RelaySetting,
    (series, shared): (String, usize),
    prompts: &dyn Fn(u64) -> Vec<Prompt>,
    bar: &ProgressBar,
) -> Result<Point, BenchError> {
    let all = interleaved(setting.num_iters, |iteration, mode| {
        bar.set_message(format!("{series}, {shared} shared, {}", mode.name()));
        let run = runs.run(&prompts(iteration as u64 + 1), mode)?;
        bar.inc(1);
        Ok(run.output_tokens_per_second())
    })?;
    Ok(Point { series, shared, num_requests: setting.num_prompts, tok_s: all.map(Distribution::new) })
}

fn report(key: &str, title: &str, points: &[Point]) -> RelayReport {
    let mut text = format!(
        "{title}: output tokens per second\n{:<18} {:>8} {:>7} {:>10} {:>10} {:>10} {:>13} {:>13}\n",
        "lengths", "requests", "shared", "no cache", "cached", "relay", "over no cache", "over cached"
    );
    for point in points {
        let [none, cached, relay] = point.tok_s.each_ref().map(Distribution::median);
        let _ = writeln!(
            text,
            "{:<18} {:>8} {:>7} {none:>10.1} {cached:>10.1} {relay:>10.1} {:>11.2} x {:>11.2} x",
            point.series,
            point.num_requests,
            point.shared,
            relay / none.max(1e-9),
            relay / cached.max(1e-9),
        );
    }
    let json: Value = points.iter().map(to_json).collect();
    let mut series: Vec<&str> = points.iter().map(|point| point.series.as_str()).collect();
    series.dedup();
    let chart = |&name: &&str| {
        let of_chart = points.iter().filter(|point| point.series == name);
        let curves = curves_by(of_chart.flat_map(|point| {
            let one = |(mode, tok_s): (&RelayMode, &Distribution)| {
                (mode.name().to_owned(), (point.shared as f64, tok_s.median()))
            };
            RelayMode::ALL.iter().zip(&point.tok_s).map(one).collect::<Vec<_>>()
        }));
        let x_title = ("tokens that are shared", XScale::Doubling);
        draw_scaled(&format!("All at once, {name}"), x_title, "output tokens/s", &curves)
    };
    let charts = series.iter().map(chart).collect();
    RelayReport { text, json: [(key.to_owned(), json)].into_iter().collect(), charts }
}

fn to_json(point: &Point) -> Value {
    let mut json = json!({
        "lengths": point.series,
        "num_requests": point.num_requests,
        "shared_len": point.shared,
    });
    for (mode, tok_s) in RelayMode::ALL.iter().zip(&point.tok_s) {
        json[mode.key()] = json!({"output_tok_s": tok_s.median(), "all_output_tok_s": tok_s.sorted()});
    }
    json
}
