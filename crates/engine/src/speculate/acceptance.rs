//! How often guesses were right: by class of guess over all sequences, and by sequence against what its classes led to expect.

use super::proposer::{Guess, NUM_CLASSES};

/// Guesses that the first estimate of a class counts for.
const PRIOR_WEIGHT: f64 = 8.0;
/// After so many guesses older ones begin to be forgotten.
const CLASS_MEMORY: f64 = 400.0;
/// What a sequence's record is worth after each further step.
const SEQUENCE_MEMORY: f64 = 0.9;
/// The same for a step without guesses, so that a sequence that was left alone is tried again.
const IDLE_MEMORY: f64 = 0.97;
const SEQUENCE_PRIOR: f64 = 2.0;

#[derive(Clone, Copy, Debug)]
struct Rate {
    right: f64,
    tried: f64,
}

impl Rate {
    fn value(self) -> f64 {
        self.right / self.tried
    }
}

/// By class, over all sequences.
#[derive(Clone, Debug)]
pub(crate) struct Classes([Rate; NUM_CLASSES]);

impl Classes {
    pub(crate) fn new(prior: impl Fn(usize) -> f64) -> Self {
        let rate = |class| Rate { right: prior(class) * PRIOR_WEIGHT, tried: PRIOR_WEIGHT };
        Self(std::array::from_fn(rate))
    }

    /// The chance that each guess is right where those before it are.
    pub(crate) fn chances(&self, guess: &Guess, record: &Record) -> Vec<f64> {
        let rate = self.0[guess.class].value() * record.ratio();
        guess.likelihoods.iter().map(|&likelihood| (rate * f64::from(likelihood)).clamp(0.0, 0.99)).collect()
    }

    /// `num_right` of the guesses were right, and those after them are not known of.
    pub(crate) fn learn(
        &mut self,
        class: usize,
        chances: &[f64],
        likelihoods: &[f32],
        num_right: usize,
        record: &mut Record,
    ) {
        let num_tried = chances.len().min(num_right + 1);
        let rate = &mut self.0[class];
        let said: f64 = likelihoods[..num_tried].iter().map(|&likelihood| f64::from(likelihood)).sum();
        rate.right += num_right as f64;
        rate.tried += said.max(num_right as f64);
        if rate.tried > CLASS_MEMORY {
            let keep = CLASS_MEMORY / rate.tried;
            rate.right *= keep;
            rate.tried *= keep;
        }
        record.expected = record.expected * SEQUENCE_MEMORY + chances[..num_tried].iter().sum::<f64>();
        record.right = record.right * SEQUENCE_MEMORY + num_right as f64;
    }
}

/// Of one sequence: how many guesses were right, and how many its classes led to expect.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Record {
    right: f64,
    expected: f64,
}

impl Record {
    fn ratio(&self) -> f64 {
        ((self.right + SEQUENCE_PRIOR) / (self.expected + SEQUENCE_PRIOR)).clamp(0.05, 1.5)
    }

    /// A step went by without guesses.
    pub(crate) fn idle(&mut self) {
        self.right *= IDLE_MEMORY;
        self.expected *= IDLE_MEMORY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(len: usize) -> Guess {
        Guess { token_ids: vec![1; len], likelihoods: vec![1.0; len], class: 3 }
    }

    fn learn(classes: &mut Classes, record: &mut Record, len: usize, right: usize) {
        let guess = guess(len);
        let chances = classes.chances(&guess, record);
        classes.learn(3, &chances, &guess.likelihoods, right, record);
    }

    #[test]
    fn a_class_learns_its_rate_and_follows_it() {
        let mut classes = Classes::new(|_| 0.5);
        let mut record = Record::default();
        for step in 0..400 {
            // Nine of ten are right.
            learn(&mut classes, &mut record, 4, if step % 10 < 6 { 4 } else { 1 });
        }
        let chance = classes.chances(&guess(1), &Record::default())[0];
        assert!((0.75..0.95).contains(&chance), "{chance}");
        for _ in 0..400 {
            learn(&mut classes, &mut record, 4, 0);
        }
        assert!(classes.chances(&guess(1), &Record::default())[0] < 0.4);
    }

    #[test]
    fn a_sequence_that_differs_is_known_and_tried_again() {
        let mut classes = Classes::new(|_| 0.8);
        let mut record = Record::default();
        for _ in 0..6 {
            learn(&mut classes, &mut record, 4, 0);
        }
        let low = classes.chances(&guess(1), &record)[0];
        assert!(low < 0.4, "{low}");
        (0..200).for_each(|_| record.idle());
        assert!(classes.chances(&guess(1), &record)[0] > 1.5 * low);
    }
}
