//! The product of quantised panels with many tokens.
//!
//! Some panels are opened (quants to bytes, scales to f32) into a scratch that stays in the first-level cache and is
//! then multiplied with all tokens, a register tile of panels × tokens at a time: a vector load costs as much as a dot
//! product on these machines, so every loaded line of weights and every broadcast activation is used several times.
//! The order of additions for each (row, token) is that of [`super::gemm`], to the last bit.
//!
//! # Safety
//! As in [`super::gemm`].
#![allow(unsafe_op_in_unsafe_fn)]

use std::mem::MaybeUninit;

use super::gemm::{MAX_PANELS, PanelArgs, block_scales, unpack};
use super::simd::Simd;
use crate::quantize::{ActivationBlock, LANES};
use crate::weights::formats::{BLOCK, PANEL_ROWS, Planes, Quant, Scales};

/// The most blocks along k that are opened at once.
const MAX_BLOCKS: usize = 20;
/// Blocks that are opened at once in longer rows: whole super-blocks.
const DEPTH: usize = 16;
/// Bytes of an opened block.
const BLOCK_BYTES: usize = BLOCK * PANEL_ROWS;
/// Vectors of f32 of an opened block: two scales, two mins.
const SCALE_VECTORS: usize = 4;
const SCALE_FLOATS: usize = SCALE_VECTORS * PANEL_ROWS;

#[repr(align(64))]
struct Opened {
    quants: [MaybeUninit<u8>; MAX_PANELS * MAX_BLOCKS * BLOCK_BYTES],
    scales: [MaybeUninit<f32>; MAX_PANELS * MAX_BLOCKS * SCALE_FLOATS],
}

/// Opened panels and the tokens they are multiplied with.
#[derive(Clone, Copy, Debug)]
pub struct TileArgs {
    quants: *const u8,
    quants_stride: usize,
    num_panels: usize,
    /// `[panels][MAX_BLOCKS]`.
    scales: *const f32,
    /// Two to this power is taken from every quant, in formats without mins.
    offset_shift: u32,
    num_blocks: usize,
    /// The first opened block of the first token; a token has `row_blocks` of them, `lanes` tokens are interleaved.
    blocks: *const ActivationBlock,
    row_blocks: usize,
    lanes: usize,
    first: usize,
    count: usize,
    out: *mut f32,
    out_stride: usize,
    /// The totals start from what is in `out`.
    goes_on: bool,
}

/// Multiplies opened panels of one class of formats with tokens. It may work on up to three tokens past the last.
pub type TileKernel = unsafe fn(&TileArgs);

/// What the arithmetic on opened panels depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// One scale and one min a block; quants below 32.
    WithMin,
    /// One scale a block; quants below 32, or of eight bits.
    Plain5,
    Plain8,
    /// A scale and a min for each half of a block; quants below 32.
    HalvesWithMin,
    /// A scale for each half; quants below 32, or below 128.
    Halves5,
    Halves7,
}

impl Class {
    pub const fn of<Q: Quant>() -> Self {
        match (halves(Q::SCALES), Q::OFFSET_SHIFT, Q::BITS) {
            (1, None, _) => Self::WithMin,
            (1, Some(_), 0..=5) => Self::Plain5,
            (1, Some(_), _) => Self::Plain8,
            (_, None, _) => Self::HalvesWithMin,
            (_, Some(_), 0..=5) => Self::Halves5,
            (_, Some(_), _) => Self::Halves7,
        }
    }
}

/// Halves of a block that have scales of their own.
const fn halves(scales: Scales) -> usize {
    match scales {
        Scales::Plain | Scales::WithMin | Scales::SubMin32 => 1,
        Scales::SubSigned16 | Scales::SubNibble16 => 2,
    }
}

