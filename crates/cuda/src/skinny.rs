//! Ops of a few tokens with a bf16 or e4m3 weight as one launch each: norm, product and what follows it. Each function says whether
//! it could; the others go by `products` and their own kernels.

use baton_backend::{
    BackendError, BufferId, GatedLinear, Linear, Logits, Norm, NormKind, Qkv, VectorId, WeightId,
};

use crate::compile::SkinnyWeights;
use crate::kernels::{SKINNY_TILES, SkinnyKernels};
use crate::ops::{Run, activation_number, unsupported};
use crate::params::{Address, ProductParams, SkinnyParams};

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
        if params.num_tokens == 0 {
            return Ok(true);
        }
        let tiles = SKINNY_TILES.iter().position(|tiles| params.num_tokens <= 8 * tiles);
        let tiles = tiles.expect("no more tokens than the widest kernel takes");
        let function = kernels.functions[tiles][usize::from(params.norm != 0)];
        // SAFETY: the struct is the kernels'; input and output have the shape's tokens, the weight its rows.
        unsafe {
            self.device.gpu.launch(function, (blocks, 1), kernels.threads, kernels.shared_bytes, params)
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
        self.launch_skinny(&self.device.kernels.skinny(kind).linear, params.num_rows.div_ceil(16), &params)
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

    /// Rotates whole heads of the half style only, and norms no heads.
    pub(crate) fn skinny_qkv(&mut self, op: &Qkv) -> Result<bool, BackendError> {
        let Some((kind, mut params)) = self.skinny(op.weight, op.norm.as_ref(), self.shape.tokens) else {
            return Ok(false);
        };
        let device = &*self.device;
        let kv = device.kv.as_ref().ok_or_else(|| unsupported("attention without a KV cache"))?;
        let spec = kv.layer_spec(op.layer);
        let rope = op.rope.map(|rope| &device.ropes[rope.0 as usize]);
        let is_whole = |half: u32| half as usize * 2 == spec.head_dim;
        let is_simple = op.q_norm.is_none()
            && op.k_norm.is_none()
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
            ..params
        };
        let blocks = params.num_rows / 16;
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
