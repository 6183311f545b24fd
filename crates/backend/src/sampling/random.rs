//! Random numbers as a pure function: Philox4x32-10 (Salmon et al., 2011), which every platform and every GPU thread can
//! compute from `(seed, counter)` alone, with no state to keep or to pass on.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The 64 random bits of a draw: the key is the seed, the counter words are the counter's low and high half, 0, 0; the
/// result is the first output word, with the second above it.
pub fn random_bits(seed: u64, counter: u64) -> u64 {
    let words = philox([counter as u32, (counter >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    u64::from(words[0]) | u64::from(words[1]) << 32
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
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
    fn known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
        assert_eq!(random_bits(0, 0), 0xe169c58d_6627e8d5);
    }

    #[test]
    fn seed_and_counter_both_matter() {
        assert_ne!(random_bits(1, 0), random_bits(0, 1));
        assert_ne!(random_bits(1 << 32, 0), random_bits(1, 0));
        assert_ne!(random_bits(0, 1 << 32), random_bits(0, 1));
    }
}
