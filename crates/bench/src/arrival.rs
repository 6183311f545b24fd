//! When requests are sent: all at once, as a Poisson or gamma process, or at a rate that grows.
//!
//! A trace brings its own times; see `dataset::trace`.

use crate::BenchError;
use crate::random::{Random, gamma};

/// A rate that changes over the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RampUp {
    pub exponential: bool,
    pub start_rps: f64,
    pub end_rps: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrivals {
    /// Requests per second; infinite sends everything at once.
    pub request_rate: f64,
    /// 1 is a Poisson process; less comes in bursts, more comes evenly, infinite is a metronome.
    pub burstiness: f64,
    pub ramp_up: Option<RampUp>,
}

impl Default for Arrivals {
    fn default() -> Self {
        Self { request_rate: f64::INFINITY, burstiness: 1.0, ramp_up: None }
    }
}

impl Arrivals {
    pub fn validate(&self) -> Result<(), BenchError> {
        if self.request_rate.is_nan() || self.request_rate <= 0.0 {
            return Err(BenchError::options("--request-rate must be a number above 0, or inf"));
        }
        if self.burstiness.is_nan() || self.burstiness <= 0.0 {
            return Err(BenchError::options("--burstiness must be a number above 0"));
        }
        let Some(ramp) = self.ramp_up else { return Ok(()) };
        if self.request_rate.is_finite() {
            return Err(BenchError::options("--request-rate and --ramp-up-strategy exclude each other"));
        }
        let sound = |rate: f64| rate.is_finite() && rate > 0.0;
        if !sound(ramp.start_rps) || !sound(ramp.end_rps) || ramp.start_rps > ramp.end_rps {
            return Err(BenchError::options(
                "--ramp-up-start-rps must be above 0 and at most --ramp-up-end-rps",
            ));
        }
        Ok(())
    }

    fn rate_of(&self, index: usize, count: usize) -> f64 {
        let Some(ramp) = self.ramp_up else { return self.request_rate };
        let progress = index as f64 / count.saturating_sub(1).max(1) as f64;
        if ramp.exponential {
            ramp.start_rps * (ramp.end_rps / ramp.start_rps).powf(progress)
        } else {
            ramp.start_rps + (ramp.end_rps - ramp.start_rps) * progress
        }
    }

    /// Seconds after the start at which each of `count` requests is sent.
    ///
    /// At a constant rate the last one is sent at exactly `count / rate`: random sums would miss the rate by a percent
    /// or two, which would show in the throughput of short runs.
    pub fn times(&self, count: usize, seed: u64) -> Vec<f64> {
        let mut random = Random::new(seed);
        let mut now = 0.0;
        let mut times = Vec::with_capacity(count);
        for index in 0..count {
            let rate = self.rate_of(index, count);
            now += match (rate.is_infinite(), self.burstiness.is_infinite()) {
                (true, _) => 0.0,
                (false, true) => 1.0 / rate,
                (false, false) => gamma(&mut random, self.burstiness) / (rate * self.burstiness),
            };
            times.push(now);
        }
        if self.ramp_up.is_none() && now > 0.0 {
            let scale = count as f64 / self.request_rate / now;
            for time in &mut times {
                *time *= scale;
            }
        }
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(arrivals: &Arrivals) -> Vec<f64> {
        let times = arrivals.times(20_000, 3);
        assert!(times.is_sorted());
        times.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Standard deviation of the gaps over their mean: 1 / √burstiness.
    fn spread(arrivals: &Arrivals) -> f64 {
        let gaps = crate::stats::Distribution::new(gaps(arrivals));
        gaps.standard_deviation() / gaps.mean()
    }

    #[test]
    fn everything_at_once_without_a_rate() {
        assert_eq!(Arrivals::default().times(3, 0), [0.0; 3]);
    }

    #[test]
    fn the_rate_is_kept_and_burstiness_spreads() {
        let poisson = Arrivals { request_rate: 50.0, ..Arrivals::default() };
        let last = *poisson.times(20_000, 3).last().unwrap();
        assert!((last - 400.0).abs() < 1e-6, "{last}");
        assert!((spread(&poisson) - 1.0).abs() < 0.03);
        let bursty = Arrivals { burstiness: 0.25, ..poisson };
        assert!((spread(&bursty) - 2.0).abs() < 0.1);
        let even = Arrivals { burstiness: f64::INFINITY, ..poisson };
        assert!(spread(&even) < 1e-6);
    }

    #[test]
    fn a_ramp_gets_denser() {
        for exponential in [false, true] {
            let ramp_up = Some(RampUp { exponential, start_rps: 1.0, end_rps: 10.0 });
            let times = Arrivals { burstiness: f64::INFINITY, ramp_up, ..Arrivals::default() }.times(100, 0);
            assert!((times[0] - 1.0).abs() < 1e-9);
            assert!((times[99] - times[98] - 0.1).abs() < 1e-9);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let check = |arrivals: Arrivals| arrivals.validate().is_err();
        assert!(check(Arrivals { request_rate: 0.0, ..Arrivals::default() }));
        assert!(check(Arrivals { request_rate: f64::NAN, ..Arrivals::default() }));
        assert!(check(Arrivals { burstiness: -1.0, ..Arrivals::default() }));
        let ramp_up = Some(RampUp { exponential: false, start_rps: 2.0, end_rps: 1.0 });
        assert!(check(Arrivals { ramp_up, ..Arrivals::default() }));
        let ramp_up = Some(RampUp { exponential: false, start_rps: 1.0, end_rps: 2.0 });
        assert!(check(Arrivals { ramp_up, request_rate: 1.0, ..Arrivals::default() }));
        assert!(Arrivals { ramp_up, ..Arrivals::default() }.validate().is_ok());
    }
}
