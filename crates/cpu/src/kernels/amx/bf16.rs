//! Weights of bf16 times rows of f32, in tiles of bf16 with sums of f32.
//!
//! One `tdpbf16ps` multiplies 16 tokens × 32 k with 32 k × 16 output rows (one panel). Nothing of f32's precision is given
//! up for it that matters: a value `x` is `hi + lo`, `hi` being the bf16 nearest to `x` and `lo` the one nearest to the
//! rest, which leaves 16 bits or more. Rows are split once a product ([`split_row`]). Weights of f16 could be split too, but
//! then a single token takes three times as long as without tiles.
//!
//! Everything lies as tiles read it, one after the other: tiles that do not come from the first-level cache in this way
//! are several times slower. Panels are packed in pairs of k, `[k / 2][16 rows][2]`. Split rows are `[blocks of 256 k][tiles of
//! 16 tokens][groups of 32 k][hi, lo][16 tokens][32 k]`, which is the order of the loops. A single row lies by itself,
//! `[groups][hi, lo][32 k]`, and is read as 16 rows with no distance between them.
//!
//! A tile has always 16 tokens, so all numbers of tokens come here and a row's result does not depend on them; what stands in
//! the rows past the last token goes to results that nobody reads. For each (row, output) the additions are those of k in
//! order, `hi` before `lo`.
//!
//! # Safety
//! As in [`super`]; further, the processor has AVX-512 F, BW, DQ and VL.
#![allow(unsafe_op_in_unsafe_fn, clippy::wildcard_imports)]

use std::arch::asm;
use std::arch::x86_64::*;

use super::{FULL_CONFIG, TILE_ROWS, configure, release};
use crate::kernels::gemm::{MAX_PANELS, PanelArgs};
use crate::weights::formats::{PANEL_ROWS, SPLIT_COLS, SPLIT_TOKENS};

/// Values along k of one instruction; rows are split in groups of as many.
const GROUP: usize = SPLIT_COLS;
/// Tokens of a tile.
const TOKENS: usize = SPLIT_TOKENS;

/// Groups of a block of split rows: so many k of three panels are half of the first-level cache.
const BLOCK_GROUPS: usize = 8;
/// Bytes of `hi` or `lo` of a row's group.
const LINE: usize = 2 * GROUP;
/// Bytes of a tile of either.
const TILE: usize = TOKENS * LINE;
/// Bytes of `GROUP` k of a panel.
const PANEL_GROUP: usize = 2 * GROUP * PANEL_ROWS;

/// Gives the tile registers their shapes. [`end`] undoes it.
pub unsafe fn begin() {
    configure(&FULL_CONFIG);
}

pub unsafe fn end() {
    release();
}

/// Where rows of `num_groups` groups are, once split.
#[derive(Clone, Copy, Debug)]
struct Split {
    num_groups: usize,
    /// Of 16 tokens; zero for a single row.
    num_tiles: usize,
}

impl Split {
    /// Bytes from the start to the `hi` of a row's group.
    fn place(self, row: usize, group: usize) -> usize {
        if self.num_tiles == 0 {
            return group * self.group_bytes();
        }
        let (block, inner) = (group / BLOCK_GROUPS, group % BLOCK_GROUPS);
        let groups = BLOCK_GROUPS.min(self.num_groups - block * BLOCK_GROUPS);
        let tiles = block * BLOCK_GROUPS * self.num_tiles + row / TOKENS * groups + inner;
        tiles * self.group_bytes() + row % TOKENS * LINE
    }

    /// From `hi` to `lo` of a group; from a group to the next.
    fn low_bytes(self) -> usize {
        if self.num_tiles == 0 { LINE } else { TILE }
    }

    fn group_bytes(self) -> usize {
        2 * self.low_bytes()
    }

    /// From a row to the next.
    fn row_bytes(self) -> usize {
        if self.num_tiles == 0 { 0 } else { LINE }
    }
}

/// The nearest bf16 (the even one of two), in the upper halves. What is not a number stays none.
#[inline]
#[target_feature(enable = "avx512f")]
fn round(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    // A carry would make a number of it.
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
    let rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), quiet);
    _mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000_u32 as i32))
}

