//! The tile unit's products of bytes, for [`supers`](crate::kernels::supers).
//!
//! Registers 0 to 3 hold sums (high and low plane of the first tile of tokens, then of the second), 4 and 5 tokens, 6 and 7 the
//! planes. A product keeps the unit busy for 16 cycles and its sums are there after 52, so that no product waits for the
//! one before with four of them in turn; loading four registers takes the load ports half of that time.
//!
//! # Safety
//! As in [`super`]: between `begin` and `end`.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::asm;

use super::{FULL_CONFIG, configure, release};
use crate::kernels::supers::{NEXT_TOKENS, Sums, TileUnit};

/// AMX's tiles of bytes.
#[derive(Debug)]
pub struct Tiles;

/// Multiplies registers 4 and, for a pair, 5 with both planes; `$high` is the product of the signed or unsigned high plane.
macro_rules! add_products {
    (pair $high:literal, $tokens:ident, $weights:ident) => {
        asm!(
            "tileloadd tmm6, [{weights} + {line}*1]",
            "tileloadd tmm4, [{tokens} + {line}*1]",
            concat!($high, " tmm0, tmm4, tmm6"),
            "tileloadd tmm7, [{weights} + {line}*1 + 1024]",
            "tdpbsud tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{tokens} + {line}*1 + {next}]",
            concat!($high, " tmm2, tmm5, tmm6"),
            "tdpbsud tmm3, tmm5, tmm7",
            tokens = in(reg) $tokens,
            weights = in(reg) $weights,
            line = in(reg) 64usize,
            next = const NEXT_TOKENS,
            options(nostack, readonly, preserves_flags),
        )
    };
    (single $high:literal, $tokens:ident, $weights:ident) => {
        asm!(
            "tileloadd tmm6, [{weights} + {line}*1]",
            "tileloadd tmm4, [{tokens} + {line}*1]",
            concat!($high, " tmm0, tmm4, tmm6"),
            "tileloadd tmm7, [{weights} + {line}*1 + 1024]",
            "tdpbsud tmm1, tmm4, tmm7",
            tokens = in(reg) $tokens,
            weights = in(reg) $weights,
            line = in(reg) 64usize,
            options(nostack, readonly, preserves_flags),
        )
    };
}

impl TileUnit for Tiles {
    #[inline(always)]
    unsafe fn begin() {
        configure(&FULL_CONFIG);
    }

    #[inline(always)]
    unsafe fn end() {
        release();
    }

    #[inline(always)]
    unsafe fn zero() {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nostack, nomem, preserves_flags)
        );
    }

    #[inline(always)]
    unsafe fn add<const PAIR: bool, const SIGNED: bool>(tokens: *const u8, weights: *const u8) {
        match (PAIR, SIGNED) {
            (true, true) => add_products!(pair "tdpbssd", tokens, weights),
            (true, false) => add_products!(pair "tdpbsud", tokens, weights),
            (false, true) => add_products!(single "tdpbssd", tokens, weights),
            (false, false) => add_products!(single "tdpbsud", tokens, weights),
        }
    }

    #[inline(always)]
    unsafe fn store<const PAIR: bool>(to: *mut Sums) {
        asm!(
            "tilestored [{to} + {line}*1], tmm0",
            "tilestored [{to} + {line}*1 + 1024], tmm1",
            to = in(reg) to,
            line = in(reg) 64usize,
            options(nostack, preserves_flags),
        );
        if PAIR {
            asm!(
                "tilestored [{to} + {line}*1 + 2048], tmm2",
                "tilestored [{to} + {line}*1 + 3072], tmm3",
                to = in(reg) to,
                line = in(reg) 64usize,
                options(nostack, preserves_flags),
            );
        }
    }
}
