//! `baton bench relay`: what relay attention gains, from the operator alone to a server under load.
//!
//! Every part runs its baselines interleaved in the same process and reports medians. `row` and `run` make prompts and run
//! them; the other modules are the parts, each with its table and its JSON.

mod offline;
mod online;
mod operator;
mod row;
mod rows;
mod run;

use baton_core::SamplingParams;
use baton_engine::Engine;
use indicatif::ProgressBar;
use serde_json::{Map, Value};

use crate::BenchError;
use crate::dataset::TokenRange;
use crate::report::charts::{Chart, Curve};
use crate::report::{page_of, picture_of};
use run::Runs;

pub use offline::Lengths;
pub use online::OnlineOptions;
pub use operator::{OpenRecorded, OperatorOptions, relay_operator};
pub use row::RelayRow;
pub use run::RelayMode;

/// What all parts with an engine have in common.
#[derive(Clone, Debug)]
pub struct RelaySetting {
    /// Lengths of the shared prefix.
    pub shared: Vec<usize>,
    /// Requests of a workload.
    pub num_prompts: usize,
    /// Runs of each workload in each way.
    pub num_iters: usize,
    /// Its `max_tokens` and `ignore_eos` are set here.
    pub params: SamplingParams,
    pub tokens: TokenRange,
    pub seed: u64,
}

/// What is measured with an engine.
#[derive(Clone, Debug)]
pub enum RelayWork {
    /// Workloads with relay attention off and on.
    Rows(Vec<RelayRow>),
    /// Requests of equal lengths, all at once.
    Offline(Vec<Lengths>),
    /// The lengths of real conversations, all at once.
    ShareGpt(Vec<Lengths>),
    /// Requests that come one after the other.
    Online(OnlineOptions),
}

/// Tables for people, figures for files, and charts.
#[derive(Clone, Debug, Default)]
pub struct RelayReport {
    pub text: String,
    pub json: Map<String, Value>,
    charts: Vec<Chart>,
}

impl RelayReport {
    /// Puts another part's behind this.
    pub fn extend(&mut self, part: Self) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.text.push_str(&part.text);
        self.json.extend(part.json);
        self.charts.extend(part.charts);
    }

    /// One page that needs nothing else.
    pub fn to_html(&self, title: &str) -> String {
        page_of(title, &self.text, &self.charts)
    }

    /// All charts in one picture.
    pub fn to_png(&self, title: &str) -> Result<Vec<u8>, BenchError> {
        picture_of(title, &self.charts)
    }
}

/// Points with the names of their curves to curves, in the order in which the names come.
fn curves_by(points: impl Iterator<Item = (String, (f64, f64))>) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for (name, point) in points {
        let tip = format!("{name}: {:.0}, {:.2}", point.0, point.1);
        let index = curves.iter().position(|curve| curve.name == name).unwrap_or_else(|| {
            curves.push(Curve { name, points: Vec::new(), tips: Vec::new() });
            curves.len() - 1
        });
        curves[index].points.push(point);
        curves[index].tips.push(tip);
    }
    curves
}

/// Runs every mode in each iteration. The order changes, so that a device that slows down as it warms up favours no mode.
fn interleaved<T>(
    num_iters: usize,
    mut run: impl FnMut(usize, RelayMode) -> Result<T, BenchError>,
) -> Result<[Vec<T>; 3], BenchError> {
    let mut all = [const { Vec::new() }; 3];
    for iteration in 0..num_iters {
        for offset in 0..RelayMode::ALL.len() {
            let index = (iteration + offset) % RelayMode::ALL.len();
            all[index].push(run(iteration, RelayMode::ALL[index])?);
        }
    }
    Ok(all)
}

/// One part that needs an engine.
pub fn relay(
    engine: &mut Engine,
    setting: &RelaySetting,
    work: &RelayWork,
    bar: &ProgressBar,
) -> Result<RelayReport, BenchError> {
    if setting.num_iters == 0 || setting.num_prompts == 0 {
        return Err(BenchError::options("--num-iters and --num-prompts are above 0"));
    }
    let mut runs = Runs::new(engine, &setting.params);
    let can_relay = runs.can_relay();
    let mut report = match work {
        RelayWork::Rows(rows) => rows::measure(&mut runs, setting, rows, bar)?,
        RelayWork::Offline(lengths) => offline::synthetic(&mut runs, setting, lengths, bar)?,
        RelayWork::ShareGpt(lengths) => offline::sharegpt(&mut runs, setting, lengths, bar)?,
        RelayWork::Online(options) => online::measure(&mut runs, setting, options, bar)?,
    };
    if !can_relay {
        report
            .text
            .push_str("Reads are not shared here: the device does not, or --deterministic forbids it.\n");
    }
    report.json.insert("relay_available".to_owned(), can_relay.into());
    Ok(report)
}
