//! What is done to whole rows: normalisation, quantisation, epilogues of products, rotation of heads.
//!
//! Each row's result depends on that row alone.
//!
//! # Safety
//! As in [`super::simd`]; row pointers are valid for the lengths given.
#![allow(unsafe_op_in_unsafe_fn)]

use baton_backend::{Activation, RopeStyle};

use super::attention::PANEL_KEYS;
use super::math::{activate_gate, softcap};
use super::simd::Simd;
use crate::quantize::ActivationBlock;
use crate::weights::formats::{BLOCK, PANEL_ROWS};

/// A normalisation with its vectors at hand. Vectors are padded to whole vectors of 16.
#[derive(Clone, Copy, Debug)]
pub struct NormArgs {
    pub weight: *const f32,
    /// Null without.
    pub bias: *const f32,
    /// Subtract the mean.
    pub centred: bool,
    pub eps: f32,
}

impl NormArgs {
    /// The same with weights from the `count`-th on.
    ///
    /// # Safety
    /// There are more weights than that.
    pub unsafe fn skip(&self, count: usize) -> Self {
        // SAFETY: promised by the caller; a bias is as long as the weights.
        unsafe {
            Self {
                weight: self.weight.add(count),
                bias: if self.bias.is_null() { self.bias } else { self.bias.add(count) },
                centred: self.centred,
                eps: self.eps,
            }
        }
    }
}

#[inline(always)]
unsafe fn load_tail<S: Simd>(from: *const f32, len: usize) -> S::F {
    let mut buffer = [0.0f32; 16];
    std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), len);
    S::load(buffer.as_ptr())
}

#[inline(always)]
unsafe fn store_tail<S: Simd>(to: *mut f32, x: S::F, len: usize) {
    let mut buffer = [0.0f32; 16];
    S::store(buffer.as_mut_ptr(), x);
    std::ptr::copy_nonoverlapping(buffer.as_ptr(), to, len);
}

/// Up to 16 values; those past `len` are 0.
#[inline(always)]
pub(super) unsafe fn load_some<S: Simd>(from: *const f32, len: usize) -> S::F {
    if len >= 16 { S::load(from) } else { load_tail::<S>(from, len) }
}

#[inline(always)]
unsafe fn store_some<S: Simd>(to: *mut f32, x: S::F, len: usize) {
    if len >= 16 { S::store(to, x) } else { store_tail::<S>(to, x, len) }
}

/// Mean (0 unless centred) and the factor `1 / sqrt(variance + eps)`.
#[inline(always)]
unsafe fn statistics<S: Simd>(x: *const f32, len: usize, norm: &NormArgs) -> (f32, f32) {
    let mut mean = 0.0;
    if norm.centred {
        let mut sum = S::splat(0.0);
        for i in (0..len).step_by(16) {
            sum = S::add(sum, load_some::<S>(x.add(i), len - i));
        }
        mean = S::sum(sum) / len as f32;
    }
    let mut squares = S::splat(0.0);
    let mut others = S::splat(0.0);
    let whole = len / 16 * 16;
    for i in (0..len / 32 * 32).step_by(32) {
        let value = S::sub(S::load(x.add(i)), S::splat(mean));
        squares = S::fma(value, value, squares);
        let value = S::sub(S::load(x.add(i + 16)), S::splat(mean));
        others = S::fma(value, value, others);
    }
    if !whole.is_multiple_of(32) {
        let value = S::sub(S::load(x.add(whole - 16)), S::splat(mean));
        squares = S::fma(value, value, squares);
    }
    let mut sum = S::sum(S::add(squares, others));
    for i in whole..len {
        sum += (*x.add(i) - mean) * (*x.add(i) - mean);
    }
    (mean, 1.0 / (sum / len as f32 + norm.eps).sqrt())
}

