//! Plain quantisers of the 256-value formats: each sub-block's range gives its scale, and nothing is searched for.
//! Good enough to make weights for tests; a published model should be quantised by ggml.

use super::SUPER_BLOCK;
use super::encode::{inverse, push_scale, range, value_of_largest_magnitude};

type Quants = [u8; SUPER_BLOCK];

pub(super) fn q2_k(block: &[f32], bytes: &mut Vec<u8>) {
    let affine = Affine::<16>::fit(block, 3.0, 15.0);
    bytes.extend((0..16).map(|sub| affine.scales[sub] | affine.minimums[sub] << 4));
    bytes.extend(pack_two_bits(&affine.quants));
    push_scale(bytes, affine.scale);
    push_scale(bytes, affine.minimum);
}

pub(super) fn q3_k(block: &[f32], bytes: &mut Vec<u8>) {
    let (scale, scales, quants) = symmetric(block, 4.0, 31.0);
    let stored = scales.map(|scale| (scale + 32) as u8);
    bytes.extend(pack_bits(&quants, 2));
    bytes.extend(pack_two_bits(&quants));
    bytes.extend((0..8).map(|i| stored[i] & 0x0F | (stored[i + 8] & 0x0F) << 4));
    bytes.extend(
        (0..4).map(|i| (0..4).fold(0, |byte, plane| byte | stored[plane * 4 + i] >> 4 << (2 * plane))),
    );
    push_scale(bytes, scale);
}

pub(super) fn q4_k(block: &[f32], bytes: &mut Vec<u8>) {
    let affine = Affine::<8>::fit(block, 15.0, 63.0);
    affine.push_header(bytes);
    bytes.extend(pack_nibbles(&affine.quants, 32));
}

pub(super) fn q5_k(block: &[f32], bytes: &mut Vec<u8>) {
    let affine = Affine::<8>::fit(block, 31.0, 63.0);
    affine.push_header(bytes);
    bytes.extend(pack_bits(&affine.quants, 4));
    bytes.extend(pack_nibbles(&affine.quants, 32));
}

pub(super) fn q6_k(block: &[f32], bytes: &mut Vec<u8>) {
    let (scale, scales, quants) = symmetric(block, 32.0, 127.0);
    bytes.extend(pack_nibbles(&quants, 64));
    bytes.extend(pack_two_bits(&quants.map(|q| q >> 4)));
    bytes.extend(scales.map(|scale| scale as i8 as u8));
    push_scale(bytes, scale);
}

/// Values of a sub-block are `scale · scales[sub] · q − minimum · minimums[sub]`.
struct Affine<const SUBS: usize> {
    scale: f32,
    minimum: f32,
    scales: [u8; SUBS],
    minimums: [u8; SUBS],
    quants: Quants,
}

impl<const SUBS: usize> Affine<SUBS> {
    /// `levels`: the largest quant; `steps`: the largest sub-block scale.
    fn fit(block: &[f32], levels: f32, steps: f32) -> Self {
        let sub_len = SUPER_BLOCK / SUBS;
        let ranges: [(f32, f32); SUBS] = std::array::from_fn(|sub| {
            let (low, high) = range(&block[sub * sub_len..(sub + 1) * sub_len]);
            (low.min(0.0), high.max(0.0))
        });
        let widest = ranges.iter().fold(0.0_f32, |widest, (low, high)| widest.max(high - low));
        let lowest = ranges.iter().fold(0.0_f32, |lowest, (low, _)| lowest.min(*low));
        let (scale, minimum) = (widest / levels / steps, -lowest / steps);
        // Round up, so that the ends of a sub-block's range can still be reached.
        let scales =
            ranges.map(|(low, high)| ((high - low) / levels * inverse(scale)).ceil().min(steps) as u8);
        let minimums = ranges.map(|(low, _)| (-low * inverse(minimum)).round().min(steps) as u8);
        let quants = std::array::from_fn(|i| {
            let sub = i / sub_len;
            let (step, offset) = (scale * f32::from(scales[sub]), minimum * f32::from(minimums[sub]));
            ((block[i] + offset) * inverse(step)).round().clamp(0.0, levels) as u8
        });
        Self { scale, minimum, scales, minimums, quants }
    }
}

impl Affine<8> {
    /// `d, dmin`, then eight scales and eight minimums of six bits in twelve bytes.
    fn push_header(&self, bytes: &mut Vec<u8>) {
        push_scale(bytes, self.scale);
        push_scale(bytes, self.minimum);
        bytes.extend((0..4).map(|i| self.scales[i] | self.scales[i + 4] >> 4 << 6));
        bytes.extend((0..4).map(|i| self.minimums[i] | self.minimums[i + 4] >> 4 << 6));
        bytes.extend((4..8).map(|i| self.scales[i] & 0x0F | self.minimums[i] << 4));
    }
}

/// Sixteen sub-blocks whose values are `scale · scales[sub] · (q − middle)`.
fn symmetric(block: &[f32], middle: f32, steps: f32) -> (f32, [i32; 16], Quants) {
    let sub_scales: [f32; 16] =
        std::array::from_fn(|sub| value_of_largest_magnitude(&block[sub * 16..(sub + 1) * 16]) / -middle);
    let scale = value_of_largest_magnitude(&sub_scales) / -steps;
    let scales = sub_scales.map(|sub_scale| (sub_scale * inverse(scale)).round() as i32);
    let quants = std::array::from_fn(|i| {
        let step = scale * scales[i / 16] as f32;
        (block[i] * inverse(step) + middle).round().clamp(0.0, 2.0 * middle - 1.0) as u8
    });
    (scale, scales, quants)
}

/// Bit `bit` of each value, in eight planes of 32.
fn pack_bits(quants: &Quants, bit: u32) -> [u8; 32] {
    std::array::from_fn(|l| (0..8).fold(0, |byte, plane| byte | (quants[plane * 32 + l] >> bit & 1) << plane))
}

/// The low two bits of each value: of each 128, four planes of 32.
fn pack_two_bits(quants: &Quants) -> [u8; 64] {
    std::array::from_fn(|byte| {
        let first = byte / 32 * 128 + byte % 32;
        (0..4).fold(0, |packed, plane| packed | (quants[first + plane * 32] & 3) << (2 * plane))
    })
}

/// The low nibble of each value: of each `2 · width`, two planes of `width`.
fn pack_nibbles(quants: &Quants, width: usize) -> [u8; 128] {
    std::array::from_fn(|byte| {
        let first = byte / width * 2 * width + byte % width;
        quants[first] & 0x0F | quants[first + width] << 4
    })
}
