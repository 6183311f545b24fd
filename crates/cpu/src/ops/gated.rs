//! `output = activation(gate) * up`, gate and up being the halves of one product. Panels of both halves are taken in
//! pairs, so that neither half is ever written to memory.

use baton_backend::GatedLinear;

use super::product::{Product, ProductInput, Tile};
use super::{OpResult, Step, require};
use crate::buffers::Shared;
use crate::kernels::rows::Epilogue;

impl Step<'_> {
    pub(super) fn run_gated(&mut self, op: &GatedLinear) -> OpResult {
        let num_tokens = self.num_rows();
        if num_tokens == 0 {
            return Ok(());
        }
        let (weight, matrix) = self.packed(op.weight)?;
        require(weight.rows.is_multiple_of(2), "a gated weight has an odd number of rows")?;
        let half = weight.rows / 2;
        let output = self.buffer(op.output, num_tokens)?;
        require(output.cols == half, "the output of a gated product is not as wide as half its weight")?;
        let bias = self.optional_vector(op.bias, weight.rows)?;
        let input = ProductInput {
            buffer: op.input,
            norm: op.norm,
            gather: None,
            num_tokens,
            in_place: op.input == op.output,
        };
        let num_pairs = matrix.panels.len() / 2;
        let product = Product::new(self, &input, matrix, weight.cols, num_pairs)?;
        let activation = op.activation;
        // SAFETY: each pair of panels and its tokens are written by the one worker that took the unit.
        let shared = unsafe { Shared::new((output, bias)) };
        self.backend.pool.run(&|worker| {
            product.prepare(worker, |_| {});
            let (output, bias) = shared.get();
            let (mut gate, mut up) = (Tile::new(), Tile::new());
            while let Some(mut unit) = product.take(worker) {
                while let Some(group) = product.group(&unit.panels) {
                    unit.panels.start = group.end;
                    let panels = &matrix.panels[group.clone()];
                    product.multiply(worker, panels, &unit, &mut gate, None);
                    let others = num_pairs + group.start..num_pairs + group.end;
                    let column = panels.first().map_or(0, |panel| panel.row as usize);
                    let target = Some((output, column));
                    product.multiply(worker, &matrix.panels[others], &unit, &mut up, target);
                    for (i, panel) in panels.iter().enumerate() {
                        let row = panel.row as usize;
                        // SAFETY: shapes were checked above; the weight's panels pair (see `PackedMatrix::panels`).
                        unsafe {
                            let bias_at = |row: usize| if bias.is_null() { *bias } else { bias.add(row) };
                            let epilogue = Epilogue {
                                bias: bias_at(row),
                                out: output.row(unit.first_token).add(row),
                                stride: output.cols,
                                num_rows: panel.num_rows as usize,
                                accumulate: false,
                                softcap: None,
                            };
                            (product.kernels.finish_gated)(
                                &epilogue,
                                bias_at(half + row),
                                activation,
                                gate.panel(i),
                                up.panel(i),
                                unit.num_tokens,
                            );
                        }
                    }
                }
            }
        });
        Ok(())
    }
}
