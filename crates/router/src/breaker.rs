//! A circuit breaker: a worker that failed several times in a row is left alone for a while, then tried with one request.
//! The clock is the caller's.

use std::time::{Duration, Instant};

#[derive(Debug)]
enum State {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
    },
    /// One request is on its way to find out; another may follow if nothing was heard by then.
    HalfOpen {
        until: Instant,
    },
}

#[derive(Debug)]
pub struct Breaker {
    state: State,
    threshold: u32,
    cooldown: Duration,
    /// Times it has opened.
    pub num_opened: u64,
}

impl Breaker {
    pub fn new(threshold: u32, cooldown: Duration) -> Self {
        Self { state: State::Closed { failures: 0 }, threshold: threshold.max(1), cooldown, num_opened: 0 }
    }

    /// Whether a request could go there, without claiming the trial of a breaker that is half open.
    pub fn would_allow(&self, now: Instant) -> bool {
        match self.state {
            State::Closed { .. } => true,
            State::Open { until } | State::HalfOpen { until } => now >= until,
        }
    }

    /// Claims a request. False where the worker is to be left alone.
    pub fn allow(&mut self, now: Instant) -> bool {
        let allowed = self.would_allow(now);
        if allowed && !self.is_closed() {
            self.state = State::HalfOpen { until: now + self.cooldown };
        }
        allowed
    }

    pub fn succeeded(&mut self) {
        self.state = State::Closed { failures: 0 };
    }

    pub fn failed(&mut self, now: Instant) {
        let failures = match self.state {
            State::Closed { failures } => failures + 1,
            State::Open { .. } => return,
            State::HalfOpen { .. } => self.threshold,
        };
        self.state = if failures >= self.threshold {
            self.num_opened += 1;
            State::Open { until: now + self.cooldown }
        } else {
            State::Closed { failures }
        };
    }

    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOLDOWN: Duration = Duration::from_secs(5);

    #[test]
    fn opens_after_failures_in_a_row_and_tries_once() {
        let start = Instant::now();
        let mut breaker = Breaker::new(3, COOLDOWN);
        breaker.failed(start);
        breaker.failed(start);
        breaker.succeeded();
        for _ in 0..2 {
            breaker.failed(start);
            assert!(breaker.allow(start));
        }
        breaker.failed(start);
        assert!(!breaker.allow(start + COOLDOWN / 2) && !breaker.is_closed());
        let later = start + COOLDOWN;
        assert!(breaker.allow(later), "one trial");
        assert!(!breaker.allow(later), "and no second one at the same time");
        breaker.failed(later);
        assert!(!breaker.would_allow(later + COOLDOWN / 2), "the trial failed");
        assert!(breaker.allow(later + COOLDOWN));
        breaker.succeeded();
        assert!(breaker.is_closed() && breaker.num_opened == 2);
    }

    #[test]
    fn a_trial_that_nobody_tells_of_does_not_shut_the_worker_out() {
        let start = Instant::now();
        let mut breaker = Breaker::new(1, COOLDOWN);
        breaker.failed(start);
        assert!(breaker.allow(start + COOLDOWN));
        assert!(breaker.allow(start + COOLDOWN * 2));
    }
}
