//! Tiles in plain code, for tests on processors without them.

use std::cell::RefCell;

use super::tiles::{NEXT_TOKENS, Sums, TileUnit};
use crate::weights::formats::{PANEL_ROWS, SPLIT_TOKENS};

/// Rows and columns of a tile of sums; bytes of a row of tokens.
const SIZE: usize = 16;
const LINE: usize = 64;

type Tile = [i32; SIZE * SIZE];

thread_local! {
    /// None outside of `begin` and `end`.
    static REGISTERS: RefCell<Option<[Tile; 4]>> = const { RefCell::new(None) };
}

fn with_registers<T>(work: impl FnOnce(&mut [Tile; 4]) -> T) -> T {
    REGISTERS.with_borrow_mut(|registers| work(registers.as_mut().expect("tiles were configured")))
}

/// What `tdpbssd` and `tdpbsud` do: row `m` of the signed bytes `a` times column `n` of `b`, of which four bytes lie together.
fn dot(sums: &mut Tile, a: &[u8], b: &[u8], is_signed: bool) {
    for m in 0..SIZE {
        for n in 0..SIZE {
            let product = |k: usize| {
                let weight = b[k / 4 * LINE + n * 4 + k % 4];
                let weight = if is_signed { i32::from(weight as i8) } else { i32::from(weight) };
                i32::from(a[m * LINE + k] as i8) * weight
            };
            let sum: i32 = (0..LINE).map(product).sum();
            sums[m * SIZE + n] = sums[m * SIZE + n].wrapping_add(sum);
        }
    }
}

#[derive(Debug)]
pub struct Emulated;

impl TileUnit for Emulated {
    unsafe fn begin() {
        // Whatever registers hold before they are zeroed must not matter.
        REGISTERS.with_borrow_mut(|registers| *registers = Some([[0x5555_5555; SIZE * SIZE]; 4]));
    }

    unsafe fn end() {
        REGISTERS.with_borrow_mut(|registers| *registers = None);
    }

    unsafe fn zero() {
        with_registers(|registers| *registers = [[0; SIZE * SIZE]; 4]);
    }

    unsafe fn add<const PAIR: bool, const SIGNED: bool>(tokens: *const u8, weights: *const u8) {
        // SAFETY: what the caller promises of both.
        let tile = |from: *const u8| unsafe { std::slice::from_raw_parts(from, SIZE * LINE) };
        with_registers(|registers| {
            for i in 0..if PAIR { 2 } else { 1 } {
                let tokens = tile(tokens.wrapping_add(i * NEXT_TOKENS));
                dot(&mut registers[2 * i], tokens, tile(weights), SIGNED);
                dot(&mut registers[2 * i + 1], tokens, tile(weights.wrapping_add(SIZE * LINE)), false);
            }
        });
    }

    unsafe fn store<const PAIR: bool>(to: *mut Sums) {
        const { assert!(SPLIT_TOKENS == SIZE && PANEL_ROWS == SIZE) };
        with_registers(|registers| {
            for (i, register) in registers.iter().enumerate().take(if PAIR { 4 } else { 2 }) {
                // SAFETY: there is room for four tiles.
                unsafe { to.cast::<Tile>().add(i).write(*register) };
            }
        });
    }
}
