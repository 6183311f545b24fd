//! `[q; k; v] = weight · norm(input) + bias`; norm and rotate q and k; k and v go into the step's slots.
//!
//! Three phases: make rows (and the step's angles) ready; multiply, q into the output and k, v into scratch; then norm,
//! rotate and store, one head of one token a unit.

use baton_backend::{BackendError, KvDtype, NormSpan, Qkv, RopeStyle};

use super::product::{Product, ProductInput, ProductUnit, Tile};
use super::{OpResult, Step, require};
use crate::buffers::{Matrix, Shared};
use crate::kernels::Kernels;
use crate::kernels::attention::PANEL_KEYS;
use crate::kernels::rows::{Epilogue, NormArgs};
use crate::kv::KvLayer;
use crate::units::Units;
use crate::weights::Panel;

/// What the second and third phase need.
struct QkvArgs<'a> {
    kernels: Kernels,
    layer: &'a KvLayer,
    dtype: KvDtype,
    block_size: usize,
    slots: &'a [u32],
    num_heads: usize,
    output: Matrix, // [tokens, heads * head_dim]
    kv: Matrix,     // [tokens, 2 * kv heads * head_dim]
    bias: *const f32,
    q_norm: Option<NormArgs>,
    k_norm: Option<NormArgs>,
    span: NormSpan,
    rope: Option<RopeArgs<'a>>,
}

struct RopeArgs<'a> {
    inv_freq: &'a [f32],
    scale: f32,
    style: RopeStyle,
    cos: Matrix, // [tokens, inv_freq.len()]
    sin: Matrix,
    is_filled: bool,
}

impl RopeArgs<'_> {
    /// The angles of one row.
    fn fill(&self, row: usize, position: u32) {
        for (i, frequency) in self.inv_freq.iter().enumerate() {
            let angle = position as f32 * frequency;
            // SAFETY: the row belongs to the worker that took it, and has an entry for each frequency.
            unsafe {
                *self.cos.row(row).add(i) = angle.cos() * self.scale;
                *self.sin.row(row).add(i) = angle.sin() * self.scale;
            }
        }
    }
}

impl QkvArgs<'_> {
    /// Stores a panel; its rows may be of q, of k and v, or of both.
    fn store_panel(&self, panel: &Panel, unit: &ProductUnit, tile: *const f32) {
        let (start, end) = (panel.row as usize, (panel.row + panel.num_rows) as usize);
        let border = self.output.cols.clamp(start, end);
        for (rows, target, first) in
            [(start..border, self.output, 0), (border..end, self.kv, self.output.cols)]
        {
            if rows.is_empty() {
                continue;
            }
            // SAFETY: columns `rows.start - first ..` exist in the target, whose width was checked; the tile has room
            // for a vector from any lane on; the unit's worker alone writes these columns of these tokens.
            unsafe {
                let epilogue = Epilogue {
                    bias: if self.bias.is_null() { self.bias } else { self.bias.add(rows.start) },
                    out: target.row(unit.first_token).add(rows.start - first),
                    stride: target.cols,
                    num_rows: rows.len(),
                    accumulate: false,
                    softcap: None,
                };
                (self.kernels.finish_panel)(&epilogue, tile.add(rows.start - start), unit.num_tokens);
            }
        }
    }

    /// Where the first row of a panel goes.
    fn target(&self, panel: &Panel) -> (&Matrix, usize) {
        let row = panel.row as usize;
        row.checked_sub(self.output.cols).map_or((&self.output, row), |row| (&self.kv, row))
    }

    /// Norms of a whole row of q and k.
    fn norm_row(&self, token: usize) {
        let kv_len = self.layer.num_kv_heads * self.layer.head_dim;
        let parts = [(self.output, self.output.cols, &self.q_norm), (self.kv, kv_len, &self.k_norm)];
        for (rows, len, norm) in parts {
            if let Some(norm) = norm {
                // SAFETY: both rows have so many values, as the norms have weights, and belong to this unit.
                unsafe { (self.kernels.norm_row)(rows.row(token), len, norm, rows.row(token), false) };
            }
        }
    }

    /// Norm and rotation of one head in place; `head` is its number among those of q or of k.
    fn turn(&self, token: usize, x: *mut f32, norm: Option<&NormArgs>, head: usize) {
        let head_dim = self.layer.head_dim;
        // SAFETY: `x` is one head, `head_dim` values, of this unit; norms were checked to have as many weights, or as many for
        // each head, and the rotation to be no wider.
        unsafe {
            match (norm, self.span) {
                (Some(norm), NormSpan::Head) => (self.kernels.norm_row)(x, head_dim, norm, x, false),
                (Some(norm), NormSpan::EachHead) => {
                    (self.kernels.norm_row)(x, head_dim, &norm.skip(head * head_dim), x, false);
                }
                (Some(_), NormSpan::Row) | (None, _) => {}
            }
            if let Some(rope) = &self.rope {
                let half = rope.inv_freq.len();
                (self.kernels.rotate_head)(x, rope.cos.row(token), rope.sin.row(token), half, rope.style);
            }
        }
    }

    /// Finishes a query head, or (from `num_heads` on) a key head with its value.
    fn finish_head(&self, token: usize, head: usize) {
        let head_dim = self.layer.head_dim;
        // SAFETY: heads lie within the rows; the slot was checked against the cache, and a slot has one token.
        unsafe {
            if head < self.num_heads {
                let query = self.output.row(token).add(head * head_dim);
                self.turn(token, query, self.q_norm.as_ref(), head);
            } else {
                let head = head - self.num_heads;
                let key = self.kv.row(token).add(head * head_dim);
                let value = key.add(self.layer.num_kv_heads * head_dim);
                self.turn(token, key, self.k_norm.as_ref(), head);
                let slot = self.slots[token] as usize;
                self.layer.write(&self.kernels, self.dtype, self.block_size, slot, head, (key, value));
            }
        }
    }
}

