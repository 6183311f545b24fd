//! Rows of a graph's neighbours reduced to one, and the end of a layer.
//!
//! A row's columns stay in registers while its neighbours go by, in their order, so that each sum has one order however the
//! work is cut. Rows lie anywhere in memory: a few of those to come are asked for ahead.
//!
//! # Safety
//! As in [`super::simd`]; further, the pointers of [`ReduceArgs`] and [`FinishArgs`] cover what their fields say.
#![allow(unsafe_op_in_unsafe_fn)]

use super::floats::{Element, ElementBf16, ElementF32};
use super::simd::Simd;

/// Neighbours between the one that is added and the one that is asked for.
const AHEAD: usize = 6;
/// Lines of a row that are asked for; what follows comes as a stream.
const AHEAD_BYTES: usize = 1024;

pub const MEAN: u32 = 0;
pub const MAX: u32 = 1;
pub const WEIGHTED: u32 = 2;

/// Where the rows of nodes are.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_field_names)]
pub struct Rows {
    pub start: *const u8,
    pub num_rows: usize,
    pub cols: usize,
    pub is_bf16: bool,
    /// Null where node `n` is row `n`.
    pub pages: *const u32,
    pub num_pages: usize,
    pub shift: u32,
}

impl Rows {
    /// The row of a node, or `usize::MAX` where the map has none.
    #[inline(always)]
    pub unsafe fn row(&self, node: u32) -> usize {
        let row = if self.pages.is_null() {
            node as usize
        } else {
            let page = (node >> self.shift) as usize;
            if page >= self.num_pages {
                return usize::MAX;
            }
            ((*self.pages.add(page) as usize) << self.shift) + (node as usize & ((1 << self.shift) - 1))
        };
        if row < self.num_rows { row } else { usize::MAX }
    }

    pub fn row_bytes(&self) -> usize {
        self.cols * if self.is_bf16 { 2 } else { 4 }
    }
}

/// One node's neighbours.
#[derive(Clone, Copy, Debug)]
pub struct ReduceArgs {
    pub rows: Rows,
    pub sources: *const u32,
    pub count: usize,
    /// Sources that may be asked for ahead, from the first one on: those of the next nodes as well.
    pub count_ahead: usize,
    /// Of each node, `[num_scales]`; for `WEIGHTED`.
    pub scales: *const f32,
    pub num_scales: usize,
    /// `[cols]`: the sums so far, and then with these neighbours.
    pub sums: *mut f32,
}

#[inline(always)]
unsafe fn step<S: Simd, const KIND: u32>(sum: S::F, value: S::F, scale: f32) -> S::F {
    match KIND {
        MEAN => S::add(sum, value),
        // The second operand is the result where one is NaN.
        MAX => S::max(sum, value),
        _ => S::fma(S::splat(scale), value, sum),
    }
}

/// Columns `first..first + 16 V` of all neighbours.
#[inline(always)]
unsafe fn reduce_columns<S: Simd, E: Element, const KIND: u32, const V: usize>(
    args: &ReduceArgs,
    first: usize,
) -> bool {
    let row_bytes = args.rows.cols * E::BYTES;
    let start = args.rows.start.add(first * E::BYTES);
    let mut sums = [S::splat(0.0); V];
    for v in 0..V {
        sums[v] = S::load(args.sums.add(first + v * 16));
    }
    for i in 0..args.count {
        if i + AHEAD < args.count_ahead {
            let row = args.rows.row(*args.sources.add(i + AHEAD));
            let from = start.wrapping_add(row.wrapping_mul(row_bytes));
            for line in (0..(V * 16 * E::BYTES).min(AHEAD_BYTES)).step_by(64) {
                S::prefetch(from.wrapping_add(line));
            }
        }
        let node = *args.sources.add(i);
        let row = args.rows.row(node);
        if row == usize::MAX || (KIND == WEIGHTED && node as usize >= args.num_scales) {
            return false;
        }
        let scale = if KIND == WEIGHTED { *args.scales.add(node as usize) } else { 1.0 };
        let from = start.add(row * row_bytes);
        for v in 0..V {
            sums[v] = step::<S, KIND>(sums[v], E::load::<S>(from.add(v * 16 * E::BYTES)), scale);
        }
    }
    for v in 0..V {
        S::store(args.sums.add(first + v * 16), sums[v]);
    }
    true
}

/// The last columns, fewer than 16.
#[inline(always)]
unsafe fn reduce_tail<const KIND: u32>(args: &ReduceArgs, first: usize) -> bool {
    for i in 0..args.count {
        let node = *args.sources.add(i);
        let row = args.rows.row(node);
        if row == usize::MAX || (KIND == WEIGHTED && node as usize >= args.num_scales) {
            return false;
        }
        let scale = if KIND == WEIGHTED { *args.scales.add(node as usize) } else { 1.0 };
        for col in first..args.rows.cols {
            let at = row * args.rows.cols + col;
            let value = read(&args.rows, at);
            let sum = args.sums.add(col);
            *sum = match KIND {
                MEAN => *sum + value,
                MAX => {
                    if *sum > value {
                        *sum
                    } else {
                        value
                    }
                }
                _ => scale.mul_add(value, *sum),
            };
        }
    }
    true
}