/// Opens blocks `first..first + count` of one panel.
#[inline(always)]
unsafe fn open<S: Simd, Q: Quant>(
    args: &PanelArgs,
    panel: usize,
    first: usize,
    count: usize,
    quants: *mut u8,
    scales: *mut f32,
) {
    let per_header = Q::SCALES.blocks_per_header();
    let from = args.quants.add(panel * args.quants_stride);
    let headers = args.scales.add(panel * args.scales_stride);
    for i in 0..count {
        let block = first + i;
        if !is_open::<Q>() {
            let groups = unpack::<S, Q>(from.add(block * Q::PLANES.bytes()));
            for g in 0..8 {
                S::store_bytes(quants.add(i * BLOCK_BYTES + g * 64), groups[g]);
            }
        }
        let header = headers.add(block / per_header * Q::SCALES.group_bytes());
        let opened = block_scales::<S, Q>(header, block % per_header);
        let to = scales.add(i * SCALE_FLOATS);
        for half in 0..halves(Q::SCALES) {
            S::store(to.add(half * PANEL_ROWS), opened.scale[half]);
            if Q::OFFSET_SHIFT.is_none() {
                S::store(to.add((2 + half) * PANEL_ROWS), opened.min[half]);
            }
        }
    }
}

/// The packed quants are bytes already.
const fn is_open<Q: Quant>() -> bool {
    matches!(Q::PLANES, Planes::Eight) && !Q::LOOKUP
}

/// `R` panels times `T` tokens that lie side by side.
#[inline(always)]
unsafe fn tile<
    S: Simd,
    const HALVES: usize,
    const MINS: bool,
    const BITS: u32,
    const R: usize,
    const T: usize,
>(
    args: &TileArgs,
    blocks: *const ActivationBlock,
    out: *mut f32,
) {
    let mut totals = [[S::splat(0.0); R]; T];
    if args.goes_on {
        for t in 0..T {
            for r in 0..R {
                totals[t][r] = S::load(out.add(t * PANEL_ROWS + r * args.out_stride));
            }
        }
    }
    let (mut quants, mut scales, mut blocks) = (args.quants, args.scales, blocks);
    for _ in 0..args.num_blocks {
        for half in 0..HALVES {
            add::<S, HALVES, MINS, BITS, R, T>(args, &mut totals, quants, scales, blocks, half);
        }
        quants = quants.add(BLOCK_BYTES);
        scales = scales.add(SCALE_FLOATS);
        blocks = blocks.add(args.lanes);
    }
    for t in 0..T {
        for r in 0..R {
            S::store(out.add(t * PANEL_ROWS + r * args.out_stride), totals[t][r]);
        }
    }
}

/// Adds a block, or one half of it where halves have scales of their own.
#[inline(always)]
unsafe fn add<
    S: Simd,
    const HALVES: usize,
    const MINS: bool,
    const BITS: u32,
    const R: usize,
    const T: usize,
>(
    args: &TileArgs,
    totals: &mut [[S::F; R]; T],
    quants: *const u8,
    scales: *const f32,
    blocks: *const ActivationBlock,
    half: usize,
) {
    let whole = HALVES == 1;
    let mut sums = [[S::splat_int(0); R]; T];
    if !MINS {
        for t in 0..T {
            let block = blocks.add(t);
            // Starting at minus offset · Σa takes the offset out of every quant.
            let negative = if whole { (*block).negative_sum } else { (*block).negative_sums[half] };
            sums[t] = [S::shift_left(S::splat_int(negative), args.offset_shift); R];
        }
    }
    let activations = (&raw const (*blocks).quants).cast::<i8>().add(half * 16);
    let (quants, stride) = (quants.add(half * 256), args.quants_stride);
    let token_stride = size_of::<ActivationBlock>();
    if whole {
        S::dot_block::<BITS, R, T>(&mut sums, quants, stride, activations, token_stride);
    } else {
        S::dot_tile::<BITS, R, T>(&mut sums, quants, stride, activations, token_stride);
    }
    let mut scale = [S::splat(0.0); R];
    let mut min = [S::splat(0.0); R];
    for r in 0..R {
        let vectors = scales.add(r * MAX_BLOCKS * SCALE_FLOATS);
        scale[r] = S::load(vectors.add(half * PANEL_ROWS));
        if MINS {
            min[r] = S::load(vectors.add((2 + half) * PANEL_ROWS));
        }
    }
    for t in 0..T {
        let block = blocks.add(t);
        let d = S::splat((*block).d);
        let sum = S::splat(if whole { (*block).scaled_sum } else { (*block).scaled_sums[half] });
        for r in 0..R {
            totals[t][r] = S::fma(S::to_float(sums[t][r]), S::mul(scale[r], d), totals[t][r]);
            if MINS {
                totals[t][r] = S::fma(min[r], sum, totals[t][r]);
            }
        }
    }
}

