//! Ops of a few tokens with a bf16 or e4m3 weight as one launch each: norm, product and what follows it. Each function says whether
//! it could; the others go by `products` and their own kernels.

use baton_backend::{
    BackendError, BufferId, GatedLinear, Linear, Logits, Norm, NormKind, Op, Qkv, VectorId, WeightId,
};

use crate::compile::SkinnyWeights;
use crate::kernels::{SKINNY_TILES, SkinnyKernels};
use crate::ops::{Run, activation_number, unsupported};
use crate::params::{Address, ProductParams, SkinnyParams};

/// Blocks of a head whose norm they share, as in `skinny.cu`.
const HEAD_BLOCKS: usize = 8;

impl Run<'_> {
    /// What all skinny launches begin with, or `None` if this product is not one.
    fn skinny(
        &self,
        weight: WeightId,
        norm: Option<&Norm>,
        num_tokens: u32,
    ) -> Option<(SkinnyWeights, SkinnyParams)> {
        let device = &*self.device;
        let weight = &device.weights[weight.0 as usize];
        let [part] = weight.parts.as_slice() else { return None };
        let is_layer_norm = norm.is_some_and(|norm| norm.kind != NormKind::Rms);
        let kind = part.skinny_weights()?;
        let is_skinny = weight.cols.is_multiple_of(kind.unit())
            && !is_layer_norm
            && num_tokens as usize <= device.skinny_rows(kind).min(8 * SKINNY_TILES[1] as usize);
        let params = || SkinnyParams {
            step: device.step.address(),
            weight: part.memory.address(),
            norm: self.vector(norm.map(|norm| norm.weight)),
            eps: norm.map_or(0.0, |norm| norm.eps),
            num_rows: weight.rows as u32,
            cols: weight.cols as u32,
            num_tokens,
            across: part.across.unwrap_or(0) as u32,
            first_blocks: u32::MAX,
            ..SkinnyParams::default()
        };
        is_skinny.then(|| (kind, params()))
    }

    fn launch_skinny(
        &self,
        kernels: &SkinnyKernels,
        blocks: u32,
        params: &SkinnyParams,
    ) -> Result<bool, BackendError> {
        self.launch_skinny_clusters(kernels, (blocks, 1), params)
    }

    fn launch_skinny_clusters(
        &self,
        kernels: &SkinnyKernels,
        blocks: (u32, u32),
        params: &SkinnyParams,
    ) -> Result<bool, BackendError> {
        if params.num_tokens == 0 {
            return Ok(true);
        }
        let tiles = SKINNY_TILES.iter().position(|tiles| params.num_tokens <= 8 * tiles);
        let tiles = tiles.expect("no more tokens than the widest kernel takes");
        let function = kernels.functions[tiles][usize::from(params.norm != 0)];
        let (gpu, threads, shared_bytes) = (&self.device.gpu, kernels.threads, kernels.shared_bytes);
        // SAFETY: the struct is the kernels'; input and output have the shape's tokens, the weight its rows.
        unsafe {
            if blocks.1 == 1 {
                gpu.launch(function, (blocks.0, 1), threads, shared_bytes, params)
            } else {
                gpu.launch_clusters(function, blocks, threads, shared_bytes, params)
            }
        }?;
        Ok(true)
    }

    /// The activations of a launch. Before e4m3 weights they are normed by a launch of their own: their product is bound by
    /// instructions, and norming in each of its warps would be a third of them.
    fn skinny_input(
        &mut self,
        kind: SkinnyWeights,
        params: &mut SkinnyParams,
        input: BufferId,
        norm: Option<&Norm>,
    ) -> Result<(), BackendError> {
        let cols = params.cols as usize;
        let norms_before = kind != SkinnyWeights::Bf16 && norm.is_some() && params.num_tokens > 0;
        params.input = if norms_before { self.normed(input, norm, cols)? } else { self.buffer(input, cols)? };
        if norms_before {
            params.norm = 0;
        }
        Ok(())
    }

    /// The same product for the kernels of `wide`.
    fn few_params(
        &self,
        params: &SkinnyParams,
        input: BufferId,
        bias: Option<VectorId>,
    ) -> Result<ProductParams, BackendError> {
        Ok(ProductParams {
            weight: params.weight,
            unit_bytes: u64::from(params.cols),
            input: self.buffer(input, params.cols as usize)?,
            bias: self.vector(bias),
            output: 0,
            num_rows: params.num_rows,
            cols: params.cols,
            m: params.num_tokens,
            output_stride: params.num_rows,
            accumulate: 0,
            is_f32: 0,
            softcap: 0.0,
            activation: 0,
        })
    }

    pub(crate) fn skinny_linear(&mut self, op: &Linear) -> Result<bool, BackendError> {
        let Some((kind, mut params)) = self.skinny(op.weight, op.norm.as_ref(), self.shape.tokens) else {
            return Ok(false);
        };
        let product = ProductParams {
            output: self.buffer(op.output, params.num_rows as usize)?,
            accumulate: u32::from(op.accumulate),
            ..self.few_params(&params, op.input, op.bias)?
        };
        if kind == SkinnyWeights::Bf16 && self.skinny_pair(op, &params)? {
            return Ok(true);
        }
        let part = &self.device.weights[op.weight.0 as usize].parts[0];
        // A norm needs whole rows, and so many blocks.
        if op.norm.is_none() && self.device.few_product(part, &product, None, false)? {
            return Ok(true);
        }
        self.skinny_input(kind, &mut params, op.input, op.norm.as_ref())?;
        let params = SkinnyParams {
            bias: self.vector(op.bias),
            output: self.buffer(op.output, params.num_rows as usize)?,
            output_stride: params.num_rows,
            accumulate: u32::from(op.accumulate),
            ..params
        };
        let (blocks, skinny) = (params.num_rows.div_ceil(16), self.device.kernels.skinny(kind));
        // The output of attention before experts: memory has nothing else to do meanwhile, and every block has a multiprocessor.
        let is_deep = matches!(self.next, Some(Op::Route(_)))
            && blocks <= self.device.gpu.properties.num_multiprocessors;
        let kernels = skinny.deep_linear.as_ref().filter(|_| is_deep).unwrap_or(&skinny.linear);
        self.launch_skinny(kernels, blocks, &params)
    }

    /// Two products of the same rows as one launch, where the next op is the second one.
    fn skinny_pair(&mut self, op: &Linear, params: &SkinnyParams) -> Result<bool, BackendError> {
        let Some(Op::Linear(other)) = self.next else { return Ok(false) };
        let is_pair = (op.input, op.norm) == (other.input, other.norm)
            && op.output != other.output
            && ![op.output, other.output].contains(&op.input)
            && !op.accumulate
            && !other.accumulate
            && op.bias.is_none()
            && other.bias.is_none();
        let second = self.skinny(other.weight, other.norm.as_ref(), self.shape.tokens);
        let Some((SkinnyWeights::Bf16, second)) = second.filter(|_| is_pair) else { return Ok(false) };
        let first_blocks = params.num_rows.div_ceil(16);
        let params = SkinnyParams {
            input: self.buffer(op.input, params.cols as usize)?,
            output: self.buffer(op.output, params.num_rows as usize)?,
            output_stride: params.num_rows,
            other_weight: second.weight,
            other_output: self.buffer(other.output, second.num_rows as usize)?,
            other_rows: second.num_rows,
            first_blocks,
            ..*params
        };
        let kernels = &self.device.kernels.skinny(SkinnyWeights::Bf16).linear;
        self.launch_skinny(kernels, first_blocks + second.num_rows.div_ceil(16), &params)?;
        self.took_next = true;
        Ok(true)
    }

    /// Projects into scratch, normed on the way, where the op cannot be one launch.
    pub(crate) fn skinny_project(
        &self,
        input: Address,
        norm: Option<&Norm>,
        weight: WeightId,
    ) -> Result<Option<Address>, BackendError> {
        let Some((kind, params)) = self.skinny(weight, norm, self.shape.tokens) else { return Ok(None) };
        let output = self.device.projected.address();
        let params = SkinnyParams { input, output, output_stride: params.num_rows, ..params };
        let kernels = &self.device.kernels.skinny(kind).linear;
        self.launch_skinny(kernels, params.num_rows.div_ceil(16), &params)?;
        Ok(Some(output))
    }

    pub(crate) fn skinny_gated(&mut self, op: &GatedLinear) -> Result<bool, BackendError> {
        let Some((kind, mut params)) = self.skinny(op.weight, op.norm.as_ref(), self.shape.tokens) else {
            return Ok(false);
        };
        let width = params.num_rows / 2;
        if !width.is_multiple_of(8) {
            return Ok(false);
        }
        let product = ProductParams {
            output: self.buffer(op.output, width as usize)?,
            num_rows: width,
            output_stride: width,
            activation: activation_number(op.activation),
            ..self.few_params(&params, op.input, op.bias)?
        };
        let part = &self.device.weights[op.weight.0 as usize].parts[0];
        let norm = op.norm.as_ref().map(|norm| (self.vector(Some(norm.weight)), norm.eps));
        if self.device.few_product(part, &product, norm, true)? {
            return Ok(true);
        }
        self.skinny_input(kind, &mut params, op.input, op.norm.as_ref())?;
        let params = SkinnyParams {
            bias: self.vector(op.bias),
            output: self.buffer(op.output, width as usize)?,
            num_rows: width,
            output_stride: width,
            activation: activation_number(op.activation),
            ..params
        };
        self.launch_skinny(&self.device.kernels.skinny(kind).gated, width / 8, &params)
    }

    /// Rotates whole heads of the half style only. Heads are normed by clusters of blocks, where the device has them.
    pub(crate) fn skinny_qkv(&mut self, op: &Qkv) -> Result<bool, BackendError> {
        let Some((kind, mut params)) = self.skinny(op.weight, op.norm.as_ref(), self.shape.tokens) else {
            return Ok(false);
        };
        let device = &*self.device;
        let kv = device.kv.as_ref().ok_or_else(|| unsupported("attention without a KV cache"))?;
        let spec = kv.layer_spec(op.layer);
        let rope = op.rope.map(|rope| &device.ropes[rope.0 as usize]);
        let is_whole = |half: u32| half as usize * 2 == spec.head_dim;
        let norms_heads = op.q_norm.is_some() || op.k_norm.is_some();
        let can_norm = device.gpu.properties.capability.0 >= 9
            && !Self::has_other_head_norms(op)
            && spec.head_dim <= 16 * HEAD_BLOCKS;
        let is_simple = (!norms_heads || can_norm)
            && spec.head_dim.is_multiple_of(16)
            && rope.is_none_or(|rope| !rope.is_interleaved && is_whole(rope.half));
        if !is_simple {
            return Ok(false);
        }
        self.skinny_input(kind, &mut params, op.input, op.norm.as_ref())?;
        let device = &*self.device;
        let kv = device.kv.as_ref().ok_or_else(|| unsupported("attention without a KV cache"))?;
        let spec = kv.layer_spec(op.layer);
        let rope = op.rope.map(|rope| &device.ropes[rope.0 as usize]);
        let inv_freq: Address = rope.map_or(0, |rope| rope.inv_freq.address());
        let params = SkinnyParams {
            bias: self.vector(op.bias),
            output: self.buffer(op.output, op.num_heads * spec.head_dim)?,
            inv_freq,
            cache: kv.array(op.layer).device.address(),
            num_heads: op.num_heads as u32,
            num_kv_heads: spec.num_kv_heads as u32,
            head_dim: spec.head_dim as u32,
            block_shift: kv.block_shift,
            cache_type: kv.cache_type(),
            lane: kv.lane_of(op.layer) as u32,
            rope_scale: rope.map_or(1.0, |rope| rope.scale),
            q_norm: self.vector(op.q_norm.map(|norm| norm.weight)),
            k_norm: self.vector(op.k_norm.map(|norm| norm.weight)),
            q_eps: op.q_norm.map_or(0.0, |norm| norm.eps),
            k_eps: op.k_norm.map_or(0.0, |norm| norm.eps),
            ..params
        };
        let blocks = params.num_rows / 16;
        if norms_heads {
            let kernels = &device.kernels.skinny(kind).head_normed_qkv;
            return self.launch_skinny_clusters(kernels, (blocks, params.head_dim / 16), &params);
        }
        // Two large blocks fit a multiprocessor. Three halves of a round would take two.
        let round = 2 * device.gpu.properties.num_multiprocessors;
        let skinny = device.kernels.skinny(kind);
        let kernels = if (round + 1..2 * round).contains(&blocks) { &skinny.small_qkv } else { &skinny.qkv };
        self.launch_skinny(kernels, blocks, &params)
    }

    pub(crate) fn skinny_logits(&self, op: &Logits) -> Result<bool, BackendError> {
        let Some((kind, params)) = self.skinny(op.weight, op.norm.as_ref(), self.shape.logit_rows) else {
            return Ok(false);
        };
        let buffer = &self.device.buffers[op.output.0 as usize];
        if !buffer.is_logits || buffer.cols != params.num_rows as usize {
            return Err(unsupported("logits in a buffer that is not as wide as the vocabulary"));
        }
        let params = SkinnyParams {
            input: self.buffer(op.input, params.cols as usize)?,
            output: buffer.memory.address(),
            output_stride: params.num_rows,
            softcap: op.softcap.unwrap_or(0.0),
            ..params
        };
        self.launch_skinny(&self.device.kernels.skinny(kind).logits, params.num_rows.div_ceil(16), &params)
    }
}