/// `x ≈ hi + lo`, both bf16 in the upper halves; `lo` is zero where `hi` is not finite.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn split(x: __m512) -> (__m512i, __m512i) {
    /// Quiet and signalling NaN, both infinities.
    const NOT_FINITE: i32 = 0x01 | 0x80 | 0x08 | 0x10;
    let hi = round(x);
    let finite = !_mm512_fpclass_ps_mask::<NOT_FINITE>(_mm512_castsi512_ps(hi));
    (hi, round(_mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(hi))))
}

/// Splits row `row` of `num_tiles` tiles of tokens, or the only one where that is zero, into `out`, which has room for whole
/// tiles. `len` is a multiple of [`GROUP`].
#[target_feature(enable = "avx512f,avx512dq")]
pub unsafe fn split_row(x: *const f32, len: usize, out: *mut f32, row: usize, num_tiles: usize) {
    let places = Split { num_groups: len / GROUP, num_tiles };
    for group in 0..places.num_groups {
        let from = x.add(group * GROUP);
        let to = out.cast::<u8>().add(places.place(row, group));
        for (i, half) in [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))].into_iter().enumerate() {
            let (hi, lo) = split(half);
            let narrow = |bits| _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits));
            _mm256_storeu_si256(to.add(i * 32).cast(), narrow(hi));
            _mm256_storeu_si256(to.add(places.low_bytes() + i * 32).cast(), narrow(lo));
        }
    }
}

/// A tile of tokens and some groups of panels.
#[derive(Debug)]
pub struct Tile {
    /// The first group of the tokens, `hi` and `lo`; from a row to the next, from a group to the next.
    hi: *const u8,
    lo: *const u8,
    row_bytes: usize,
    group_bytes: usize,
    /// The first group of the first panel, and how far the next panel's is.
    weights: *const u8,
    panel_bytes: usize,
    num_groups: usize,
}

/// Adds a tile's products to registers 0 to 2. For each panel its registers of sums and of weights. Neighbouring products
/// have different sums: one takes three times as long as it keeps the unit busy.
macro_rules! add_products {
    ($tile:ident: $($sums:literal += $weights:literal, $from:ident = $panel:literal;)+) => {
        asm!(
            "2:",
            "tileloadd tmm3, [{hi} + {row}*1]",
            $(
                concat!("tileloadd ", $weights, ", [{", stringify!($from), "} + {line}*1]"),
                concat!("tdpbf16ps ", $sums, ", tmm3, ", $weights),
            )+
            "tileloadd tmm4, [{lo} + {row}*1]",
            $(concat!("tdpbf16ps ", $sums, ", tmm4, ", $weights),)+
            "add {hi}, {group}",
            "add {lo}, {group}",
            $(concat!("add {", stringify!($from), "}, 1024"),)+
            "dec {num_groups}",
            "jnz 2b",
            hi = inout(reg) $tile.hi => _,
            lo = inout(reg) $tile.lo => _,
            row = in(reg) $tile.row_bytes,
            group = in(reg) $tile.group_bytes,
            num_groups = inout(reg) $tile.num_groups => _,
            line = in(reg) 64usize,
            $($from = inout(reg) $tile.weights.add($panel * $tile.panel_bytes) => _,)+
            options(nostack),
        )
    };
}

const _: () = assert!(
    TOKENS == TILE_ROWS && LINE == 64 && PANEL_GROUP == 1024 && MAX_PANELS == 3,
    "written out above and below"
);

/// What is done with the sums of a panel: 16 tokens by 16 rows, `$at` in memory.
macro_rules! sums {
    (zero $register:literal) => {
        asm!(concat!("tilezero ", $register), options(nostack, nomem, preserves_flags))
    };
    (load $register:literal, $at:expr) => {
        asm!(concat!("tileloadd ", $register, ", [{at} + {line}*1]"), at = in(reg) $at, line = in(reg) 64usize,
            options(nostack, readonly, preserves_flags))
    };
    (store $register:literal, $at:expr) => {
        asm!(concat!("tilestored [{at} + {line}*1], ", $register), at = in(reg) $at, line = in(reg) 64usize,
            options(nostack, preserves_flags))
    };
}

/// The sums of up to three panels, so many floats apart.
#[derive(Clone, Copy, Debug)]
struct Sums {
    start: *mut f32,
    panel_stride: usize,
    num_panels: usize,
}

