//! What a step of so many rows takes, and how many guesses are worth checking in the next one.

use std::time::Duration;

/// Part of a new measurement that is taken over.
const GAIN: f64 = 0.05;
/// A step with guesses must promise this much more than one without: what it costs besides is not counted.
const MARGIN: f64 = 1.02;

/// Seconds of a step by its rows: measured at some sizes, straight lines between them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepTimes(Vec<(usize, f64)>);

impl StepTimes {
    /// Sizes that are measured at start, up to the largest step.
    pub(crate) fn sizes(max_rows: usize) -> impl Iterator<Item = usize> {
        [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
            .into_iter()
            .filter(move |&rows| rows <= max_rows)
    }

    /// Ascending by rows, at least one.
    pub(crate) fn new(points: Vec<(usize, f64)>) -> Self {
        debug_assert!(!points.is_empty() && points.is_sorted_by(|a, b| a.0 < b.0));
        Self(points)
    }

    pub(crate) fn seconds(&self, rows: usize) -> f64 {
        let (left, right, share) = self.between(rows);
        let (left, right) = (self.0[left], self.0[right]);
        (left.1 + (right.1 - left.1) * share).max(1e-9)
    }

    /// A step of so many rows took this long.
    pub(crate) fn took(&mut self, rows: usize, time: Duration) {
        let error = time.as_secs_f64() - self.seconds(rows);
        let (left, right, share) = self.between(rows);
        let largest = self.0[self.0.len() - 1].0;
        if rows > largest {
            return;
        }
        self.0[left].1 += GAIN * error * (1.0 - share);
        self.0[right].1 += GAIN * error * share;
    }

    /// The points around a size, and how far it is from the first to the second; beyond the last, more than 1.
    fn between(&self, rows: usize) -> (usize, usize, f64) {
        let points = &self.0;
        let right = points.partition_point(|point| point.0 < rows).min(points.len() - 1);
        let left = right.saturating_sub(1);
        let width = points[right].0 - points[left].0;
        if width == 0 || rows <= points[left].0 {
            return (left, right, if rows <= points[left].0 { 0.0 } else { 1.0 });
        }
        (left, right, (rows - points[left].0) as f64 / width as f64)
    }

    /// How many of each sequence's guesses to check, so that the most tokens per second are to be expected. `chances` has for
    /// each sequence the chance of each guess to be right where those before it are; a step without any has `base_rows`. A draft
    /// model makes the guesses in passes, one for all that are equally deep; what a pass takes is in `drafts`.
    pub(crate) fn choose(
        &self,
        base_rows: usize,
        chances: &[Vec<f64>],
        most: usize,
        drafts: Option<&StepTimes>,
    ) -> Choice {
        let mut gains: Vec<(f64, usize)> = Vec::new();
        for (index, chances) in chances.iter().enumerate() {
            let mut gain = 1.0;
            gains.extend(chances.iter().map(|chance| {
                gain *= chance;
                (gain, index)
            }));
        }
        // A later guess of a sequence never gains more than an earlier one, and the order of equals stays.
        gains.sort_by(|a, b| b.0.total_cmp(&a.0));
        let base = base_rows.max(1);
        let plain = base as f64 / self.seconds(base);
        let (mut best, mut best_count, mut tokens) = (plain * MARGIN, 0, base as f64);
        let mut passes =
            Passes { times: drafts, depths: vec![0; chances.len()], widths: Vec::new(), seconds: 0.0 };
        for (count, (gain, index)) in gains.iter().enumerate().take(most) {
            tokens += gain;
            passes.add(*index);
            let rate = tokens / (self.seconds(base + count + 1) + passes.seconds);
            if rate > best {
                (best, best_count) = (rate, count + 1);
            }
        }
        let mut counts = vec![0; chances.len()];
        gains[..best_count].iter().for_each(|(_, index)| counts[*index] += 1);
        let row_seconds = match best_count {
            0 => 0.0,
            count => (self.seconds(base + count) - self.seconds(base)).max(0.0) / count as f64,
        };
        Choice { counts, rate: best, row_seconds }
    }
}

/// How many guesses of each sequence are worth it, and what that was reckoned with.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Choice {
    pub(crate) counts: Vec<usize>,
    /// Tokens per second that are expected.
    pub(crate) rate: f64,
    /// What checking one more guess takes.
    pub(crate) row_seconds: f64,
}

