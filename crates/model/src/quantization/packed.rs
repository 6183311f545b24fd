//! Integers of four and eight bits as AWQ, GPTQ and compressed-tensors pack them into words of 32 bits, and their way into
//! blocks of 32.
//!
//! Published facts of the three layouts, `out` being rows and `in` columns of a weight, and `n` integers a word:
//! AWQ (gemm): words `[in, out / n]`, eight outputs a word in the order 0 2 4 6 1 3 5 7; zeros `[groups, out / n]` likewise.
//! GPTQ: words `[in / n, out]`, neighbouring inputs from the lowest bits on; zeros `[groups, out / n]`, outputs in order, one
//! less than they are unless the layout is `gptq_v2`. compressed-tensors: words `[out, in / n]`, inputs in order; zeros
//! `[out / n, groups]`, outputs in order. AWQ and GPTQ have scales `[groups, out]`, compressed-tensors `[out, groups]`.

use std::sync::Arc;

use baton_backend::{SharedBytes, WeightFormat};
use half::f16;

/// Values of a block.
pub(super) const BLOCK: usize = 32;
/// Rows that are unpacked together: those of one line of 64 bytes of AWQ's words.
const STRIP: usize = 128;

/// Where output `i` of a word is, in units of its bits.
const AWQ_ORDER: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    Awq,
    Gptq,
    Compressed,
}

/// The integers of a weight, unsigned.
#[derive(Clone, Debug)]
pub(super) struct Words {
    pub(super) layout: Layout,
    pub(super) bits: u32,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// As many words as the layout needs; checked by the caller.
    pub(super) bytes: SharedBytes,
}

fn word(bytes: &[u8], index: usize) -> u32 {
    let at = index * 4;
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl Words {
    fn per_word(&self) -> usize {
        32 / self.bits as usize
    }

    /// Words that the layout needs.
    pub(super) fn num_words(&self) -> Option<usize> {
        let n = self.per_word();
        match self.layout {
            Layout::Awq => self.cols.checked_mul(self.rows.div_ceil(n)),
            Layout::Gptq | Layout::Compressed => self.rows.checked_mul(self.cols.div_ceil(n)),
        }
    }

    fn value(&self, bytes: &[u8], row: usize, col: usize) -> u8 {
        let (n, bits) = (self.per_word(), self.bits as usize);
        let (index, shift) = match self.layout {
            Layout::Awq => (col * self.rows.div_ceil(n) + row / n, awq_place(bits, row % n)),
            Layout::Gptq => (col / n * self.rows + row, col % n),
            Layout::Compressed => (row * self.cols.div_ceil(n) + col / n, col % n),
        };
        (word(bytes, index) >> (shift * bits)) as u8 & self.mask()
    }

    fn mask(&self) -> u8 {
        (0xff_u32 >> (8 - self.bits)) as u8
    }

    /// The values of a strip of rows in some columns, in the order of `columns`.
    fn strip(&self, first_row: usize, columns: &[u32], out: &mut [[u8; BLOCK]]) {
        let bytes = self.bytes.as_slice();
        let (n, bits, mask) = (self.per_word(), self.bits as usize, self.mask());
        if self.layout == Layout::Awq && first_row.is_multiple_of(n) {
            // A line of words at a time.
            let words_per_col = self.rows.div_ceil(n);
            for (k, &col) in columns.iter().enumerate() {
                let start = col as usize * words_per_col + first_row / n;
                for (i, rows) in out.chunks_mut(n).enumerate() {
                    let packed = word(bytes, start + i);
                    for (j, row) in rows.iter_mut().enumerate() {
                        row[k] = (packed >> (awq_place(bits, j) * bits)) as u8 & mask;
                    }
                }
            }
            return;
        }
        for (k, &col) in columns.iter().enumerate() {
            for (i, row) in out.iter_mut().enumerate() {
                row[k] = self.value(bytes, first_row + i, col as usize);
            }
        }
    }
}

fn awq_place(bits: usize, output: usize) -> usize {
    if bits == 4 { AWQ_ORDER[output] } else { output }
}

/// Integers with the scale and zero of each group, all checked.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    pub(super) words: Words,
    /// `[groups][rows]`, finite in f16.
    pub(super) scales: Arc<[f32]>,
    /// `[groups][rows]`
    pub(super) zeros: Arc<[u16]>,
    /// The group of each stored column.
    pub(super) group_of: Arc<[u32]>,
    /// Which input column each stored column is.
    pub(super) columns: Arc<[u32]>,
}

