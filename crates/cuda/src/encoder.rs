//! Attention in both directions without a cache, for encoders.

use baton_backend::{BackendError, EncoderAttention};

use crate::ops::{Run, unsupported};
use crate::params::EncoderParams;

/// As in `encoder.cu`.
const MAX_HEAD_DIM: usize = 256;
/// Warps of a block, each with a query.
const WARPS: u32 = 4;

impl Run<'_> {
    pub(crate) fn encoder_attention(&mut self, op: &EncoderAttention) -> Result<(), BackendError> {
        let width = self.device.buffers[op.output.0 as usize].cols;
        let head_dim = width / op.num_heads;
        if head_dim > MAX_HEAD_DIM {
            return Err(unsupported(format!("an encoder with heads of {head_dim}")));
        }
        let rope = op.rope.map(|rope| &self.device.ropes[rope.0 as usize]);
        let params = EncoderParams {
            step: self.device.step.address(),
            qkv: self.buffer(op.qkv, 3 * width)?,
            inv_freq: rope.map_or(0, |rope| rope.inv_freq.address()),
            output: self.buffer(op.output, width)?,
            num_heads: op.num_heads as u32,
            head_dim: head_dim as u32,
            half_rotary: rope.map_or(0, |rope| rope.half),
            interleaved: rope.map_or(0, |rope| u32::from(rope.is_interleaved)),
            scale: op.scale,
            rope_scale: rope.map_or(1.0, |rope| rope.scale),
        };
        let (gpu, core) = (&self.device.gpu, self.device.kernels.core());
        let tokens = self.shape.tokens;
        if tokens == 0 {
            return Ok(());
        }
        // SAFETY: the struct is the kernels'; both buffers have a row for each of the shape's tokens.
        unsafe {
            if rope.is_some() {
                gpu.launch(core.rotate_rows, (tokens, 1), 128, 0, &params)?;
            }
            let grid = (tokens, (op.num_heads as u32).div_ceil(WARPS));
            gpu.launch(core.encoder_attention, grid, 32 * WARPS, 0, &params)
        }
    }
}
