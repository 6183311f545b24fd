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
use crate::quantize::{ActivationBlock, LANES, START, START_BITS, START_SHIFT};
use crate::weights::formats::{BLOCK, PANEL_ROWS, Planes, Quant, Scales};

/// The most blocks along k that are opened at once.
const MAX_BLOCKS: usize = 20;
/// Blocks that are opened at once in longer rows: whole super-blocks.
const DEPTH: usize = 16;
/// Bytes of an opened block.
const BLOCK_BYTES: usize = BLOCK * PANEL_ROWS;
/// The most vectors of f32 of an opened block: see [`scale_floats`].
const MAX_SCALE_VECTORS: usize = 6;

#[repr(align(64))]
struct Opened {
    quants: [MaybeUninit<u8>; MAX_PANELS * MAX_BLOCKS * BLOCK_BYTES],
    scales: [MaybeUninit<f32>; MAX_PANELS * MAX_BLOCKS * MAX_SCALE_VECTORS * PANEL_ROWS],
}

/// Floats of the scales of an opened block: for each half a scale, its product with −[`START`] where sums start there,
/// and a min where there are mins.
const fn scale_floats<S: Simd>(halves: usize, mins: bool) -> usize {
    halves * (1 + S::BIASED as usize + mins as usize) * PANEL_ROWS
}

/// Memory that will be wanted after this product: it is asked for while the product keeps the processor busy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    from: *const u8,
    bytes: usize,
}

impl Ahead {
    /// The part of a walk over `whole` bytes of the next panels that belongs to `section` of `sections`.
    pub fn new(from: *const u8, whole: usize, section: usize, sections: usize) -> Self {
        let (start, end) = (whole * section / sections, whole * (section + 1) / sections);
        Self { from: from.wrapping_add(start), bytes: end - start }
    }

    /// Whole lines for each of `steps` steps.
    pub fn share(&self, steps: usize) -> usize {
        self.bytes.div_ceil(steps.max(1)).next_multiple_of(64)
    }

    /// Asks for one step's share and goes on behind it.
    #[inline(always)]
    pub unsafe fn ask<S: Simd>(&mut self, share: usize) {
        let share = share.min(self.bytes);
        for at in (0..share).step_by(64) {
            S::prefetch_far(self.from.wrapping_add(at));
        }
        self.from = self.from.wrapping_add(share);
        self.bytes -= share;
    }
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
    ahead: [Ahead; 2],
    /// See [`PanelArgs`]; null unless these are the last blocks of the rows.
    target: *const u8,
    target_stride: usize,
}

/// Multiplies opened panels of one class of formats with tokens. It may work on up to three tokens past the last.
pub type TileKernel = unsafe fn(&TileArgs);

/// What the arithmetic on opened panels depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// One scale and one min a block; quants below 32.
    WithMin,
    /// One scale per block; quants below 32, or of eight bits.
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
        Scales::Plain | Scales::WithMin | Scales::SubMin32 | Scales::SubSigned32 => 1,
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
                let group = match Q::OFFSET_SHIFT {
                    // All offsets become the one that the activations' `start` is made for.
                    Some(shift) if S::BIASED && shift < START_SHIFT => {
                        S::add_bytes(groups[g], S::splat_byte((1 << START_SHIFT) - (1 << shift)))
                    }
                    _ => groups[g],
                };
                S::store_bytes(quants.add(i * BLOCK_BYTES + g * 64), group);
            }
        }
        let header = headers.add(block / per_header * Q::SCALES.group_bytes());
        let opened = block_scales::<S, Q>(header, block % per_header);
        let mins = Q::OFFSET_SHIFT.is_none();
        let mut to = scales.add(i * scale_floats::<S>(halves(Q::SCALES), mins));
        for half in 0..halves(Q::SCALES) {
            S::store(to, opened.scale[half]);
            to = to.add(PANEL_ROWS);
            if S::BIASED {
                S::store(to, S::mul(opened.scale[half], S::splat(-START)));
                to = to.add(PANEL_ROWS);
            }
            if mins {
                S::store(to, opened.min[half]);
                to = to.add(PANEL_ROWS);
            }
        }
    }
}

