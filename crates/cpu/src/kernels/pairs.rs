//! The products of attention in pairs of bf16 (AVX-512 BF16), for caches of f16, bf16 and int8: twice the multiplications of f32
//! an instruction.
//!
//! Queries, keys, weights and values are rounded to bf16 (which holds every i8), sums are f32, and so is the softmax between the
//! two products. A row's sums run over pairs of dimensions, or of keys, in ascending order, in one accumulator each: so its result depends
//! neither on the rows beside it nor on whether keys were opened first.
//!
//! The cache has the pairs side by side, so that opening a line is no more than a conversion, and nothing at all where it
//! is bf16: keys `[block][kv head][block_size / 16][head_dim / 2][16 keys][2]`, values
//! `[block][kv head][block_size / 2][value_dim][2 keys]`.
//!
//! # Safety
//! As in [`super::attention`]; further, the processor has AVX-512 F, BW, DQ, VL, VNNI and BF16, and `head_dim` is even.
#![allow(unsafe_op_in_unsafe_fn, clippy::wildcard_imports)]

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::attention::{self, AttentionArgs, PANEL_KEYS, Products, TILE_KEYS};
use super::avx512::Avx512;
use super::float_products::prefetch_around;
use super::floats::{Element, ElementBf16, ElementF16, ElementI8};
use super::rows::load_some;
use super::simd::Simd;
use super::softmax::weigh_scores;

type S = Avx512<true>;

/// Up to this many rows keys and values are converted on their way into the products.
const FEW_ROWS: usize = 6;
const TILE_PANELS: usize = TILE_KEYS / PANEL_KEYS;
/// Rows that are multiplied at a time, where there are many.
const TILE_ROWS: usize = 6;
/// Values of a line: sixteen pairs.
const LINE: usize = 32;
/// Bytes of an opened line.
const LINE_BYTES: usize = LINE * ElementBf16::BYTES;

/// The start of each panel of a tile.
type Panels = [*const u8; TILE_PANELS];

/// A format that bf16 comes close to.
pub trait PairElement: Element {
    /// The values are bf16 as they are.
    const IS_OPEN: bool;
    /// The sixteen pairs of a line.
    unsafe fn load_pairs(from: *const u8) -> __m512i;
}

impl PairElement for ElementF16 {
    const IS_OPEN: bool = false;
    #[inline(always)]
    unsafe fn load_pairs(from: *const u8) -> __m512i {
        load_narrow::<Self>(from)
    }
}

impl PairElement for ElementI8 {
    const IS_OPEN: bool = false;
    #[inline(always)]
    unsafe fn load_pairs(from: *const u8) -> __m512i {
        load_narrow::<Self>(from)
    }
}

impl PairElement for ElementBf16 {
    const IS_OPEN: bool = true;
    #[inline(always)]
    unsafe fn load_pairs(from: *const u8) -> __m512i {
        S::load_bytes(from)
    }
}

#[inline(always)]
unsafe fn load_narrow<E: Element>(from: *const u8) -> __m512i {
    narrow(E::load::<S>(from), E::load::<S>(from.add(LINE / 2 * E::BYTES)))
}

/// The nearest bf16 of 32 values.
#[inline(always)]
unsafe fn narrow(low: __m512, high: __m512) -> __m512i {
    // SAFETY: both are 512 bits without a meaning of their own.
    std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
}

#[inline(always)]
unsafe fn dot(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
    // SAFETY: as above.
    let pairs = |x: __m512i| std::mem::transmute::<__m512i, __m512bh>(x);
    _mm512_dpbf16_ps(sum, pairs(a), pairs(b))
}

/// The keys or the values of the next tile, asked for while this one is multiplied, some lines for every few rows: more at
/// once than a core can wait for would hold up the loads behind them. They come as far as the second-level cache; the first
/// is full of rows.
struct Ahead {
    panels: Panels,
    num_panels: usize,
    panel_bytes: usize,
    /// The next line, and how many are asked for at a time.
    panel: usize,
    offset: usize,
    step: usize,
}

impl Ahead {
    const NONE: Self = Self {
        panels: [std::ptr::null(); TILE_PANELS],
        num_panels: 0,
        panel_bytes: 0,
        panel: 0,
        offset: 0,
        step: 0,
    };

    #[inline(always)]
    unsafe fn keys<E: PairElement>(args: &AttentionArgs, tile: usize, rows: usize) -> Self {
        let key_bytes = args.head_dim * E::BYTES;
        Self::of(args, tile, rows, key_bytes, |key| {
            let (keys, _, inside) = args.place(key, E::BYTES);
            keys.add(inside * key_bytes)
        })
    }

