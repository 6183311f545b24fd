//! The IQ formats of 256 values: groups of four or eight values are entries of a fixed grid, with signs beside, or nibbles are
//! entries of a table; sub-blocks of 16 or 32 have small integer scales under one f16 scale.
//!
//! All of them are `d · factor · scale · level` with small integers for scale and level: [`GridBlock`]. Backends take them from
//! there into layouts of their own.
//!
//! The grids are facts of the format. `grids.bin` holds them, made by `make_grids.py`.

use super::{IQ4_NL_VALUES, SUPER_BLOCK, f16_at};
use crate::WeightFormat;

/// A grid: entries of two bytes, each value as an index of its level, in two bits (eight values) or four (four values).
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    /// Where it begins in [`GRIDS`].
    start: usize,
    pub(super) num_entries: usize,
    pub(super) levels: &'static [i8],
}

static GRIDS: &[u8; 9216] = include_bytes!("grids.bin");
const IQ2_LEVELS: &[i8] = &[8, 25, 43];
pub(super) const IQ2_XXS: Grid = Grid { start: 0, num_entries: 256, levels: IQ2_LEVELS };
pub(super) const IQ2_XS: Grid = Grid { start: 512, num_entries: 512, levels: IQ2_LEVELS };
pub(super) const IQ2_S: Grid = Grid { start: 1536, num_entries: 1024, levels: IQ2_LEVELS };
/// Before the shift, which moves all values of a group by an eighth of a step: in eighths.
pub(super) const IQ1: Grid = Grid { start: 3584, num_entries: 2048, levels: &[-8, 0, 8] };
pub(super) const IQ3_XXS: Grid =
    Grid { start: 7680, num_entries: 256, levels: &[4, 12, 20, 28, 36, 44, 52, 62] };
pub(super) const IQ3_S: Grid = Grid { start: 8192, num_entries: 512, levels: &[1, 3, 5, 7, 9, 11, 13, 15] };

impl Grid {
    /// Values of an entry.
    pub(super) fn width(&self) -> usize {
        if self.levels.len() == 3 { 8 } else { 4 }
    }

    pub(super) fn value(&self, entry: usize, i: usize) -> i8 {
        let at = self.start + 2 * entry;
        let fields = u16::from_le_bytes([GRIDS[at], GRIDS[at + 1]]);
        let bits = 16 / self.width();
        self.levels[usize::from(fields >> (bits * i)) % (1 << bits)]
    }

    /// Writes an entry, negative where a bit of `signs` is set.
    fn write(&self, entry: usize, signs: u8, out: &mut [i8]) {
        for (i, level) in out[..self.width()].iter_mut().enumerate() {
            let size = self.value(entry, i);
            *level = if signs >> i & 1 == 1 { -size } else { size };
        }
    }
}

/// A block, taken apart: value `i` is `d · factor · scales[i / 16] · levels[i]`, see [`grid_factor`].
#[derive(Clone, Debug)]
pub struct GridBlock {
    pub levels: [i8; SUPER_BLOCK],
    pub scales: [i8; 16],
    /// Bits of f16.
    pub d: u16,
}

impl Default for GridBlock {
    fn default() -> Self {
        Self { levels: [0; SUPER_BLOCK], scales: [0; 16], d: 0 }
    }
}

/// The power of two that all values of a grid format are multiplied with; `None` for the other formats.
pub const fn grid_factor(format: WeightFormat) -> Option<f32> {
    match format {
        WeightFormat::IQ1_S
        | WeightFormat::IQ1_M
        | WeightFormat::IQ2_XXS
        | WeightFormat::IQ2_XS
        | WeightFormat::IQ2_S => Some(0.125),
        WeightFormat::IQ3_XXS => Some(0.25),
        WeightFormat::IQ3_S | WeightFormat::IQ4_XS => Some(1.0),
        _ => None,
    }
}

