//! Attention over latents: what stands around it.

use baton_backend::{Attention, BackendError, HeadLinear, LatentKv, NormKind, Op};

use crate::kernels::LatentAttention;
use crate::kernels::expert_kernels::{HEAD_COLS, HEAD_ROWS, LATENT_MANY_SHARED_BYTES, LATENT_SHARED_BYTES};
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

/// Which of the kernels of heads takes so many columns.
fn head_rows(cols: usize) -> Option<usize> {
    HEAD_COLS.iter().position(|&most| cols <= most)
}

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
        &mut self,
        op: &Attention,
        kernels: LatentAttention,
        params: &AttentionParams,
        max_queries: u32,
    ) -> Result<(), BackendError> {
        self.launch_latents(kernels, params, max_queries)?;
        if self.joins_later(op) {
            self.unjoined = Some(*params);
            return Ok(());
        }
        let gpu = &self.device.gpu;
        let blocks = 4 * gpu.properties.num_multiprocessors;
        // SAFETY: the struct is the kernel's; the partial results are those of these items.
        unsafe { gpu.launch(kernels.merge, (blocks, 1), 128, 0, params) }
    }

    fn launch_latents(
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

    /// Whether the next op is a product of heads of few tokens, which has blocks for more than itself.
    fn next_heads(&self) -> Option<HeadLinear> {
        let Some(Op::HeadLinear(next)) = self.next else { return None };
        let weight = &self.device.weights[next.weight.0 as usize];
        let is_few = !self.is_grouped_heads(*next) && weight.parts.len() == 1;
        (is_few && head_rows(weight.cols).is_some()).then_some(*next)
    }

    /// The next op writes the latents along with its products. One head has no blocks for both parts of them.
    fn writes_later(&self, op: &LatentKv) -> bool {
        op.num_heads > 1
            && self.next_heads().is_some_and(|next| next.input == op.query && next.output == op.output)
    }

    /// The next op joins the partial results, of rows as wide as the values that it reads.
    fn joins_later(&self, op: &Attention) -> bool {
        self.next_heads().is_some_and(|next| {
            let weight = &self.device.weights[next.weight.0 as usize];
            next.input == op.output && weight.num_experts == op.num_heads && weight.cols.is_multiple_of(4)
        })
    }

    pub(crate) fn head_linear(&mut self, op: HeadLinear) -> Result<(), BackendError> {
        let tokens = self.shape.tokens;
        let (unwritten, unjoined) = (self.unwritten.take(), self.unjoined.take());
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
            partials: unjoined.map_or(0, |attention| attention.partials),
            partial_lse: unjoined.map_or(0, |attention| attention.partial_lse),
            plan: unjoined.map_or(0, |attention| attention.plan),
            has_latent: u32::from(unwritten.is_some()),
            latent: unwritten.unwrap_or_default(),
        };
        let products = device.kernels.expert_products(format);
        if let Some(which) = head_rows(weight.cols) {
            let parts = params.num_rows.div_ceil(HEAD_ROWS[which]) + params.has_latent;
            let grid = (tokens * heads as u32, parts);
            // SAFETY: as below.
            return unsafe { device.gpu.launch(products.head_rows[which], grid, 128, 0, &params) };
        }
        let grid = (tokens * heads as u32, params.num_rows.div_ceil(BLOCK_ROWS));
        let function = products.heads;
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
        if self.writes_later(op) {
            self.unwritten = Some(params);
            return Ok(());
        }
        let function = device.kernels.experts().latent_kv;
        let grid = (tokens, 1 + params.num_heads.div_ceil(ROTATED_HEADS));
        // SAFETY: the struct is the kernel's; slots were checked against the cache when the step was submitted.
        unsafe { device.gpu.launch(function, grid, 128, 0, &params) }
    }
}