    #[inline(always)]
    unsafe fn values<E: PairElement>(args: &AttentionArgs, tile: usize, rows: usize) -> Self {
        let value_bytes = args.value_dim * E::BYTES;
        Self::of(args, tile, rows, value_bytes, |key| {
            let (_, values, inside) = args.place(key, E::BYTES);
            values.add(inside * value_bytes)
        })
    }

    #[inline(always)]
    unsafe fn of(
        args: &AttentionArgs,
        tile: usize,
        rows: usize,
        key_bytes: usize,
        start: impl Fn(usize) -> *const u8,
    ) -> Self {
        let (mut ahead, next) = (Self::NONE, tile + TILE_KEYS);
        if rows <= FEW_ROWS {
            return ahead;
        }
        let end = args.kv_end.min(args.keys_end).min(next + TILE_KEYS);
        while ahead.num_panels < TILE_PANELS && next + ahead.num_panels * PANEL_KEYS < end {
            ahead.panels[ahead.num_panels] = start(next + ahead.num_panels * PANEL_KEYS);
            ahead.num_panels += 1;
        }
        ahead.panel_bytes = PANEL_KEYS * (key_bytes + args.scale_bytes);
        let lines = ahead.num_panels * ahead.panel_bytes.div_ceil(64);
        ahead.step = lines.div_ceil(rows.div_ceil(TILE_ROWS));
        ahead
    }

    /// Asks for the next lines, if there are any.
    #[inline(always)]
    unsafe fn fetch(&mut self) {
        for _ in 0..self.step {
            if self.panel == self.num_panels {
                return;
            }
            S::prefetch_far(self.panels[self.panel].wrapping_add(self.offset));
            self.offset += 64;
            if self.offset >= self.panel_bytes {
                (self.panel, self.offset) = (self.panel + 1, 0);
            }
        }
    }
}

/// Runs a unit over a cache of `E`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
pub unsafe fn attend<E: PairElement>(args: &AttentionArgs) {
    attention::attend::<S, PairProducts<E>>(args, &PairProducts(PhantomData));
}

struct PairProducts<E>(PhantomData<E>);

impl<E: PairElement> Products<S> for PairProducts<E> {
    #[inline(always)]
    unsafe fn load_query(&self, args: &AttentionArgs, row: usize, from: *const f32) {
        let scale = S::splat(args.scale);
        let to = args.scratch.queries.cast::<u16>().add(row * args.value_dim);
        // The last line may reach into the next row, which is written after this one.
        for i in (0..args.head_dim).step_by(32) {
            let low = S::mul(load_some::<S>(from.add(i), args.head_dim - i), scale);
            let high = args.head_dim.saturating_sub(i + 16);
            let high = S::mul(load_some::<S>(from.wrapping_add(i + 16), high), scale);
            S::store_bytes(to.add(i).cast(), narrow(low, high));
        }
    }

    #[inline(always)]
    unsafe fn score(&self, args: &AttentionArgs, rows: usize, tile: usize, first: usize, last: usize) {
        let panels = first / PANEL_KEYS..last.div_ceil(PANEL_KEYS);
        let first_panel = panels.start - tile / PANEL_KEYS;
        let mut keys: Panels = [std::ptr::null(); TILE_PANELS];
        for (i, panel) in panels.clone().enumerate() {
            let (block, _, inside) = args.place(panel * PANEL_KEYS, E::BYTES);
            keys[i] = block.add(inside * args.head_dim * E::BYTES);
            if rows <= FEW_ROWS {
                prefetch_around::<S, E>(args, panel * PANEL_KEYS);
            }
        }
        if rows <= FEW_ROWS && !E::IS_OPEN {
            let mut nothing = Ahead::NONE;
            return score_rows::<E>(args, &keys, first_panel, panels.len(), 0, rows, &mut nothing);
        }
        let mut ahead = Ahead::keys::<E>(args, tile, rows);
        open::<E>(args, &mut keys, panels.len(), args.head_dim * PANEL_KEYS);
        let mut query = 0;
        while query < args.num_queries {
            let (end, panels) = args.run_of(query, tile);
            if panels > first_panel {
                let (row, end) = (query * args.group, end * args.group);
                score_opened(args, &keys, first_panel, panels - first_panel, row, end, &mut ahead);
            }
            query = end;
        }
    }

    #[inline(always)]
    unsafe fn weigh_scores(&self, args: &AttentionArgs, rows: usize, tile: usize) {
        weigh_scores::<S, true>(args, rows, tile);
    }