impl GridBlock {
    /// Takes a block apart. `bytes` is one whole block of a format that has a [`grid_factor`].
    pub fn read(&mut self, format: WeightFormat, bytes: &[u8]) {
        self.d = u16_at(bytes, 0);
        match format {
            WeightFormat::IQ2_XXS => self.read_iq2_xxs(&bytes[2..]),
            WeightFormat::IQ2_XS => self.read_iq2_xs(&bytes[2..66], &bytes[66..]),
            WeightFormat::IQ2_S => self.read_iq2_s(&bytes[2..]),
            WeightFormat::IQ3_XXS => self.read_iq3_xxs(&bytes[2..66], &bytes[66..]),
            WeightFormat::IQ3_S => self.read_iq3_s(&bytes[2..]),
            WeightFormat::IQ1_S => self.read_iq1_s(&bytes[2..34], &bytes[34..]),
            WeightFormat::IQ1_M => self.read_iq1_m(bytes),
            WeightFormat::IQ4_XS => self.read_iq4_xs(bytes),
            other => unreachable!("{other} has no grid"),
        }
    }

    /// For each 32 values four entries of eight bits, then four times seven signs and a scale of four bits.
    fn read_iq2_xxs(&mut self, bytes: &[u8]) {
        for (sub, bytes) in bytes.chunks_exact(8).enumerate() {
            let signs = u32_at(bytes, 4);
            self.set_scale(sub, (signs >> 28) as u8);
            for (group, &entry) in bytes[..4].iter().enumerate() {
                let out = &mut self.levels[sub * 32 + group * 8..];
                IQ2_XXS.write(usize::from(entry), even_signs(signs >> (7 * group)), out);
            }
        }
    }

    /// Entries of nine bits with seven signs; scales of four bits for each 16 values.
    fn read_iq2_xs(&mut self, entries: &[u8], scales: &[u8]) {
        self.set_nibble_scales(scales);
        for group in 0..32 {
            let field = u16_at(entries, 2 * group);
            let signs = even_signs(u32::from(field >> 9));
            IQ2_XS.write(usize::from(field & 511), signs, &mut self.levels[group * 8..]);
        }
    }

    /// The low eight bits of entries, eight signs each, the high two bits, scales of four bits for each 16 values.
    fn read_iq2_s(&mut self, bytes: &[u8]) {
        self.set_nibble_scales(&bytes[72..80]);
        for group in 0..32 {
            let high = usize::from(bytes[64 + group / 4] >> (2 * (group % 4)) & 3);
            let entry = usize::from(bytes[group]) | high << 8;
            IQ2_S.write(entry, bytes[32 + group], &mut self.levels[group * 8..]);
        }
    }

    /// Entries of eight bits; for each 32 values four times seven signs and a scale of four bits.
    fn read_iq3_xxs(&mut self, entries: &[u8], signs: &[u8]) {
        for sub in 0..8 {
            let signs = u32_at(signs, 4 * sub);
            self.set_scale(sub, (signs >> 28) as u8);
            for pair in 0..4 {
                let signs = even_signs(signs >> (7 * pair));
                let group = sub * 8 + pair * 2;
                for (i, signs) in [signs, signs >> 4].into_iter().enumerate() {
                    let out = &mut self.levels[(group + i) * 4..];
                    IQ3_XXS.write(usize::from(entries[group + i]), signs, out);
                }
            }
        }
    }

    /// The low eight bits of entries, the ninth ones, signs, scales of four bits for each 32 values.
    fn read_iq3_s(&mut self, bytes: &[u8]) {
        for sub in 0..8 {
            self.set_scale(sub, bytes[104 + sub / 2] >> (4 * (sub % 2)) & 15);
        }
        for group in 0..64 {
            let entry =
                usize::from(bytes[group]) | usize::from(bytes[64 + group / 8] >> (group % 8) & 1) << 8;
            let signs = bytes[72 + group / 2] >> (4 * (group % 2));
            IQ3_S.write(entry, signs, &mut self.levels[group * 4..]);
        }
    }

    /// The low eight bits of entries; for each 32 values four times the high three, a scale of three bits, and the shift.
    fn read_iq1_s(&mut self, entries: &[u8], fields: &[u8]) {
        for sub in 0..8 {
            let field = u16_at(fields, 2 * sub);
            self.set_scale(sub, (field >> 12 & 7) as u8);
            for group in sub * 4..sub * 4 + 4 {
                let high = usize::from(field >> (3 * (group % 4)) & 7);
                self.write_shifted(group, usize::from(entries[group]) | high << 8, field >> 15 == 1);
            }
        }
    }

