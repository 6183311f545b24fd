//! The product of panels (16 output rows each) with some tokens, for quantised weights.
//!
//! A lane is an output row, so there is no sum across lanes. For each (row, token) the additions happen in the order of
//! k with one accumulator of f32, whatever the number of tokens: that is what makes results independent of the batch.
//! Few tokens are multiplied here, straight from the packed planes; many are [`super::tile`]'s.
//!
//! # Safety
//! As in [`super::simd`]; further, the pointers of [`PanelArgs`] cover what its fields say.
#![allow(unsafe_op_in_unsafe_fn)]

use crate::quantize::{ActivationBlock, LANES};
use crate::weights::formats::{BLOCK, PANEL_ROWS, Planes, Quant, Scales};

use super::simd::Simd;
use super::tile::{self, TileKernel};

/// From this many tokens on it pays to open weights into scratch.
pub const TILED_TOKENS: usize = 5;

/// The same for quantised weights: a machine that holds a whole group of tokens in registers takes it straight from the packed
/// planes, whose lines then come as a stream while they are multiplied.
const fn tiled_tokens<S: Simd>() -> usize {
    if S::TILE >= LANES { LANES + 1 } else { TILED_TOKENS }
}

/// Some panels of one part and the activations of all tokens.
#[derive(Clone, Copy, Debug)]
pub struct PanelArgs {
    /// Of the first panel; those of the next ones lie at these distances in bytes.
    pub quants: *const u8,
    pub scales: *const u8,
    pub quants_stride: usize,
    pub scales_stride: usize,
    /// At most [`MAX_PANELS`].
    pub num_panels: usize,
    pub cols: usize,
    /// `[tokens / lanes][cols / 32][lanes]`; for quantised panels.
    pub blocks: *const ActivationBlock,
    /// Tokens that are interleaved: see [`crate::quantize`].
    pub lanes: usize,
    /// `[tokens][stride]`; for float panels.
    pub floats: *const f32,
    pub stride: usize,
    /// Tiles of tokens that `floats` has where rows are split, zero for a single row: see `kernels::amx::bf16`.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Others do not split.
    pub split_tiles: usize,
    /// Rows quantised in super-blocks, and how many tiles of tokens they have, zero for a single row: see
    /// [`SuperPlaces`](crate::quantize::SuperPlaces). For k-quants, where there are tiles for them.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Others have none.
    pub supers: *const u8,
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub super_tiles: usize,
    /// Floats between the results of two panels.
    pub out_stride: usize,
    /// Where the first result of the first of all tokens will go in the end, and the bytes from there to the next token's:
    /// only asked for ahead. Null where it is not known.
    pub target: *const u8,
    pub target_stride: usize,
}

/// The most panels of one call.
pub const MAX_PANELS: usize = 3;

/// Computes tokens `first..first + count` of each panel into `out`, `[count, 16]`. `first` is a multiple of [`LANES`]; the
/// blocks and `out` have room for whole groups of that many tokens.
pub type PanelKernel = unsafe fn(args: &PanelArgs, first: usize, count: usize, out: *mut f32);

/// The quants of a block as eight groups of `16 rows × 4 k`.
#[inline(always)]
pub unsafe fn unpack<S: Simd, Q: Quant>(from: *const u8) -> [S::B; 8] {
    let line = |i: usize| S::load_bytes(from.add(i * 64));
    let zero = S::splat_byte(0);
    let mut groups = [zero; 8];
    match Q::PLANES {
        Planes::Eight => {
            for g in 0..8 {
                groups[g] = line(g);
            }
        }
        Planes::Four | Planes::FourOne | Planes::FourTwo => {
            let mask = S::splat_byte(15);
            for i in 0..4 {
                let pair = line(i);
                groups[i] = S::and(pair, mask);
                groups[i + 4] = S::and(S::bytes_right(pair, 4), mask);
            }
        }
        Planes::Two | Planes::TwoOne => {
            let mask = S::splat_byte(3);
            for g in 0..8 {
                groups[g] = S::and(S::bytes_right(line(g / 4), (g % 4 * 2) as u32), mask);
            }
        }
    }
    match Q::PLANES {
        Planes::FourOne => {
            let (bits, mask) = (line(4), S::splat_byte(16));
            for g in 0..8u32 {
                let bit = if g < 4 { S::bytes_left(bits, 4 - g) } else { S::bytes_right(bits, g - 4) };
                groups[g as usize] = S::or(groups[g as usize], S::and(bit, mask));
            }
        }
        Planes::FourTwo => {
            let mask = S::splat_byte(48);
            for g in 0..8usize {
                let crumbs = line(4 + g / 4);
                let crumb = match g % 4 {
                    0 => S::bytes_left(crumbs, 4),
                    1 => S::bytes_left(crumbs, 2),
                    2 => crumbs,
                    _ => S::bytes_right(crumbs, 2),
                };
                groups[g] = S::or(groups[g], S::and(crumb, mask));
            }
        }
        Planes::TwoOne => {
            let (bits, mask) = (line(2), S::splat_byte(4));
            for g in 0..8u32 {
                let bit = if g < 2 { S::bytes_left(bits, 2 - g) } else { S::bytes_right(bits, g - 2) };
                groups[g as usize] = S::or(groups[g as usize], S::and(bit, mask));
            }
        }
        Planes::Two | Planes::Four | Planes::Eight => {}
    }
    if let Some(values) = Q::LOOKUP {
        for group in &mut groups {
            *group = S::lookup(values, *group);
        }
    }
    groups
}

