//! Rows of numbers in every [`WeightFormat`], to f32 and back.
//!
//! [`dequantize_row`] is what a weight *means*: it equals the `gguf` Python package to the last bit, and every backend's
//! kernels are tested against it. [`quantize_row`] is what tests and tools make weights with: the 32-value formats are
//! quantised exactly as ggml does; for the 256-value ones it makes valid blocks that are close to the values, without
//! ggml's search for the best scales and grid entries.
//!
//! Not here: products of quantised rows. Those are the backends' own, in the layouts they repack weights to.

mod decode;
mod decode_k;
mod encode;
mod encode_grid;
mod encode_k;
mod grid;

use half::{bf16, f16};

pub use grid::{GridBlock, grid_factor};

use crate::{WeightFormat, e4m3_from_f32, e4m3_to_f32};

/// The 16 values an IQ4_NL nibble stands for.
pub const IQ4_NL_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Values in a block of the K formats.
const SUPER_BLOCK: usize = 256;

/// Decodes whole blocks: `bytes` must be exactly the row of `out.len()` values.
pub fn dequantize_row(format: WeightFormat, bytes: &[u8], out: &mut [f32]) {
    check_row(format, out.len(), bytes.len());
    match format {
        WeightFormat::F32 => {
            decode_each(bytes, out, |raw: [u8; 4]| f32::from_le_bytes(raw));
        }
        WeightFormat::F16 => decode_each(bytes, out, |raw| f16::from_le_bytes(raw).to_f32()),
        WeightFormat::BF16 => decode_each(bytes, out, |raw| bf16::from_le_bytes(raw).to_f32()),
        WeightFormat::F8_E4M3 => decode_each(bytes, out, |[code]: [u8; 1]| e4m3_to_f32(code)),
        WeightFormat::Q4_0 => decode_blocks::<18, 32>(bytes, out, decode::q4_0),
        WeightFormat::Q4_1 => decode_blocks::<20, 32>(bytes, out, decode::q4_1),
        WeightFormat::Q5_0 => decode_blocks::<22, 32>(bytes, out, decode::q5_0),
        WeightFormat::Q5_1 => decode_blocks::<24, 32>(bytes, out, decode::q5_1),
        WeightFormat::Q8_0 => decode_blocks::<34, 32>(bytes, out, decode::q8_0),
        WeightFormat::IQ4_NL => decode_blocks::<18, 32>(bytes, out, decode::iq4_nl),
        WeightFormat::Q2_K => decode_blocks::<84, SUPER_BLOCK>(bytes, out, decode_k::q2_k),
        WeightFormat::Q3_K => decode_blocks::<110, SUPER_BLOCK>(bytes, out, decode_k::q3_k),
        WeightFormat::Q4_K => decode_blocks::<144, SUPER_BLOCK>(bytes, out, decode_k::q4_k),
        WeightFormat::Q5_K => decode_blocks::<176, SUPER_BLOCK>(bytes, out, decode_k::q5_k),
        WeightFormat::Q6_K => decode_blocks::<210, SUPER_BLOCK>(bytes, out, decode_k::q6_k),
        WeightFormat::IQ4_XS
        | WeightFormat::IQ3_S
        | WeightFormat::IQ3_XXS
        | WeightFormat::IQ2_S
        | WeightFormat::IQ2_XS
        | WeightFormat::IQ2_XXS
        | WeightFormat::IQ1_M
        | WeightFormat::IQ1_S => {
            let blocks = bytes.chunks_exact(format.block_bytes());
            for (block, out) in blocks.zip(out.chunks_exact_mut(SUPER_BLOCK)) {
                grid::decode(format, block, out);
            }
        }
    }
}

