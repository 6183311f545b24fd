//! How often a draft model is right, by how sure it was.

/// Guesses that the first estimate of a bucket counts for, and after how many older ones begin to be forgotten.
const PRIOR_WEIGHT: f64 = 12.0;
const MEMORY: f64 = 600.0;
/// Part of a new guess that the average takes over.
const GAIN: f64 = 0.02;
/// Upper ends of the buckets, by the probability that the draft gave its token.
const BUCKETS: [f32; 9] = [0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 1.0];
/// Those of tokens beside the one that it drew are less likely.
const BUCKETS_BESIDE: [f32; 9] = [0.01, 0.03, 0.06, 0.1, 0.15, 0.22, 0.3, 0.4, 1.0];
/// Acceptance before anything is known, by bucket: of the token that the draft drew, and of another that it found likely.
const PRIOR: [f64; 9] = [0.15, 0.3, 0.4, 0.5, 0.62, 0.75, 0.85, 0.92, 0.97];
const PRIOR_BESIDE: [f64; 9] = [0.02, 0.05, 0.1, 0.18, 0.28, 0.4, 0.5, 0.6, 0.6];

#[derive(Clone, Debug)]
pub(crate) struct Confidence {
    /// Right and tried guesses of each bucket.
    counts: [(f64, f64); BUCKETS.len()],
    /// Chance of a guess before it is made: the average of those made.
    average: f64,
}

impl Default for Confidence {
    fn default() -> Self {
        Self { counts: PRIOR.map(|rate| (rate * PRIOR_WEIGHT, PRIOR_WEIGHT)), average: 0.7 }
    }
}

impl Confidence {
    /// Of tokens that a draft found likely but did not draw.
    pub(crate) fn beside() -> Self {
        Self { counts: PRIOR_BESIDE.map(|rate| (rate * PRIOR_WEIGHT, PRIOR_WEIGHT)), average: 0.1 }
    }

    pub(crate) fn bucket_beside(probability: f32) -> usize {
        BUCKETS_BESIDE.iter().position(|end| probability <= *end).unwrap_or(BUCKETS_BESIDE.len() - 1)
    }

    pub(crate) fn bucket(probability: f32) -> usize {
        BUCKETS.iter().position(|end| probability <= *end).unwrap_or(BUCKETS.len() - 1)
    }

    /// The chance of a guess of this bucket to be right where those before it are.
    pub(crate) fn chance(&self, bucket: usize) -> f64 {
        let (right, tried) = self.counts[bucket];
        right / tried
    }

    pub(crate) fn average(&self) -> f64 {
        self.average
    }

    /// A guess was made, whether or not it is then checked.
    pub(crate) fn made(&mut self, bucket: usize) {
        self.average += GAIN * (self.chance(bucket) - self.average);
    }

    /// A guess was checked, and those before it were right.
    pub(crate) fn checked(&mut self, bucket: usize, is_right: bool) {
        let (right, tried) = &mut self.counts[bucket];
        *right += f64::from(u8::from(is_right));
        *tried += 1.0;
        if *tried > MEMORY {
            *right *= MEMORY / *tried;
            *tried = MEMORY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn surer_guesses_are_thought_likelier_and_buckets_learn() {
        let mut confidence = Confidence::default();
        let chance =
            |confidence: &Confidence, probability| confidence.chance(Confidence::bucket(probability));
        assert!(chance(&confidence, 0.1) < chance(&confidence, 0.7));
        assert!(chance(&confidence, 0.7) < chance(&confidence, 1.0));
        for step in 0..2000 {
            confidence.made(3);
            confidence.checked(3, step % 10 != 0);
        }
        assert!((0.88..0.92).contains(&confidence.chance(3)), "{}", confidence.chance(3));
        assert!((confidence.average() - 0.9).abs() < 0.02, "{}", confidence.average());
        for _ in 0..2000 {
            confidence.checked(3, false);
        }
        assert!(confidence.chance(3) < 0.1);
    }
}
