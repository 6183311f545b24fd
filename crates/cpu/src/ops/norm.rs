//! `output = norm(input)`, or `output += norm(input)`: one row per unit.

use baton_backend::NormOp;

use super::{OpResult, Step, require};
use crate::buffers::Shared;
use crate::units::Units;

impl Step<'_> {
    pub(super) fn run_norm(&mut self, op: &NormOp) -> OpResult {
        let num_tokens = self.num_rows();
        if num_tokens == 0 {
            return Ok(());
        }
        let input = self.buffer(op.input, num_tokens)?;
        let output = self.buffer(op.output, num_tokens)?;
        require(input.cols == output.cols, "input and output of a norm differ in width")?;
        let kernel = self.backend.kernels.norm_row;
        // SAFETY: the vectors are only read; each row is written by the one worker that took it.
        let norm = unsafe { Shared::new(self.norm_args(&op.norm, input.cols)?) };
        let units = Units::new(num_tokens);
        self.backend.pool.run(&|_| {
            while let Some(row) = units.take() {
                // SAFETY: both rows have `cols` values; the kernel allows them to be the same row.
                unsafe { kernel(input.row(row), input.cols, norm.get(), output.row(row), op.accumulate) };
            }
        });
        Ok(())
    }
}
