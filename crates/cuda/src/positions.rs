//! Ops that few models have: learned positions, and products with an activation but no gate. Each is made of kernels that others
//! use as well.

use baton_backend::{ActivatedLinear, AddPositions, BackendError, Linear};

use crate::layout::Layout;
use crate::ops::{Run, activation_number, unsupported};
use crate::params::{ActivateRowsParams, EmbedParams};

impl Run<'_> {
    /// The lookup of an embedding by position instead of by token, added to what is there.
    pub(crate) fn add_positions(&mut self, op: AddPositions) -> Result<(), BackendError> {
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let output = self.buffer(op.output, weight.cols)?;
        for part in &weight.parts {
            let Layout::Plain(_) = part.layout else {
                return Err(unsupported("a table of positions that is packed as a head"));
            };
            let params = EmbedParams {
                step: device.step.address(),
                drawn: device.drawn.address(),
                weight: part.memory.address(),
                unit_bytes: part.unit_bytes as u64,
                output,
                first_row: part.first_row as u32,
                num_rows: part.rows as u32,
                cols: weight.cols as u32,
                scale: 1.0,
                adds_positions: 1,
            };
            let function = device.kernels.embed(part.layout);
            // SAFETY: the struct is the kernel's; the output has a row per token, and positions were compared with the table's rows.
            unsafe { device.gpu.launch(function, (self.shape.tokens, 1), 128, 0, &params) }?;
        }
        Ok(())
    }

    pub(crate) fn activated_linear(&mut self, op: &ActivatedLinear) -> Result<(), BackendError> {
        let ActivatedLinear { input, norm, weight, bias, activation, output } = *op;
        self.linear(&Linear { input, norm, weight, bias, output, accumulate: false })?;
        let (width, _) = self.weight_size(weight);
        let count = self.tokens() * width;
        if count == 0 {
            return Ok(());
        }
        let params = ActivateRowsParams {
            values: self.buffer(output, width)?,
            count: count as u64,
            activation: activation_number(activation),
        };
        let blocks = count.div_ceil(8 * 256).clamp(1, 2048) as u32;
        let function = self.device.kernels.core().activate_rows;
        // SAFETY: the struct is the kernel's; the output has the shape's rows, of a multiple of 8 columns.
        unsafe { self.device.gpu.launch(function, (blocks, 1), 256, 0, &params) }
    }
}
