//! Activations as the quantised kernels read them: int8 in blocks of 32 with a scale and sums.
//!
//! A block is one cache line. The blocks of up to [`LANES`] tokens are interleaved, so that a kernel which works on
//! several tokens walks through memory with one pointer: `[tokens / lanes][blocks][lanes]`, where `lanes` is the number
//! of tokens if that is smaller than [`LANES`].

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
