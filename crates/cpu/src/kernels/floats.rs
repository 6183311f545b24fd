//! Products of panels of floats (weights, or the keys of attention) with rows of f32.
//!
//! For each (row, output) the order of additions is one whatever the number of rows: k is cut into chunks of
//! [`CHUNK`]; within one, even and odd k have an accumulator each; their sum is added to the total.
//!
//! # Safety
//! As in [`super::simd`]; further, the pointers of [`FloatArgs`] and [`PanelArgs`] cover what their fields say.
#![allow(unsafe_op_in_unsafe_fn)]

use std::mem::MaybeUninit;

use super::gemm::{MAX_PANELS, PanelArgs, TILED_TOKENS};
use super::simd::Simd;
use crate::weights::formats::PANEL_ROWS;

/// k that are summed on their own: even, and few enough for [`MAX_PANELS`] opened panels in the first-level cache.
pub const CHUNK: usize = 128;

/// A float format in memory.
pub trait Element: 'static {
    const BYTES: usize;
    unsafe fn load<S: Simd>(from: *const u8) -> S::F;
}

#[derive(Debug)]
pub struct ElementF32;
#[derive(Debug)]
pub struct ElementF16;
#[derive(Debug)]
pub struct ElementBf16;
/// Without its factor, which [`super::int8_cache`] brings in.
#[derive(Debug)]
pub struct ElementI8;

impl Element for ElementF32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        S::load(from.cast())
    }
}
impl Element for ElementF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        S::load_f16(from.cast())
    }
}
impl Element for ElementBf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        S::load_bf16(from.cast())
    }
}
impl Element for ElementI8 {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        S::load_i8(from)
    }
}

/// Panels `[cols, 16]` and rows of f32.
#[derive(Clone, Copy, Debug)]
pub struct FloatArgs {
    pub panels: *const u8,
    /// Bytes between two panels.
    pub panel_stride: usize,
    pub num_panels: usize,
    pub cols: usize,
    pub rows: *const f32,
    pub stride: usize,
    pub num_rows: usize,
    /// Result of the first row and panel, and floats from there to the next row's and the next panel's.
    pub out: *mut f32,
    pub out_stride: usize,
    pub out_panel_stride: usize,
    /// Adds to what is in `out`.
    pub accumulate: bool,
}

impl FloatArgs {
    /// The same from another panel and row on.
    #[inline(always)]
    pub unsafe fn at(&self, panel: usize, row: usize) -> Self {
        Self {
            panels: self.panels.add(panel * self.panel_stride),
            rows: self.rows.add(row * self.stride),
            out: self.out.add(row * self.out_stride + panel * self.out_panel_stride),
            ..*self
        }
    }
}

/// Adds the products of one k. A function and not a closure, which would not be inlined across target features.
#[inline(always)]
unsafe fn add_column<S: Simd, E: Element, const R: usize, const T: usize>(
    args: &FloatArgs,
    sums: &mut [[S::F; R]; T],
    k: usize,
) {
    let mut lanes = [S::splat(0.0); R];
    for r in 0..R {
        lanes[r] = E::load::<S>(args.panels.add(r * args.panel_stride + k * E::BYTES * PANEL_ROWS));
    }
    for t in 0..T {
        let value = S::splat(*args.rows.add(t * args.stride + k));
        for r in 0..R {
            sums[t][r] = S::fma(lanes[r], value, sums[t][r]);
        }
    }
}

/// `R` panels times `T` rows, at most [`CHUNK`] columns.
#[inline(always)]
unsafe fn tile<S: Simd, E: Element, const R: usize, const T: usize>(args: &FloatArgs) {
    let mut even = [[S::splat(0.0); R]; T];
    let mut odd = [[S::splat(0.0); R]; T];
    for k in 0..args.cols / 2 {
        add_column::<S, E, R, T>(args, &mut even, 2 * k);
        add_column::<S, E, R, T>(args, &mut odd, 2 * k + 1);
    }
    if args.cols % 2 == 1 {
        add_column::<S, E, R, T>(args, &mut even, args.cols - 1);
    }
    for t in 0..T {
        for r in 0..R {
            let out = args.out.add(t * args.out_stride + r * args.out_panel_stride);
            let mut sum = S::add(even[t][r], odd[t][r]);
            if args.accumulate {
                sum = S::add(S::load(out), sum);
            }
            S::store(out, sum);
        }
    }
}

