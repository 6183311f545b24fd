//! Quick hashes. Those that place sessions and prefixes are the same in every router and after a restart; the names of the
//! index begin with a secret of this process, because their tokens come from clients, who could otherwise choose them so that
//! names collide. A collision costs a worse choice of worker and nothing else.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

static SECRET: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());

/// Known to this process only.
pub fn secret() -> u64 {
    *SECRET
}

const MULTIPLIER: u64 = 0x9fb2_1c65_1e98_df25;

/// Joins two words so that every bit of both matters for every bit of the result.
pub fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ MULTIPLIER.rotate_left(17)) * u128::from(b.wrapping_add(MULTIPLIER) | 1);
    let folded = (product as u64) ^ ((product >> 64) as u64);
    let spread = (folded ^ b.rotate_left(32)).wrapping_mul(MULTIPLIER);
    spread ^ (spread >> 29)
}

pub fn of_bytes(seed: u64, bytes: &[u8]) -> u64 {
    let mut hash = mix(seed, bytes.len() as u64);
    for part in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        hash = mix(hash, u64::from_le_bytes(word));
    }
    hash
}

pub fn of_tokens(seed: u64, tokens: &[u32]) -> u64 {
    let mut hash = mix(seed, tokens.len() as u64);
    for pair in tokens.chunks(2) {
        let high = pair.get(1).map_or(0, |&token| u64::from(token) + 1);
        hash = mix(hash, u64::from(pair[0]) | high << 32);
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_matters() {
        let mut hashes = vec![
            of_bytes(0, b""),
            of_bytes(1, b""),
            of_bytes(0, b"a"),
            of_bytes(0, b"a\0"),
            of_bytes(0, b"12345678"),
            of_bytes(0, b"123456789"),
            of_tokens(0, &[1]),
            of_tokens(0, &[1, 0]),
            of_tokens(0, &[0, 1]),
            of_tokens(0, &[1, 0, 0]),
        ];
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 10);
    }

    #[test]
    fn hashes_are_spread_evenly() {
        let mut counts = [0usize; 16];
        for number in 0..16_000 {
            counts[(of_tokens(7, &[number, 3]) % 16) as usize] += 1;
        }
        assert!(counts.iter().all(|&count| (850..1150).contains(&count)), "{counts:?}");
    }
}