/// `out = norm(x)`, or `out += norm(x)`. `out` may be `x`.
#[inline(always)]
pub unsafe fn norm_row<S: Simd>(x: *const f32, len: usize, norm: &NormArgs, out: *mut f32, accumulate: bool) {
    let (mean, factor) = statistics::<S>(x, len, norm);
    for i in (0..len).step_by(16) {
        let left = len - i;
        let centred = S::sub(load_some::<S>(x.add(i), left), S::splat(mean));
        let mut value = S::mul(S::mul(centred, S::splat(factor)), S::load(norm.weight.add(i)));
        if !norm.bias.is_null() {
            value = S::add(value, S::load(norm.bias.add(i)));
        }
        if accumulate {
            value = S::add(load_some::<S>(out.add(i), left), value);
        }
        store_some::<S>(out.add(i), value, left);
    }
}

/// Blocks that are quantised together: their scales are one vector.
const BATCH: usize = 16;

/// Quantises a row of whole blocks; its blocks lie `lanes` apart.
#[inline(always)]
pub unsafe fn quantize_row<S: Simd>(x: *const f32, len: usize, blocks: *mut ActivationBlock, lanes: usize) {
    let count = len / BLOCK;
    for first in (0..count).step_by(BATCH) {
        // Rows are too short for the processor to see the stream by itself.
        for line in (((first + BATCH) * BLOCK).min(len)..((first + 2 * BATCH) * BLOCK).min(len)).step_by(16) {
            S::prefetch(x.add(line).cast());
        }
        let (x, blocks) = (x.add(first * BLOCK), blocks.add(first * lanes));
        quantize_blocks::<S>(x, BATCH.min(count - first), blocks, lanes);
    }
}

/// At most [`BATCH`] blocks.
#[inline(always)]
unsafe fn quantize_blocks<S: Simd>(x: *const f32, count: usize, blocks: *mut ActivationBlock, lanes: usize) {
    let mut sizes = [S::splat(0.0); BATCH];
    for (i, size) in sizes[..count].iter_mut().enumerate() {
        S::prefetch_write(blocks.add(i * lanes).cast());
        let (low, high) = (S::load(x.add(i * BLOCK)), S::load(x.add(i * BLOCK + 16)));
        *size = S::max(S::abs(low), S::abs(high));
    }
    let largest = S::maxima(&sizes);
    let mut halves = [0u16; BATCH];
    S::store_f16(halves.as_mut_ptr(), S::div(largest, S::splat(127.0)));
    let mut scales = [0.0f32; BATCH];
    S::store(scales.as_mut_ptr(), S::load_f16(halves.as_ptr()));
    let mut inverses = [0.0f32; BATCH];
    // Zero, and whatever is no number, stay zero.
    let inverse = S::zero_below(S::div(S::splat(127.0), largest), largest, f32::from_bits(1));
    S::store(inverses.as_mut_ptr(), inverse);
    for i in 0..count {
        let inverse = S::splat(inverses[i]);
        let (low, high) = (S::load(x.add(i * BLOCK)), S::load(x.add(i * BLOCK + 16)));
        let (low, high) = (S::to_int(S::mul(low, inverse)), S::to_int(S::mul(high, inverse)));
        S::store_block(blocks.add(i * lanes), low, high, scales[i]);
    }
}

/// Where the product of a panel goes.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue {
    /// Of the panel's first row; null without.
    pub bias: *const f32,
    /// Column of the panel's first row in the first token's output row.
    pub out: *mut f32,
    pub stride: usize,
    pub num_rows: usize,
    pub accumulate: bool,
    pub softcap: Option<f32>,
}

/// Finishes a panel: `tile` is `[count, 16]`.
#[inline(always)]
pub unsafe fn finish_panel<S: Simd>(epilogue: &Epilogue, tile: *const f32, count: usize) {
    let Epilogue { bias, out, stride, num_rows, accumulate, softcap: cap } = *epilogue;
    let bias = if bias.is_null() { S::splat(0.0) } else { load_some::<S>(bias, num_rows) };
    for t in 0..count {
        let out = out.add(t * stride);
        let mut value = S::add(S::load(tile.add(t * PANEL_ROWS)), bias);
        if let Some(cap) = cap {
            value = softcap::<S>(value, cap);
        }
        if accumulate {
            value = S::add(load_some::<S>(out, num_rows), value);
        }
        store_some::<S>(out, value, num_rows);
    }
}