/// All rows with the `R` panels at `panel`.
#[inline(always)]
unsafe fn rows_of<S: Simd, E: Element, const R: usize>(args: &FloatArgs, panel: usize) {
    let mut row = 0;
    while row < args.num_rows {
        let left = args.num_rows - row;
        let args = args.at(panel, row);
        row += if R == 1 && S::TILE >= 8 && left >= 8 {
            tile::<S, E, R, 8>(&args);
            8
        } else if R < 4 && left >= 4 {
            tile::<S, E, R, 4>(&args);
            4
        } else if (R == 1 || R == 4) && left >= 3 {
            tile::<S, E, R, 3>(&args);
            3
        } else if R == 1 && left >= 2 {
            tile::<S, E, R, 2>(&args);
            2
        } else {
            tile::<S, E, R, 1>(&args);
            1
        };
    }
}

/// Multiplies panels of f32, at most [`CHUNK`] columns.
pub type ChunkKernel = unsafe fn(&FloatArgs);

/// The [`ChunkKernel`].
#[inline(always)]
pub unsafe fn multiply_chunk<S: Simd>(args: &FloatArgs) {
    let mut panel = 0;
    while panel < args.num_panels {
        let left = args.num_panels - panel;
        panel += if S::WIDE && left == 4 {
            rows_of::<S, ElementF32, 4>(args, panel);
            4
        } else if S::WIDE && left >= 3 {
            rows_of::<S, ElementF32, 3>(args, panel);
            3
        } else if S::WIDE && left >= 2 {
            rows_of::<S, ElementF32, 2>(args, panel);
            2
        } else {
            rows_of::<S, ElementF32, 1>(args, panel);
            1
        };
    }
}

impl FloatArgs {
    /// The columns of one chunk of panels whose values have `bytes` bytes.
    #[inline(always)]
    unsafe fn chunk(&self, first: usize, bytes: usize) -> Self {
        Self {
            panels: self.panels.add(first * bytes * PANEL_ROWS),
            cols: CHUNK.min(self.cols - first),
            rows: self.rows.add(first),
            accumulate: first > 0,
            ..*self
        }
    }
}

/// Panels of f32.
#[inline(always)]
pub unsafe fn multiply_opened(args: &FloatArgs, multiply: ChunkKernel) {
    for first in (0..args.cols).step_by(CHUNK) {
        multiply(&args.chunk(first, 4));
    }
}

/// Panels straight from their format: for few rows.
#[inline(always)]
pub unsafe fn multiply_few<S: Simd, E: Element>(args: &FloatArgs) {
    for first in (0..args.cols).step_by(CHUNK) {
        let chunk = args.chunk(first, E::BYTES);
        for panel in 0..args.num_panels {
            rows_of::<S, E, 1>(&chunk, panel);
        }
    }
}

/// Copies `count` values as f32; a multiple of 16.
#[inline(always)]
pub unsafe fn open<S: Simd, E: Element>(from: *const u8, count: usize, to: *mut f32) {
    for i in (0..count).step_by(16) {
        S::store(to.add(i), E::load::<S>(from.add(i * E::BYTES)));
    }
}

/// Some panels opened to f32.
#[repr(align(64))]
struct Opened([MaybeUninit<f32>; MAX_PANELS * CHUNK * PANEL_ROWS]);

/// The [`PanelKernel`](super::gemm::PanelKernel) of a float format.
#[inline(always)]
pub unsafe fn float_panels<S: Simd, E: Element>(
    args: &PanelArgs,
    first: usize,
    count: usize,
    out: *mut f32,
    multiply: ChunkKernel,
) {
    let all = FloatArgs {
        panels: args.quants,
        panel_stride: args.quants_stride,
        num_panels: args.num_panels,
        cols: args.cols,
        rows: args.floats.add(first * args.stride),
        stride: args.stride,
        num_rows: count,
        out,
        out_stride: PANEL_ROWS,
        out_panel_stride: args.out_stride,
        accumulate: false,
    };
    if count < TILED_TOKENS {
        return multiply_few::<S, E>(&all);
    }
    if E::BYTES == 4 {
        return multiply_opened(&all, multiply);
    }
    #[allow(clippy::large_stack_arrays)]
    // It must stay in the first-level cache, and a step allocates nothing.
    let mut opened = Opened([MaybeUninit::uninit(); MAX_PANELS * CHUNK * PANEL_ROWS]);
    let opened = opened.0.as_mut_ptr().cast::<f32>();
    for first in (0..args.cols).step_by(CHUNK) {
        let chunk = all.chunk(first, E::BYTES);
        for panel in 0..args.num_panels {
            let from = chunk.panels.add(panel * args.quants_stride);
            open::<S, E>(from, chunk.cols * PANEL_ROWS, opened.add(panel * CHUNK * PANEL_ROWS));
        }
        let panel_stride = CHUNK * PANEL_ROWS * 4;
        multiply(&FloatArgs { panels: opened.cast_const().cast(), panel_stride, ..chunk });
    }
}
