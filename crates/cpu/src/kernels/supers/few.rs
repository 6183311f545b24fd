//! Few tokens, straight from the packed planes: memory is what they wait for.

use std::arch::x86_64::*;

use super::super::gemm::{PanelArgs, prefetch, unpack};
use super::{BLOCKS, FloatScales, Vnni, has_mins, min_pair, pair, signed, sub_scales, unsigned};
use crate::quantize::{SUPER_LINE, SuperPlaces, SuperSums};
use crate::weights::formats::{BLOCK, PANEL_ROWS, Quant, SPLIT_TOKENS};

/// A [`PanelKernel`](crate::kernels::gemm::PanelKernel) for any number of tokens.
#[inline(always)]
pub unsafe fn panels<Q: Quant>(args: &PanelArgs, first: usize, count: usize, out: *mut f32) {
    // One token with three panels: three streams keep memory busier than one.
    if count == 1 && args.num_panels == 3 {
        tile::<Q, 3, 1>(args, first, out);
        return;
    }
    for panel in 0..args.num_panels {
        let args = PanelArgs {
            quants: args.quants.add(panel * args.quants_stride),
            scales: args.scales.add(panel * args.scales_stride),
            ..*args
        };
        let out = out.add(panel * args.out_stride);
        let mut done = 0;
        while done < count {
            let row = first + done;
            let left = (count - done).min(SPLIT_TOKENS - row % SPLIT_TOKENS);
            let out = out.add(done * PANEL_ROWS);
            done += match left {
                1 => tile::<Q, 1, 1>(&args, row, out),
                2..4 => tile::<Q, 1, 2>(&args, row, out),
                4 => tile::<Q, 1, 4>(&args, row, out),
                _ => tile::<Q, 1, 8>(&args, row, out),
            };
        }
    }
}

/// `R` panels times `T` tokens that lie side by side, from `row` on; returns `T`.
#[inline(always)]
unsafe fn tile<Q: Quant, const R: usize, const T: usize>(
    args: &PanelArgs,
    row: usize,
    out: *mut f32,
) -> usize {
    let places = SuperPlaces::new(args.cols, args.super_tiles);
    let mut totals = [[_mm512_setzero_ps(); T]; R];
    let (mut quants, mut header) = (args.quants, args.scales);
    let mut left = args.quants_stride;
    for super_block in 0..places.num_supers() {
        let rows = Rows {
            quants: args.supers.add(places.quants(row, super_block)).cast(),
            line_stride: places.line_stride(),
            sums: args.supers.add(places.sums(row, super_block)).cast(),
        };
        let mut sums = [[_mm512_setzero_si512(); T]; R];
        let mut mins = [[_mm512_setzero_si512(); T]; R];
        for block in 0..BLOCKS {
            for r in 0..R {
                let (quants, header) =
                    (quants.add(r * args.quants_stride), header.add(r * args.scales_stride));
                prefetch::<Vnni, Q>(quants, left, (R - 1) * args.quants_stride);
                _mm_prefetch::<_MM_HINT_T0>(header.wrapping_add(block * 64 + PREFETCH_SCALES).cast());
                rows.add_block::<Q, T>(&mut sums[r], &mut mins[r], quants, header, block);
            }
            quants = quants.add(Q::PLANES.bytes());
            left -= Q::PLANES.bytes();
        }
        for r in 0..R {
            let header = header.add(r * args.scales_stride);
            if has_mins::<Q>() {
                rows.add_mins::<Q, T>(&mut mins[r], header);
            }
            let scales = FloatScales::read::<Q>(header);
            for t in 0..T {
                let d = &raw const (*rows.sums.add(t)).d;
                totals[r][t] = if has_mins::<Q>() {
                    scales.add::<true>(totals[r][t], sums[r][t], mins[r][t], d)
                } else {
                    let offset = _mm512_slli_epi32::<OFFSET_SHIFT>(mins[r][t]);
                    scales.add::<false>(totals[r][t], _mm512_sub_epi32(sums[r][t], offset), offset, d)
                };
            }
        }
        header = header.add(Q::SCALES.group_bytes());
    }
    for r in 0..R {
        for t in 0..T {
            _mm512_storeu_ps(out.add(r * args.out_stride + t * PANEL_ROWS), totals[r][t]);
        }
    }
    T
}

