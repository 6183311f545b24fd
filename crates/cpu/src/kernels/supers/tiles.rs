//! Many tokens, in tiles of bytes.
//!
//! A super-block of up to three panels is opened into planes that stay in the first-level cache, and multiplied with two tiles of
//! 16 tokens at a time: four tiles of sums (two planes of each tile of tokens), alive for 256 columns. What is left for
//! vectors, scaling once per super-block, is done for the sums before while the next ones are on their way: products of tiles
//! do not wait for vectors, and stored sums are slow to load at once.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::super::gemm::{MAX_PANELS, PanelArgs};
use super::super::tile::Ahead;
use super::open::{OPENED, TILE, high_shift, open};
use super::{BLOCKS, FloatScales, Vnni, has_mins, min_pair};
use crate::quantize::{SUPER_LINES, SuperPlaces, SuperSums};
use crate::weights::formats::{PANEL_ROWS, Quant, SPLIT_TOKENS};

/// Sums of two tiles of tokens, `[tiles][high, low][16 tokens][16 rows]`.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Sums([MaybeUninit<i32>; 4 * SPLIT_TOKENS * PANEL_ROWS]);

/// What a processor with tiles does: four tiles of sums, multiplied with two tiles of tokens and two planes.
///
/// # Safety
/// All of it between `begin` and `end` on one thread that uses tiles for nothing else meanwhile.
pub trait TileUnit {
    unsafe fn begin();
    unsafe fn end();
    unsafe fn zero();
    /// Adds the products of 64 columns: `[16 tokens][64]` of one or two tiles, the second a super-block of a tile behind the first,
    /// with `[high, low][16 groups][16 rows × 4]`. `SIGNED`: bytes of the high plane are signed; those of the low one never are.
    unsafe fn add<const PAIR: bool, const SIGNED: bool>(tokens: *const u8, weights: *const u8);
    unsafe fn store<const PAIR: bool>(to: *mut Sums);
}

/// Bytes from a tile of tokens to the next one's: a super-block.
pub const NEXT_TOKENS: usize = SUPER_LINES * TILE;

#[repr(C, align(64))]
struct Scratch {
    weights: [MaybeUninit<u8>; MAX_PANELS * OPENED],
    scales: [MaybeUninit<OpenedScales>; MAX_PANELS],
    /// The sums being added up, and those being scaled.
    sums: [Sums; 2],
}

/// What the sums of a panel's super-block are multiplied with.
#[derive(Clone, Copy)]
struct OpenedScales {
    floats: FloatScales,
    /// Zero where there are none.
    min_pairs: [__m512i; BLOCKS / 2],
}

impl OpenedScales {
    #[inline(always)]
    unsafe fn read<Q: Quant>(header: *const u8) -> Self {
        let mut min_pairs = [_mm512_setzero_si512(); BLOCKS / 2];
        if has_mins::<Q>() {
            for (i, pair) in min_pairs.iter_mut().enumerate() {
                *pair = min_pair::<Q>(header, i);
            }
        }
        Self { floats: FloatScales::read::<Q>(header), min_pairs }
    }
}

/// Sums that wait to be scaled: a panel's of some tokens.
#[derive(Clone, Copy)]
struct Waiting {
    sums: *const Sums,
    tokens: *const SuperSums,
    scales: *const OpenedScales,
    out: *mut f32,
    /// A multiple of 16; zero where nothing waits.
    num_tokens: usize,
    /// All bits set where `out` has totals already.
    goes_on: __mmask16,
}

impl Waiting {
    /// Scales the `part`-th of four parts of the sums.
    #[inline(always)]
    unsafe fn finish<Q: Quant>(&self, part: usize) {
        let count = self.num_tokens / SUPER_LINES;
        if count == 0 {
            return;
        }
        // All of a part lie in one tile.
        let first = part * count;
        let place = first / SPLIT_TOKENS * 2 * SPLIT_TOKENS + first % SPLIT_TOKENS;
        let mut line = self.sums.cast::<i32>().add(place * PANEL_ROWS);
        let (mut tokens, mut out) = (self.tokens.add(first), self.out.add(first * PANEL_ROWS));
        let scales = *self.scales;
        for _ in 0..count / UNROLLED {
            for i in 0..UNROLLED {
                let (line, out) = (line.add(i * PANEL_ROWS), out.add(i * PANEL_ROWS));
                self.finish_token::<Q>(&scales, line, tokens.add(i), out);
            }
            line = line.add(UNROLLED * PANEL_ROWS);
            tokens = tokens.add(UNROLLED);
            out = out.add(UNROLLED * PANEL_ROWS);
        }
    }

    /// Scales one token's sums, whose high ones are at `line`.
    #[inline(always)]
    unsafe fn finish_token<Q: Quant>(
        &self,
        scales: &OpenedScales,
        line: *const i32,
        token: *const SuperSums,
        out: *mut f32,
    ) {
        let high = _mm512_load_si512(line.cast());
        let low = _mm512_load_si512(line.add(SPLIT_TOKENS * PANEL_ROWS).cast());
        let high =
            if high_shift::<Q>() == 3 { _mm512_slli_epi32::<3>(high) } else { _mm512_slli_epi32::<8>(high) };
        let sum = _mm512_add_epi32(high, low);
        let total = _mm512_maskz_loadu_ps(self.goes_on, out);
        let d = &raw const (*token).d;
        let total = if has_mins::<Q>() {
            let mut mins = _mm512_setzero_si512();
            let sums = (&raw const (*token).sums).cast::<i32>();
            for (i, &pair) in scales.min_pairs.iter().enumerate() {
                mins = add_pairs(mins, pair, sums.add(i));
            }
            scales.floats.add::<true>(total, sum, mins, d)
        } else {
            scales.floats.add::<false>(total, sum, sum, d)
        };
        _mm512_storeu_ps(out, total);
    }
}

