//! Intel's tile unit (AMX): registers of up to 16 rows of 64 bytes, and instructions that multiply two of them into a third.
//!
//! [`int8`] multiplies planes of k-quants, [`bf16`] float weights. Here is what both need: whether the machine has
//! tiles, and the shapes of the registers. Stable Rust has no intrinsics for tiles, hence `asm!`. No compiler-made code
//! touches tile registers, so what one block of assembly leaves in them is there for the next on the same thread.
//!
//! # Safety
//! [`is_available`] has said yes in this process; from [`configure`] to [`release`] the thread runs nothing else that uses tiles.
#![allow(unsafe_op_in_unsafe_fn)]

pub mod bf16;
pub mod int8;

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// Rows of a register, and bytes of each.
const TILE_ROWS: usize = 16;
const TILE_BYTES: usize = 64;

/// Linux's number of the tile registers among the processor's states, and the call that asks for permission to use them.
const XFEATURE_TILE_DATA: libc::c_ulong = 18;
const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;

/// True where the processor has tiles of bytes and of bf16 and the system lets this process use them. Asks for it once.
pub fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && system_saves_tiles() && request_permission())
}

/// CPUID leaf 7: AMX-BF16, AMX-TILE and AMX-INT8. No processor has one kind of tiles without the other.
#[allow(unused_unsafe)] // Safe functions since some version of the compiler.
fn has_tiles() -> bool {
    const TILES: u32 = (1 << 22) | (1 << 24) | (1 << 25);
    // SAFETY: every 64-bit processor has CPUID.
    let (highest, leaf) = unsafe { (__cpuid(0).eax, __cpuid_count(7, 0)) };
    highest >= 7 && leaf.edx & TILES == TILES
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

impl Config {
    /// Registers of the given `(rows, bytes of a row)`.
    const fn new(shapes: [(usize, usize); 8]) -> Self {
        let mut config =
            Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut register = 0;
        while register < shapes.len() {
            let (rows, bytes) = shapes[register];
            assert!(rows <= TILE_ROWS && bytes <= TILE_BYTES);
            config.rows[register] = rows as u8;
            config.row_bytes[register] = bytes as u16;
            register += 1;
        }
        config
    }
}

/// All registers full: for peaks.
static FULL_CONFIG: Config = Config::new([(TILE_ROWS, TILE_BYTES); 8]);

/// Gives the registers their shapes and empties them.
#[inline(always)]
unsafe fn configure(config: &'static Config) {
    asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly, preserves_flags));
}

/// Takes the registers out of use, so that a switch of threads need not save them.
#[inline(always)]
unsafe fn release() {
    asm!("tilerelease", options(nostack, nomem, preserves_flags));
}

/// Rounds of four products of full tiles that do not wait for each other.
macro_rules! run_products {
    ($instruction:literal, $rounds:expr) => {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tilezero tmm4",
            "tilezero tmm5",
            "2:",
            concat!($instruction, " tmm0, tmm4, tmm5"),
            concat!($instruction, " tmm1, tmm4, tmm5"),
            concat!($instruction, " tmm2, tmm4, tmm5"),
            concat!($instruction, " tmm3, tmm4, tmm5"),
            "dec {rounds}",
            "jnz 2b",
            rounds = inout(reg) $rounds => _,
            options(nostack, nomem),
        )
    };
}

/// The [`PeakKernel`](super::peak::PeakKernel) of bytes.
pub unsafe fn peak_dot(rounds: usize) -> f64 {
    let rounds = rounds.max(1);
    configure(&FULL_CONFIG);
    run_products!("tdpbsud", rounds);
    release();
    (rounds * 4 * TILE_ROWS * 16 * TILE_BYTES) as f64
}

/// The [`PeakKernel`](super::peak::PeakKernel) of bf16.
pub unsafe fn peak_bf16(rounds: usize) -> f64 {
    let rounds = rounds.max(1);
    configure(&FULL_CONFIG);
    run_products!("tdpbf16ps", rounds);
    release();
    (rounds * 4 * TILE_ROWS * 16 * TILE_BYTES / 2) as f64
}