impl Sums {
    fn panel(self, panel: usize) -> *mut f32 {
        self.start.wrapping_add(panel * self.panel_stride)
    }

    #[inline(always)]
    unsafe fn zero() {
        sums!(zero "tmm0");
        sums!(zero "tmm1");
        sums!(zero "tmm2");
    }

    #[inline(always)]
    unsafe fn load(self) {
        sums!(load "tmm0", self.panel(0));
        if self.num_panels > 1 {
            sums!(load "tmm1", self.panel(1));
        }
        if self.num_panels > 2 {
            sums!(load "tmm2", self.panel(2));
        }
    }

    #[inline(always)]
    unsafe fn store(self) {
        sums!(store "tmm0", self.panel(0));
        if self.num_panels > 1 {
            sums!(store "tmm1", self.panel(1));
        }
        if self.num_panels > 2 {
            sums!(store "tmm2", self.panel(2));
        }
    }
}

impl Tile {
    #[inline(always)]
    unsafe fn multiply(&self, num_panels: usize) {
        match num_panels {
            1 => add_products!(self:
                "tmm0" += "tmm5", from0 = 0;
            ),
            2 => add_products!(self:
                "tmm0" += "tmm5", from0 = 0;
                "tmm1" += "tmm6", from1 = 1;
            ),
            _ => add_products!(self:
                "tmm0" += "tmm5", from0 = 0;
                "tmm1" += "tmm6", from1 = 1;
                "tmm2" += "tmm7", from2 = 2;
            ),
        }
    }
}