/// The packed quants are bytes already.
const fn is_open<Q: Quant>() -> bool {
    matches!(Q::PLANES, Planes::Eight) && Q::LOOKUP.is_none()
}

/// `R` panels times `T` tokens that lie side by side; the tokens after them are `next` blocks away. A
/// share of what lies ahead is asked for with each block.
#[inline(always)]
unsafe fn tile<
    S: Simd,
    const HALVES: usize,
    const MINS: bool,
    const BITS: u32,
    const R: usize,
    const T: usize,
    const SPREAD: bool,
>(
    args: &TileArgs,
    blocks: *const ActivationBlock,
    next: usize,
    (ahead, share): (&mut Ahead, usize),
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
        if SPREAD {
            ahead.ask::<S>(share);
        }
        if S::BIASED && SPREAD {
            for t in 0..T {
                S::prefetch(blocks.wrapping_add(next + t).cast());
            }
        }
        for half in 0..HALVES {
            add::<S, HALVES, MINS, BITS, R, T>(args, &mut totals, quants, scales, blocks, half);
        }
        quants = quants.add(BLOCK_BYTES);
        scales = scales.add(scale_floats::<S>(HALVES, MINS));
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
    let mut sums = [[S::splat_int(if S::BIASED { START_BITS } else { 0 }); R]; T];
    if !MINS {
        for t in 0..T {
            let block = blocks.add(t);
            // Starting at minus offset · Σa takes the offset out of every quant.
            let start = if whole { &raw const (*block).start } else { &raw const (*block).starts[half] };
            sums[t] = if S::BIASED {
                S::splat_ints::<R>(start)
            } else {
                [S::splat_int(ActivationBlock::negative_sum(*start, args.offset_shift)); R]
            };
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
    let per_half = scale_floats::<S>(1, MINS);
    let mut scale = [S::splat(0.0); R];
    let mut negative = [S::splat(0.0); R];
    let mut min = [S::splat(0.0); R];
    for r in 0..R {
        let vectors = scales.add(r * MAX_BLOCKS * scale_floats::<S>(HALVES, MINS) + half * per_half);
        scale[r] = S::load(vectors);
        if S::BIASED {
            negative[r] = S::load(vectors.add(PANEL_ROWS));
        }
        if MINS {
            min[r] = S::load(vectors.add(per_half - PANEL_ROWS));
        }
    }
    for t in 0..T {
        let block = blocks.add(t);
        let d = S::splat((*block).d);
        let sum = S::splat(if whole { (*block).scaled_sum } else { (*block).scaled_sums[half] });
        for r in 0..R {
            // Both are the exact product of sum and scale, rounded once.
            let product = if S::BIASED {
                S::fma(S::from_bits(sums[t][r]), scale[r], negative[r])
            } else {
                S::mul(S::to_float(sums[t][r]), scale[r])
            };
            totals[t][r] = S::fma_into(product, d, totals[t][r]);
            if MINS {
                totals[t][r] = S::fma_into(min[r], sum, totals[t][r]);
            }
        }
    }
}

/// All tokens with the `R` panels at `panel`.
#[inline(always)]
unsafe fn tokens<
    S: Simd,
    const HALVES: usize,
    const MINS: bool,
    const BITS: u32,
    const R: usize,
    const SPREAD: bool,
>(
    args: &TileArgs,
    panel: usize,
) {
    let args = &TileArgs {
        quants: args.quants.add(panel * args.quants_stride),
        scales: args.scales.add(panel * MAX_BLOCKS * scale_floats::<S>(HALVES, MINS)),
        out: args.out.add(panel * args.out_stride),
        ..*args
    };
    let [mut quants, mut scales] = args.ahead;
    if panel > 0 {
        (quants.bytes, scales.bytes) = (0, 0);
    }
    let steps = args.count.div_ceil(S::QUANT_TILE.1);
    let parts = if SPREAD { steps * args.num_blocks } else { steps };
    let (share, scales_share) = (quants.share(parts), scales.share(steps));
    let mut done = 0;
    while done < args.count {
        let token = args.first + done;
        let (group, lane) = (token / LANES, token % LANES);
        let blocks = args.blocks.add(group * args.lanes * args.row_blocks + lane);
        let out = args.out.add(done * PANEL_ROWS);
        scales.ask::<S>(scales_share);
        if !SPREAD {
            quants.ask::<S>(share);
        }
        if !args.target.is_null() {
            for t in token..token + S::QUANT_TILE.1 {
                let line = args.target.wrapping_add(t * args.target_stride + panel * 4 * PANEL_ROWS);
                for r in 0..R {
                    S::prefetch_far(line.wrapping_add(r * 4 * PANEL_ROWS));
                }
            }
        }
        // Of a group of interleaved tokens the second half follows the first at once.
        let next = if lane == 0 { 4 } else { args.lanes * args.row_blocks - lane };
        if S::QUANT_TILE.1 == 8 && args.count - done > 4 {
            tile::<S, HALVES, MINS, BITS, R, 8, SPREAD>(args, blocks, next, (&mut quants, share), out);
            done += 8;
        } else {
            tile::<S, HALVES, MINS, BITS, R, 4, SPREAD>(args, blocks, next, (&mut quants, share), out);
            done += 4;
        }
    }
}

/// From this many tokens on each tile has few of the lines that are asked for ahead; with fewer they are spread over the blocks,
/// so that they come while a block is multiplied.
const MANY_TOKENS: usize = 64;

#[inline(always)]
unsafe fn all_tokens<S: Simd, const HALVES: usize, const MINS: bool, const BITS: u32, const R: usize>(
    args: &TileArgs,
    panel: usize,
) {
    if args.count < MANY_TOKENS {
        tokens::<S, HALVES, MINS, BITS, R, true>(args, panel);
    } else {
        tokens::<S, HALVES, MINS, BITS, R, false>(args, panel);
    }
}

/// A [`TileKernel`]. `args.first` is a multiple of four.
#[inline(always)]
pub unsafe fn multiply<S: Simd, const HALVES: usize, const MINS: bool, const BITS: u32>(args: &TileArgs) {
    let mut panel = 0;
    while panel < args.num_panels {
        let left = args.num_panels - panel;
        panel += if S::QUANT_TILE.0 >= 3 && left >= 3 {
            all_tokens::<S, HALVES, MINS, BITS, 3>(args, panel);
            3
        } else if S::QUANT_TILE.0 >= 2 && left >= 2 {
            all_tokens::<S, HALVES, MINS, BITS, 2>(args, panel);
            2
        } else {
            all_tokens::<S, HALVES, MINS, BITS, 1>(args, panel);
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
    for first_block in (0..row_blocks).step_by(depth.max(1)) {
        let num_blocks = depth.min(row_blocks - first_block);
        for panel in 0..args.num_panels {
            let quants = opened.add(panel * MAX_BLOCKS * BLOCK_BYTES);
            let floats = scale_floats::<S>(halves(Q::SCALES), Q::OFFSET_SHIFT.is_none());
            let scales = scales.add(panel * MAX_BLOCKS * floats);
            open::<S, Q>(args, panel, first_block, num_blocks, quants, scales);
        }
        let (quants, quants_stride) = if is_open::<Q>() {
            (args.quants.add(first_block * BLOCK_BYTES), args.quants_stride)
        } else {
            (opened.cast_const(), MAX_BLOCKS * BLOCK_BYTES)
        };
        let (section, sections) = (first_block / depth, row_blocks.div_ceil(depth));
        let ahead = |from: *const u8, stride: usize| {
            let whole = args.num_panels * stride;
            Ahead::new(from.wrapping_add(whole), whole, section, sections)
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
            target: if section + 1 == sections { args.target } else { std::ptr::null() },
            target_stride: args.target_stride,
            ahead: [ahead(args.quants, args.quants_stride), ahead(args.scales, args.scales_stride)],
        });
    }
}
