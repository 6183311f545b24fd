//! Whole blocks of bytes multiplied with eight tokens at once.
//!
//! One `tdpbsud` multiplies a tile of activations (8 tokens × 32 k, signed) with a tile of opened weights (8 groups of
//! `16 rows × 4 k`, unsigned, just as [`tile`](crate::kernels::tile) opens them) into 8 × 16 sums of i32. Its k is one block
//! of 32 and not the 64 that would fit, because the next block has another scale. The sums are exact, and what is done with
//! them afterwards is the code of every other instruction set: the results are those of VNNI, to the last bit.
//! Formats with a scale for each half block stay with VNNI: half a tile is no faster.
//!
//! # Safety
//! As in [`super`]: between [`begin`] and [`end`].
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::asm;
use std::mem::MaybeUninit;

use super::{Config, configure, release};

/// Tokens of a tile.
pub const TOKENS: usize = 8;
/// The most panels of one call.
pub const PANELS: usize = 3;

/// Registers 0 to 2 hold sums, 3 activations, 4 to 6 weights: rows are eight tokens, or eight groups of four k.
static BLOCK_CONFIG: Config =
    Config::new([(8, 64), (8, 64), (8, 64), (8, 32), (8, 64), (8, 64), (8, 64), (0, 0)]);

/// Gives the registers their shapes for [`dot_block`].
#[inline(always)]
pub unsafe fn begin() {
    configure(&BLOCK_CONFIG);
}

/// Ends what [`begin`] began.
#[inline(always)]
pub unsafe fn end() {
    release();
}

/// Sums of up to three panels, `[panels][8 tokens][16 rows]`.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Sums([MaybeUninit<i32>; PANELS * TOKENS * 16]);

impl Sums {
    #[inline(always)]
    pub fn new() -> Self {
        Self([MaybeUninit::uninit(); PANELS * TOKENS * 16])
    }

    /// The sums of one panel and token: 16 of them.
    #[inline(always)]
    pub fn at(&self, panel: usize, token: usize) -> *const i32 {
        self.0[(panel * TOKENS + token) * 16..].as_ptr().cast()
    }
}

/// Multiplies a block of one panel with the activations in register 3 and stores the sums.
macro_rules! multiply_panel {
    ($sums:literal, $weights:literal, $from:expr, $to:expr) => {
        asm!(
            concat!("tilezero ", $sums),
            concat!("tileloadd ", $weights, ", [{from} + {line}]"),
            concat!("tdpbsud ", $sums, ", tmm3, ", $weights),
            concat!("tilestored [{to} + {line}], ", $sums),
            from = in(reg) $from,
            to = in(reg) $to,
            line = in(reg) 64usize,
            options(nostack, preserves_flags),
        )
    };
}

/// The dot products of a block of `R` panels, `panel_stride` bytes apart, with eight tokens, `token_stride` bytes apart:
/// 512 bytes of each panel, 32 of each token.
#[inline(always)]
pub unsafe fn dot_block<const R: usize>(
    sums: &mut Sums,
    weights: *const u8,
    panel_stride: usize,
    activations: *const i8,
    token_stride: usize,
) {
    const { assert!(R <= PANELS) };
    asm!(
        "tileloadd tmm3, [{from} + {stride}]",
        from = in(reg) activations,
        stride = in(reg) token_stride,
        options(nostack, readonly, preserves_flags),
    );
    let sums = (&raw mut *sums).cast::<u8>();
    let to = |panel: usize| sums.add(panel * TOKENS * 64);
    multiply_panel!("tmm0", "tmm4", weights, to(0));
    if R > 1 {
        multiply_panel!("tmm1", "tmm5", weights.add(panel_stride), to(1));
    }
    if R > 2 {
        multiply_panel!("tmm2", "tmm6", weights.add(2 * panel_stride), to(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_multiplied_exactly() {
        if !super::super::is_available() {
            println!("skipped: this processor, or the system, has no AMX");
            return;
        }
        let mut random = baton_backend::testing::Random::new(3);
        let mut bytes = |len: usize| -> Vec<u8> {
            random.normals(len).iter().map(|x| (x * 100.0) as i64 as u8).collect()
        };
        // Weights `[panels][8 groups][16 rows][4 k]`, activations of 8 tokens 64 bytes apart.
        let (weights, activations) = (bytes(3 * 512), bytes(8 * 64));
        let mut sums = Sums::new();
        // SAFETY: available; the arrays have the sizes that are read.
        unsafe {
            begin();
            dot_block::<3>(&mut sums, weights.as_ptr(), 512, activations.as_ptr().cast(), 64);
            end();
        }
        for (panel, token, row) in
            (0..3).flat_map(|panel| (0..8).flat_map(move |token| (0..16).map(move |row| (panel, token, row))))
        {
            let weight = |k: usize| i32::from(weights[panel * 512 + k / 4 * 64 + row * 4 + k % 4]);
            let activation = |k: usize| i32::from(activations[token * 64 + k] as i8);
            let expected: i32 = (0..32).map(|k| weight(k) * activation(k)).sum();
            // SAFETY: the sums of all three panels were stored.
            let got = unsafe { *sums.at(panel, token).add(row) };
            assert_eq!(got, expected, "panel {panel}, token {token}, row {row}");
        }
    }
}