/// How far ahead scales are asked for.
const PREFETCH_SCALES: usize = 512;
/// The offset of Q6_K's quants as a power of two.
const OFFSET_SHIFT: u32 = 5;

/// A super-block of some neighbouring rows.
struct Rows {
    quants: *const i8,
    line_stride: usize,
    sums: *const SuperSums,
}

impl Rows {
    /// The dot products of one block of a panel times its scales. Where quants have an offset, the scales times the sums of the
    /// activations go to `mins`.
    #[inline(always)]
    unsafe fn add_block<Q: Quant, const T: usize>(
        &self,
        sums: &mut [__m512i; T],
        mins: &mut [__m512i; T],
        quants: *const u8,
        header: *const u8,
        block: usize,
    ) {
        let groups = unpack::<Vnni, Q>(quants);
        let blocks_per_line = SUPER_LINE / BLOCK;
        let activations =
            self.quants.add(block / blocks_per_line * self.line_stride + block % blocks_per_line * BLOCK);
        let sub = sub_scales::<Q>(header, block);
        if has_mins::<Q>() {
            let scale = unsigned(sub);
            for t in 0..T {
                let activations = activations.add(t * SUPER_LINE);
                let dot = dot(dot(_mm512_setzero_si512(), &groups, 0, activations), &groups, 4, activations);
                sums[t] = _mm512_add_epi32(sums[t], _mm512_mullo_epi32(dot, scale));
            }
            return;
        }
        const { assert!(has_mins::<Q>() || matches!(Q::OFFSET_SHIFT, Some(OFFSET_SHIFT))) };
        let scales = [signed(sub), signed(sub.add(PANEL_ROWS))];
        let both = pair(scales[0], scales[1]);
        for t in 0..T {
            let activations = activations.add(t * SUPER_LINE);
            for half in 0..2 {
                let dot = dot(_mm512_setzero_si512(), &groups, 4 * half, activations);
                sums[t] = _mm512_add_epi32(sums[t], _mm512_mullo_epi32(dot, scales[half]));
            }
            let halves = (&raw const (*self.sums.add(t)).halves).cast::<i32>().add(block).read();
            mins[t] = _mm512_dpwssd_epi32(mins[t], both, _mm512_set1_epi32(halves));
        }
    }

    #[inline(always)]
    unsafe fn add_mins<Q: Quant, const T: usize>(&self, mins: &mut [__m512i; T], header: *const u8) {
        for i in 0..BLOCKS / 2 {
            let pair = min_pair::<Q>(header, i);
            for t in 0..T {
                mins[t] = _mm512_dpwssd_epi32(mins[t], pair, sum_pair(self.sums.add(t), i));
            }
        }
    }
}

/// Adds the dot products of four groups from `first` on; `activations` are those of the block.
#[inline(always)]
unsafe fn dot(sum: __m512i, groups: &[__m512i; 8], first: usize, activations: *const i8) -> __m512i {
    let mut sum = sum;
    for i in first..first + 4 {
        let quad = activations.add(4 * i).cast::<i32>().read_unaligned();
        sum = _mm512_dpbusd_epi32(sum, groups[i], _mm512_set1_epi32(quad));
    }
    sum
}

/// The `i`-th pair of sums of a token's blocks, in all lanes.
#[inline(always)]
unsafe fn sum_pair(sums: *const SuperSums, i: usize) -> __m512i {
    _mm512_set1_epi32((&raw const (*sums).sums).cast::<i32>().add(i).read())
}