    #[inline(always)]
    unsafe fn add_values(&self, args: &AttentionArgs, rows: usize, tile: usize, first: usize, last: usize) {
        narrow_weights(args, rows);
        let panels = first / PANEL_KEYS..last.div_ceil(PANEL_KEYS);
        let mut values: Panels = [std::ptr::null(); TILE_PANELS];
        for (i, panel) in panels.clone().enumerate() {
            let (_, block, inside) = args.place(panel * PANEL_KEYS, E::BYTES);
            values[i] = block.add(inside * args.value_dim * E::BYTES);
        }
        if rows > FEW_ROWS {
            open::<E>(args, &mut values, panels.len(), args.value_dim * PANEL_KEYS);
        }
        let mut ahead = Ahead::values::<E>(args, tile, rows);
        let mut query = 0;
        while query < args.num_queries {
            let (end, panels) = args.run_of(query, tile);
            let keys = first - tile..(last - tile).min(panels * PANEL_KEYS);
            if keys.start < keys.end {
                let (row, end) = (query * args.group, end * args.group);
                if rows > FEW_ROWS || E::IS_OPEN {
                    add_opened(args, &values, keys.start, keys.end, row, end, &mut ahead);
                } else {
                    add_rows::<E>(args, &values, keys.start, keys.end, row, end, &mut ahead);
                }
            }
            query = end;
        }
    }
}

/// Converts panels of `len` values into the scratch, unless they are bf16 already.
#[inline(always)]
unsafe fn open<E: PairElement>(args: &AttentionArgs, panels: &mut Panels, count: usize, len: usize) {
    if E::IS_OPEN {
        return;
    }
    for (i, panel) in panels[..count].iter_mut().enumerate() {
        let to = args.scratch.opened.cast::<u8>().add(i * len * ElementBf16::BYTES);
        for at in (0..len).step_by(LINE) {
            S::store_bytes(to.add(at * ElementBf16::BYTES), E::load_pairs(panel.add(at * E::BYTES)));
        }
        *panel = to;
    }
}

/// Weights as bf16, each row at the start of its scores.
#[inline(always)]
unsafe fn narrow_weights(args: &AttentionArgs, rows: usize) {
    for row in 0..rows {
        let scores = args.scratch.scores.add(row * TILE_KEYS);
        let mut weights = [S::splat(0.0); TILE_PANELS];
        for (i, weight) in weights.iter_mut().enumerate() {
            *weight = S::load(scores.add(i * 16));
        }
        for (i, pair) in weights.chunks_exact(2).enumerate() {
            S::store_bytes(scores.cast::<u8>().add(i * LINE_BYTES), narrow(pair[0], pair[1]));
        }
    }
}

/// [`score_rows`] of opened panels.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
unsafe fn score_opened(
    args: &AttentionArgs,
    keys: &Panels,
    first: usize,
    count: usize,
    row: usize,
    end: usize,
    ahead: &mut Ahead,
) {
    score_rows::<ElementBf16>(args, keys, first, count, row, end, ahead);
}

/// The scores of the rows `row..end` with `count` panels, which are those of the tile from the panel `first` on.
#[inline(always)]
unsafe fn score_rows<E: PairElement>(
    args: &AttentionArgs,
    keys: &Panels,
    first: usize,
    count: usize,
    row: usize,
    end: usize,
    ahead: &mut Ahead,
) {
    match count {
        4 => score_panels::<E, 4>(args, keys, first, row, end, ahead),
        3 => score_panels::<E, 3>(args, keys, first, row, end, ahead),
        2 => score_panels::<E, 2>(args, keys, first, row, end, ahead),
        _ => score_panels::<E, 1>(args, keys, first, row, end, ahead),
    }
}

#[inline(always)]
unsafe fn score_panels<E: PairElement, const R: usize>(
    args: &AttentionArgs,
    keys: &Panels,
    first: usize,
    mut row: usize,
    end: usize,
    ahead: &mut Ahead,
) {
    while row < end {
        ahead.fetch();
        row += match end - row {
            TILE_ROWS.. => score_tile::<E, R, TILE_ROWS>(args, keys, first, row),
            4.. => score_tile::<E, R, 4>(args, keys, first, row),
            3 => score_tile::<E, R, 3>(args, keys, first, row),
            2 => score_tile::<E, R, 2>(args, keys, first, row),
            _ => score_tile::<E, R, 1>(args, keys, first, row),
        };
    }
}

/// `R` panels times `T` rows. Returns `T`.
#[inline(always)]
unsafe fn score_tile<E: PairElement, const R: usize, const T: usize>(
    args: &AttentionArgs,
    keys: &Panels,
    first: usize,
    row: usize,
) -> usize {
    let queries = args.scratch.queries.cast::<u16>().add(row * args.value_dim);
    let mut sums = [[S::splat(0.0); R]; T];
    for pair in 0..args.head_dim / 2 {
        let mut lines = [_mm512_setzero_si512(); R];
        for r in 0..R {
            lines[r] = E::load_pairs(keys[r].add(pair * LINE * E::BYTES));
        }
        for t in 0..T {
            let query = S::splat_int(*queries.add(t * args.value_dim + 2 * pair).cast::<i32>());
            for r in 0..R {
                sums[t][r] = dot(sums[t][r], lines[r], query);
            }
        }
    }
    for t in 0..T {
        for r in 0..R {
            S::store(args.scratch.scores.add((row + t) * TILE_KEYS + (first + r) * PANEL_KEYS), sums[t][r]);
        }
    }
    T
}

