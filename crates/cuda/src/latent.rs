//! Attention over latents: what stands around it.

use baton_backend::{Attention, BackendError, HeadLinear, LatentKv, NormKind};

use crate::kernels::LatentAttention;
use crate::kernels::expert_kernels::{LATENT_MANY_SHARED_BYTES, LATENT_SHARED_BYTES};
use crate::layout::Layout;
use crate::ops::{Run, unsupported};
use crate::params::{AttentionParams, HeadParams, LatentManyParams, LatentParams};

/// Rows of a weight that a block takes: one per warp.
const BLOCK_ROWS: u32 = 4;
/// Queries of a tile of `attention_latent_many.cu`, and its threads.
const MANY_QUERIES: u32 = 4;
const MANY_THREADS: u32 = 384;
/// Heads whose queries a block of `latent_kv` rotates.
const ROTATED_HEADS: u32 = 4;

impl Run<'_> {
    /// The kernel of latents, where it is made for this attention.
    pub(crate) fn latent_attention(
        &mut self,
        op: &Attention,
    ) -> Result<Option<LatentAttention>, BackendError> {
        let Some(kv) = &self.device.kv else { return Ok(None) };
        let is_made = self.device.latent_layers.contains(&op.layer)
            && op.num_heads.is_multiple_of(16)
            && op.alibi.is_none()
            && op.sinks.is_none();
        let dtype = kv.dtype();
        if is_made { self.device.kernels.latent_attention(dtype) } else { Ok(None) }
    }

    /// Attention over latents whose items have up to `max_queries` queries.
    pub(crate) fn attend_latents(
        &self,
        kernels: LatentAttention,
        params: &AttentionParams,
        max_queries: u32,
    ) -> Result<(), BackendError> {
        let gpu = &self.device.gpu;
        let num_multiprocessors = gpu.properties.num_multiprocessors;
        match kernels.many {
            Some(many) if max_queries >= MANY_QUERIES => {
                let params = LatentManyParams {
                    attention: *params,
                    tiles_of_item: max_queries.div_ceil(MANY_QUERIES),
                };
                let (grid, shared) = ((num_multiprocessors, 1), LATENT_MANY_SHARED_BYTES);
                // SAFETY: the struct is the kernel's; pages and queries were checked when the step was submitted.
                unsafe { gpu.launch(many, grid, MANY_THREADS, shared, &params) }
            }
            _ => {
                let grid = (2 * num_multiprocessors, max_queries.clamp(1, 64));
                // SAFETY: as above.
                unsafe { gpu.launch(kernels.few, grid, 128, LATENT_SHARED_BYTES, params) }
            }
        }
    }

    pub(crate) fn head_linear(&mut self, op: HeadLinear) -> Result<(), BackendError> {
        let tokens = self.shape.tokens;
        if tokens == 0 || self.grouped_heads(op)? {
            return Ok(());
        }
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let [part] = weight.parts.as_slice() else {
            return Err(unsupported("matrices of heads in several formats"));
        };
        let Layout::Plain(format) = part.layout else { return Err(unsupported("packed matrices of heads")) };
        let (input, output) = (&device.buffers[op.input.0 as usize], &device.buffers[op.output.0 as usize]);
        let heads = weight.num_experts;
        let params = HeadParams {
            step: device.step.address(),
            weight: part.memory.address(),
            row_bytes: part.unit_bytes as u64,
            input: input.memory.address(),
            output: output.memory.address(),
            num_rows: weight.expert_rows() as u32,
            cols: weight.cols as u32,
            num_tokens: tokens,
            num_heads: heads as u32,
            input_step: (input.cols / heads) as u32,
            output_step: (output.cols / heads) as u32,
        };
        let grid = (tokens * heads as u32, params.num_rows.div_ceil(BLOCK_ROWS));
        let function = device.kernels.expert_products(format).heads;
        // SAFETY: the struct is the kernel's; input and output have a part of a row for each head.
        unsafe { device.gpu.launch(function, grid, 128, 0, &params) }
    }

    pub(crate) fn latent_kv(&mut self, op: &LatentKv) -> Result<(), BackendError> {
        let tokens = self.shape.tokens;
        if tokens == 0 {
            return Ok(());
        }
        if op.norm.kind != NormKind::Rms {
            return Err(unsupported("a layer norm of latents"));
        }
        let device = &*self.device;
        let kv = device.kv.as_ref().ok_or_else(|| unsupported("attention without a KV cache"))?;
        let rope = &device.ropes[op.rope.0 as usize];
        let dim = kv.layer_spec(op.layer).head_dim;
        let query = &device.buffers[op.query.0 as usize];
        let params = LatentParams {
            step: device.step.address(),
            latent: self.buffer(op.latent, dim)?,
            norm: self.vector(Some(op.norm.weight)),
            query: query.memory.address(),
            inv_freq: rope.inv_freq.address(),
            cache: kv.array(op.layer).device.address(),
            output: self.buffer(op.output, op.num_heads * dim)?,
            num_tokens: tokens,
            num_heads: op.num_heads as u32,
            rank: dim as u32 - 2 * rope.half,
            half_rotary: rope.half,
            query_step: (query.cols / op.num_heads) as u32,
            interleaved: u32::from(rope.is_interleaved),
            block_shift: kv.block_shift,
            cache_type: kv.cache_type(),
            lane: kv.lane_of(op.layer) as u32,
            eps: op.norm.eps,
            rope_scale: rope.scale,
        };
        let function = device.kernels.experts().latent_kv;
        let grid = (tokens, 1 + params.num_heads.div_ceil(ROTATED_HEADS));
        // SAFETY: the struct is the kernel's; slots were checked against the cache when the step was submitted.
        unsafe { device.gpu.launch(function, grid, 128, 0, &params) }
    }
}
