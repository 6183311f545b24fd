//! Random weights that need not be stored: each value is a function of a seed and its index, so that a device can make
//! them where they are needed, and every device makes the same.

use baton_core::random::Random;
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

/// Bytes at random, byte `i` being byte `i % 8` of number `i / 8` of the sequence, under a mask; those at the beginning of each
/// block are given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawFill {
    pub header: Vec<u8>,
    pub mask: u8,
    pub block_bytes: usize,
}

impl RandomFill {
    /// The difference of two neighbouring levels; level `n` is `n * step - largest`, each operation rounded to f32.
    pub fn step(&self) -> f32 {
        2.0 * self.largest / (LEVELS - 1) as f32
    }

    /// The bytes of `count` values: floats, or what [`Self::raw`] says.
    pub fn bytes(&self, format: WeightFormat, count: usize) -> Vec<u8> {
        match format {
            WeightFormat::F32 => self.encode(count, f32::to_le_bytes),
            WeightFormat::F16 => self.encode(count, |value| f16::from_f32(value).to_le_bytes()),
            WeightFormat::BF16 => self.encode(count, |value| bf16::from_f32(value).to_le_bytes()),
            _ => self.raw_bytes(format, count / format.block_len() * format.block_bytes()),
        }
    }

    /// How the bytes of a format that is not a plain float are filled; `None` if they cannot be.
    pub fn raw(&self, format: WeightFormat) -> Option<RawFill> {
        let f16 = |value: f32| f16::from_f32(value).to_le_bytes();
        let (header, mask) = match format {
            // Without the highest bit of the exponent no code is NaN, and none is larger than 1.875.
            WeightFormat::F8_E4M3 => (Vec::new(), 0xbf),
            WeightFormat::Q4_0 => (f16(self.largest / 8.0).to_vec(), 0xff),
            WeightFormat::Q5_0 => (f16(self.largest / 16.0).to_vec(), 0xff),
            WeightFormat::Q8_0 => (f16(self.largest / 128.0).to_vec(), 0xff),
            WeightFormat::Q4_1 => ([f16(self.largest / 7.5), f16(-self.largest)].concat(), 0xff),
            // All scales and minima of sub-blocks are 1.
            WeightFormat::Q4_K => {
                let scales = [f16(self.largest / 7.5), f16(self.largest)].concat();
                ([scales, vec![1; 8], vec![0x11; 4]].concat(), 0xff)
            }
            _ => return None,
        };
        Some(RawFill { header, mask, block_bytes: format.block_bytes() })
    }

    fn raw_bytes(&self, format: WeightFormat, len: usize) -> Vec<u8> {
        let fill = self.raw(format).unwrap_or_else(|| panic!("{format} cannot be filled at random"));
        let mut random = Random::new(self.seed);
        let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| random.next_u64().to_le_bytes()).collect();
        bytes.truncate(len);
        for block in bytes.chunks_mut(fill.block_bytes) {
            for byte in block.iter_mut() {
                *byte &= fill.mask;
            }
            block[..fill.header.len()].copy_from_slice(&fill.header);
        }
        bytes
    }

    /// What eight-bit floats are multiplied with, so that the largest is `largest`.
    pub fn e4m3_scale(&self) -> f32 {
        self.largest / 1.875
    }

    fn encode<const N: usize>(&self, count: usize, encode: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
        let step = self.step();
        let levels: Vec<[u8; N]> =
            (0..LEVELS).map(|level| encode(level as f32 * step - self.largest)).collect();
        let mut random = Random::new(self.seed);
        let mut bytes = Vec::with_capacity(count * N);
        let mut left = count;
        while left > 0 {
            let levels_of = random.next_u64().to_le_bytes();
            let take = left.min(levels_of.len());
            for &byte in &levels_of[..take] {
                bytes.extend_from_slice(&levels[byte as usize]);
            }
            left -= take;
        }
        bytes
    }
}
