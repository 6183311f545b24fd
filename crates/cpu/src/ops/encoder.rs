//! Attention in both directions within the sequences of a step, without a cache. A unit is some queries of one head of a sequence:
//! their scores are kept whole, since a sequence of an encoder is short.

use baton_backend::EncoderAttention;

use super::{OpResult, Step, require};
use crate::buffers::{Matrix, Shared};
use crate::isa::Isa;
use crate::units::Units;

/// Queries of a unit.
const QUERIES: usize = 16;
/// Keys whose scores are on the stack at a time; a softmax goes on over the next ones.
const KEYS: usize = 256;
/// The widest head.
const MAX_HEAD_DIM: usize = 256;

/// Some queries of a sequence.
#[derive(Clone, Copy)]
struct Tile {
    first_query: usize,
    num_queries: usize,
    first_key: usize,
    num_keys: usize,
}

struct Args {
    qkv: Matrix,
    output: Matrix,
    head_dim: usize,
    scale: f32,
}

impl Step<'_> {
    pub(super) fn run_encoder_attention(&mut self, op: &EncoderAttention) -> OpResult {
        let num_tokens = self.input.num_tokens();
        if num_tokens == 0 {
            return Ok(());
        }
        let (qkv, output) = (self.buffer(op.qkv, num_tokens)?, self.buffer(op.output, num_tokens)?);
        let head_dim = output.cols / op.num_heads.max(1);
        require(head_dim * op.num_heads == output.cols, "heads do not fill the output of attention")?;
        require(qkv.cols == 3 * output.cols, "q, k and v are not as wide as the output of attention")?;
        require(head_dim <= MAX_HEAD_DIM, "a head of an encoder is too wide")?;
        self.rotate_rows(op, qkv, head_dim)?;
        let tiles = tiles(&self.input.slots[..num_tokens]);
        let units = Units::new(tiles.len() * op.num_heads);
        let kernel = kernel(self.backend.isa());
        // SAFETY: each worker writes the queries of one head that it took; q, k and v are only read.
        let args = unsafe { Shared::new(Args { qkv, output, head_dim, scale: op.scale }) };
        self.backend.pool.run(&|_| {
            while let Some(unit) = units.take() {
                let (tile, head) = (tiles[unit / op.num_heads], unit % op.num_heads);
                // SAFETY: rows and heads lie in the buffers, whose shapes were checked.
                unsafe { kernel(args.get(), tile, head) };
            }
        });
        Ok(())
    }

    /// Rotates q and k in place.
    fn rotate_rows(&mut self, op: &EncoderAttention, qkv: Matrix, head_dim: usize) -> OpResult {
        let Some(id) = op.rope else { return Ok(()) };
        let rope =
            self.backend.ropes.get(id.0 as usize).ok_or_else(|| super::wrong("no such rotary table"))?;
        let (spec, half) = (&rope.spec, rope.spec.inv_freq.len());
        require(2 * half <= head_dim, "more is rotated than a head has")?;
        let (cos, sin) = (rope.cos.matrix(), rope.sin.matrix());
        let positions = self.input.positions.as_slice();
        let (kernel, style, is_filled) = (self.backend.kernels.rotate_head, spec.style, rope.is_filled);
        let units = Units::new(self.input.num_tokens());
        self.backend.pool.run(&|_| {
            while let Some(row) = units.take() {
                // SAFETY: the row belongs to this unit; the tables have a row for each token of a step and an entry for each
                // frequency; a head is at least as wide as what is rotated.
                unsafe {
                    for (i, frequency) in spec.inv_freq.iter().enumerate().filter(|_| !is_filled) {
                        let angle = positions[row] as f32 * frequency;
                        *cos.row(row).add(i) = angle.cos() * spec.scale;
                        *sin.row(row).add(i) = angle.sin() * spec.scale;
                    }
                    for head in 0..2 * op.num_heads {
                        let x = qkv.row(row).add(head * head_dim);
                        kernel(x, cos.row(row), sin.row(row), half, style);
                    }
                }
            }
        });
        self.backend.ropes[id.0 as usize].is_filled = true;
        Ok(())
    }
}

/// Cuts the sequences into tiles of queries.
fn tiles(starts: &[u32]) -> Vec<Tile> {
    let mut tiles = Vec::new();
    let mut first_key = 0;
    while first_key < starts.len() {
        let num_keys = starts[first_key..].iter().take_while(|&&start| start == starts[first_key]).count();
        for first in (0..num_keys).step_by(QUERIES) {
            let num_queries = QUERIES.min(num_keys - first);
            tiles.push(Tile { first_query: first_key + first, num_queries, first_key, num_keys });
        }
        first_key += num_keys;
    }
    tiles
}

type Kernel = unsafe fn(&Args, Tile, usize);

/// The same loops, compiled for what the machine has.
fn kernel(isa: Isa) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    {
        if isa >= Isa::Avx512 {
            return attend_avx512;
        }
        if isa == Isa::Avx2 {
            return attend_avx2;
        }
    }
    let _ = isa;
    attend_portable
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]
unsafe fn attend_avx512(args: &Args, tile: Tile, head: usize) {
    // SAFETY: promised by the caller.
    unsafe { attend(args, tile, head) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn attend_avx2(args: &Args, tile: Tile, head: usize) {
    // SAFETY: promised by the caller.
    unsafe { attend(args, tile, head) }
}

unsafe fn attend_portable(args: &Args, tile: Tile, head: usize) {
    // SAFETY: promised by the caller.
    unsafe { attend(args, tile, head) }
}

/// One head of some queries: scores of up to `KEYS` keys at a time, softmax with a running maximum.
///
/// # Safety
/// The rows of the tile and the head lie in the buffers, and nobody else writes this head of these rows of the output.
#[inline(always)]
unsafe fn attend(args: &Args, tile: Tile, head: usize) {
    let (head_dim, width) = (args.head_dim, args.output.cols);
    let row = |row: usize, offset: usize| {
        // SAFETY: promised by the caller.
        unsafe {
            std::slice::from_raw_parts(args.qkv.row(row).add(offset + head * head_dim).cast_const(), head_dim)
        }
    };
    let mut scores = [0.0_f32; KEYS];
    for query_row in tile.first_query..tile.first_query + tile.num_queries {
        let query = row(query_row, 0);
        // SAFETY: promised by the caller.
        let output = unsafe {
            std::slice::from_raw_parts_mut(args.output.row(query_row).add(head * head_dim), head_dim)
        };
        output.fill(0.0);
        let (mut most, mut sum) = (f32::NEG_INFINITY, 0.0_f32);
        for first in (0..tile.num_keys).step_by(KEYS) {
            let count = KEYS.min(tile.num_keys - first);
            let mut largest = most;
            for (i, score) in scores[..count].iter_mut().enumerate() {
                *score = args.scale * dot(query, row(tile.first_key + first + i, width));
                largest = largest.max(*score);
            }
            let factor = if most == f32::NEG_INFINITY { 0.0 } else { (most - largest).exp() };
            sum *= factor;
            for value in output.iter_mut() {
                *value *= factor;
            }
            most = largest;
            for (i, score) in scores[..count].iter().enumerate() {
                let weight = (*score - most).exp();
                sum += weight;
                let values = row(tile.first_key + first + i, 2 * width);
                for (total, value) in output.iter_mut().zip(values) {
                    *total += weight * value;
                }
            }
        }
        let inverse = sum.recip();
        for value in output.iter_mut() {
            *value *= inverse;
        }
    }
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0_f32; LANES];
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for i in 0..LANES {
            sums[i] += a[i] * b[i];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
