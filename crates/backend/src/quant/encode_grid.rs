//! Plain quantisers of the IQ formats of 256 values: each sub-block's largest value gives its scale, and groups take the nearest
//! entry of the grid. Good enough to make weights for tests; a published model should be quantised by ggml, which weighs errors.

use half::f16;

use super::encode::{inverse, push_scale};
use super::grid::{self, Grid};
use super::{IQ4_NL_VALUES, SUPER_BLOCK};

/// With three levels a scale that reaches the largest value would leave most values at zero: this much of it is better.
const IQ1_REACH: f32 = 0.55;

/// A block's scale and the odd scales of its sub-blocks.
struct Scales {
    d: f32,
    /// Half of each scale, rounded down.
    stored: Vec<u8>,
    sub_len: usize,
}

impl Scales {
    /// Sub-blocks of `sub_len` values, whose largest is to be `top`; scales have `bits` bits.
    fn fit(block: &[f32], sub_len: usize, top: f32, bits: u32) -> Self {
        let largest = |values: &[f32]| values.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let most = (1 << bits) as f32 - 1.0;
        let d = f16::from_f32(largest(block) / top / (2.0 * most + 1.0)).to_f32();
        let half = |values: &[f32]| (largest(values) / top * inverse(d) - 1.0) / 2.0;
        let stored =
            block.chunks_exact(sub_len).map(|values| half(values).round().clamp(0.0, most) as u8).collect();
        Self { d, stored, sub_len }
    }

    /// What value `i` is to be in levels, times `factor`.
    fn inverse(&self, i: usize) -> f32 {
        inverse(self.d * f32::from(2 * self.stored[i / self.sub_len] + 1))
    }

    fn nibbles(&self) -> impl Iterator<Item = u8> {
        self.stored.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4)
    }
}

/// The entry nearest to the values, moved by `shift`, and its distance.
fn nearest(grid: &Grid, values: &[f32], shift: f32) -> (usize, f32) {
    let distance = |entry: usize| -> f32 {
        let error = |(i, value): (usize, &f32)| value - f32::from(grid.value(entry, i)) - shift;
        values.iter().enumerate().map(error).map(|error| error * error).sum()
    };
    let entries = (0..grid.num_entries).map(|entry| (entry, distance(entry)));
    entries.min_by(|a, b| a.1.total_cmp(&b.1)).expect("a grid has entries")
}

/// Entries and signs of all groups of eight values; with `is_even` the number of negative ones of a group is.
fn signed(grid: &Grid, block: &[f32], scales: &Scales, factor: f32, is_even: bool) -> (Vec<usize>, Vec<u8>) {
    let (mut entries, mut signs) = (Vec::new(), Vec::new());
    for (group, values) in block.chunks_exact(8).enumerate() {
        let inverse = scales.inverse(group * 8) / factor;
        let mut sizes: Vec<f32> = values.iter().map(|value| value.abs() * inverse).collect();
        let mut bits = (0..8).fold(0, |bits, i| bits | u8::from(values[i] < 0.0) << i);
        if is_even && bits.count_ones() % 2 == 1 {
            let least = (0..8).min_by(|&a, &b| sizes[a].total_cmp(&sizes[b])).expect("eight values");
            bits ^= 1 << least;
            sizes[least] = -sizes[least];
        }
        entries.extend(sizes.chunks_exact(grid.width()).map(|sizes| nearest(grid, sizes, 0.0).0));
        signs.push(bits);
    }
    (entries, signs)
}

/// Four groups of seven signs and a scale.
fn signs_and_scale(signs: &[u8], scale: u8) -> [u8; 4] {
    let seven = |(i, signs): (usize, &u8)| u32::from(signs & 0x7F) << (7 * i);
    (signs.iter().enumerate().map(seven).sum::<u32>() | u32::from(scale) << 28).to_le_bytes()
}

pub(super) fn iq2_xxs(block: &[f32], bytes: &mut Vec<u8>) {
    let scales = Scales::fit(block, 32, 43.0 / 8.0, 4);
    let (entries, signs) = signed(&grid::IQ2_XXS, block, &scales, 0.125, true);
    push_scale(bytes, scales.d);
    for sub in 0..8 {
        bytes.extend(entries[sub * 4..][..4].iter().map(|&entry| entry as u8));
        bytes.extend(signs_and_scale(&signs[sub * 4..][..4], scales.stored[sub]));
    }
}

pub(super) fn iq2_xs(block: &[f32], bytes: &mut Vec<u8>) {
    let scales = Scales::fit(block, 16, 43.0 / 8.0, 4);
    let (entries, signs) = signed(&grid::IQ2_XS, block, &scales, 0.125, true);
    push_scale(bytes, scales.d);
    for (entry, signs) in entries.iter().zip(signs) {
        bytes.extend((*entry as u16 | u16::from(signs & 0x7F) << 9).to_le_bytes());
    }
    bytes.extend(scales.nibbles());
}

pub(super) fn iq2_s(block: &[f32], bytes: &mut Vec<u8>) {
    let scales = Scales::fit(block, 16, 43.0 / 8.0, 4);
    let (entries, signs) = signed(&grid::IQ2_S, block, &scales, 0.125, false);
    push_scale(bytes, scales.d);
    bytes.extend(entries.iter().map(|&entry| entry as u8));
    bytes.extend(signs);
    let high = |four: &[usize]| (0..4).fold(0, |byte, i| byte | ((four[i] >> 8) as u8) << (2 * i));
    bytes.extend(entries.chunks_exact(4).map(high));
    bytes.extend(scales.nibbles());
}