/// [`add_rows`] of opened panels.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
unsafe fn add_opened(
    args: &AttentionArgs,
    values: &Panels,
    first: usize,
    last: usize,
    row: usize,
    end: usize,
    ahead: &mut Ahead,
) {
    add_rows::<ElementBf16>(args, values, first, last, row, end, ahead);
}

/// The values of the keys `first..last` of a tile for the rows `row..end`; the panels are those from the key `first` on.
#[inline(always)]
unsafe fn add_rows<E: PairElement>(
    args: &AttentionArgs,
    values: &Panels,
    first: usize,
    last: usize,
    mut row: usize,
    end: usize,
    ahead: &mut Ahead,
) {
    while row < end {
        ahead.fetch();
        row += match end - row {
            TILE_ROWS.. => add_dims::<E, TILE_ROWS>(args, values, first, last, row),
            4.. => add_dims::<E, 4>(args, values, first, last, row),
            3 => add_dims::<E, 3>(args, values, first, last, row),
            2 => add_dims::<E, 2>(args, values, first, last, row),
            _ => add_dims::<E, 1>(args, values, first, last, row),
        };
    }
}

/// The same for `T` rows, which is what it returns.
#[inline(always)]
unsafe fn add_dims<E: PairElement, const T: usize>(
    args: &AttentionArgs,
    values: &Panels,
    first: usize,
    last: usize,
    row: usize,
) -> usize {
    let mut dim = 0;
    while dim + 64 <= args.value_dim {
        add_tile::<E, T, 4>(args, values, first, last, row, dim);
        dim += 64;
    }
    while dim < args.value_dim {
        add_tile::<E, T, 1>(args, values, first, last, row, dim);
        dim += 16;
    }
    T
}

/// The same for `D` vectors of dimensions from `dim` on.
#[inline(always)]
unsafe fn add_tile<E: PairElement, const T: usize, const D: usize>(
    args: &AttentionArgs,
    values: &Panels,
    first: usize,
    last: usize,
    row: usize,
    dim: usize,
) {
    let outputs = args.scratch.states.outputs.add(row * args.value_dim + dim);
    let mut sums = [[S::splat(0.0); D]; T];
    for t in 0..T {
        let factor = S::splat(*args.scratch.factors.add(row + t));
        for d in 0..D {
            sums[t][d] = S::mul(S::load(outputs.add(t * args.value_dim + d * 16)), factor);
        }
    }
    let mut key = first / 2 * 2;
    while key < last {
        let panel = values[key / PANEL_KEYS - first / PANEL_KEYS].add(2 * dim * E::BYTES);
        let stop = last.min((key / PANEL_KEYS + 1) * PANEL_KEYS);
        while key + 1 < stop {
            add_pair::<E, T, D>(args, &mut sums, panel, row, key, !0);
            key += 2;
        }
        if key < stop {
            // Nobody has written the other key, so that it may be anything.
            add_pair::<E, T, D>(args, &mut sums, panel, row, key, 0xffff);
            key += 2;
        }
    }
    for t in 0..T {
        for d in 0..D {
            S::store(outputs.add(t * args.value_dim + d * 16), sums[t][d]);
        }
    }
}

/// The keys `key` and the next; of each pair the bits of `mask`.
#[inline(always)]
unsafe fn add_pair<E: PairElement, const T: usize, const D: usize>(
    args: &AttentionArgs,
    sums: &mut [[__m512; D]; T],
    panel: *const u8,
    row: usize,
    key: usize,
    mask: i32,
) {
    let line = panel.add(key % PANEL_KEYS / 2 * 2 * args.value_dim * E::BYTES);
    let mut lines = [_mm512_setzero_si512(); D];
    for d in 0..D {
        lines[d] = E::load_pairs(line.add(d * LINE * E::BYTES));
        if mask != !0 {
            lines[d] = S::and(lines[d], S::splat_int(mask));
        }
    }
    let weights = args.scratch.scores.cast::<i32>().add(row * TILE_KEYS + key / 2);
    for t in 0..T {
        let weight = S::splat_int(*weights.add(t * TILE_KEYS));
        for d in 0..D {
            sums[t][d] = dot(sums[t][d], lines[d], weight);
        }
    }
}
