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
    /// −Σ quants, and the same for each half.
    pub negative_sum: i32,
    pub negative_sums: [i32; 2],
    /// d · Σ quants, and the same for each half.
    pub scaled_sum: f32,
    pub scaled_sums: [f32; 2],
    pub unused: u32,
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
