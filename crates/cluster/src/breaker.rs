//! A store that fails again and again is left alone for a while: nobody waits for it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Failures in a row after which the store is left alone, and for how long. Then one call tries whether it is back.
const MAX_FAILURES: u32 = 3;
const PAUSE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(crate) struct Breaker(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    num_failures: u32,
    closed_at: Option<Instant>,
}

impl Breaker {
    /// Whether the store may be called.
    pub(crate) fn lets_through(&self) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        match state.closed_at {
            Some(until) if now < until => false,
            Some(_) => {
                // This one tries; the others wait for what comes of it.
                state.closed_at = Some(now + PAUSE);
                true
            }
            None => true,
        }
    }

    pub(crate) fn succeeded(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = State::default();
    }

    pub(crate) fn failed(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.num_failures += 1;
        if state.num_failures >= MAX_FAILURES {
            state.closed_at = Some(Instant::now() + PAUSE);
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.closed_at.is_some_and(|until| Instant::now() < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_after_some_failures_in_a_row() {
        let breaker = Breaker::default();
        breaker.failed();
        breaker.failed();
        breaker.succeeded();
        breaker.failed();
        breaker.failed();
        assert!(breaker.lets_through() && !breaker.is_open());
        breaker.failed();
        assert!(!breaker.lets_through() && breaker.is_open());
        breaker.succeeded();
        assert!(breaker.lets_through());
    }
}
