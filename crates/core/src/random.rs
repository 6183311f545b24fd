//! The random numbers of every crate, each a function of its seed alone: the same seed gives the same numbers everywhere.
//!
//! Two generators, for two needs. [`philox`] is a pure function of `(seed, counter)` without state, which a GPU thread can
//! compute for itself: sampling uses it, and `sample_choose.cu` has the same. [`Random`] (splitmix64) is a sequence: random
//! weights (`basic.cu` has the same), workloads, the simulator, tests. `rand` is not used, because its generators may change between
//! versions, and seeded answers must not.

/// The golden ratio in 64 bits: the step of splitmix64.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of splitmix64 after one step: a bijection that spreads every bit.
pub fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(STEP);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The splitmix64 sequence from a seed on.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        let next = mix(self.0);
        self.0 = self.0.wrapping_add(STEP);
        next
    }

    /// In `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// In `[0, limit)`; the limit must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        // The high half of a 128-bit product: the bias is below 2⁻³² for every limit we use.
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }

    /// In `low..=high`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        debug_assert!(low <= high);
        low + self.below((high - low) as u64 + 1) as usize
    }

    /// True `times` times in a thousand.
    pub fn per_mille(&mut self, times: u64) -> bool {
        self.below(1000) < times
    }

    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.between(0, choices.len() - 1)]
    }

    /// A random order of all items.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// 64 random bits by Philox4x32-10 (Salmon et al., 2011): the key is the seed, the counter words are the counter's low and
/// high half, 0, 0; the result is the first output word, with the second above it.
pub fn philox(seed: u64, counter: u64) -> u64 {
    let counter = [counter as u32, (counter >> 32) as u32, 0, 0];
    let words = philox_rounds(counter, [seed as u32, (seed >> 32) as u32]);
    u64::from(words[0]) | u64::from(words[1]) << 32
}

fn philox_rounds(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let first = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let second = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with the generator (Random123).
    #[test]
    fn philox_gives_the_published_numbers() {
        assert_eq!(philox_rounds([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(
            philox_rounds([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]
        );
        assert_eq!(
            philox_rounds([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
        assert_eq!(philox(0, 0), 0xe169c58d_6627e8d5);
    }

    #[test]
    fn philox_seed_and_counter_both_matter() {
        assert_ne!(philox(1, 0), philox(0, 1));
        assert_ne!(philox(1 << 32, 0), philox(1, 0));
        assert_ne!(philox(0, 1 << 32), philox(0, 1));
    }

    /// The first numbers of the generator's own test vector, seed 1234567.
    #[test]
    fn splitmix_gives_the_published_numbers() {
        let mut random = Random::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| random.next_u64()).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn bounds_are_kept_and_reached() {
        let mut random = Random::new(2);
        let draws: Vec<usize> = (0..1000).map(|_| random.between(3, 5)).collect();
        assert_eq!((draws.iter().min(), draws.iter().max()), (Some(&3), Some(&5)));
        assert!((0..1000).all(|_| (0.0..1.0).contains(&random.uniform())));
        let mut items: Vec<u32> = (0..50).collect();
        random.shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
