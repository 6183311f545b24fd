//! A histogram that any number of threads may add to.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub struct Histogram {
    /// Upper bounds, rising; the last bucket has none.
    bounds: Vec<f64>,
    counts: Vec<AtomicU64>,
    /// The bits of an f64.
    sum: AtomicU64,
}

impl Histogram {
    pub fn new(bounds: &[f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds: bounds.to_vec(), counts, sum: AtomicU64::new(0f64.to_bits()) }
    }

    /// 1, 2, 5, 10, 20, … up to the largest value there can be.
    pub fn of_counts(max: usize) -> Self {
        let mut bounds = Vec::new();
        let mut scale = 1f64;
        'all: loop {
            for mantissa in [1.0, 2.0, 5.0] {
                if mantissa * scale > max as f64 {
                    break 'all;
                }
                bounds.push(mantissa * scale);
            }
            scale *= 10.0;
        }
        Self::new(&bounds)
    }

    pub fn observe(&self, value: f64) {
        self.observe_many(value, 1);
    }

    pub fn observe_many(&self, value: f64, times: u64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        self.counts[bucket].fetch_add(times, Ordering::Relaxed);
        let add = |bits: u64| Some((f64::from_bits(bits) + value * times as f64).to_bits());
        self.sum
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add)
            .expect("the closure always gives a sum");
    }

    /// Prometheus's text format: cumulative buckets, sum, count.
    pub fn render(&self, name: &str, labels: &str, out: &mut String) {
        let mut cumulative = 0;
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            cumulative += count.load(Ordering::Relaxed);
            // Python writes 1.0 where Rust writes 1; dashboards compare `le` as text.
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound:?}\"}} {cumulative}");
        }
        cumulative += self.counts[self.bounds.len()].load(Ordering::Relaxed);
        let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {cumulative}");
        let _ = writeln!(out, "{name}_sum{{{labels}}} {}", f64::from_bits(self.sum.load(Ordering::Relaxed)));
        let _ = writeln!(out, "{name}_count{{{labels}}} {cumulative}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_include_their_bound() {
        let histogram = Histogram::new(&[0.5, 1.0, 10.0]);
        for value in [0.1, 0.5, 0.7, 99.0] {
            histogram.observe(value);
        }
        histogram.observe_many(2.0, 3);
        let mut text = String::new();
        histogram.render("h", "a=\"b\"", &mut text);
        let expect = "h_bucket{a=\"b\",le=\"0.5\"} 2\nh_bucket{a=\"b\",le=\"1.0\"} 3\n\
                      h_bucket{a=\"b\",le=\"10.0\"} 6\nh_bucket{a=\"b\",le=\"+Inf\"} 7\n\
                      h_sum{a=\"b\"} 106.3\nh_count{a=\"b\"} 7\n";
        assert_eq!(text, expect);
    }

    #[test]
    fn counts_go_by_one_two_five() {
        assert_eq!(Histogram::of_counts(100).bounds, [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(Histogram::of_counts(0).bounds, [0.0; 0]);
    }
}