/// The scales of one 32-block: for each half (16 k) a scale and a min; both halves are equal in 32-wide formats.
pub struct BlockScales<F> {
    pub scale: [F; 2],
    pub min: [F; 2],
}

#[inline(always)]
pub unsafe fn block_scales<S: Simd, Q: Quant>(header: *const u8, block: usize) -> BlockScales<S::F> {
    let zero = S::splat(0.0);
    let sub = header.add(Q::SCALES.header_bytes() + block * Q::SCALES.sub_bytes());
    let mut d = S::load_f16(header.cast());
    if Q::FACTOR != 1.0 {
        d = S::mul(d, S::splat(Q::FACTOR));
    }
    match Q::SCALES {
        Scales::Plain => BlockScales { scale: [d; 2], min: [zero; 2] },
        Scales::WithMin => {
            let min = S::load_f16(header.add(32).cast());
            BlockScales { scale: [d; 2], min: [min; 2] }
        }
        Scales::SubMin32 => {
            let dmin = S::mul(S::load_f16(header.add(32).cast()), S::splat(-Q::FACTOR));
            let scale = S::mul(d, S::load_u8(sub));
            let min = S::mul(dmin, S::load_u8(sub.add(16)));
            BlockScales { scale: [scale; 2], min: [min; 2] }
        }
        Scales::SubSigned32 => BlockScales { scale: [S::mul(d, S::load_i8(sub)); 2], min: [zero; 2] },
        Scales::SubSigned16 => {
            let scale = [S::mul(d, S::load_i8(sub)), S::mul(d, S::load_i8(sub.add(16)))];
            BlockScales { scale, min: [zero; 2] }
        }
        Scales::SubNibble16 => {
            let dmin = S::sub(zero, S::load_f16(header.add(32).cast()));
            let (first, second) = (S::load_u4(sub), S::load_u4(sub.add(16)));
            BlockScales {
                scale: [S::mul(d, first.0), S::mul(d, second.0)],
                min: [S::mul(dmin, first.1), S::mul(dmin, second.1)],
            }
        }
    }
}

/// Adds one block of one token.
#[inline(always)]
unsafe fn add_block<S: Simd, Q: Quant>(
    total: S::F,
    groups: &[S::B; 8],
    scales: &BlockScales<S::F>,
    block: *const ActivationBlock,
) -> S::F {
    let quants = (&raw const (*block).quants).cast::<i8>();
    let low = [groups[0], groups[1], groups[2], groups[3]];
    let high = [groups[4], groups[5], groups[6], groups[7]];
    let d = S::splat((*block).d);
    // Starting at minus offset · Σa takes the offset out of every quant.
    let start = |start: i32| match Q::OFFSET_SHIFT {
        Some(shift) => S::splat_int(ActivationBlock::negative_sum(start, shift)),
        None => S::splat_int(0),
    };
    match Q::SCALES {
        Scales::Plain | Scales::WithMin | Scales::SubMin32 | Scales::SubSigned32 => {
            let sum = dot_both::<S, Q>(start((*block).start), low, high, quants);
            let mut total = S::fma(S::mul(S::to_float(sum), scales.scale[0]), d, total);
            if Q::OFFSET_SHIFT.is_none() {
                total = S::fma(scales.min[0], S::splat((*block).scaled_sum), total);
            }
            total
        }
        Scales::SubSigned16 | Scales::SubNibble16 => {
            let mut total = total;
            for (half, weights) in [low, high].into_iter().enumerate() {
                let sum = dot_one::<S, Q>(start((*block).starts[half]), weights, quants.add(half * 16));
                total = S::fma(S::mul(S::to_float(sum), scales.scale[half]), d, total);
                if Q::OFFSET_SHIFT.is_none() {
                    total = S::fma(scales.min[half], S::splat((*block).scaled_sums[half]), total);
                }
            }
            total
        }
    }
}

#[inline(always)]
unsafe fn dot_one<S: Simd, Q: Quant>(sum: S::I, weights: [S::B; 4], quants: *const i8) -> S::I {
    match Q::BITS {
        0..=5 => S::dot::<5>(sum, weights, quants),
        6..=7 => S::dot::<7>(sum, weights, quants),
        _ => S::dot::<8>(sum, weights, quants),
    }
}

