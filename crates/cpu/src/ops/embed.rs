//! `output = embedding[token_ids] * scale`: rows are opened from the file's own format.

use baton_backend::{BackendError, Embed};

use super::{OpResult, Step, require};
use crate::units::Units;

impl Step<'_> {
    pub(super) fn run_embed(&mut self, op: &Embed) -> OpResult {
        let num_tokens = self.input.num_tokens();
        let weight = self.weight(op.weight)?;
        let output = self.buffer(op.output, num_tokens)?;
        require(output.cols == weight.cols, "the output of an embedding is not as wide as its rows")?;
        require(!weight.tensors.is_empty(), "a weight was not loaded for lookups")?;
        let token_ids = self.backend.token_ids.as_slice();
        if let Some(token) = token_ids.iter().find(|&&token| token as usize >= weight.rows) {
            let cause = format!("token {token} is outside the vocabulary of {}", weight.rows);
            return Err(BackendError::Device { cause });
        }
        let units = Units::new(num_tokens);
        self.backend.pool.run(&|_| {
            while let Some(row) = units.take() {
                // SAFETY: the row lies in the buffer, has `cols` values, and belongs to this unit.
                let out = unsafe { std::slice::from_raw_parts_mut(output.row(row), output.cols) };
                let (tensor, token) = weight
                    .tensor_of(token_ids[row] as usize)
                    .expect("tokens were compared with the rows above");
                tensor.dequantize_row(token, out);
                if op.scale != 1.0 {
                    for value in out {
                        *value *= op.scale;
                    }
                }
            }
        });
        Ok(())
    }
}