/// The [`PanelKernel`](crate::kernels::gemm::PanelKernel) for rows that were split and panels that were packed in pairs, between
/// [`begin`] and [`end`]. `first` is a multiple of [`TOKENS`], and `out` has room for whole tiles.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn panels(args: &PanelArgs, first: usize, count: usize, out: *mut f32) {
    debug_assert!(args.cols.is_multiple_of(GROUP) && (1..=MAX_PANELS).contains(&args.num_panels));
    debug_assert!(first.is_multiple_of(TOKENS) && (count == 1 || args.split_tiles > 0));
    let places = Split { num_groups: args.cols / GROUP, num_tiles: args.split_tiles };
    // The sums of a single tile stay in their registers: what was just stored is slow to load.
    let is_single = count <= TOKENS;
    for group in (0..places.num_groups).step_by(BLOCK_GROUPS) {
        let num_groups = BLOCK_GROUPS.min(places.num_groups - group);
        let is_last = group + num_groups == places.num_groups;
        for token in (0..count).step_by(TOKENS) {
            let hi = args.floats.cast::<u8>().add(places.place(first + token, group));
            let tile = Tile {
                hi,
                lo: hi.add(places.low_bytes()),
                row_bytes: places.row_bytes(),
                group_bytes: places.group_bytes(),
                weights: args.quants.add(group * PANEL_GROUP),
                panel_bytes: args.quants_stride,
                num_groups,
            };
            let start = out.add(token * PANEL_ROWS);
            let sums = Sums { start, panel_stride: args.out_stride, num_panels: args.num_panels };
            if group == 0 {
                Sums::zero();
            } else if !is_single {
                sums.load();
            }
            tile.multiply(args.num_panels);
            if is_last || !is_single {
                sums.store();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_backend::testing::Random;
    use half::bf16;

    use super::super::is_available;
    use super::*;
    use crate::isa::Isa;

    /// Panels of one test: packed, `[panels][k / 2][16][2]`, and as numbers, `[panels][k][16]`.
    struct Panels {
        packed: Vec<u16>,
        values: Vec<f32>,
    }

    fn random_panels(random: &mut Random, num_panels: usize, cols: usize) -> Panels {
        let numbers = random.normals(num_panels * cols * PANEL_ROWS);
        let (mut packed, mut values) = (vec![0; numbers.len()], vec![0.0; numbers.len()]);
        for (at, x) in numbers.into_iter().enumerate() {
            let (k, row) = (at / PANEL_ROWS, at % PANEL_ROWS);
            packed[(k / 2 * PANEL_ROWS + row) * 2 + k % 2] = bf16::from_f32(x).to_bits();
            values[at] = bf16::from_f32(x).to_f32();
        }
        Panels { packed, values }
    }

    fn lacks_avx512() -> bool {
        let lacks = !Isa::Avx512.is_available();
        if lacks {
            println!("skipped: this processor has no AVX-512");
        }
        lacks
    }

    #[test]
    fn rows_are_split_into_nearest_numbers() {
        if lacks_avx512() {
            return;
        }
        let mut random = Random::new(5);
        let mut row: Vec<f32> = random.normals(3 * GROUP);
        for (i, x) in row.iter_mut().enumerate() {
            *x *= 10.0f32.powi(i as i32 % 70 - 35);
        }
        let ties = [0x3f80_8000, 0x3f81_8000, 0x3f80_7fff, 0x3f80_8001, 0xbf80_8000].map(f32::from_bits);
        let special = [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN, 1e-41];
        let not_numbers = [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001].map(f32::from_bits);
        for (x, &value) in row.iter_mut().zip(ties.iter().chain(&special).chain(&not_numbers)) {
            *x = value;
        }
        let mut apart = vec![0.0f32; row.len()];
        let mut in_place = row.clone();
        // SAFETY: the processor has the instructions; the rows have whole groups.
        unsafe {
            split_row(row.as_ptr(), row.len(), apart.as_mut_ptr(), 0, 0);
            split_row(in_place.as_ptr(), row.len(), in_place.as_mut_ptr(), 0, 0);
        }
        let halves = |row: &[f32]| -> Vec<u16> {
            row.iter().flat_map(|x| [x.to_bits() as u16, (x.to_bits() >> 16) as u16]).collect()
        };
        assert_eq!(halves(&apart), halves(&in_place));
        let halves = halves(&apart);
        for (k, &x) in row.iter().enumerate() {
            let at = k / GROUP * 2 * GROUP + k % GROUP;
            let (hi, lo) = (bf16::from_bits(halves[at]), bf16::from_bits(halves[at + GROUP]));
            if x.is_nan() {
                assert!(hi.is_nan() && lo.to_f32() == 0.0, "{k}: {x} is {hi} + {lo}");
                continue;
            }
            let expected = bf16::from_f32(x);
            assert_eq!(hi.to_bits(), expected.to_bits(), "{k}: {x}");
            let rest = if expected.is_finite() { x - expected.to_f32() } else { 0.0 };
            assert_eq!(lo.to_bits(), bf16::from_f32(rest).to_bits(), "{k}: {x}");
            if x.is_finite() && hi.is_finite() && x.abs() > 1e-30 {
                let both = f64::from(hi.to_f32()) + f64::from(lo.to_f32());
                assert!((both - f64::from(x)).abs() <= f64::from(x).abs() / f64::from(1 << 17), "{k}: {x}");
            }
        }
    }

    #[test]
    fn split_rows_lie_in_the_order_of_the_loops() {
        for (num_tiles, num_groups) in [(1, 1), (1, 8), (3, 5), (2, 19), (5, 24)] {
            let places = Split { num_groups, num_tiles };
            let mut expected = 0;
            for block in (0..num_groups).step_by(BLOCK_GROUPS) {
                for tile in 0..num_tiles {
                    for group in block..(block + BLOCK_GROUPS).min(num_groups) {
                        for row in 0..TOKENS {
                            assert_eq!(places.place(tile * TOKENS + row, group), expected + row * LINE);
                        }
                        assert_eq!((places.low_bytes(), places.row_bytes()), (TILE, LINE));
                        expected += places.group_bytes();
                    }
                }
            }
            assert_eq!(expected, num_tiles * TOKENS * num_groups * GROUP * 4);
        }
        let single = Split { num_groups: 9, num_tiles: 0 };
        assert_eq!((single.place(0, 8), single.low_bytes(), single.row_bytes()), (8 * 128, 64, 0));
    }

    /// Multiplies tokens `first..first + count` of `rows`, or its only one; what lies behind the tiles must stay.
    unsafe fn multiply(
        panels: &Panels,
        (num_panels, cols): (usize, usize),
        (rows, split_tiles): (*const f32, usize),
        (first, count): (usize, usize),
    ) -> Vec<f32> {
        const UNTOUCHED: f32 = -7.0;
        let written = count.next_multiple_of(TOKENS) * PANEL_ROWS;
        let out_stride = written + PANEL_ROWS;
        let mut out = vec![UNTOUCHED; num_panels * out_stride];
        let args = PanelArgs {
            quants: panels.packed.as_ptr().cast(),
            scales: std::ptr::null(),
            quants_stride: cols * PANEL_ROWS * 2,
            scales_stride: 0,
            num_panels,
            cols,
            blocks: std::ptr::null(),
            lanes: 1,
            floats: rows,
            stride: cols,
            split_tiles,
            supers: std::ptr::null(),
            super_tiles: 0,
            out_stride,
            target: std::ptr::null(),
            target_stride: 0,
        };
        begin();
        super::panels(&args, first, count, out.as_mut_ptr());
        end();
        let behind = out.chunks(out_stride).flat_map(|panel| &panel[written..]);
        assert!(behind.into_iter().all(|&x| x == UNTOUCHED), "more than {count} tokens were written");
        out.chunks(out_stride).flat_map(|panel| &panel[..count * PANEL_ROWS]).copied().collect()
    }

    #[test]
    fn tiles_agree_with_exact_arithmetic_for_any_number_of_tokens() {
        if !is_available() {
            println!("skipped: this processor, or the system, has no AMX");
            return;
        }
        let num_tokens = 40;
        let shapes = [(1, 32), (2, 96), (3, 128), (3, 256), (2, 416), (1, 544), (3, 608)];
        for (num_panels, cols) in shapes {
            let mut random = Random::new(11);
            let panels = random_panels(&mut random, num_panels, cols);
            let rows = random.normals(num_tokens * cols);
            let shape = (num_panels, cols);
            let split = |first: usize, count: usize, num_tiles: usize| {
                let mut split = vec![f32::NAN; num_tiles.max(1) * TOKENS * cols];
                for row in 0..count {
                    let from = rows[(first + row) * cols..].as_ptr();
                    // SAFETY: available; the arrays have the sizes that are said.
                    unsafe { split_row(from, cols, split.as_mut_ptr(), row, num_tiles) };
                }
                split
            };
            let whole = split(0, num_tokens, 3);
            // SAFETY: available; the arrays have the sizes that are said.
            let all = unsafe { multiply(&panels, shape, (whole.as_ptr(), 3), (0, num_tokens)) };
            for (at, got) in all.iter().enumerate() {
                let (panel, token, row) =
                    (at / PANEL_ROWS / num_tokens, at / PANEL_ROWS % num_tokens, at % PANEL_ROWS);
                let products = (0..cols).map(|k| {
                    let weight = panels.values[(panel * cols + k) * PANEL_ROWS + row];
                    f64::from(weight) * f64::from(rows[token * cols + k])
                });
                let (expected, scale) = (products.clone().sum::<f64>(), products.map(f64::abs).sum::<f64>());
                assert!(
                    (f64::from(*got) - expected).abs() <= scale / f64::from(1 << 16),
                    "{num_panels} panels of {cols}, token {token}, row {row}: {got}, not {expected}"
                );
            }
            // A token's results are the same bits in every batch, and alone.
            let same = |some: &[f32], first: usize, count: usize| {
                for (panel, some) in some.chunks(count * PANEL_ROWS).enumerate() {
                    let all = &all[(panel * num_tokens + first) * PANEL_ROWS..][..count * PANEL_ROWS];
                    let is_same = some.iter().zip(all).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(is_same, "{count} from {first}");
                }
            };
            for (first, count) in [(0, 1), (0, 16), (0, 17), (16, 1), (16, 24), (32, 8)] {
                // SAFETY: as above.
                let some = unsafe { multiply(&panels, shape, (whole.as_ptr(), 3), (first, count)) };
                same(&some, first, count);
            }
            for (first, count) in [(5_usize, 1_usize), (7, 20)] {
                let num_tiles = count.div_ceil(TOKENS);
                let some = split(first, count, num_tiles);
                // SAFETY: as above.
                let some = unsafe { multiply(&panels, shape, (some.as_ptr(), num_tiles), (0, count)) };
                same(&some, first, count);
            }
            let alone = split(9, 1, 0);
            // SAFETY: as above.
            let alone = unsafe { multiply(&panels, shape, (alone.as_ptr(), 0), (0, 1)) };
            same(&alone, 9, 1);
        }
    }
}