#[inline(always)]
unsafe fn dot_both<S: Simd, Q: Quant>(sum: S::I, low: [S::B; 4], high: [S::B; 4], quants: *const i8) -> S::I {
    dot_one::<S, Q>(dot_one::<S, Q>(sum, low, quants), high, quants.add(16))
}

/// How far ahead of the use quants are asked for: the processor's own prefetching stops at every page.
const AHEAD: usize = 2048;

/// Asks for a block that lies [`AHEAD`] of this one, `left` bytes of whose panel are still to come, this one included. What
/// would lie behind the panel is looked for in the panel that this pass goes on with, `next` panels away.
#[inline(always)]
pub(super) unsafe fn prefetch<S: Simd, Q: Quant>(quants: *const u8, left: usize, next: usize) {
    let ahead = quants.wrapping_add(if left > AHEAD { AHEAD } else { AHEAD + next });
    for line in 0..Q::PLANES.bytes() / 64 {
        S::prefetch(ahead.wrapping_add(line * 64));
    }
}

/// `R` panels times `T` tokens that lie side by side, `blocks` being the first one's first block.
#[inline(always)]
unsafe fn quant_tile<S: Simd, Q: Quant, const R: usize, const T: usize>(
    args: &PanelArgs,
    blocks: *const ActivationBlock,
    out: *mut f32,
) {
    let mut totals = [[S::splat(0.0); T]; R];
    let (mut quants, mut scales, mut blocks) = (args.quants, args.scales, blocks);
    let blocks_per_header = Q::SCALES.blocks_per_header();
    let mut left = args.quants_stride;
    for _ in 0..args.cols / BLOCK / blocks_per_header {
        for i in 0..blocks_per_header {
            for r in 0..R {
                let (quants, scales) =
                    (quants.add(r * args.quants_stride), scales.add(r * args.scales_stride));
                prefetch::<S, Q>(quants, left, (R - 1) * args.quants_stride);
                S::prefetch(scales.wrapping_add(i * 64 + AHEAD / 4));
                let groups = unpack::<S, Q>(quants);
                let block_scales = block_scales::<S, Q>(scales, i);
                for t in 0..T {
                    totals[r][t] = add_block::<S, Q>(totals[r][t], &groups, &block_scales, blocks.add(t));
                }
            }
            quants = quants.add(Q::PLANES.bytes());
            left -= Q::PLANES.bytes();
            blocks = blocks.add(args.lanes);
        }
        scales = scales.add(Q::SCALES.group_bytes());
    }
    for r in 0..R {
        for t in 0..T {
            S::store(out.add(r * args.out_stride + t * PANEL_ROWS), totals[r][t]);
        }
    }
}

/// [`PanelKernel`] of a quantised format; `multiply` is the kernel of its class for many tokens.
#[inline(always)]
pub unsafe fn quant_panels<S: Simd, Q: Quant>(
    args: &PanelArgs,
    first: usize,
    count: usize,
    out: *mut f32,
    multiply: TileKernel,
) {
    if count >= tiled_tokens::<S>() {
        return tile::quant_panels::<S, Q>(args, first, count, out, multiply);
    }
    // One token with three panels: three streams keep memory busier than one.
    if count == 1 && args.num_panels == 3 {
        let blocks = args.blocks.add(first / LANES * args.lanes * (args.cols / BLOCK));
        return quant_tile::<S, Q, 3, 1>(args, blocks, out);
    }
    for panel in 0..args.num_panels {
        let args = PanelArgs {
            quants: args.quants.add(panel * args.quants_stride),
            scales: args.scales.add(panel * args.scales_stride),
            ..*args
        };
        quant_panel::<S, Q>(&args, first, count, out.add(panel * args.out_stride));
    }
}

/// One panel with few tokens.
#[inline(always)]
unsafe fn quant_panel<S: Simd, Q: Quant>(args: &PanelArgs, first: usize, count: usize, out: *mut f32) {
    let tile_blocks = args.lanes * (args.cols / BLOCK);
    let mut done = 0;
    while done < count {
        let token = first + done;
        let (tile, lane) = (token / LANES, token % LANES);
        let blocks = args.blocks.add(tile * tile_blocks + lane);
        let left = (count - done).min(LANES - lane);
        let out = out.add(done * PANEL_ROWS);
        done += if S::TILE >= LANES && left > 4 {
            quant_tile::<S, Q, 1, 8>(args, blocks, out);
            8
        } else if left >= 4 {
            quant_tile::<S, Q, 1, 4>(args, blocks, out);
            4
        } else if left >= 2 {
            quant_tile::<S, Q, 1, 2>(args, blocks, out);
            2
        } else {
            quant_tile::<S, Q, 1, 1>(args, blocks, out);
            1
        };
    }
}
