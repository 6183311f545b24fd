//! Attention over latents: what stands around it. Tokens are units.

use baton_backend::{HeadLinear, LatentKv};

use super::experts::{ExpertInput, Grouped, cut_units};
use super::product::Tile;
use super::{OpResult, Step, require, wrong};
use crate::buffers::Shared;
use crate::kernels::rows::Epilogue;
use crate::units::Units;

impl Step<'_> {
    pub(super) fn run_latent_kv(&mut self, op: &LatentKv) -> OpResult {
        let num_tokens = self.input.num_tokens();
        if num_tokens == 0 {
            return Ok(());
        }
        let kv = self.backend.kv.as_ref().ok_or_else(|| wrong("there is no KV cache"))?;
        let layer = kv.layers.get(op.layer).ok_or_else(|| wrong("no such layer of the KV cache"))?;
        let rope = self.backend.ropes.get(op.rope.0 as usize).ok_or_else(|| wrong("no such rotary table"))?;
        let (half, style, scale) = (rope.spec.inv_freq.len(), rope.spec.style, rope.spec.scale);
        let (latent, query, output) = (
            self.buffer(op.latent, num_tokens)?,
            self.buffer(op.query, num_tokens)?,
            self.buffer(op.output, num_tokens)?,
        );
        let (rotary, head_dim) = (2 * half, latent.cols);
        require(rotary < head_dim, "more is rotated than a latent has")?;
        require(layer.head_dim == head_dim && layer.num_kv_heads == 1, "the cache is not of such latents")?;
        require(output.cols == op.num_heads * head_dim, "the output of queries is not heads x latent wide")?;
        let from = query.cols / op.num_heads.max(1);
        require(query.cols == op.num_heads * from && from >= rotary, "queries have no ends to rotate")?;
        let rank = head_dim - rotary;
        let norm = self.norm_args(&op.norm, rank)?;
        let kernels = self.backend.kernels;
        let (cos, sin) = (rope.cos.matrix(), rope.sin.matrix());
        let (is_filled, inv_freq) = (rope.is_filled, rope.spec.inv_freq.as_slice());
        let scratch = self.backend.scratch.kv.matrix();
        let scratch = scratch.reshaped(num_tokens, 2 * head_dim).expect("the scratch holds the widest layer");
        let slots = &self.input.slots[kv.lane_of(op.layer) * num_tokens..];
        let positions = self.input.positions.as_slice();
        let (dtype, block_size) = (kv.dtype, kv.block_size);
        let units = Units::new(num_tokens);
        // SAFETY: each token's rows are written by the one worker that took it.
        let shared = unsafe { Shared::new((norm, layer)) };
        self.backend.pool.run(&|_| {
            let (norm, layer) = shared.get();
            while let Some(token) = units.take() {
                // SAFETY: all rows are this token's, of the widths that were checked; the slot was checked against the cache.
                unsafe {
                    if !is_filled {
                        for (i, frequency) in inv_freq.iter().enumerate() {
                            let angle = positions[token] as f32 * frequency;
                            *cos.row(token).add(i) = angle.cos() * scale;
                            *sin.row(token).add(i) = angle.sin() * scale;
                        }
                    }
                    let (key, value) = (scratch.row(token), scratch.row(token).add(head_dim));
                    std::ptr::copy_nonoverlapping(latent.row(token).cast_const(), key, head_dim);
                    (kernels.norm_row)(key, rank, norm, key, false);
                    (kernels.rotate_head)(key.add(rank), cos.row(token), sin.row(token), half, style);
                    std::ptr::copy_nonoverlapping(key.cast_const(), value, rank);
                    std::slice::from_raw_parts_mut(value.add(rank), rotary).fill(0.0);
                    layer.write(&kernels, dtype, block_size, slots[token] as usize, 0, (key, value));
                    for head in 0..op.num_heads {
                        let end = output.row(token).add(head * head_dim + rank);
                        let source = query.row(token).add((head + 1) * from - rotary).cast_const();
                        std::ptr::copy_nonoverlapping(source, end, rotary);
                        (kernels.rotate_head)(end, cos.row(token), sin.row(token), half, style);
                    }
                }
            }
        });
        self.backend.ropes[op.rope.0 as usize].is_filled = true;
        Ok(())
    }

    /// Heads are experts that every token goes to.
    pub(super) fn run_head_linear(&mut self, op: &HeadLinear) -> OpResult {
        let num_tokens = self.num_rows();
        if num_tokens == 0 {
            return Ok(());
        }
        let num_threads = self.backend.pool.num_threads();
        let weight = &self.backend.weights[op.weight.0 as usize];
        let num_heads = weight.experts.len();
        require(num_heads > 0, "a weight was not loaded as the matrices of heads")?;
        self.backend.scratch.experts.sort_heads(num_tokens, num_heads);
        cut_units(&mut self.backend.scratch.experts, weight, num_threads, false);
        let slot_step = self.buffer(op.input, num_tokens)?.cols / num_heads;
        let input = ExpertInput {
            weight: op.weight,
            routing: op.input,
            buffer: op.input,
            norm: None,
            is_gated: false,
            slot_step,
        };
        let grouped = self.grouped(&input, num_heads)?;
        let output = self.buffer(op.output, num_tokens)?;
        let (step, height) = (output.cols / num_heads, grouped.weight.rows / num_heads);
        require(
            step >= height && op.input != op.output,
            "the output of heads is not as wide as they are high",
        )?;
        self.backend.pool.run(&|worker| {
            grouped.prepare(worker);
            let mut tile = Tile::new();
            while let Some(number) = grouped.units.take() {
                let unit = &grouped.scratch.units[number];
                let matrix = &grouped.weight.experts[unit.expert as usize];
                let (mut panel, end) =
                    (unit.first_panel as usize, (unit.first_panel + unit.num_panels) as usize);
                while panel < end {
                    let group = Grouped::group(matrix, panel, end);
                    panel = group.end;
                    grouped.multiply(unit, &matrix.panels[group.clone()], &mut tile);
                    for (i, panel) in matrix.panels[group].iter().enumerate() {
                        // SAFETY: the columns of this head are the unit's alone, and there are as many as the weight has rows.
                        unsafe {
                            let column = unit.expert as usize * step + panel.row as usize;
                            let epilogue = Epilogue {
                                bias: std::ptr::null(),
                                out: output.row(unit.first_row as usize).add(column),
                                stride: output.cols,
                                num_rows: panel.num_rows as usize,
                                accumulate: false,
                                softcap: None,
                            };
                            (grouped.kernels.finish_panel)(&epilogue, tile.panel(i), unit.num_rows as usize);
                        }
                    }
                }
            }
            grouped.finish();
        });
        Ok(())
    }
}