pub(super) fn iq3_xxs(block: &[f32], bytes: &mut Vec<u8>) {
    let scales = Scales::fit(block, 32, 62.0 / 4.0, 4);
    let (entries, signs) = signed(&grid::IQ3_XXS, block, &scales, 0.25, true);
    push_scale(bytes, scales.d);
    bytes.extend(entries.iter().map(|&entry| entry as u8));
    for (signs, scale) in signs.chunks_exact(4).zip(&scales.stored) {
        bytes.extend(signs_and_scale(signs, *scale));
    }
}

pub(super) fn iq3_s(block: &[f32], bytes: &mut Vec<u8>) {
    let scales = Scales::fit(block, 32, 15.0, 4);
    let (entries, signs) = signed(&grid::IQ3_S, block, &scales, 1.0, false);
    push_scale(bytes, scales.d);
    bytes.extend(entries.iter().map(|&entry| entry as u8));
    let ninth = |eight: &[usize]| (0..8).fold(0, |byte, i| byte | ((eight[i] >> 8) as u8) << i);
    bytes.extend(entries.chunks_exact(8).map(ninth));
    bytes.extend(signs);
    bytes.extend(scales.nibbles());
}

/// Entries of all groups of eight values, and whether each is moved down; `group_len` values are moved alike.
fn shifted(block: &[f32], scales: &Scales, group_len: usize) -> (Vec<usize>, Vec<bool>) {
    let (mut entries, mut are_down) = (Vec::new(), Vec::new());
    for (number, values) in block.chunks_exact(group_len).enumerate() {
        let nearest_with = |shift: f32| -> (Vec<usize>, f32) {
            let each = values.chunks_exact(8).enumerate().map(|(i, values)| {
                let inverse = 8.0 * scales.inverse(number * group_len + i * 8);
                let values: Vec<f32> = values.iter().map(|value| value * inverse).collect();
                nearest(&grid::IQ1, &values, shift)
            });
            let each: Vec<(usize, f32)> = each.collect();
            (each.iter().map(|(entry, _)| *entry).collect(), each.iter().map(|(_, distance)| distance).sum())
        };
        let (up, down) = (nearest_with(1.0), nearest_with(-1.0));
        are_down.push(down.1 < up.1);
        entries.extend(if down.1 < up.1 { down.0 } else { up.0 });
    }
    (entries, are_down)
}

pub(super) fn iq1_s(block: &[f32], bytes: &mut Vec<u8>) {
    let scales = Scales::fit(block, 32, 1.0 / IQ1_REACH, 3);
    let (entries, are_down) = shifted(block, &scales, 32);
    push_scale(bytes, scales.d);
    bytes.extend(entries.iter().map(|&entry| entry as u8));
    for (sub, four) in entries.chunks_exact(4).enumerate() {
        let high = (0..4).fold(0, |field, i| field | ((four[i] >> 8) as u16) << (3 * i));
        let field = high | u16::from(scales.stored[sub]) << 12 | u16::from(are_down[sub]) << 15;
        bytes.extend(field.to_le_bytes());
    }
}

pub(super) fn iq1_m(block: &[f32], bytes: &mut Vec<u8>) {
    let scales = Scales::fit(block, 16, 1.0 / IQ1_REACH, 3);
    let (entries, are_down) = shifted(block, &scales, 8);
    bytes.extend(entries.iter().map(|&entry| entry as u8));
    let field = |group: usize| (entries[group] >> 8) as u8 | u8::from(are_down[group]) << 3;
    bytes.extend((0..16).map(|pair| field(2 * pair) | field(2 * pair + 1) << 4));
    let d = f16::from_f32(scales.d).to_bits();
    for (i, four) in scales.stored.chunks_exact(4).enumerate() {
        let three = (0..4).fold(0, |field, i| field | u16::from(four[i]) << (3 * i));
        bytes.extend((three | (d >> (4 * i) & 15) << 12).to_le_bytes());
    }
}

pub(super) fn iq4_xs(block: &[f32], bytes: &mut Vec<u8>) {
    let largest = |values: &[f32]| values.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let top = f32::from(IQ4_NL_VALUES[15]);
    let d = f16::from_f32(largest(block) / top / 31.0).to_f32();
    let scales: Vec<u8> =
        block.chunks_exact(32).map(|sub| (largest(sub) / top * inverse(d)).ceil().min(31.0) as u8).collect();
    push_scale(bytes, d);
    let stored: Vec<u8> = scales.iter().map(|scale| scale + 32).collect();
    let high = (0..8).fold(0, |field, sub| field | u16::from(stored[sub] >> 4) << (2 * sub));
    bytes.extend(high.to_le_bytes());
    bytes.extend(stored.chunks_exact(2).map(|pair| pair[0] & 15 | pair[1] << 4));
    for (sub, values) in block.chunks_exact(SUPER_BLOCK / 8).enumerate() {
        let inverse = inverse(d * f32::from(scales[sub]));
        let quant = |i: usize| super::encode::nearest_iq4_nl(values[i] * inverse);
        bytes.extend((0..16).map(|i| quant(i) | quant(i + 16) << 4));
    }
}
