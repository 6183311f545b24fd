//! The formats with 32 values per block: a scale (and a minimum), then the low nibbles of values 0..16 and the high nibbles
//! of values 16..32. The 5-bit ones keep every value's fifth bit in one little-endian u32.

use super::{IQ4_NL_VALUES, f16_at};

/// `d: f16, nibbles: [u8; 16]`; value = d · (q − 8).
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = f16_at(block, 0);
    nibbles(&block[2..], out, |_, q| scale * (i32::from(q) - 8) as f32);
}

/// `d: f16, m: f16, nibbles: [u8; 16]`; value = d · q + m.
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
    nibbles(&block[4..], out, |_, q| scale * f32::from(q) + minimum);
}

/// `d: f16, fifth bits: u32, nibbles: [u8; 16]`; value = d · (q − 16).
pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = f16_at(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    nibbles(&block[6..], out, |i, q| scale * (i32::from(five_bits(q, high, i)) - 16) as f32);
}

/// `d: f16, m: f16, fifth bits: u32, nibbles: [u8; 16]`; value = d · q + m.
pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    nibbles(&block[8..], out, |i, q| scale * f32::from(five_bits(q, high, i)) + minimum);
}

/// `d: f16, q: [i8; 32]`; value = q · d.
pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = f16_at(block, 0);
    for (value, q) in out.iter_mut().zip(&block[2..]) {
        *value = f32::from(*q as i8) * scale;
    }
}

/// `d: f16, nibbles: [u8; 16]`; value = d · table[q].
pub(super) fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = f16_at(block, 0);
    nibbles(&block[2..], out, |_, q| scale * f32::from(IQ4_NL_VALUES[q as usize]));
}

fn nibbles(packed: &[u8], out: &mut [f32; 32], value: impl Fn(usize, u8) -> f32) {
    for (i, byte) in packed.iter().enumerate() {
        out[i] = value(i, byte & 0x0F);
        out[i + 16] = value(i + 16, byte >> 4);
    }
}

fn five_bits(nibble: u8, high: u32, index: usize) -> u8 {
    nibble | ((high >> index & 1) as u8) << 4
}