/// The passes of a draft model that make some guesses.
struct Passes<'a> {
    times: Option<&'a StepTimes>,
    /// Guesses of each sequence.
    depths: Vec<usize>,
    /// Sequences of each pass.
    widths: Vec<usize>,
    seconds: f64,
}

impl Passes<'_> {
    fn add(&mut self, sequence: usize) {
        let Some(times) = self.times else { return };
        let depth = self.depths[sequence];
        self.depths[sequence] += 1;
        if self.widths.len() == depth {
            self.widths.push(1);
            self.seconds += times.seconds(1);
        } else {
            let width = &mut self.widths[depth];
            self.seconds += times.seconds(*width + 1) - times.seconds(*width);
            *width += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reading costs as much as 20 rows.
    fn bandwidth_bound() -> StepTimes {
        StepTimes::new(StepTimes::sizes(128).map(|rows| (rows, (20 + rows) as f64)).collect())
    }

    #[test]
    fn lines_go_through_the_points_and_beyond_them() {
        let times = StepTimes::new(vec![(1, 1.0), (2, 1.5), (4, 2.5), (8, 2.9)]);
        for (rows, expect) in [(1, 1.0), (2, 1.5), (3, 2.0), (8, 2.9), (6, 2.7), (12, 3.3)] {
            assert!((times.seconds(rows) - expect).abs() < 1e-9, "{rows}: {}", times.seconds(rows));
        }
        assert_eq!(StepTimes::new(vec![(1, 1.0)]).seconds(9), 1.0);
    }

    #[test]
    fn measurements_move_the_points_nearby() {
        let mut times = StepTimes::new(vec![(1, 1.0), (2, 1.0), (8, 1.0)]);
        for _ in 0..200 {
            times.took(2, Duration::from_secs(2));
        }
        assert!((times.seconds(2) - 2.0).abs() < 0.01 && (times.seconds(1) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn likely_guesses_are_checked_and_unlikely_ones_are_not() {
        let times = bandwidth_bound();
        let all = |chance: f64| times.choose(1, &[vec![chance; 8]], 100, None).counts[0];
        assert_eq!(all(0.95), 8);
        assert_eq!(all(0.02), 0);
        assert!((2..=6).contains(&all(0.6)), "{}", all(0.6));
        // Sequences that differ get numbers that differ.
        assert_eq!(times.choose(2, &[vec![0.95; 4], vec![0.01; 4]], 100, None).counts, [4, 0]);
        assert_eq!(times.choose(1, &[vec![0.95; 8]], 3, None).counts, [3]);
    }

    #[test]
    fn a_batch_that_fills_the_device_gets_none() {
        // Every row costs the same: there is nothing to gain.
        let times = StepTimes::new(StepTimes::sizes(128).map(|rows| (rows, rows as f64)).collect());
        assert_eq!(times.choose(1, &[vec![0.9; 8]], 100, None).counts, [0]);
        let times = bandwidth_bound();
        let few = times.choose(1, &[vec![0.7; 8]], 100, None).counts[0];
        let many: usize = times.choose(64, &vec![vec![0.7; 8]; 64], 1000, None).counts.iter().sum();
        assert!(many < 64 * few, "{many} for 64, {few} for one");
    }

    #[test]
    fn a_draft_that_costs_too_much_is_not_asked() {
        let times = bandwidth_bound();
        let counts = |pass: f64, chance: f64| {
            let drafts = StepTimes::new(vec![(1, pass), (64, pass)]);
            times.choose(1, &[vec![chance; 8]], 100, Some(&drafts)).counts[0]
        };
        assert_eq!(counts(0.01, 0.95), 8);
        assert!((1..8).contains(&counts(4.0, 0.8)), "{}", counts(4.0, 0.8));
        assert_eq!(counts(21.0, 0.8), 0);
        // A pass is for all sequences: eight of them pay for it once.
        let drafts = StepTimes::new(vec![(1, 8.0), (64, 8.0)]);
        let counts = times.choose(8, &vec![vec![0.7; 4]; 8], 100, Some(&drafts)).counts;
        assert!(counts.iter().all(|&count| count >= 1), "{counts:?}");
    }
}