impl Step<'_> {
    pub(super) fn run_qkv(&mut self, op: &Qkv) -> OpResult {
        let num_tokens = self.input.num_tokens();
        if num_tokens == 0 {
            return Ok(());
        }
        let args = self.qkv_args(op)?;
        let (weight, matrix) = self.packed(op.weight)?;
        let input = ProductInput {
            buffer: op.input,
            norm: op.norm,
            gather: None,
            num_tokens,
            in_place: op.input == op.output,
        };
        let product = Product::new(self, &input, matrix, weight.cols, matrix.panels.len())?;
        let positions = self.input.positions.as_slice();
        let num_units = op.num_heads + args.layer.num_kv_heads;
        // Many tokens: all heads of a token are one unit. Very many: so are tokens whose keys share cache lines.
        let tokens_per_thread = num_tokens / self.backend.pool.num_threads();
        let heads_per_unit = match tokens_per_thread {
            0..4 => 1,
            4..64 => num_units,
            _ => num_units * PANEL_KEYS,
        };
        let num_heads = num_tokens * num_units;
        let heads = Units::new(num_heads.div_ceil(heads_per_unit));
        let normed_rows = Units::new(if op.norm_span == NormSpan::Row { num_tokens } else { 0 });
        // SAFETY: every write is told apart by units, with barriers between the phases.
        let shared = unsafe { Shared::new(args) };
        self.backend.pool.run(&|worker| {
            let args = shared.get();
            product.prepare(worker, |row| {
                if let Some(rope) = args.rope.as_ref().filter(|rope| !rope.is_filled) {
                    rope.fill(row, positions[row]);
                }
            });
            let mut tile = Tile::new();
            while let Some(mut unit) = product.take(worker) {
                while let Some(group) = product.group(&unit.panels) {
                    unit.panels.start = group.end;
                    let panels = &matrix.panels[group];
                    let target = panels.first().map(|panel| args.target(panel));
                    product.multiply(worker, panels, &unit, &mut tile, target);
                    for (i, panel) in panels.iter().enumerate() {
                        args.store_panel(panel, &unit, tile.panel(i));
                    }
                }
            }
            worker.barrier();
            if op.norm_span == NormSpan::Row {
                while let Some(token) = normed_rows.take() {
                    args.norm_row(token);
                }
                worker.barrier();
            }
            while let Some(unit) = heads.take() {
                let first = unit * heads_per_unit;
                (first..(first + heads_per_unit).min(num_heads))
                    .for_each(|head| args.finish_head(head / num_units, head % num_units));
            }
        });
        if let Some(rope) = op.rope {
            self.backend.ropes[rope.0 as usize].is_filled = true;
        }
        Ok(())
    }

    fn qkv_args(&self, op: &Qkv) -> Result<QkvArgs<'_>, BackendError> {
        let num_tokens = self.input.num_tokens();
        let kv = self.backend.kv.as_ref().ok_or_else(|| super::wrong("there is no KV cache"))?;
        let layer = kv.layers.get(op.layer).ok_or_else(|| super::wrong("no such layer of the KV cache"))?;
        let (head_dim, kv_width) = (layer.head_dim, 2 * layer.num_kv_heads * layer.head_dim);
        let output = self.buffer(op.output, num_tokens)?;
        require(output.cols == op.num_heads * head_dim, "the output of qkv is not heads x head_dim wide")?;
        let rows = self.weight(op.weight)?.rows;
        require(
            rows == output.cols + kv_width,
            "the weight of qkv does not have (heads + 2 kv heads) x head_dim rows",
        )?;
        let head_norm = |norm: Option<_>, heads: usize| {
            let len = op.norm_span.weight_len(heads, head_dim);
            norm.map(|norm| self.norm_args(&norm, len)).transpose()
        };
        let rope = match op.rope {
            None => None,
            Some(id) => {
                let rope = self
                    .backend
                    .ropes
                    .get(id.0 as usize)
                    .ok_or_else(|| super::wrong("no such rotary table"))?;
                require(2 * rope.spec.inv_freq.len() <= head_dim, "more is rotated than a head has")?;
                Some(RopeArgs {
                    inv_freq: &rope.spec.inv_freq,
                    scale: rope.spec.scale,
                    style: rope.spec.style,
                    cos: rope.cos.matrix(),
                    sin: rope.sin.matrix(),
                    is_filled: rope.is_filled,
                })
            }
        };
        let scratch = self.backend.scratch.kv.matrix();
        Ok(QkvArgs {
            kernels: self.backend.kernels,
            layer,
            dtype: kv.dtype,
            block_size: kv.block_size,
            slots: &self.input.slots[kv.lane_of(op.layer) * self.input.num_tokens()..],
            num_heads: op.num_heads,
            output,
            kv: scratch.reshaped(num_tokens, kv_width).expect("the scratch holds the widest layer"),
            bias: self.optional_vector(op.bias, rows)?,
            q_norm: head_norm(op.q_norm, op.num_heads)?,
            k_norm: head_norm(op.k_norm, layer.num_kv_heads)?,
            span: op.norm_span,
            rope,
        })
    }
}
