//! Activations as the quantised kernels read them: int8 in blocks of 32 with a scale and sums.
//!
//! A block is one cache line. The blocks of up to [`LANES`] tokens are interleaved, so that a kernel which works on
//! several tokens walks through memory with one pointer: `[tokens / lanes][blocks][lanes]`, where `lanes` is the number
//! of tokens if that is smaller than [`LANES`].
//!
//! Where k-quants are multiplied in tiles (`kernels::supers`), their rows are int8 with one scale per super-block of 256
//! instead; [`SuperPlaces`] says where they lie.

use crate::weights::formats::{SPLIT_TOKENS, SUPER_BLOCK};

/// Tokens that are interleaved.
pub const LANES: usize = 8;

/// 32 activations of one token: `x ≈ d · quants`.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct ActivationBlock {
    pub quants: [i8; 32],
    /// `amax / 127`, rounded to f16, as llama.cpp does.
    pub d: f32,
    /// [`START_BITS`] − 128 Σ quants, and the same for each half.
    pub start: i32,
    pub starts: [i32; 2],
    /// d · Σ quants, and the same for each half.
    pub scaled_sum: f32,
    pub scaled_sums: [f32; 2],
    pub unused: u32,
}

/// The bits of 1.5 · 2^23. An integer below 2^22 that is added to them makes a float which is that much larger: so a
/// sum of products which starts here needs no conversion.
pub const START_BITS: i32 = 0x4b40_0000;
/// The float of [`START_BITS`].
pub const START: f32 = 12_582_912.0;
/// The offset of quants for which a block's `start` is made, as a power of two.
pub const START_SHIFT: u32 = 7;

impl ActivationBlock {
    /// `sums` are those of the halves of `quants`.
    #[inline(always)]
    pub fn new(quants: [i8; 32], sums: [i32; 2], d: f32) -> Self {
        let sum = sums[0].wrapping_add(sums[1]);
        let start = |sum: i32| START_BITS.wrapping_sub(sum << START_SHIFT);
        Self {
            quants,
            d,
            start: start(sum),
            starts: sums.map(start),
            scaled_sum: d * sum as f32,
            scaled_sums: sums.map(|sum| d * sum as f32),
            unused: 0,
        }
    }

    /// −2^shift · Σ quants, of the whole block or of one half.
    #[inline(always)]
    pub fn negative_sum(start: i32, shift: u32) -> i32 {
        start.wrapping_sub(START_BITS) >> (START_SHIFT - shift)
    }
}

const _: () = assert!(size_of::<ActivationBlock>() == 64);

/// Tokens that are interleaved in a batch of `num_tokens`.
pub fn lanes(num_tokens: usize) -> usize {
    num_tokens.clamp(1, LANES)
}

/// Index of a token's first block; its further ones follow at distance `lanes`.
pub fn first_block(token: usize, lanes: usize, blocks_per_row: usize) -> usize {
    token / LANES * lanes * blocks_per_row + token % LANES
}

/// Blocks that a batch takes.
pub fn num_blocks(num_tokens: usize, blocks_per_row: usize) -> Option<usize> {
    num_tokens.div_ceil(LANES).checked_mul(LANES)?.checked_mul(blocks_per_row)
}

/// What belongs to a super-block of one token beside its quants: `x ≈ d · quants`.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct SuperSums {
    /// `amax / 127`.
    pub d: f32,
    pub unused: [u32; 3],
    /// Sums of 32 quants each.
    pub sums: [i16; SUPER_BLOCK / 32],
    /// Sums of 16 quants each.
    pub halves: [i16; SUPER_BLOCK / 16],
}

const _: () = assert!(size_of::<SuperSums>() == 64);

/// Bytes of a line: the quants of 64 columns of a token, which are one row of a tile.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Others have no tiles.
pub const SUPER_LINE: usize = 64;
/// Lines of a super-block.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Others have no tiles.
pub const SUPER_LINES: usize = SUPER_BLOCK / SUPER_LINE;

/// Where rows that were quantised in super-blocks lie, in the order in which tiles are loaded: quants
/// `[super-blocks][tiles][4 lines][16 tokens][64]`, then [`SuperSums`] `[super-blocks][tiles][16 tokens]`. A single row has no
/// neighbours: there the 16 is a one.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Others have no tiles.
#[derive(Clone, Copy, Debug)]
pub struct SuperPlaces {
    num_supers: usize,
    num_tiles: usize,
    tile_rows: usize,
}

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Others have no tiles.
impl SuperPlaces {
    /// `num_tiles` of tokens, zero for a single row.
    pub fn new(cols: usize, num_tiles: usize) -> Self {
        let tile_rows = if num_tiles == 0 { 1 } else { SPLIT_TOKENS };
        Self { num_supers: cols / SUPER_BLOCK, num_tiles: num_tiles.max(1), tile_rows }
    }

    /// Bytes that `num_rows` padded rows take.
    pub fn bytes(num_rows: usize, cols: usize) -> Option<usize> {
        (cols / SUPER_BLOCK).checked_mul(num_rows)?.checked_mul(SUPER_BLOCK + size_of::<SuperSums>())
    }

    pub fn num_supers(self) -> usize {
        self.num_supers
    }

    /// From a line of a row to its next one, in bytes.
    pub fn line_stride(self) -> usize {
        self.tile_rows * SUPER_LINE
    }

    /// The first line of a row's super-block, in bytes from the start.
    pub fn quants(self, row: usize, super_block: usize) -> usize {
        let tile = super_block * self.num_tiles + row / SPLIT_TOKENS;
        tile * SUPER_LINES * self.line_stride() + row % SPLIT_TOKENS * SUPER_LINE
    }

    /// The [`SuperSums`] of a row's super-block, in bytes from the start.
    pub fn sums(self, row: usize, super_block: usize) -> usize {
        let tile = super_block * self.num_tiles + row / SPLIT_TOKENS;
        let before = self.num_supers * self.num_tiles * SUPER_LINES * self.line_stride();
        before + (tile * self.tile_rows + row % SPLIT_TOKENS) * size_of::<SuperSums>()
    }
}
