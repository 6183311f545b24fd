//! `output = weight · norm(input) + bias`, or `output += …`, or the activation of it.

use baton_backend::{ActivatedLinear, Activation, Linear};

use super::product::{Product, ProductInput, Tile};
use super::{OpResult, Step, require};
use crate::buffers::{Matrix, Shared};
use crate::kernels::rows::Epilogue;
use crate::pool::Worker;

/// Where all panels of a product go.
#[derive(Clone, Copy)]
pub struct Target {
    pub output: Matrix,
    /// Null without.
    pub bias: *const f32,
    pub accumulate: bool,
    pub softcap: Option<f32>,
    pub activation: Option<Activation>,
}

/// Both phases of a plain product on one worker.
///
/// # Safety
/// `target` has a row for each token and a column (and bias) for each row of the weight, and nobody else uses it.
pub unsafe fn multiply_into(worker: &Worker<'_>, product: &Product<'_>, target: &Target) {
    product.prepare(worker, |_| {});
    let mut tile = Tile::new();
    // The kernel of gates multiplies with what they let through.
    let mut activation = target.activation.map(|activation| (activation, Tile::ones()));
    while let Some(mut unit) = product.take(worker) {
        while let Some(group) = product.group(&unit.panels) {
            unit.panels.start = group.end;
            let panels = &product.matrix.panels[group];
            let column = panels.first().map_or(0, |panel| panel.row as usize);
            product.multiply(worker, panels, &unit, &mut tile, Some((&target.output, column)));
            for (i, panel) in panels.iter().enumerate() {
                let row = panel.row as usize;
                // SAFETY: each (panel, tokens) is written by the one worker that took the unit, within the target.
                unsafe {
                    let epilogue = Epilogue {
                        bias: if target.bias.is_null() { target.bias } else { target.bias.add(row) },
                        out: target.output.row(unit.first_token).add(row),
                        stride: target.output.cols,
                        num_rows: panel.num_rows as usize,
                        accumulate: target.accumulate,
                        softcap: target.softcap,
                    };
                    match &mut activation {
                        None => (product.kernels.finish_panel)(&epilogue, tile.panel(i), unit.num_tokens),
                        Some((activation, ones)) => (product.kernels.finish_gated)(
                            &epilogue,
                            std::ptr::null(),
                            *activation,
                            tile.panel(i),
                            ones.panel(0),
                            unit.num_tokens,
                        ),
                    }
                }
            }
        }
    }
}

impl Step<'_> {
    pub(super) fn run_linear(&mut self, op: &Linear) -> OpResult {
        self.multiply(op, None)
    }

    pub(super) fn run_activated(&mut self, op: &ActivatedLinear) -> OpResult {
        let ActivatedLinear { input, norm, weight, bias, activation, output } = *op;
        self.multiply(&Linear { input, norm, weight, bias, output, accumulate: false }, Some(activation))
    }

    fn multiply(&mut self, op: &Linear, activation: Option<Activation>) -> OpResult {
        let num_tokens = self.num_rows();
        if num_tokens == 0 {
            return Ok(());
        }
        let (weight, matrix) = self.packed(op.weight)?;
        let output = self.buffer(op.output, num_tokens)?;
        require(output.cols == weight.rows, "the output of a product is not as wide as its weight is high")?;
        let bias = self.optional_vector(op.bias, weight.rows)?;
        let input = ProductInput {
            buffer: op.input,
            norm: op.norm,
            gather: None,
            num_tokens,
            in_place: op.input == op.output,
        };
        let product = Product::new(self, &input, matrix, weight.cols, matrix.panels.len())?;
        let target = Target { output, bias, accumulate: op.accumulate, softcap: None, activation };
        // SAFETY: workers write disjoint parts of the output, as `multiply_into` says.
        let target = unsafe { Shared::new(target) };
        // SAFETY: the shapes were checked above.
        self.backend.pool.run(&|worker| unsafe { multiply_into(worker, &product, target.get()) });
        Ok(())
    }
}