/// All tokens with the `R` panels at `panel`.
#[inline(always)]
unsafe fn tokens<S: Simd, const HALVES: usize, const MINS: bool, const BITS: u32, const R: usize>(
    args: &TileArgs,
    panel: usize,
) {
    let args = &TileArgs {
        quants: args.quants.add(panel * args.quants_stride),
        scales: args.scales.add(panel * MAX_BLOCKS * SCALE_FLOATS),
        out: args.out.add(panel * args.out_stride),
        ..*args
    };
    let mut done = 0;
    while done < args.count {
        let token = args.first + done;
        let (group, lane) = (token / LANES, token % LANES);
        let blocks = args.blocks.add(group * args.lanes * args.row_blocks + lane);
        let out = args.out.add(done * PANEL_ROWS);
        if S::QUANT_TILE.1 == 8 && args.count - done > 4 {
            tile::<S, HALVES, MINS, BITS, R, 8>(args, blocks, out);
            done += 8;
        } else {
            tile::<S, HALVES, MINS, BITS, R, 4>(args, blocks, out);
            done += 4;
        }
    }
}

/// A [`TileKernel`]. `args.first` is a multiple of four.
#[inline(always)]
pub unsafe fn multiply<S: Simd, const HALVES: usize, const MINS: bool, const BITS: u32>(args: &TileArgs) {
    let mut panel = 0;
    while panel < args.num_panels {
        let left = args.num_panels - panel;
        panel += if S::QUANT_TILE.0 >= 3 && left >= 3 {
            tokens::<S, HALVES, MINS, BITS, 3>(args, panel);
            3
        } else if S::QUANT_TILE.0 >= 2 && left >= 2 {
            tokens::<S, HALVES, MINS, BITS, 2>(args, panel);
            2
        } else {
            tokens::<S, HALVES, MINS, BITS, 1>(args, panel);
            1
        };
    }
}

/// The [`PanelKernel`](super::gemm::PanelKernel) of a quantised format for many tokens; `multiply` is the kernel of its
/// class. `out` has room for whole groups of [`LANES`] tokens.
#[inline(always)]
pub unsafe fn quant_panels<S: Simd, Q: Quant>(
    args: &PanelArgs,
    first: usize,
    count: usize,
    out: *mut f32,
    multiply: TileKernel,
) {
    let mut scratch: MaybeUninit<Opened> = MaybeUninit::uninit();
    let opened = (&raw mut (*scratch.as_mut_ptr()).quants).cast::<u8>();
    let scales = (&raw mut (*scratch.as_mut_ptr()).scales).cast::<f32>();
    let row_blocks = args.cols / BLOCK;
    let depth = if row_blocks <= MAX_BLOCKS { row_blocks } else { DEPTH };
    S::begin_blocks();
    for first_block in (0..row_blocks).step_by(depth.max(1)) {
        let num_blocks = depth.min(row_blocks - first_block);
        for panel in 0..args.num_panels {
            let quants = opened.add(panel * MAX_BLOCKS * BLOCK_BYTES);
            let scales = scales.add(panel * MAX_BLOCKS * SCALE_FLOATS);
            open::<S, Q>(args, panel, first_block, num_blocks, quants, scales);
        }
        let (quants, quants_stride) = if is_open::<Q>() {
            (args.quants.add(first_block * BLOCK_BYTES), args.quants_stride)
        } else {
            (opened.cast_const(), MAX_BLOCKS * BLOCK_BYTES)
        };
        multiply(&TileArgs {
            quants,
            quants_stride,
            num_panels: args.num_panels,
            scales,
            offset_shift: Q::OFFSET_SHIFT.unwrap_or(0),
            num_blocks,
            blocks: args.blocks.add(first_block * args.lanes),
            row_blocks,
            lanes: args.lanes,
            first,
            count,
            out,
            out_stride: args.out_stride,
            goes_on: first_block > 0,
        });
    }
    S::end_blocks();
}
