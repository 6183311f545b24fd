//! How fast the device is, so that the scheduler can keep tenants from making steps long for each other.
//!
//! The first figure is what reading the weights takes, in tokens that the device computes in that time. It is fitted to the steps
//! as they are timed, small and large ones with the same weight, and old ones are forgotten. Whatever else runs on the machine
//! makes steps longer and never shorter, so steps that took longer than expected count little.
//!
//! The second is a correction: costs are estimates, and other work may take cores away. Where shared steps take longer than they may
//! for the tenant that asks the least, the others are given less of the next ones, until they do not.

use std::time::Duration;

use baton_model::{ModelConfig, num_parameters};
use baton_sched::{CostModel, StepCost};

use crate::MemoryPlan;

/// What a step's part in the sums is worth after the next one: the last few hundred steps count.
const MEMORY: f64 = 0.996;
/// Steps before the first fit is believed.
const MIN_STEPS: f64 = 16.0;
/// Where all steps are alike, reading and computing cannot be told apart: the least share of the sums that must differ.
const MIN_SPREAD: f64 = 0.02;
/// A step that took so many times as long as an undisturbed one of its cost counts less, by this much.
const LATE: f64 = 1.25;
const LATE_WEIGHT: f64 = 0.1;
/// The time of undisturbed steps goes down by this with every step that took less, and up with every step that took more: one in nine
/// takes less. It takes thousands of steps to forget how fast the machine was.
const UNDISTURBED_DOWN: f64 = 0.996;
const UNDISTURBED_UP: f64 = 1.0005;
/// A step that took too long takes this off the others' share of the next, and it comes back in so many steps: about one step
/// in twenty may take longer.
const SPARE_LOSS: f64 = 0.9;
const SPARE_STEPS: f64 = 20.0;
/// The others go on, however slow the machine has become.
const MIN_SPARE: f64 = 0.2;
/// How much of a new fit is taken over.
const GAIN: f64 = 0.1;
/// No device reads its weights in less time than it computes a token, or computes this many meanwhile.
const OVERHEADS: std::ops::RangeInclusive<f64> = 1.0..=4096.0;

/// Least squares of `(read · reads + token · work) / seconds` against one.
#[derive(Debug)]
pub(crate) struct Pace {
    num_steps: f64,
    reads: f64,
    work: f64,
    reads_squared: f64,
    work_squared: f64,
    reads_work: f64,
    overhead: Option<f64>,
    /// Seconds that a token of a step's cost takes where nothing else runs.
    token_seconds: Option<f64>,
    spare_share: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            num_steps: 0.0,
            reads: 0.0,
            work: 0.0,
            reads_squared: 0.0,
            work_squared: 0.0,
            reads_work: 0.0,
            overhead: None,
            token_seconds: None,
            spare_share: 1.0,
        }
    }
}

impl Pace {
    /// How long a step of so many tokens takes where nothing else runs.
    pub(crate) fn time_of(&self, tokens: f64) -> Option<Duration> {
        self.token_seconds.and_then(|each| Duration::try_from_secs_f64(each * tokens).ok())
    }

    /// A step that several tenants shared took so long, and `least` tokens is what it would have cost without all but one of them.
    /// Returns how much of what `max_slowdown` leaves to the others they should have of the next.
    pub(crate) fn shared(&mut self, least: f64, max_slowdown: f64, time: Duration) -> f64 {
        if let Some(alone) = self.time_of(least) {
            let is_late = time.as_secs_f64() > max_slowdown * alone.as_secs_f64();
            let change = if is_late { SPARE_LOSS } else { SPARE_LOSS.powf(-1.0 / SPARE_STEPS) };
            self.spare_share = (self.spare_share * change).clamp(MIN_SPARE, 1.0);
        }
        self.spare_share
    }

    /// A step that cost this took so long. Returns how many tokens the device computes while it reads the weights, where that
    /// is known.
    pub(crate) fn took(&mut self, cost: StepCost, time: Duration) -> Option<f64> {
        let seconds = time.as_secs_f64();
        if seconds <= 0.0 {
            return self.overhead;
        }
        let weight = self.weight(cost, seconds);
        let (reads, work) = (cost.reads / seconds, cost.work / seconds);
        for (sum, new) in [
            (&mut self.num_steps, 1.0),
            (&mut self.reads, reads),
            (&mut self.work, work),
            (&mut self.reads_squared, reads * reads),
            (&mut self.work_squared, work * work),
            (&mut self.reads_work, reads * work),
        ] {
            *sum = *sum * MEMORY + new * weight;
        }
        if let Some(fitted) = self.fit() {
            // In logarithms, because it is a ratio.
            let change = |known: f64| known * (fitted / known).powf(GAIN);
            self.overhead = Some(self.overhead.map_or(fitted, change));
        }
        self.overhead
    }

    /// What the step counts. Follows what a token takes where nothing else runs.
    fn weight(&mut self, cost: StepCost, seconds: f64) -> f64 {
        let Some(overhead) = self.overhead else { return 1.0 };
        let each = seconds / cost.tokens(overhead).max(1.0);
        let undisturbed = self.token_seconds.get_or_insert(each);
        let is_late = each > LATE * *undisturbed;
        *undisturbed *= if each < *undisturbed { UNDISTURBED_DOWN } else { UNDISTURBED_UP };
        if is_late { LATE_WEIGHT } else { 1.0 }
    }

