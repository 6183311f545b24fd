//! `output += table[positions]`: learned position embeddings, one row per unit.

use baton_backend::quant::dequantize_row;
use baton_backend::{AddPositions, BackendError};

use super::{OpResult, Step, require};
use crate::units::Units;

/// Values that are dequantised at a time, on the stack: a step allocates nothing.
const CHUNK: usize = 256;

impl Step<'_> {
    pub(super) fn run_add_positions(&mut self, op: AddPositions) -> OpResult {
        let num_tokens = self.input.num_tokens();
        let weight = self.weight(op.weight)?;
        let output = self.buffer(op.output, num_tokens)?;
        require(output.cols == weight.cols, "the output of positions is not as wide as their table")?;
        require(!weight.tensors.is_empty(), "a weight was not loaded for lookups")?;
        let positions = self.input.positions.as_slice();
        if let Some(position) = positions.iter().find(|&&position| position as usize >= weight.rows) {
            let cause = format!("position {position} is outside a table of {}", weight.rows);
            return Err(BackendError::Device { cause });
        }
        let units = Units::new(num_tokens);
        self.backend.pool.run(&|_| {
            while let Some(row) = units.take() {
                // SAFETY: the row lies in the buffer, has `cols` values, and belongs to this unit.
                let out = unsafe { std::slice::from_raw_parts_mut(output.row(row), output.cols) };
                let (tensor, position) = weight
                    .tensor_of(positions[row] as usize)
                    .expect("positions were compared with the rows above");
                let (format, bytes) = (tensor.format(), tensor.row(position));
                let mut values = [0.0_f32; CHUNK];
                for (number, out) in out.chunks_mut(CHUNK).enumerate() {
                    // Every block length divides a chunk, so that a chunk is whole blocks.
                    let start = number * CHUNK / format.block_len() * format.block_bytes();
                    let len = out.len() / format.block_len() * format.block_bytes();
                    let values = &mut values[..out.len()];
                    dequantize_row(format, &bytes[start..start + len], values);
                    out.iter_mut().zip(values).for_each(|(out, value)| *out += *value);
                }
            }
        });
        Ok(())
    }
}