/// Encodes a row of whole blocks of finite values.
pub fn quantize_row(format: WeightFormat, values: &[f32]) -> Vec<u8> {
    let Some(num_bytes) = format.row_bytes(values.len()) else {
        panic!("a row of {} values is not a whole number of {format} blocks", values.len());
    };
    let mut bytes = Vec::with_capacity(num_bytes);
    for block in values.chunks_exact(format.block_len()) {
        match format {
            WeightFormat::F32 => bytes.extend(block[0].to_le_bytes()),
            WeightFormat::F16 => bytes.extend(f16::from_f32(block[0]).to_le_bytes()),
            WeightFormat::BF16 => bytes.extend(bf16::from_f32(block[0]).to_le_bytes()),
            WeightFormat::F8_E4M3 => bytes.push(e4m3_from_f32(block[0])),
            WeightFormat::Q4_0 => encode::q4_0(block, &mut bytes),
            WeightFormat::Q4_1 => encode::q4_1(block, &mut bytes),
            WeightFormat::Q5_0 => encode::q5_0(block, &mut bytes),
            WeightFormat::Q5_1 => encode::q5_1(block, &mut bytes),
            WeightFormat::Q8_0 => encode::q8_0(block, &mut bytes),
            WeightFormat::IQ4_NL => encode::iq4_nl(block, &mut bytes),
            WeightFormat::Q2_K => encode_k::q2_k(block, &mut bytes),
            WeightFormat::Q3_K => encode_k::q3_k(block, &mut bytes),
            WeightFormat::Q4_K => encode_k::q4_k(block, &mut bytes),
            WeightFormat::Q5_K => encode_k::q5_k(block, &mut bytes),
            WeightFormat::Q6_K => encode_k::q6_k(block, &mut bytes),
            WeightFormat::IQ4_XS => encode_grid::iq4_xs(block, &mut bytes),
            WeightFormat::IQ3_S => encode_grid::iq3_s(block, &mut bytes),
            WeightFormat::IQ3_XXS => encode_grid::iq3_xxs(block, &mut bytes),
            WeightFormat::IQ2_S => encode_grid::iq2_s(block, &mut bytes),
            WeightFormat::IQ2_XS => encode_grid::iq2_xs(block, &mut bytes),
            WeightFormat::IQ2_XXS => encode_grid::iq2_xxs(block, &mut bytes),
            WeightFormat::IQ1_M => encode_grid::iq1_m(block, &mut bytes),
            WeightFormat::IQ1_S => encode_grid::iq1_s(block, &mut bytes),
        }
    }
    debug_assert_eq!(bytes.len(), num_bytes);
    bytes
}

fn check_row(format: WeightFormat, num_values: usize, num_bytes: usize) {
    assert!(
        format.row_bytes(num_values) == Some(num_bytes),
        "a {format} row of {num_values} values takes {:?} bytes, got {num_bytes}",
        format.row_bytes(num_values)
    );
}

fn decode_each<const BYTES: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn([u8; BYTES]) -> f32) {
    let (values, _) = bytes.as_chunks::<BYTES>();
    for (value, raw) in out.iter_mut().zip(values) {
        *value = decode(*raw);
    }
}

fn decode_blocks<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    let (blocks, _) = bytes.as_chunks::<BYTES>();
    let (outs, _) = out.as_chunks_mut::<LEN>();
    for (block, out) in blocks.iter().zip(outs) {
        decode(block, out);
    }
}

/// The little-endian f16 at `offset` of a block.
fn f16_at(block: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    /// Quantise, then decode: the error must stay within what the format's step size allows.
    #[test]
    fn every_format_round_trips_within_its_precision() {
        let mut random = Random::new(7);
        for format in WeightFormat::ALL {
            let values: Vec<f32> = (0..1024).map(|_| random.normal()).collect();
            let mut back = vec![0.0; values.len()];
            dequantize_row(format, &quantize_row(format, &values), &mut back);
            let error: f32 = values.iter().zip(&back).map(|(a, b)| (a - b) * (a - b)).sum();
            let energy: f32 = values.iter().map(|a| a * a).sum();
            let relative = (error / energy).sqrt();
            let allowed = match format {
                WeightFormat::F32 => 0.0,
                WeightFormat::F16 => 0.0005,
                WeightFormat::BF16 => 0.004,
                WeightFormat::Q8_0 => 0.008,
                WeightFormat::Q6_K | WeightFormat::F8_E4M3 => 0.04,
                WeightFormat::Q5_0 | WeightFormat::Q5_1 | WeightFormat::Q5_K => 0.06,
                WeightFormat::Q4_0
                | WeightFormat::Q4_1
                | WeightFormat::Q4_K
                | WeightFormat::IQ4_NL
                | WeightFormat::IQ4_XS => 0.12,
                WeightFormat::Q3_K | WeightFormat::IQ3_S | WeightFormat::IQ3_XXS => 0.25,
                WeightFormat::Q2_K | WeightFormat::IQ2_S | WeightFormat::IQ2_XS | WeightFormat::IQ2_XXS => {
                    0.40
                }
                WeightFormat::IQ1_M | WeightFormat::IQ1_S => 0.60,
            };
            assert!(relative <= allowed, "{format}: {relative} > {allowed}");
        }
    }

    #[test]
    fn zeros_stay_zero() {
        for format in WeightFormat::ALL {
            let mut back = vec![1.0; 512];
            dequantize_row(format, &quantize_row(format, &[0.0; 512]), &mut back);
            assert!(back.iter().all(|value| *value == 0.0), "{format}");
        }
    }

    #[test]
    #[should_panic(expected = "a Q4_0 row of 64 values takes Some(36) bytes, got 35")]
    fn a_short_row_is_refused() {
        dequantize_row(WeightFormat::Q4_0, &[0; 35], &mut [0.0; 64]);
    }
}