#[inline(always)]
unsafe fn read(rows: &Rows, at: usize) -> f32 {
    if rows.is_bf16 {
        f32::from_bits(u32::from(rows.start.cast::<u16>().add(at).read_unaligned()) << 16)
    } else {
        rows.start.cast::<f32>().add(at).read_unaligned()
    }
}

#[inline(always)]
unsafe fn reduce_all<S: Simd, E: Element, const KIND: u32>(args: &ReduceArgs) -> bool {
    let cols = args.rows.cols;
    let mut first = 0;
    let mut is_valid = true;
    while S::WIDE && first + 256 <= cols {
        is_valid &= reduce_columns::<S, E, KIND, 16>(args, first);
        first += 256;
    }
    while first + 128 <= cols {
        is_valid &= reduce_columns::<S, E, KIND, 8>(args, first);
        first += 128;
    }
    while first + 64 <= cols {
        is_valid &= reduce_columns::<S, E, KIND, 4>(args, first);
        first += 64;
    }
    while first + 16 <= cols {
        is_valid &= reduce_columns::<S, E, KIND, 1>(args, first);
        first += 16;
    }
    if first < cols {
        is_valid &= reduce_tail::<KIND>(args, first);
    }
    is_valid
}

/// Adds the neighbours to the sums. False where one of them has no row; the sums are then worth nothing.
#[inline(always)]
pub unsafe fn reduce<S: Simd>(args: &ReduceArgs, kind: u32) -> bool {
    match (kind, args.rows.is_bf16) {
        (MEAN, false) => reduce_all::<S, ElementF32, MEAN>(args),
        (MAX, false) => reduce_all::<S, ElementF32, MAX>(args),
        (_, false) => reduce_all::<S, ElementF32, WEIGHTED>(args),
        (MEAN, true) => reduce_all::<S, ElementBf16, MEAN>(args),
        (MAX, true) => reduce_all::<S, ElementBf16, MAX>(args),
        (_, true) => reduce_all::<S, ElementBf16, WEIGHTED>(args),
    }
}

/// One row of a product, on its way into a table.
#[derive(Clone, Copy, Debug)]
pub struct FinishArgs {
    /// `[cols]`, padded with zeros to whole vectors; changed.
    pub values: *mut f32,
    /// The same, or null.
    pub bias: *const f32,
    pub cols: usize,
    pub normalize: bool,
    pub relu: bool,
    pub out: *mut u8,
    pub is_bf16: bool,
}

#[inline(always)]
pub unsafe fn finish<S: Simd>(args: &FinishArgs) {
    let padded = args.cols.next_multiple_of(16);
    if !args.bias.is_null() {
        for col in (0..padded).step_by(16) {
            let sum = S::add(S::load(args.values.add(col)), S::load(args.bias.add(col)));
            S::store(args.values.add(col), sum);
        }
    }
    if args.normalize {
        let mut squares = S::splat(0.0);
        for col in (0..padded).step_by(16) {
            let value = S::load(args.values.add(col));
            squares = S::fma(value, value, squares);
        }
        let norm = S::splat(S::sum(squares).sqrt().max(1e-12));
        for col in (0..padded).step_by(16) {
            S::store(args.values.add(col), S::div(S::load(args.values.add(col)), norm));
        }
    }
    let values = std::slice::from_raw_parts_mut(args.values, args.cols);
    if args.relu {
        for value in values.iter_mut() {
            // Keeps a NaN.
            *value = if *value < 0.0 { 0.0 } else { *value };
        }
    }
    if args.is_bf16 {
        let out = args.out.cast::<u16>();
        for (i, value) in values.iter().enumerate() {
            out.add(i).write_unaligned(round_bf16(*value));
        }
    } else {
        std::ptr::copy_nonoverlapping(args.values.cast_const().cast(), args.out, args.cols * 4);
    }
}

/// To nearest, ties to even; a NaN stays one.
#[inline(always)]
fn round_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let nan = (bits >> 16) as u16 | 0x40;
    if value.is_nan() { nan } else { rounded }
}

/// One row as f32.
#[inline(always)]
pub unsafe fn open_row<S: Simd>(rows: &Rows, row: usize, out: *mut f32) {
    let from = rows.start.add(row * rows.row_bytes());
    let whole = rows.cols / 16 * 16;
    for col in (0..whole).step_by(16) {
        let value = if rows.is_bf16 {
            S::load_bf16(from.cast::<u16>().add(col))
        } else {
            S::load(from.cast::<f32>().add(col))
        };
        S::store(out.add(col), value);
    }
    for col in whole..rows.cols {
        *out.add(col) = read(rows, row * rows.cols + col);
    }
}