    fn fit(&self) -> Option<f64> {
        let product = self.reads_squared * self.work_squared;
        let determinant = product - self.reads_work * self.reads_work;
        if self.num_steps < MIN_STEPS || determinant <= MIN_SPREAD * product {
            return None;
        }
        let read = self.reads * self.work_squared - self.work * self.reads_work;
        let token = self.work * self.reads_squared - self.reads * self.reads_work;
        // Noise can make either negative.
        let ratio = if token <= 0.0 { *OVERHEADS.end() } else { read.max(0.0) / token };
        Some(ratio.clamp(*OVERHEADS.start(), *OVERHEADS.end()))
    }
}

/// What a position of the KV costs beside the weights.
pub(crate) fn cost_model(model: &ModelConfig, memory: &MemoryPlan, min_sharers: usize) -> CostModel {
    // Scores and sums of values.
    let macs_per_position = 2 * model.num_heads * model.head_dim * model.layers.len();
    CostModel {
        reads_per_position: memory.kv_bytes_per_token as f64 / memory.weight_bytes.max(1) as f64,
        work_per_position: macs_per_position as f64 / num_parameters(model).max(1) as f64,
        min_sharers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(reads: f64, work: f64) -> StepCost {
        StepCost { reads, work }
    }

    /// Steps of all sizes on a device with this overhead, with some noise.
    fn run(pace: &mut Pace, overhead: f64, num_steps: u64) -> Option<f64> {
        let mut known = None;
        for step in 0..num_steps {
            let work = [1.0, 4.0, 64.0, 500.0, 20.0][step as usize % 5];
            let reads = 1.0 + (step % 7) as f64 / 10.0;
            let noise = 1.0 + (step * 37 % 100) as f64 / 500.0;
            known = pace
                .took(cost(reads, work), Duration::from_secs_f64(2e-4 * (reads * overhead + work) * noise));
        }
        known
    }

    #[test]
    fn the_ratio_is_found_and_followed() {
        let mut pace = Pace::default();
        assert_eq!(run(&mut pace, 20.0, 10), None);
        let found = run(&mut pace, 20.0, 500).expect("a fit");
        assert!((15.0..26.0).contains(&found), "{found}");
        let found = run(&mut pace, 300.0, 3000).expect("a fit");
        assert!((220.0..400.0).contains(&found), "{found}");
    }

    #[test]
    fn steps_that_are_all_alike_say_nothing() {
        let mut pace = Pace::default();
        let known = run(&mut pace, 20.0, 500);
        for _ in 0..5000 {
            pace.took(cost(1.1, 30.0), Duration::from_millis(9));
        }
        let after = pace.took(cost(1.1, 30.0), Duration::from_millis(9)).expect("still known");
        let before = known.expect("known");
        assert!((before / 3.0..before * 3.0).contains(&after), "{before} and {after}");
    }

    #[test]
    fn company_on_the_machine_does_not_make_steps_look_cheap() {
        let mut pace = Pace::default();
        run(&mut pace, 20.0, 1000);
        let mut known = 0.0;
        for step in 0..4000_u64 {
            let work = [1.0, 4.0, 64.0, 20.0][step as usize % 4];
            // Two steps of three are held up for the time of a hundred tokens.
            let held_up = if step % 3 == 0 { 0.0 } else { 100.0 };
            let time = Duration::from_secs_f64(2e-4 * (20.0 + work + held_up));
            known = pace.took(cost(1.0, work), time).expect("known");
        }
        assert!((10.0..45.0).contains(&known), "{known}");
        let alone = pace.time_of(21.0).expect("known").as_secs_f64();
        assert!((2e-3..8e-3).contains(&alone), "{alone}");
    }

    #[test]
    fn others_get_less_until_steps_are_short_enough_and_more_again_after() {
        let mut pace = Pace::default();
        assert_eq!(
            pace.shared(21.0, 2.0, Duration::from_secs(1)).to_bits(),
            1.0_f64.to_bits(),
            "nothing is known"
        );
        run(&mut pace, 20.0, 1000);
        let alone = pace.time_of(21.0).expect("known").as_secs_f64();
        // What the others bring takes four times as long as their costs say.
        let step = |share: f64| Duration::from_secs_f64(alone * (1.0 + 4.0 * share));
        let mut share = 1.0;
        for _ in 0..500 {
            share = pace.shared(21.0, 2.0, step(share));
        }
        assert!((0.2..0.27).contains(&share), "{share}");
        for _ in 0..500 {
            share = pace.shared(21.0, 2.0, Duration::from_secs(9));
        }
        assert!(share > 0.0, "the others go on");
        for _ in 0..2000 {
            share = pace.shared(21.0, 2.0, Duration::from_secs_f64(alone));
        }
        assert!(share > 0.99, "{share}");
    }

    #[test]
    fn nonsense_stays_within_bounds() {
        let mut pace = Pace::default();
        pace.took(cost(1.0, 1.0), Duration::ZERO);
        for step in 0..200_u64 {
            // The larger, the faster.
            let known = pace.took(cost(1.0, step as f64), Duration::from_millis(500 - step));
            assert!(known.is_none_or(|known| OVERHEADS.contains(&known)));
        }
    }
}
