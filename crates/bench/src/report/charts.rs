//! The charts, and how values become positions: axes, ticks, curves, legends.

use super::results::RunResult;
use super::scene::{Anchor, Colour, Scene, Shape};
use crate::metrics::Metric;
use crate::stats::Distribution;

const WIDTH: f64 = 620.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 52.0;
const INK: Colour = [40, 44, 52];
const FAINT: Colour = [224, 227, 232];
/// Told apart by people with any kind of colour vision.
const COLOURS: [Colour; 8] = [
    [0, 114, 178],
    [213, 94, 0],
    [0, 158, 115],
    [204, 121, 167],
    [230, 159, 0],
    [86, 180, 233],
    [120, 94, 60],
    [90, 90, 90],
];
/// Points of a cumulative curve.
const CURVE_POINTS: usize = 200;
const LEGEND_ROWS: usize = 8;

#[derive(Clone, Debug)]
pub struct Chart {
    pub scene: Scene,
}

/// A curve of a chart.
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// One text a point, shown where the pointer is; none draws no dots.
    pub(crate) tips: Vec<String>,
}

/// How places on the x axis grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XScale {
    Linear,
    /// Each doubling is as wide as the next; for lengths that are powers of two.
    Doubling,
}

/// Every chart that the runs have data for.
pub fn all(runs: &[RunResult]) -> Vec<Chart> {
    let mut charts = Vec::new();
    charts.extend(against_latency(runs));
    for metric in [Metric::Ttft, Metric::Itl, Metric::E2el] {
        charts.extend(cumulative(runs, metric));
    }
    charts
}

/// All charts below a title, two in a row.
pub fn sheet(title: &str, charts: &[Chart]) -> Scene {
    let columns = charts.len().clamp(1, 2);
    let rows = charts.len().div_ceil(columns).max(1);
    let mut scene = Scene::new(WIDTH * columns as f64, HEIGHT * rows as f64 + 40.0);
    scene.text((scene.width / 2.0, 26.0), title, INK, Anchor::Middle);
    for (index, chart) in charts.iter().enumerate() {
        let place = ((index % columns) as f64 * WIDTH, (index / columns) as f64 * HEIGHT + 40.0);
        scene.place(&chart.scene, place);
    }
    scene
}

/// Speed against the latency that people feel, a line for each series.
fn against_latency(runs: &[RunResult]) -> Option<Chart> {
    let metric = [Metric::Itl, Metric::Tpot, Metric::E2el]
        .into_iter()
        .find(|&metric| runs.iter().any(|run| run.latency(metric).is_some()))?;
    let mut curves: Vec<Curve> = Vec::new();
    for run in runs {
        let Some((median, _)) = run.latency(metric) else { continue };
        let tip = format!(
            "{} · {}: {:.1} tok/s, median {} {median:.2} ms",
            run.series,
            run.name,
            run.output_throughput,
            metric.key().to_uppercase()
        );
        let index = curves.iter().position(|curve| curve.name == run.series).unwrap_or_else(|| {
            curves.push(Curve { name: run.series.clone(), points: Vec::new(), tips: Vec::new() });
            curves.len() - 1
        });
        curves[index].points.push((median, run.output_throughput));
        curves[index].tips.push(tip);
    }
    for curve in &mut curves {
        // In the order of the latency, with each point's text.
        let mut joined: Vec<_> = curve.points.drain(..).zip(curve.tips.drain(..)).collect();
        joined.sort_by(|a, b| a.0.0.total_cmp(&b.0.0));
        (curve.points, curve.tips) = joined.into_iter().unzip();
    }
    let x_title = format!("median {} (ms)", metric.key().to_uppercase());
    Some(draw("Throughput against latency", &x_title, "output tokens/s", &curves))
}

/// The share of measurements that are at most x.
fn cumulative(runs: &[RunResult], metric: Metric) -> Option<Chart> {
    let curve = |run: &RunResult| {
        let values = run.detail(metric)?;
        let points = (0..=CURVE_POINTS).map(|step| point(values, step as f64 / CURVE_POINTS as f64 * 100.0));
        let name = format!("{} · {}", run.series, run.name);
        Some(Curve { name, points: points.collect(), tips: Vec::new() })
    };
    let curves: Vec<Curve> = runs.iter().filter_map(curve).collect();
    let x_title = format!("{} (ms)", metric.key().to_uppercase());
    (!curves.is_empty()).then(|| draw(metric.title(), &x_title, "share of all (%)", &curves))
}

fn point(values: &Distribution, p: f64) -> (f64, f64) {
    (values.percentile(p), p)
}

/// A range of values and its place on the sheet.
struct Axis {
    /// Where values are logarithms, of base 2, so are these.
    low: f64,
    high: f64,
    step: f64,
    from: f64,
    to: f64,
    is_log: bool,
}

