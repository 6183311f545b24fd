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

/// Opened panels and the tokens of one tile.
#[derive(Clone, Copy)]
struct TileArgs {
    quants: *const u8,
    quants_stride: usize,
    /// `[panels][MAX_BLOCKS]`.
    scales: *const f32,
    num_blocks: usize,
    blocks: *const ActivationBlock,
    lanes: usize,
    out: *mut f32,
    out_stride: usize,
    /// The totals start from what is in `out`.
    goes_on: bool,
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
unsafe fn tile<S: Simd, Q: Quant, const R: usize, const T: usize>(args: &TileArgs) {
    let mut totals = [[S::splat(0.0); R]; T];
    if args.goes_on {
        for t in 0..T {
            for r in 0..R {
                totals[t][r] = S::load(args.out.add(t * PANEL_ROWS + r * args.out_stride));
            }
        }
    }
    let (mut quants, mut scales, mut blocks) = (args.quants, args.scales, args.blocks);
    for _ in 0..args.num_blocks {
        for half in 0..halves(Q::SCALES) {
            add_half::<S, Q, R, T>(&mut totals, quants, args.quants_stride, scales, blocks, half);
        }
        quants = quants.add(BLOCK_BYTES);
        scales = scales.add(SCALE_FLOATS);
        blocks = blocks.add(args.lanes);
    }
    for t in 0..T {
        for r in 0..R {
            S::store(args.out.add(t * PANEL_ROWS + r * args.out_stride), totals[t][r]);
        }
    }
}

/// Adds a block, or one half of it where halves have scales of their own.
#[inline(always)]
unsafe fn add_half<S: Simd, Q: Quant, const R: usize, const T: usize>(
    totals: &mut [[S::F; R]; T],
    quants: *const u8,
    quants_stride: usize,
    scales: *const f32,
    blocks: *const ActivationBlock,
    half: usize,
) {
    let whole = halves(Q::SCALES) == 1;
    let mut sums = [[S::splat_int(0); R]; T];
    if let Some(shift) = Q::OFFSET_SHIFT {
        for t in 0..T {
            let block = blocks.add(t);
            // Starting at minus offset · Σa takes the offset out of every quant.
            let negative = if whole { (*block).negative_sum } else { (*block).negative_sums[half] };
            sums[t] = [S::shift_left(S::splat_int(negative), shift); R];
        }
    }
    let activations = (&raw const (*blocks).quants).cast::<i8>().add(half * 16);
    let quants = quants.add(half * 256);
    dot::<S, Q, R, T>(&mut sums, quants, quants_stride, activations);
    if whole {
        dot::<S, Q, R, T>(&mut sums, quants.add(256), quants_stride, activations.add(16));
    }
    let vector = |r: usize, i: usize| S::load(scales.add(r * MAX_BLOCKS * SCALE_FLOATS + i * PANEL_ROWS));
    let mut scale = [S::splat(0.0); R];
    let mut min = [S::splat(0.0); R];
    for r in 0..R {
        scale[r] = vector(r, half);
        if Q::OFFSET_SHIFT.is_none() {
            min[r] = vector(r, 2 + half);
        }
    }
    for t in 0..T {
        let block = blocks.add(t);
        let d = S::splat((*block).d);
        let sum = S::splat(if whole { (*block).scaled_sum } else { (*block).scaled_sums[half] });
        for r in 0..R {
            totals[t][r] = S::fma(S::to_float(sums[t][r]), S::mul(scale[r], d), totals[t][r]);
            if Q::OFFSET_SHIFT.is_none() {
                totals[t][r] = S::fma(min[r], sum, totals[t][r]);
            }
        }
    }
}

#[inline(always)]
unsafe fn dot<S: Simd, Q: Quant, const R: usize, const T: usize>(
    sums: &mut [[S::I; R]; T],
    quants: *const u8,
    quants_stride: usize,
    activations: *const i8,
) {
    let stride = size_of::<ActivationBlock>();
    match Q::BITS {
        0..=5 => S::dot_tile::<5, R, T>(sums, quants, quants_stride, activations, stride),
        6..=7 => S::dot_tile::<7, R, T>(sums, quants, quants_stride, activations, stride),
        _ => S::dot_tile::<8, R, T>(sums, quants, quants_stride, activations, stride),
    }
}

/// All tokens with `R` panels.
#[inline(always)]
unsafe fn tokens<S: Simd, Q: Quant, const R: usize>(
    args: &TileArgs,
    row_blocks: usize,
    first: usize,
    count: usize,
) {
    let mut done = 0;
    while done < count {
        let token = first + done;
        let (group, lane) = (token / LANES, token % LANES);
        let tile_args = TileArgs {
            blocks: args.blocks.add(group * args.lanes * row_blocks + lane),
            out: args.out.add(done * PANEL_ROWS),
            ..*args
        };
        let left = (count - done).min(LANES - lane);
        done += if S::QUANT_TILE.1 >= 8 && left >= 8 {
            tile::<S, Q, R, 8>(&tile_args);
            8
        } else if left >= 4 {
            tile::<S, Q, R, 4>(&tile_args);
            4
        } else if left >= 2 {
            tile::<S, Q, R, 2>(&tile_args);
            2
        } else {
            tile::<S, Q, R, 1>(&tile_args);
            1
        };
    }
}

/// The [`PanelKernel`](super::gemm::PanelKernel) of a quantised format for many tokens.
#[inline(always)]
pub unsafe fn quant_panels<S: Simd, Q: Quant>(args: &PanelArgs, first: usize, count: usize, out: *mut f32) {
    let mut scratch: MaybeUninit<Opened> = MaybeUninit::uninit();
    let quants = (&raw mut (*scratch.as_mut_ptr()).quants).cast::<u8>();
    let scales = (&raw mut (*scratch.as_mut_ptr()).scales).cast::<f32>();
    let row_blocks = args.cols / BLOCK;
    let depth = if row_blocks <= MAX_BLOCKS { row_blocks } else { DEPTH };
    for first_block in (0..row_blocks).step_by(depth.max(1)) {
        let num_blocks = depth.min(row_blocks - first_block);
        for panel in 0..args.num_panels {
            let quants = quants.add(panel * MAX_BLOCKS * BLOCK_BYTES);
            let scales = scales.add(panel * MAX_BLOCKS * SCALE_FLOATS);
            open::<S, Q>(args, panel, first_block, num_blocks, quants, scales);
        }
        let (quants, quants_stride) = if is_open::<Q>() {
            (args.quants.add(first_block * BLOCK_BYTES), args.quants_stride)
        } else {
            (quants.cast_const(), MAX_BLOCKS * BLOCK_BYTES)
        };
        let mut panel = 0;
        while panel < args.num_panels {
            let left = args.num_panels - panel;
            let tile_args = TileArgs {
                quants: quants.add(panel * quants_stride),
                quants_stride,
                scales: scales.add(panel * MAX_BLOCKS * SCALE_FLOATS).cast_const(),
                num_blocks,
                blocks: args.blocks.add(first_block * args.lanes),
                lanes: args.lanes,
                out: out.add(panel * args.out_stride),
                out_stride: args.out_stride,
                goes_on: first_block > 0,
            };
            panel += if S::QUANT_TILE.0 >= 3 && left >= 3 {
                tokens::<S, Q, 3>(&tile_args, row_blocks, first, count);
                3
            } else if S::QUANT_TILE.0 >= 2 && left >= 2 {
                tokens::<S, Q, 2>(&tile_args, row_blocks, first, count);
                2
            } else {
                tokens::<S, Q, 1>(&tile_args, row_blocks, first, count);
                1
            };
        }
    }
}