/// Finishes a pair of panels: `out = activation(gate) * up`.
#[inline(always)]
pub unsafe fn finish_gated<S: Simd>(
    epilogue: &Epilogue,
    up_bias: *const f32,
    activation: Activation,
    gate: *const f32,
    up: *const f32,
    count: usize,
) {
    let Epilogue { bias, out, stride, num_rows, .. } = *epilogue;
    let load_bias =
        |bias: *const f32| if bias.is_null() { S::splat(0.0) } else { load_some::<S>(bias, num_rows) };
    let (gate_bias, up_bias) = (load_bias(bias), load_bias(up_bias));
    for t in 0..count {
        let gate = S::add(S::load(gate.add(t * PANEL_ROWS)), gate_bias);
        let up = S::add(S::load(up.add(t * PANEL_ROWS)), up_bias);
        store_some::<S>(out.add(t * stride), activate_gate::<S>(activation, gate, up), num_rows);
    }
}

/// Rotates one head in place; `cos` and `sin` have `half` entries.
#[inline(always)]
pub unsafe fn rotate_head<S: Simd>(
    x: *mut f32,
    cos: *const f32,
    sin: *const f32,
    half: usize,
    style: RopeStyle,
) {
    match style {
        RopeStyle::Half => {
            for i in (0..half).step_by(16) {
                let left = half - i;
                let (low, high) = (x.add(i), x.add(half + i));
                let (a, b) = (load_some::<S>(low, left), load_some::<S>(high, left));
                let (c, s) = (load_some::<S>(cos.add(i), left), load_some::<S>(sin.add(i), left));
                store_some::<S>(low, S::sub(S::mul(a, c), S::mul(b, s)), left);
                store_some::<S>(high, S::add(S::mul(a, s), S::mul(b, c)), left);
            }
        }
        RopeStyle::Interleaved => {
            for i in 0..half {
                let (a, b) = (*x.add(2 * i), *x.add(2 * i + 1));
                let (c, s) = (*cos.add(i), *sin.add(i));
                *x.add(2 * i) = a * c - b * s;
                *x.add(2 * i + 1) = a * s + b * c;
            }
        }
    }
}

/// `out = a * factor`, for any length.
#[inline(always)]
pub unsafe fn scale_row<S: Simd>(x: *const f32, len: usize, factor: f32, out: *mut f32) {
    let (factor, whole) = (S::splat(factor), len / 16 * 16);
    for i in (0..whole).step_by(16) {
        S::store(out.add(i), S::mul(S::load(x.add(i)), factor));
    }
    if whole < len {
        let value = S::mul(load_tail::<S>(x.add(whole), len - whole), factor);
        store_tail::<S>(out.add(whole), value, len - whole);
    }
}

/// Where the dimensions of a head lie in the cache, from its first on.
#[derive(Clone, Copy, Debug)]
pub enum Spread {
    /// So many values apart.
    Even(usize),
    /// In pairs that are as far apart as two keys of a panel.
    Pairs,
}

impl Spread {
    #[inline(always)]
    pub fn place(self, dim: usize) -> usize {
        match self {
            Self::Even(stride) => dim * stride,
            Self::Pairs => dim / 2 * 2 * PANEL_KEYS + dim % 2,
        }
    }
}

/// Writes one head's key or value as f16.
#[inline(always)]
pub unsafe fn write_f16<S: Simd>(x: *const f32, len: usize, out: *mut u16, spread: Spread) {
    let mut halves = [0u16; 16];
    for i in (0..len).step_by(16) {
        let left = (len - i).min(16);
        S::store_f16(halves.as_mut_ptr(), load_some::<S>(x.add(i), left));
        match spread {
            Spread::Even(1) => std::ptr::copy_nonoverlapping(halves.as_ptr(), out.add(i), left),
            _ => {
                for (j, &half) in halves[..left].iter().enumerate() {
                    *out.add(spread.place(i + j)) = half;
                }
            }
        }
    }
}
