//! Random weights that need not be stored: each value is a function of a seed and its index, so that a device can make
//! them where they are needed, and every device makes the same.

use half::{bf16, f16};

use crate::WeightFormat;

/// Distinct values, so that one random byte makes one weight.
const LEVELS: usize = 256;

/// Uniform values within ± `largest`, 256 of them: value `i` is level number byte `i % 8` of the number `i / 8` of the
/// splitmix64 sequence that starts at `seed`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomFill {
    pub seed: u64,
    pub largest: f32,
}

impl RandomFill {
    /// The difference of two neighbouring levels; level `n` is `n * step - largest`, each operation rounded to f32.
    pub fn step(&self) -> f32 {
        2.0 * self.largest / (LEVELS - 1) as f32
    }

    /// The bytes of `count` values of a float format; block formats are filled as bf16 would be.
    pub fn bytes(&self, format: WeightFormat, count: usize) -> Vec<u8> {
        match format {
            WeightFormat::F32 => self.encode(count, f32::to_le_bytes),
            WeightFormat::F16 => self.encode(count, |value| f16::from_f32(value).to_le_bytes()),
            _ => self.encode(count, |value| bf16::from_f32(value).to_le_bytes()),
        }
    }

    fn encode<const N: usize>(&self, count: usize, encode: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
        let step = self.step();
        let levels: Vec<[u8; N]> =
            (0..LEVELS).map(|level| encode(level as f32 * step - self.largest)).collect();
        let mut state = self.seed;
        let mut bytes = Vec::with_capacity(count * N);
        let mut left = count;
        while left > 0 {
            let random = split_mix(&mut state).to_le_bytes();
            let take = left.min(random.len());
            for &byte in &random[..take] {
                bytes.extend_from_slice(&levels[byte as usize]);
            }
            left -= take;
        }
        bytes
    }
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