impl Axis {
    /// From 0 to a round number above every value.
    fn new(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let high = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
        let high = if high > 0.0 { high } else { 1.0 };
        let raw = high / 5.0;
        let magnitude = 10_f64.powf(raw.log10().floor());
        let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|factor| factor * magnitude);
        let step = steps.into_iter().find(|&step| step >= raw).unwrap_or(raw);
        Self { low: 0.0, high: (high / step).ceil() * step, step, from, to, is_log: false }
    }

    /// From the power of two below every value to the one above.
    fn doubling(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Self {
        let logs = values.filter(|value| *value > 0.0).map(f64::log2);
        let low = logs.clone().fold(f64::INFINITY, f64::min).floor();
        let high = logs.fold(f64::NEG_INFINITY, f64::max).ceil();
        let (low, high) = if low.is_finite() { (low, high.max(low + 1.0)) } else { (0.0, 1.0) };
        Self { low, high, step: 1.0, from, to, is_log: true }
    }

    fn place(&self, value: f64) -> f64 {
        let value = if self.is_log { value.max(f64::MIN_POSITIVE).log2() } else { value };
        let share = (value - self.low) / (self.high - self.low);
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    fn label(&self, value: f64) -> String {
        if self.is_log && value >= 1024.0 {
            return format!("{}k", value / 1024.0);
        }
        label(value, self.step)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let (low, step, is_log) = (self.low, self.step, self.is_log);
        let count = ((self.high - low) / step).round() as u32;
        (0..=count).map(move |index| {
            let value = low + f64::from(index) * step;
            if is_log { value.exp2() } else { value }
        })
    }
}

fn draw(title: &str, x_title: &str, y_title: &str, curves: &[Curve]) -> Chart {
    draw_scaled(title, (x_title, XScale::Linear), y_title, curves)
}

pub(crate) fn draw_scaled(
    title: &str,
    (x_title, x_scale): (&str, XScale),
    y_title: &str,
    curves: &[Curve],
) -> Chart {
    let mut scene = Scene::new(WIDTH, HEIGHT);
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let xs = points().map(|point| point.0);
    let x_axis = match x_scale {
        XScale::Linear => Axis::new(xs, LEFT, WIDTH - RIGHT),
        XScale::Doubling => Axis::doubling(xs, LEFT, WIDTH - RIGHT),
    };
    let y_axis = Axis::new(points().map(|point| point.1), HEIGHT - BOTTOM, TOP);
    draw_axes(&mut scene, &x_axis, &y_axis);
    scene.text((LEFT, 22.0), title, INK, Anchor::Start);
    scene.text(((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 12.0), x_title, INK, Anchor::Middle);
    scene.text((WIDTH - RIGHT, 22.0), y_title, INK, Anchor::End);
    for (index, curve) in curves.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let placed: Vec<(f64, f64)> =
            curve.points.iter().map(|&(x, y)| (x_axis.place(x), y_axis.place(y))).collect();
        for (&at, tip) in placed.iter().zip(&curve.tips) {
            scene.shapes.push(Shape::Dot { at, radius: 4.5, colour, tip: tip.clone() });
        }
        scene.line(placed, colour, 2.0);
        if index < LEGEND_ROWS {
            let y = HEIGHT - BOTTOM - 12.0 - 18.0 * (curves.len().min(LEGEND_ROWS) - 1 - index) as f64;
            scene.line(vec![(WIDTH - RIGHT - 28.0, y - 5.0), (WIDTH - RIGHT - 8.0, y - 5.0)], colour, 3.0);
            scene.text((WIDTH - RIGHT - 34.0, y), shorten(&curve.name), INK, Anchor::End);
        }
    }
    Chart { scene }
}

fn draw_axes(scene: &mut Scene, x_axis: &Axis, y_axis: &Axis) {
    for value in y_axis.ticks() {
        let y = y_axis.place(value);
        scene.line(vec![(LEFT, y), (WIDTH - RIGHT, y)], FAINT, 1.0);
        scene.text((LEFT - 8.0, y + 5.0), y_axis.label(value), INK, Anchor::End);
    }
    for value in x_axis.ticks() {
        let x = x_axis.place(value);
        scene.line(vec![(x, HEIGHT - BOTTOM), (x, HEIGHT - BOTTOM + 5.0)], INK, 1.0);
        scene.text((x, HEIGHT - BOTTOM + 20.0), x_axis.label(value), INK, Anchor::Middle);
    }
    scene.line(vec![(LEFT, TOP), (LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM)], INK, 1.0);
}

/// With as many decimals as the steps need.
fn label(value: f64, step: f64) -> String {
    if value >= 10_000.0 {
        return format!("{}k", value / 1000.0);
    }
    let decimals =
        if step.fract() == 0.0 { 0 } else { (1.0 - step.log10().floor()).clamp(1.0, 6.0) as usize };
    format!("{value:.decimals$}")
}

fn shorten(name: &str) -> String {
    const LONGEST: usize = 40;
    if name.chars().count() <= LONGEST {
        return name.to_owned();
    }
    format!("{}...", name.chars().take(LONGEST - 3).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        let axis = Axis::new([3.0, 47.0].into_iter(), 0.0, 100.0);
        assert_eq!((axis.high, axis.step), (50.0, 10.0));
        assert_eq!(axis.ticks().collect::<Vec<_>>(), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
        assert_eq!(axis.place(25.0), 50.0);
        let empty = Axis::new(std::iter::empty(), 0.0, 1.0);
        assert!(empty.high >= 1.0 && empty.place(f64::MAX) == 1.0);
    }

    #[test]
    fn doublings_are_equally_wide() {
        let axis = Axis::doubling([64.0, 700.0].into_iter(), 0.0, 100.0);
        assert_eq!(axis.ticks().collect::<Vec<_>>(), [64.0, 128.0, 256.0, 512.0, 1024.0]);
        assert_eq!([64.0, 256.0, 1024.0].map(|value| axis.place(value)), [0.0, 50.0, 100.0]);
        let empty = Axis::doubling([0.0].into_iter(), 0.0, 1.0);
        assert!(empty.place(0.0) == 0.0 && empty.place(2.0) == 1.0);
    }

    #[test]
    fn labels_are_short() {
        assert_eq!(label(20_000.0, 5000.0), "20k");
        assert_eq!(label(0.05, 0.01), "0.050");
        assert_eq!(label(40.0, 10.0), "40");
        assert_eq!(shorten(&"x".repeat(60)).len(), 40);
    }
}
