//! MXFP4: 32 neighbours of four bits (e2m1) share a power of two (e8m0).
//!
//! Twice an e2m1 number is a whole number from -12 to 12, so a block of Q5_0 with half the scale holds exactly the same numbers,
//! and every device has kernels for it. It takes 22 bytes instead of 17. Two layouts are read: pairs of neighbours in a byte,
//! codes and scales in tensors of their own (gpt-oss, compressed-tensors), and GGUF's blocks, a scale before sixteen bytes with
//! value `i` low and value `i + 16` high.

use baton_backend::{SharedBytes, Tensor, WeightFormat};
use half::f16;

use super::packed::BLOCK;

/// Twice the magnitudes of e2m1.
const LEVELS: [u8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
/// Of 2^0.
const BIAS: i32 = 127;
/// The smallest and the largest power of two in f16.
const F16_EXPONENTS: (i32, i32) = (-24, 15);
/// Of a block: its codes.
const CODE_BYTES: usize = BLOCK / 2;
const GGUF_BYTES: usize = 1 + CODE_BYTES;

/// Where codes and scales lie.
#[derive(Clone, Debug)]
pub(crate) enum Mxfp4 {
    Pairs {
        codes: SharedBytes,
        scales: SharedBytes,
    },
    Gguf(SharedBytes),
    /// The same of a matrix of which every `step`-th row from `first` on is meant.
    Rows {
        codes: SharedBytes,
        scales: SharedBytes,
        first: usize,
        step: usize,
        blocks_per_row: usize,
    },
}

impl Mxfp4 {
    fn block(&self, index: usize) -> (u8, &[u8]) {
        match self {
            Self::Pairs { codes, scales } => {
                (scales.as_slice()[index], &codes.as_slice()[index * CODE_BYTES..(index + 1) * CODE_BYTES])
            }
            Self::Rows { codes, scales, first, step, blocks_per_row } => {
                let row = first + index / blocks_per_row * step;
                let at = row * blocks_per_row + index % blocks_per_row;
                (scales.as_slice()[at], &codes.as_slice()[at * CODE_BYTES..(at + 1) * CODE_BYTES])
            }
            Self::Gguf(blocks) => {
                let block = &blocks.as_slice()[index * GGUF_BYTES..(index + 1) * GGUF_BYTES];
                (block[0], &block[1..])
            }
        }
    }

    fn code(&self, codes: &[u8], index: usize) -> u8 {
        let (byte, is_high) = match self {
            Self::Pairs { .. } | Self::Rows { .. } => (index / 2, index % 2 == 1),
            Self::Gguf(_) => (index % CODE_BYTES, index >= CODE_BYTES),
        };
        if is_high { codes[byte] >> 4 } else { codes[byte] & 15 }
    }

    /// A matrix of Q5_0 with the same numbers. What is wrong with its scales or its size is the error.
    pub(crate) fn tensor(self, rows: usize, cols: usize) -> Result<Tensor, String> {
        let blocks = rows.checked_mul(cols).filter(|_| cols.is_multiple_of(BLOCK)).map(|all| all / BLOCK);
        let blocks =
            blocks.ok_or_else(|| format!("of {rows} x {cols} values is no whole blocks of {BLOCK}"))?;
        let sizes = match &self {
            Self::Pairs { codes, scales } => (codes.len(), scales.len()),
            Self::Rows { codes, scales, step, .. } => (codes.len() / step, scales.len() / step),
            Self::Gguf(bytes) => (bytes.len() / GGUF_BYTES * CODE_BYTES, bytes.len() / GGUF_BYTES),
        };
        if Some(sizes.0) != blocks.checked_mul(CODE_BYTES) || sizes.1 != blocks {
            let (codes, scales) = sizes;
            return Err(format!(
                "has {codes} bytes of values and {scales} scales; {rows} x {cols} values are {blocks} blocks"
            ));
        }
        // Zeros may have any scale.
        let largest = BIAS + 1 + F16_EXPONENTS.1;
        let bad = (0..blocks).map(|block| (block, self.block(block))).find(|(_, (scale, codes))| {
            *scale == u8::MAX || i32::from(*scale) > largest && codes.iter().any(|byte| byte & 0x77 != 0)
        });
        if let Some((block, (scale, _))) = bad {
            let what =
                if scale == u8::MAX { "NaN".to_owned() } else { format!("2^{}", i32::from(scale) - BIAS) };
            return Err(format!("has the scale {what} at {block}, which no sound weight has"));
        }
        let format = WeightFormat::Q5_0;
        let total = blocks.checked_mul(format.block_bytes()).ok_or("is too large")?;
        let bytes = SharedBytes::lazy(total, move || {
            let mut bytes = vec![0; total];
            let row_bytes = total / rows.max(1);
            super::round::in_parallel(&mut bytes, row_bytes.max(1), |row, out| {
                for (i, out) in out.chunks_exact_mut(format.block_bytes()).enumerate() {
                    self.write_block(row * cols / BLOCK + i, out);
                }
            });
            bytes
        });
        Tensor::new(format, rows, cols, bytes).map_err(|error| error.to_string())
    }

    fn write_block(&self, index: usize, out: &mut [u8]) {
        let (scale, codes) = self.block(index);
        let exponent = i32::from(scale) - BIAS - 1;
        let kept = exponent.clamp(F16_EXPONENTS.0, F16_EXPONENTS.1);
        // Of what is smaller than f16 can scale, the nearest.
        let shrink = ((exponent - kept).min(0) as f32).exp2();
        out[..2].copy_from_slice(&f16::from_f32((kept as f32).exp2()).to_le_bytes());
        let (mut high, mut low) = (0_u32, [0_u8; CODE_BYTES]);
        for i in 0..BLOCK {
            let code = self.code(codes, i);
            let level = (f32::from(LEVELS[usize::from(code & 7)]) * shrink).round() as u8;
            let value = if code & 8 == 0 { 16 + level } else { 16 - level };
            high |= u32::from(value >> 4) << i;
            low[i % CODE_BYTES] |= (value & 15) << (i / CODE_BYTES * 4);
        }
        out[2..6].copy_from_slice(&high.to_le_bytes());
        out[6..].copy_from_slice(&low);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sixteen e2m1 numbers.
    const VALUES: [f32; 16] =
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

    fn values(mxfp4: Mxfp4, rows: usize) -> Vec<f32> {
        let tensor = mxfp4.tensor(rows, 32).unwrap();
        assert_eq!(tensor.format(), WeightFormat::Q5_0);
        let mut values = vec![0.0; 32 * rows];
        for (row, values) in values.chunks_mut(32).enumerate() {
            tensor.dequantize_row(row, values);
        }
        values
    }

    #[test]
    fn numbers_are_the_same() {
        let code = |i: usize| (i * 7 % 16) as u8;
        let scales = [127_u8, 120, 104, 143];
        let pairs: Vec<u8> = (0..16).map(|i| code(2 * i) | code(2 * i + 1) << 4).collect();
        let halves: Vec<u8> = (0..16).map(|i| code(i) | code(i + 16) << 4).collect();
        let blocks: Vec<u8> = scales.iter().flat_map(|scale| [&[*scale][..], &halves].concat()).collect();
        let expected: Vec<f32> = scales
            .iter()
            .flat_map(|scale| {
                (0..32).map(move |i| VALUES[usize::from(code(i))] * f32::from(i16::from(*scale) - 127).exp2())
            })
            .collect();
        let separate = Mxfp4::Pairs {
            codes: SharedBytes::from_vec(pairs.repeat(4)),
            scales: SharedBytes::from_vec(scales.to_vec()),
        };
        assert_eq!(values(separate, 4), expected);
        assert_eq!(values(Mxfp4::Gguf(SharedBytes::from_vec(blocks)), 4), expected);
    }

    #[test]
    fn scales_beyond_f16_are_rounded_or_refused() {
        let block = |scale: u8, code: u8| {
            let bytes = [&[scale][..], &[code | code << 4; 16]].concat();
            Mxfp4::Gguf(SharedBytes::from_vec(bytes))
        };
        // 6 * 2^-26 is 1.5 * 2^-24, nearest to 2 * 2^-24.
        assert_eq!(values(block(101, 7), 1), [2.0_f32 * (-24.0_f32).exp2(); 32]);
        assert_eq!(values(block(0, 7), 1), [0.0; 32]);
        assert_eq!(values(block(200, 8), 1), [0.0; 32]);
        let error = |mxfp4: Mxfp4| mxfp4.tensor(1, 32).unwrap_err();
        assert_eq!(error(block(255, 0)), "has the scale NaN at 0, which no sound weight has");
        assert_eq!(error(block(200, 1)), "has the scale 2^73 at 0, which no sound weight has");
        assert!(block(127, 1).tensor(2, 32).unwrap_err().contains("2 blocks"));
        assert!(block(127, 1).tensor(usize::MAX, 32).unwrap_err().contains("no whole blocks"));
        assert!(block(127, 1).tensor(1, 31).unwrap_err().contains("no whole blocks"));
    }
}
