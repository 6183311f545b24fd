//! `output = softcap(weight · norm(input[logit_rows]) + bias)`: a product whose input rows are gathered.

use baton_backend::Logits;

use super::linear::{Target, multiply_into};
use super::product::{Product, ProductInput};
use super::{OpResult, Step, require};
use crate::buffers::Shared;

impl Step<'_> {
    pub(super) fn run_logits(&mut self, op: &Logits) -> OpResult {
        let rows = self.input.logit_rows.as_slice();
        if rows.is_empty() {
            return Ok(());
        }
        let (weight, matrix) = self.packed(op.weight)?;
        let output = self.buffer(op.output, rows.len())?;
        require(output.cols == weight.rows, "the logits are not as wide as the vocabulary")?;
        require(op.input != op.output, "logits cannot be written over their input")?;
        let input = ProductInput {
            buffer: op.input,
            norm: op.norm,
            gather: (!self.keeps_logit_rows).then_some(rows),
            num_tokens: rows.len(),
            in_place: false,
        };
        let bias = self.optional_vector(op.bias, weight.rows)?;
        let product = Product::new(self, &input, matrix, weight.cols, matrix.panels.len())?;
        let target = Target { output, bias, accumulate: false, softcap: op.softcap, activation: None };
        // SAFETY: workers write disjoint parts of the output, as `multiply_into` says.
        let target = unsafe { Shared::new(target) };
        // SAFETY: the shapes were checked above.
        self.backend.pool.run(&|worker| unsafe { multiply_into(worker, &product, target.get()) });
        Ok(())
    }
}
