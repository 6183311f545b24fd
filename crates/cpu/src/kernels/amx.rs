//! Intel's tile unit (AMX): whole blocks of bytes multiplied with eight tokens at once.
//!
//! A tile register holds up to 16 rows of 64 bytes. One `tdpbsud` multiplies a tile of activations (8 tokens × 32 k, signed)
//! with a tile of opened weights (8 groups of `16 rows × 4 k`, unsigned, just as [`super::tile`] opens them) into 8 × 16 sums
//! of i32. Its k is one block of 32 and not the 64 that would fit, because the next block has another scale. The sums are
//! exact, and what is done with them afterwards is the code of every other instruction set: the results are those of
//! VNNI, to the last bit.
//!
//! Stable Rust has no intrinsics for tiles, hence `asm!`. No compiler-made code touches tile registers, so what one block of
//! assembly leaves in them is there for the next on the same thread. Formats with a scale for each half block stay with
//! VNNI: half a tile is no faster.
//!
//! # Safety
//! [`is_available`] has said yes in this process; between [`begin`] and [`end`] the thread runs nothing else that uses tiles.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// Tokens of a tile.
pub const TOKENS: usize = 8;
/// The most panels of one call.
pub const PANELS: usize = 3;

/// Linux's number of the tile registers among the processor's states, and the call that asks for permission to use them.
const XFEATURE_TILE_DATA: libc::c_ulong = 18;
const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;

/// True where the processor has tiles of bytes and the system lets this process use them. Asks for it once.
pub fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && system_saves_tiles() && request_permission())
}

/// CPUID leaf 7: AMX-TILE and AMX-INT8.
#[allow(unused_unsafe)] // Safe functions since some version of the compiler.
fn has_tiles() -> bool {
    // SAFETY: every 64-bit processor has CPUID.
    let (highest, leaf) = unsafe { (__cpuid(0).eax, __cpuid_count(7, 0)) };
    highest >= 7 && leaf.edx & (1 << 24) != 0 && leaf.edx & (1 << 25) != 0
}

/// The system saves tile configuration and data (bits 17 and 18 of XCR0) when it switches threads.
fn system_saves_tiles() -> bool {
    #[target_feature(enable = "xsave")]
    fn saved_states() -> u64 {
        // SAFETY: register 0 exists wherever the instruction does.
        unsafe { _xgetbv(0) }
    }
    const TILES: u64 = (1 << 17) | (1 << 18);
    // SAFETY: the processor has the instruction.
    is_x86_feature_detected!("xsave") && unsafe { saved_states() } & TILES == TILES
}

/// Linux lets a process use tiles only after it has asked.
fn request_permission() -> bool {
    // SAFETY: the call has no other effect than to allow the process larger state.
    cfg!(target_os = "linux")
        && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_TILE_DATA) } == 0
}

/// The shapes of the tile registers, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const _: () = assert!(size_of::<Config>() == 64);

/// Registers 0 to 2 hold sums, 3 activations, 4 to 6 weights.
static BLOCK_CONFIG: Config = {
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut register = 0;
    while register < 7 {
        // Eight tokens, or eight groups of four k.
        config.rows[register] = 8;
        config.row_bytes[register] = if register == 3 { 32 } else { 64 };
        register += 1;
    }
    config
};

/// All registers full: for [`peak_dot`].
static FULL_CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

#[inline(always)]
unsafe fn configure(config: &'static Config) {
    asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly, preserves_flags));
}

/// Gives the registers their shapes for [`dot_block`].
#[inline(always)]
pub unsafe fn begin() {
    configure(&BLOCK_CONFIG);
}

/// Empties the registers, so that a switch of threads need not save them.
#[inline(always)]
pub unsafe fn end() {
    asm!("tilerelease", options(nostack, nomem, preserves_flags));
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

/// The [`PeakKernel`](super::peak::PeakKernel) of bytes: full tiles, four sums that do not wait for each other.
pub unsafe fn peak_dot(rounds: usize) -> f64 {
    configure(&FULL_CONFIG);
    asm!(
        "tilezero tmm0",
        "tilezero tmm1",
        "tilezero tmm2",
        "tilezero tmm3",
        "tilezero tmm4",
        "tilezero tmm5",
        "2:",
        "tdpbsud tmm0, tmm4, tmm5",
        "tdpbsud tmm1, tmm4, tmm5",
        "tdpbsud tmm2, tmm4, tmm5",
        "tdpbsud tmm3, tmm4, tmm5",
        "dec {rounds}",
        "jnz 2b",
        rounds = inout(reg) rounds.max(1) => _,
        options(nostack, nomem),
    );
    end();
    (rounds.max(1) * 4 * 16 * 16 * 64) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_multiplied_exactly() {
        if !is_available() {
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