    /// The low eight bits of entries, then for each the high three and the shift, then for each 64 values four scales of three
    /// bits and four bits of the f16 scale.
    fn read_iq1_m(&mut self, bytes: &[u8]) {
        let (entries, high, scales) = (&bytes[..32], &bytes[32..48], &bytes[48..56]);
        self.d = (0..4).fold(0, |d, i| d | u16_at(scales, 2 * i) >> 12 << (4 * i));
        for (sub, scale) in self.scales.iter_mut().enumerate() {
            *scale = odd(u16_at(scales, sub / 4 * 2) >> (3 * (sub % 4)) & 7);
        }
        for group in 0..32 {
            let field = high[group / 2] >> (4 * (group % 2));
            let entry = usize::from(entries[group]) | usize::from(field & 7) << 8;
            self.write_shifted(group, entry, field & 8 != 0);
        }
    }

    /// `d`, the high two bits of scales, their low four, and nibbles of [`IQ4_NL_VALUES`].
    fn read_iq4_xs(&mut self, bytes: &[u8]) {
        let high = u16_at(bytes, 2);
        for sub in 0..8 {
            let low = bytes[4 + sub / 2] >> (4 * (sub % 2)) & 15;
            let scale = low | ((high >> (2 * sub) & 3) as u8) << 4;
            self.scales[2 * sub..2 * sub + 2].fill(scale as i8 - 32);
            for i in 0..16 {
                let byte = bytes[8 + sub * 16 + i];
                self.levels[sub * 32 + i] = IQ4_NL_VALUES[usize::from(byte & 15)];
                self.levels[sub * 32 + 16 + i] = IQ4_NL_VALUES[usize::from(byte >> 4)];
            }
        }
    }

    /// Eight values of IQ1, all moved up an eighth, or down.
    fn write_shifted(&mut self, group: usize, entry: usize, is_down: bool) {
        let levels = &mut self.levels[group * 8..][..8];
        IQ1.write(entry, 0, levels);
        for level in levels {
            *level += if is_down { -1 } else { 1 };
        }
    }

    /// Of 32 values.
    fn set_scale(&mut self, sub: usize, scale: u8) {
        self.scales[2 * sub..2 * sub + 2].fill(odd(u16::from(scale)));
    }

    /// Of 16 values each.
    fn set_nibble_scales(&mut self, bytes: &[u8]) {
        for (sub, scale) in self.scales.iter_mut().enumerate() {
            *scale = odd(u16::from(bytes[sub / 2] >> (4 * (sub % 2)) & 15));
        }
    }
}

/// Scales are odd numbers, of which the half is stored.
fn odd(stored: u16) -> i8 {
    2 * stored as i8 + 1
}

/// Seven signs, and an eighth that makes the number of negative ones even.
pub(super) fn even_signs(signs: u32) -> u8 {
    let seven = signs as u8 & 0x7F;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// Decodes a block of a grid format.
pub(super) fn decode(format: WeightFormat, bytes: &[u8], out: &mut [f32]) {
    let mut block = GridBlock::default();
    block.read(format, bytes);
    let factor = grid_factor(format).expect("only formats with a grid come here");
    let d = f16_at(&block.d.to_le_bytes(), 0) * factor;
    for (i, value) in out.iter_mut().enumerate() {
        *value = d * f32::from(block.scales[i / 16]) * f32::from(block.levels[i]);
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The golden blocks reach a part of the entries only. No two entries of a grid are equal.
    #[test]
    fn entries_of_a_grid_are_all_different() {
        for grid in [IQ2_XXS, IQ2_XS, IQ2_S, IQ1, IQ3_XXS, IQ3_S] {
            let entry = |entry: usize| (0..grid.width()).map(|i| grid.value(entry, i)).collect::<Vec<_>>();
            let different: BTreeSet<_> = (0..grid.num_entries).map(entry).collect();
            assert_eq!(different.len(), grid.num_entries, "{grid:?}");
        }
    }

    #[test]
    fn signs_are_even() {
        assert_eq!([0, 1, 3, 0x7F, 0x80].map(even_signs), [0, 0x81, 3, 0xFF, 0]);
    }
}
