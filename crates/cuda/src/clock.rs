//! When the device worked on each step, from events around it in its stream. Nothing is waited for but the step itself, whose
//! result is wanted anyway.
//!
//! An event knows how long after another it came, not what time it was. A step that the host has waited for ended just now; of
//! one that was done before, the end is as long after that of the step before as their events are apart.

use std::time::{Duration, Instant};

use baton_backend::{BackendError, DeviceSpan};

use crate::gpu::{Event, Gpu};

/// Two steps may be in flight, and the one before them is measured from.
const NUM_KEPT: usize = 3;

#[derive(Debug)]
pub(crate) struct StepClock {
    steps: [(Event, Event); NUM_KEPT],
    num_started: usize,
    num_collected: usize,
    last: Option<DeviceSpan>,
}

impl StepClock {
    pub(crate) fn new() -> Result<Self, BackendError> {
        let step = || Ok::<_, BackendError>((Event::timed()?, Event::timed()?));
        Ok(Self { steps: [step()?, step()?, step()?], num_started: 0, num_collected: 0, last: None })
    }

    /// Before anything of a step is put on its stream.
    pub(crate) fn start(&self, gpu: &Gpu) -> Result<(), BackendError> {
        self.steps[self.num_started % NUM_KEPT].0.record(gpu)
    }

    /// When all of it is. A step that failed on its way is not ended, and the next one takes its place.
    pub(crate) fn end(&mut self, gpu: &Gpu) -> Result<(), BackendError> {
        self.steps[self.num_started % NUM_KEPT].1.record(gpu)?;
        self.num_started += 1;
        Ok(())
    }

    /// The end of the step that was submitted last.
    pub(crate) fn last_end(&self) -> Option<&Event> {
        self.num_started.checked_sub(1).map(|number| &self.steps[number % NUM_KEPT].1)
    }

    /// Waits for the oldest step in flight.
    pub(crate) fn collect(&mut self) -> Result<(), BackendError> {
        let number = self.num_collected;
        // Also of a step that failed: the next one is asked for next.
        self.num_collected += 1;
        let (start, end) = &self.steps[number % NUM_KEPT];
        let is_waited_for = !end.is_done()?;
        end.wait()?;
        let now = Instant::now();
        let previous = number.checked_sub(1).map(|number| &self.steps[number % NUM_KEPT].1);
        let ended = match (self.last, previous) {
            (Some(last), Some(previous)) if !is_waited_for => (last.end + end.since(previous)?).min(now),
            _ => now,
        };
        let took = end.since(start)?;
        self.last = Some(DeviceSpan { start: ended.checked_sub(took).unwrap_or(ended), end: ended });
        Ok(())
    }

    /// Of the step that was collected last.
    pub(crate) fn last(&self) -> Option<DeviceSpan> {
        self.last
    }
}

/// What the driver says in milliseconds; never negative, whatever it says.
pub(crate) fn from_milliseconds(milliseconds: f32) -> Duration {
    Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_are_a_duration_whatever_they_are() {
        assert_eq!(from_milliseconds(0.25), Duration::from_micros(250));
        assert_eq!([-1.0, f32::NAN, f32::INFINITY].map(from_milliseconds), [Duration::ZERO; 3]);
    }
}
