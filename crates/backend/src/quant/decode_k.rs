//! The K formats: 256 values per block, in sub-blocks of 16 or 32 that have small integer scales under one f16 scale.
//!
//! The values are packed in planes: a byte holds the same two bits (or nibble) of values 32 (or 64) apart, so that one
//! wide load can be shifted into several vectors. The index expressions below say where value `i` lies.

use super::{SUPER_BLOCK, f16_at};

/// `scales: [u8; 16], q: [u8; 64], d: f16, dmin: f16`; value = d · scale · q − dmin · min, over 16 values each.
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; SUPER_BLOCK]) {
    let (scale, minimum) = (f16_at(block, 80), f16_at(block, 82));
    let (scales, quants) = (&block[..16], &block[16..80]);
    for (sub, values) in out.chunks_exact_mut(16).enumerate() {
        let sub_scale = scale * f32::from(scales[sub] & 0x0F);
        let sub_minimum = minimum * f32::from(scales[sub] >> 4);
        for (l, value) in values.iter_mut().enumerate() {
            *value = sub_scale * f32::from(two_bits(quants, sub * 16 + l)) - sub_minimum;
        }
    }
}

/// `high: [u8; 32], q: [u8; 64], scales: [u8; 12], d: f16`; value = d · (scale − 32) · (q − 4 · !high), over 16 values.
pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; SUPER_BLOCK]) {
    let scale = f16_at(block, 108);
    let (high, quants, scales) = (&block[..32], &block[32..96], &block[96..108]);
    for (sub, values) in out.chunks_exact_mut(16).enumerate() {
        let sub_scale = scale * (i32::from(q3_k_scale(scales, sub)) - 32) as f32;
        for (l, value) in values.iter_mut().enumerate() {
            let i = sub * 16 + l;
            let offset = if one_bit(high, i) == 1 { 0 } else { 4 };
            *value = sub_scale * (i32::from(two_bits(quants, i)) - offset) as f32;
        }
    }
}

/// `d: f16, dmin: f16, scales: [u8; 12], q: [u8; 128]`; value = d · scale · q − dmin · min, over 32 values each.
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; SUPER_BLOCK]) {
    scaled_with_minimum(block, out, |i| nibble(&block[16..], i, 32));
}

/// As Q4_K with `fifth bits: [u8; 32]` between the scales and the nibbles.
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; SUPER_BLOCK]) {
    scaled_with_minimum(block, out, |i| nibble(&block[48..], i, 32) | one_bit(&block[16..48], i) << 4);
}

/// `low: [u8; 128], high: [u8; 64], scales: [i8; 16], d: f16`; value = d · scale · (q − 32), over 16 values each.
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; SUPER_BLOCK]) {
    let scale = f16_at(block, 208);
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    for (sub, values) in out.chunks_exact_mut(16).enumerate() {
        let sub_scale = scale * f32::from(scales[sub] as i8);
        for (l, value) in values.iter_mut().enumerate() {
            let i = sub * 16 + l;
            let q = nibble(low, i, 64) | two_bits(high, i) << 4;
            *value = sub_scale * (i32::from(q) - 32) as f32;
        }
    }
}

/// Scale and minimum, six bits each, of sub-block `sub` of Q4_K and Q5_K.
pub(super) fn scale_and_minimum(scales: &[u8], sub: usize) -> (u8, u8) {
    if sub < 4 {
        return (scales[sub] & 0x3F, scales[sub + 4] & 0x3F);
    }
    let low = scales[sub + 4];
    (low & 0x0F | scales[sub - 4] >> 2 & 0x30, low >> 4 | scales[sub] >> 2 & 0x30)
}

fn scaled_with_minimum(block: &[u8], out: &mut [f32; SUPER_BLOCK], quant: impl Fn(usize) -> u8) {
    let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
    for (sub, values) in out.chunks_exact_mut(32).enumerate() {
        let (sub_scale, sub_minimum) = scale_and_minimum(&block[4..16], sub);
        let (sub_scale, sub_minimum) = (scale * f32::from(sub_scale), minimum * f32::from(sub_minimum));
        for (l, value) in values.iter_mut().enumerate() {
            *value = sub_scale * f32::from(quant(sub * 32 + l)) - sub_minimum;
        }
    }
}

/// Six-bit scale: the low four bits in bytes 0..8 (two planes), the high two in bytes 8..12 (four planes).
fn q3_k_scale(scales: &[u8], sub: usize) -> u8 {
    let low = scales[sub % 8] >> (4 * (sub / 8)) & 0x0F;
    let high = scales[8 + sub % 4] >> (2 * (sub / 4)) & 0x03;
    low | high << 4
}

/// Bit plane `i / 32` of byte `i % 32`.
fn one_bit(plane: &[u8], i: usize) -> u8 {
    plane[i % 32] >> (i / 32) & 1
}

/// Of each 128 values, 32 bytes with four planes.
fn two_bits(plane: &[u8], i: usize) -> u8 {
    plane[i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3
}

/// Of each `2 · width` values, `width` bytes with two planes.
fn nibble(plane: &[u8], i: usize, width: usize) -> u8 {
    plane[i / (2 * width) * width + i % width] >> (4 * (i % (2 * width) / width)) & 0x0F
}
