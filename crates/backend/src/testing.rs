//! Weights and numbers for tests and measurements of this and other crates: seeded, the same on every platform.

use half::f16;

use crate::{SharedBytes, Tensor, WeightFormat};

/// The numbers of [`baton_core::random::Random`] as values of tensors.
#[derive(Clone, Debug)]
pub struct Random(baton_core::random::Random);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(baton_core::random::Random::new(seed))
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// In `0..bound`, for small bounds (the bias of the remainder does not matter in a test).
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next_u64() % bound as u64) as usize
    }

    /// In [0, 1), with 24 bits.
    pub fn uniform(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1_u32 << 24) as f32
    }

    /// Nearly a standard normal: the sum of twelve uniforms, which needs no libm and so has no platform.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }

    pub fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }
}

/// A row with every bit pattern of quants and sub-block scales, and f16 scales that keep all values finite, of mean about
/// zero and of magnitude at most about `amplitude`. Unlike [`crate::quant::quantize_row`], it reaches all of a format.
pub fn random_row(format: WeightFormat, cols: usize, amplitude: f32, random: &mut Random) -> Vec<u8> {
    let num_blocks = cols / format.block_len();
    assert!(format.row_bytes(cols).is_some(), "{cols} values are not a whole number of {format} blocks");
    let mut bytes = Vec::with_capacity(num_blocks * format.block_bytes());
    for _ in 0..num_blocks {
        bytes.extend(random_block(format, amplitude, random));
    }
    bytes
}

/// A matrix of [`random_row`]s.
pub fn random_tensor(
    format: WeightFormat,
    rows: usize,
    cols: usize,
    amplitude: f32,
    random: &mut Random,
) -> Tensor {
    let bytes = (0..rows).flat_map(|_| random_row(format, cols, amplitude, random)).collect();
    Tensor::new(format, rows, cols, SharedBytes::from_vec(bytes)).expect("rows are whole blocks")
}

fn random_block(format: WeightFormat, amplitude: f32, random: &mut Random) -> Vec<u8> {
    let value = amplitude * (2.0 * random.uniform() - 1.0);
    match format {
        WeightFormat::F32 => return value.to_le_bytes().to_vec(),
        WeightFormat::F16 => return f16::from_f32(value).to_le_bytes().to_vec(),
        WeightFormat::BF16 => return half::bf16::from_f32(value).to_le_bytes().to_vec(),
        WeightFormat::F8_E4M3 => return vec![crate::e4m3_from_f32(value)],
        _ => {}
    }
    let mut block: Vec<u8> = (0..format.block_bytes()).map(|_| random.next_u64() as u8).collect();
    let layout = scale_layout(format);
    // Either sign, because most formats reach one step further down than up.
    let sign = if random.below(2) == 0 { 1.0 } else { -1.0 };
    let scale = sign * amplitude / layout.largest * (0.5 + 0.5 * random.uniform());
    if format == WeightFormat::IQ1_M {
        write_spread_f16(&mut block[layout.scale_at..], scale);
    } else {
        write_f16(&mut block, layout.scale_at, scale);
    }
    if let Some((at, factor)) = layout.minimum {
        write_f16(&mut block, at, scale * factor);
    }
    block
}

/// Where a block keeps its f16 fields.
struct ScaleLayout {
    scale_at: usize,
    /// The largest magnitude a value can have with a scale of 1.
    largest: f32,
    /// The field of the minimum, and what it must be times the scale for a mean of zero.
    minimum: Option<(usize, f32)>,
}

fn scale_layout(format: WeightFormat) -> ScaleLayout {
    let (scale_at, largest, minimum) = match format {
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 | WeightFormat::F8_E4M3 => {
            unreachable!("floats have no scale")
        }
        WeightFormat::Q4_0 => (0, 8.0, None),
        WeightFormat::Q4_1 => (0, 7.5, Some((2, -7.5))),
        WeightFormat::Q5_0 => (0, 16.0, None),
        WeightFormat::Q5_1 => (0, 15.5, Some((2, -15.5))),
        WeightFormat::Q8_0 => (0, 128.0, None),
        WeightFormat::IQ4_NL => (0, 127.0, None),
        WeightFormat::Q2_K => (80, 45.0, Some((82, 1.5))),
        WeightFormat::Q3_K => (108, 128.0, None),
        WeightFormat::Q4_K => (0, 945.0, Some((2, 7.5))),
        WeightFormat::Q5_K => (0, 1953.0, Some((2, 15.5))),
        WeightFormat::Q6_K => (208, 4096.0, None),
        WeightFormat::IQ4_XS => (0, 4064.0, None),
        WeightFormat::IQ3_S => (0, 465.0, None),
        WeightFormat::IQ3_XXS => (0, 480.5, None),
        WeightFormat::IQ2_S | WeightFormat::IQ2_XS | WeightFormat::IQ2_XXS => (0, 166.7, None),
        WeightFormat::IQ1_S => (0, 16.9, None),
        WeightFormat::IQ1_M => (48, 16.9, None),
    };
    ScaleLayout { scale_at, largest, minimum }
}

fn write_f16(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Four bits at the top of each of four u16.
fn write_spread_f16(fields: &mut [u8], value: f32) {
    let bits = f16::from_f32(value).to_bits();
    for (i, field) in fields.as_chunks_mut::<2>().0.iter_mut().take(4).enumerate() {
        field[1] = field[1] & 15 | ((bits >> (4 * i) & 15) as u8) << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::dequantize_row;

    #[test]
    fn random_rows_are_finite_bounded_and_centred() {
        let mut random = Random::new(3);
        for format in WeightFormat::ALL {
            let tensor = random_tensor(format, 8, 1024, 0.5, &mut random);
            let mut values = vec![0.0; 8 * 1024];
            dequantize_row(format, tensor.bytes(), &mut values);
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            assert!(values.iter().all(|value| value.abs() <= 0.51), "{format}");
            assert!(mean.abs() < 0.02, "{format}: mean {mean}");
            assert!(values.iter().any(|value| value.abs() > 0.2), "{format}");
        }
    }
}
