//! `--parts rows`: a workload with relay attention off and on, interleaved, in one engine.

use std::fmt::Write;

use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::row::RelayRow;
use super::run::{Prompt, RelayMode, RunResult, Runs};
use super::{RelayReport, RelaySetting};
use crate::BenchError;
use crate::stats::Distribution;

/// Tokens of the answers of the run that warms up.
const WARM_UP_TOKENS: usize = 4;
const MODES: [RelayMode; 2] = [RelayMode::Cached, RelayMode::Relay];

/// All runs of a row, in the order of [`MODES`].
#[derive(Clone, Debug)]
struct RowResult {
    row: RelayRow,
    runs: [Vec<RunFigures>; 2],
    /// Answers that were the same to the last token, of all in runs with relay attention.
    num_equal: usize,
}

#[derive(Clone, Copy, Debug)]
struct RunFigures {
    output_tok_s: f64,
    decode_tok_s: f64,
    ttft_ms: f64,
    tpot_ms: f64,
    num_cached_tokens: usize,
    num_tokens_saved: u64,
    device_idle_share: Option<f64>,
}

impl RunFigures {
    fn new(run: &RunResult) -> Self {
        Self {
            output_tok_s: run.output_tokens_per_second(),
            decode_tok_s: run.decode_tokens_per_second(),
            ttft_ms: run.ttfts_ms().median(),
            tpot_ms: run.tpots_ms().median(),
            num_cached_tokens: run.num_cached_tokens,
            num_tokens_saved: run.relay.num_tokens_saved,
            device_idle_share: run.device_idle_share,
        }
    }
}

/// Runs every row. Each is first run with short answers in both ways, which is not counted.
pub(super) fn measure(
    runs: &mut Runs<'_>,
    setting: &RelaySetting,
    rows: &[RelayRow],
    bar: &ProgressBar,
) -> Result<RelayReport, BenchError> {
    bar.set_length((rows.len() * setting.num_iters * MODES.len()) as u64);
    let mut results = Vec::with_capacity(rows.len());
    for (seed, row) in (setting.seed..).zip(rows) {
        bar.set_message(row.to_string());
        let prompts = |own_seed: usize| row.prompts(seed, own_seed as u64, setting.tokens);
        let short = |prompt: Prompt| Prompt { output_len: prompt.output_len.min(WARM_UP_TOKENS), ..prompt };
        let warm_up: Vec<Prompt> = prompts(0).into_iter().map(short).collect();
        for mode in MODES {
            runs.run(&warm_up, mode)?;
        }
        let mut result = RowResult { row: row.clone(), runs: [Vec::new(), Vec::new()], num_equal: 0 };
        for iteration in 1..=setting.num_iters {
            let prompts = prompts(iteration);
            // The order changes, so that a device that slows down as it warms up favours no mode.
            let mut order = [0, 1];
            order.rotate_left(iteration % 2);
            let mut outputs = [Vec::new(), Vec::new()];
            for index in order {
                let run = runs.run(&prompts, MODES[index])?;
                result.runs[index].push(RunFigures::new(&run));
                outputs[index] = run.outputs;
                bar.inc(1);
            }
            let [plain, relay] = &outputs;
            result.num_equal += plain.iter().zip(relay).filter(|(plain, relay)| plain == relay).count();
        }
        results.push(result);
    }
    bar.finish_and_clear();
    let json = results.iter().map(RowResult::to_json).collect();
    let json = [("rows".to_owned(), json)].into_iter().collect();
    Ok(RelayReport { text: table(&results), json, ..RelayReport::default() })
}

impl RowResult {
    fn median(&self, mode: usize, of: impl Fn(&RunFigures) -> f64) -> f64 {
        Distribution::new(self.runs[mode].iter().map(of).collect()).median()
    }

    /// Of the medians.
    fn speedup(&self, of: impl Fn(&RunFigures) -> f64 + Copy) -> f64 {
        self.median(1, of) / self.median(0, of).max(1e-9)
    }

    fn num_answers(&self) -> usize {
        self.row.num_requests() * self.runs[1].len()
    }

    fn to_json(&self) -> Value {
        let runs = |mode: usize| {
            let list = |of: &dyn Fn(&RunFigures) -> Value| -> Vec<Value> {
                self.runs[mode].iter().map(of).collect()
            };
            json!({
                "output_tok_s": self.median(mode, |run| run.output_tok_s),
                "decode_tok_s": self.median(mode, |run| run.decode_tok_s),
                "median_ttft_ms": self.median(mode, |run| run.ttft_ms),
                "median_tpot_ms": self.median(mode, |run| run.tpot_ms),
                "all_output_tok_s": list(&|run| json!(run.output_tok_s)),
                "all_decode_tok_s": list(&|run| json!(run.decode_tok_s)),
                "num_cached_tokens": list(&|run| json!(run.num_cached_tokens)),
                "num_kv_tokens_saved": list(&|run| json!(run.num_tokens_saved)),
                "device_idle_share": list(&|run| json!(run.device_idle_share)),
            })
        };
        let levels: Vec<[usize; 2]> =
            self.row.levels.iter().map(|level| [level.count, level.tokens]).collect();
        json!({
            "row": self.row.to_string(),
            "levels": levels,
            "num_requests": self.row.num_requests(),
            "shared_len": self.row.num_shared(),
            "output_len": self.row.output_len,
            "cached": runs(0),
            "relay": runs(1),
            "speedup": self.speedup(|run| run.output_tok_s),
            "decode_speedup": self.speedup(|run| run.decode_tok_s),
            "equal_answers": self.num_equal,
            "num_answers": self.num_answers(),
        })
    }
}

fn table(results: &[RowResult]) -> String {
    let mut text = format!(
        "{:<32} {:>12} {:>12} {:>7} {:>12} {:>12} {:>7} {:>12}\n",
        "requests x (shared + own)/output",
        "plain tok/s",
        "relay tok/s",
        "",
        "plain decode",
        "relay decode",
        "",
        "same answers"
    );
    for result in results {
        let (output, decode) = (|run: &RunFigures| run.output_tok_s, |run: &RunFigures| run.decode_tok_s);
        let _ = writeln!(
            text,
            "{:<32} {:>12.1} {:>12.1} {:>5.2} x {:>12.1} {:>12.1} {:>5.2} x {:>12}",
            result.row.to_string(),
            result.median(0, output),
            result.median(1, output),
            result.speedup(output),
            result.median(0, decode),
            result.median(1, decode),
            result.speedup(decode),
            format!("{} / {}", result.num_equal, result.num_answers()),
        );
    }
    text
}