/// Tokens that are scaled side by side.
const UNROLLED: usize = 4;

/// Adds the products of pairs of i16 with the pair at `with`. The compiler would make a load, a product and a sum of it.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn add_pairs(sum: __m512i, pairs: __m512i, with: *const i32) -> __m512i {
    let mut sum = sum;
    asm!(
        "vpdpwssd {}, {}, dword ptr [{}]{{1to16}}",
        inout(zmm_reg) sum,
        in(zmm_reg) pairs,
        in(reg) with,
        options(pure, readonly, nostack, preserves_flags)
    );
    sum
}

/// A [`PanelKernel`](crate::kernels::gemm::PanelKernel). `first` is a multiple of 16, and `out` has room for whole tiles.
#[inline(always)]
pub unsafe fn panels<U: TileUnit, Q: Quant>(args: &PanelArgs, first: usize, count: usize, out: *mut f32) {
    debug_assert!(first.is_multiple_of(SPLIT_TOKENS) && args.super_tiles > 0);
    let mut scratch: MaybeUninit<Scratch> = MaybeUninit::uninit();
    let opened = (&raw mut (*scratch.as_mut_ptr()).weights).cast::<u8>();
    let places = SuperPlaces::new(args.cols, args.super_tiles);
    let scales = (&raw mut (*scratch.as_mut_ptr()).scales).cast::<OpenedScales>();
    let mut sums = (&raw mut (*scratch.as_mut_ptr()).sums).cast::<Sums>();
    let mut others = sums.add(1);
    U::begin();
    for super_block in 0..places.num_supers() {
        let header = args.scales.add(super_block * Q::SCALES.group_bytes());
        for panel in 0..args.num_panels {
            let quants =
                args.quants.add(panel * args.quants_stride + super_block * BLOCKS * Q::PLANES.bytes());
            let header = header.add(panel * args.scales_stride);
            open::<Q>(quants, header, opened.add(panel * OPENED));
            scales.add(panel).write(OpenedScales::read::<Q>(header));
        }
        let mut waiting = Waiting {
            sums,
            tokens: args.supers.cast(),
            scales,
            out,
            num_tokens: 0,
            goes_on: if super_block > 0 { 0xffff } else { 0 },
        };
        let mut ahead = Lines::new(args, count, super_block, places.num_supers());
        let mut token = 0;
        while token < count {
            let is_pair = count - token > SPLIT_TOKENS;
            let tokens = args.supers.add(places.quants(first + token, super_block));
            for panel in 0..args.num_panels {
                let weights = opened.add(panel * OPENED);
                if is_pair {
                    multiply::<U, Q, true>(tokens, weights, &waiting, sums);
                } else {
                    multiply::<U, Q, false>(tokens, weights, &waiting, sums);
                }
                ahead.ask(args, panel, first + token);
                waiting = Waiting {
                    sums,
                    tokens: args.supers.add(places.sums(first + token, super_block)).cast(),
                    scales: scales.add(panel),
                    out: out.add(panel * args.out_stride + token * PANEL_ROWS),
                    num_tokens: if is_pair { 2 * SPLIT_TOKENS } else { SPLIT_TOKENS },
                    ..waiting
                };
                (sums, others) = (others, sums);
            }
            token += 2 * SPLIT_TOKENS;
        }
        for part in 0..SUPER_LINES {
            waiting.finish::<Q>(part);
        }
    }
    U::end();
}

/// Adds up a super-block of one or two tiles of tokens while the sums before are scaled, a line behind: they were stored only now.
#[inline(always)]
unsafe fn multiply<U: TileUnit, Q: Quant, const PAIR: bool>(
    tokens: *const u8,
    weights: *const u8,
    waiting: &Waiting,
    sums: *mut Sums,
) {
    U::zero();
    for line in 0..SUPER_LINES {
        let (tokens, weights) = (tokens.add(line * TILE), weights.add(line * 2 * TILE));
        if has_mins::<Q>() {
            U::add::<PAIR, false>(tokens, weights);
        } else {
            U::add::<PAIR, true>(tokens, weights);
        }
        if line > 0 {
            waiting.finish::<Q>(line - 1);
        }
    }
    U::store::<PAIR>(sums);
    waiting.finish::<Q>(SUPER_LINES - 1);
}

/// Lines that will be wanted after this product, asked for while it keeps the processor busy: the next panels, and where the
/// results go.
struct Lines {
    next: [(Ahead, usize); 2],
    /// Null but in the last super-block.
    target: *const u8,
}

impl Lines {
    fn new(args: &PanelArgs, count: usize, super_block: usize, num_supers: usize) -> Self {
        let steps = count.div_ceil(2 * SPLIT_TOKENS) * args.num_panels;
        let next =
            [(args.quants, args.quants_stride), (args.scales, args.scales_stride)].map(|(from, stride)| {
                let whole = args.num_panels * stride;
                let ahead = Ahead::new(from.wrapping_add(whole), whole, super_block, num_supers);
                (ahead, ahead.share(steps))
            });
        let is_last = super_block + 1 == num_supers;
        Self { next, target: if is_last { args.target } else { std::ptr::null() } }
    }

    #[inline(always)]
    unsafe fn ask(&mut self, args: &PanelArgs, panel: usize, token: usize) {
        for (ahead, share) in &mut self.next {
            ahead.ask::<Vnni>(*share);
        }
        if !self.target.is_null() {
            for token in token..token + 2 * SPLIT_TOKENS {
                let line = self.target.wrapping_add(token * args.target_stride + panel * 4 * PANEL_ROWS);
                _mm_prefetch::<_MM_HINT_T1>(line.cast());
            }
        }
    }
}
