//! Quantisers of the 32-value formats, rounding exactly as ggml does (IQ4_NL: the nearest table entry, without ggml's
//! search over scales).

use half::f16;

use super::IQ4_NL_VALUES;

pub(super) fn q4_0(block: &[f32], bytes: &mut Vec<u8>) {
    let scale = value_of_largest_magnitude(block) / -8.0;
    let inverse = inverse(scale);
    let quants = each(block, |value| (value * inverse + 8.5).clamp(0.0, 15.0) as u8);
    push_scale(bytes, scale);
    push_nibbles(bytes, &quants);
}

pub(super) fn q4_1(block: &[f32], bytes: &mut Vec<u8>) {
    let (minimum, maximum) = range(block);
    let scale = (maximum - minimum) / 15.0;
    let inverse = inverse(scale);
    let quants = each(block, |value| ((value - minimum) * inverse + 0.5).min(15.0) as u8);
    push_scale(bytes, scale);
    push_scale(bytes, minimum);
    push_nibbles(bytes, &quants);
}

pub(super) fn q5_0(block: &[f32], bytes: &mut Vec<u8>) {
    let scale = value_of_largest_magnitude(block) / -16.0;
    let inverse = inverse(scale);
    let quants = each(block, |value| (value * inverse + 16.5).clamp(0.0, 31.0) as u8);
    push_scale(bytes, scale);
    push_fifth_bits(bytes, &quants);
    push_nibbles(bytes, &quants);
}

pub(super) fn q5_1(block: &[f32], bytes: &mut Vec<u8>) {
    let (minimum, maximum) = range(block);
    let scale = (maximum - minimum) / 31.0;
    let inverse = inverse(scale);
    let quants = each(block, |value| ((value - minimum) * inverse + 0.5).min(31.0) as u8);
    push_scale(bytes, scale);
    push_scale(bytes, minimum);
    push_fifth_bits(bytes, &quants);
    push_nibbles(bytes, &quants);
}

pub(super) fn q8_0(block: &[f32], bytes: &mut Vec<u8>) {
    let scale = value_of_largest_magnitude(block).abs() / 127.0;
    let inverse = inverse(scale);
    push_scale(bytes, scale);
    bytes.extend(block.iter().map(|value| (value * inverse).round() as i8 as u8));
}

pub(super) fn iq4_nl(block: &[f32], bytes: &mut Vec<u8>) {
    let scale = value_of_largest_magnitude(block) / f32::from(IQ4_NL_VALUES[0]);
    let inverse = inverse(scale);
    let quants = each(block, |value| nearest_iq4_nl(value * inverse));
    push_scale(bytes, scale);
    push_nibbles(bytes, &quants);
}

pub(super) fn push_scale(bytes: &mut Vec<u8>, scale: f32) {
    bytes.extend(f16::from_f32(scale).to_le_bytes());
}

/// 1 / scale, or 0 for a block of zeros.
pub(super) fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// With its sign; the first of equals.
pub(super) fn value_of_largest_magnitude(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |best: f32, value| if value.abs() > best.abs() { *value } else { best })
}

pub(super) fn range(values: &[f32]) -> (f32, f32) {
    values
        .iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), value| (low.min(*value), high.max(*value)))
}

fn each(block: &[f32], quant: impl Fn(f32) -> u8) -> [u8; 32] {
    std::array::from_fn(|i| quant(block[i]))
}

fn push_nibbles(bytes: &mut Vec<u8>, quants: &[u8; 32]) {
    bytes.extend((0..16).map(|i| quants[i] & 0x0F | quants[i + 16] << 4));
}

fn push_fifth_bits(bytes: &mut Vec<u8>, quants: &[u8; 32]) {
    let high = (0..32).fold(0_u32, |bits, i| bits | u32::from(quants[i] >> 4) << i);
    bytes.extend(high.to_le_bytes());
}

pub(super) fn nearest_iq4_nl(value: f32) -> u8 {
    let distance = |index: &u8| (value - f32::from(IQ4_NL_VALUES[*index as usize])).abs();
    (0..16_u8).min_by(|a, b| distance(a).total_cmp(&distance(b))).expect("the table is not empty")
}