impl Groups {
    /// What the values become: blocks where 32 neighbours have one scale.
    pub(super) fn format(&self) -> WeightFormat {
        let is_whole = self.words.cols.is_multiple_of(BLOCK)
            && self.group_of.chunks(BLOCK).all(|block| block.iter().all(|group| *group == block[0]));
        let offset = 1 << (self.words.bits - 1);
        let is_symmetric = self.zeros.iter().all(|zero| *zero == offset);
        match (self.words.bits, is_symmetric) {
            _ if !is_whole => WeightFormat::F16,
            (4, true) => WeightFormat::Q4_0,
            (4, false) => WeightFormat::Q4_1,
            (_, true) => WeightFormat::Q8_0,
            (_, false) => WeightFormat::F16,
        }
    }

    /// The bytes of all rows, made by all threads of the machine.
    pub(super) fn bytes(&self, format: WeightFormat) -> Vec<u8> {
        let row_bytes = format.row_bytes(self.words.cols).expect("the format was chosen for these columns");
        let mut bytes = vec![0; row_bytes * self.words.rows];
        super::round::in_parallel(&mut bytes, row_bytes * STRIP, |strip, out| {
            self.write_strip(strip * STRIP, row_bytes, format, out);
        });
        bytes
    }

    fn write_strip(&self, first_row: usize, row_bytes: usize, format: WeightFormat, out: &mut [u8]) {
        let rows = out.len() / row_bytes;
        let mut values = [[0_u8; BLOCK]; STRIP];
        for (number, columns) in self.columns.chunks(BLOCK).enumerate() {
            self.words.strip(first_row, columns, &mut values[..rows]);
            for (row, values) in values[..rows].iter().enumerate() {
                let start = row * row_bytes + number * BLOCK / format.block_len() * format.block_bytes();
                let of_group = |k: usize| {
                    let at = self.group_of[number * BLOCK + k] as usize * self.words.rows + first_row + row;
                    (self.scales[at], f32::from(self.zeros[at]))
                };
                if format == WeightFormat::F16 {
                    for (k, value) in values[..columns.len()].iter().enumerate() {
                        let (scale, zero) = of_group(k);
                        let real = f16::from_f32(scale * (f32::from(*value) - zero));
                        out[start + 2 * k..start + 2 * k + 2].copy_from_slice(&real.to_le_bytes());
                    }
                } else {
                    let (scale, zero) = of_group(0);
                    write_block(format, scale, zero, values, &mut out[start..start + format.block_bytes()]);
                }
            }
        }
    }
}

/// A block of the GGUF format, with the same numbers: Q4_1's minimum, the only one that is rounded, is the zero times the scale.
fn write_block(format: WeightFormat, scale: f32, zero: f32, values: &[u8; BLOCK], out: &mut [u8]) {
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    let quants = match format {
        WeightFormat::Q4_1 => {
            out[2..4].copy_from_slice(&f16::from_f32(-scale * zero).to_le_bytes());
            4
        }
        _ => 2,
    };
    let out = &mut out[quants..];
    if format == WeightFormat::Q8_0 {
        // Symmetric: the zero is 128.
        out.iter_mut().zip(values).for_each(|(out, value)| *out = value ^ 0x80);
    } else {
        for (i, out) in out.iter_mut().enumerate() {
            *out = values[i] | values[i + 16] << 4;
        }
    }
}

/// The zeros of AWQ and GPTQ, `[groups, rows]`, unpacked.
pub(super) fn zeros(layout: Layout, bits: u32, groups: usize, rows: usize, bytes: &[u8]) -> Vec<u16> {
    // They are packed along outputs as AWQ's values are, or in order; compressed-tensors has outputs first.
    let (n, mask) = (32 / bits as usize, 0xffff_ffff_u32 >> (32 - bits));
    let mut zeros = vec![0; groups * rows];
    for group in 0..groups {
        for row in 0..rows {
            let (index, place) = match layout {
                Layout::Awq => (group * rows.div_ceil(n) + row / n, awq_place(bits as usize, row % n)),
                Layout::Gptq => (group * rows.div_ceil(n) + row / n, row % n),
                Layout::Compressed => (row / n * groups + group, row % n),
            };
            zeros[group * rows + row] = (word(bytes, index) >> (place * bits as usize) & mask) as u16;
        }
    }
    zeros
}
