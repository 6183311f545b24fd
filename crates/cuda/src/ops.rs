//! The ops of a step as launches. A launch covers the rows of the step's [`Shape`]; kernels that must not touch more rows
//! than the step has read its counts from the uploaded header.
//!
//! Ops cannot fail in the trait, so the first failure is kept and the rest of the program passes over.

use baton_backend::{
    Activation, Attention, BackendError, BufferId, Embed, GatedLinear, Linear, Logits, Norm, NormKind,
    NormOp, Ops, Qkv, VectorId, WeightFormat, WeightId,
};

use crate::backend::{Device, PARTIAL_LSE_SHARE};
use crate::gemm;
use crate::graphs::Shape;
use crate::kernels::PRODUCT_ROWS;
use crate::params::{
    ActivateParams, Address, AttentionParams, BiasParams, ConvertParams, EmbedParams, NormParams,
    ProductParams, RopeParams, SampleParams, SoftcapParams,
};
use crate::weights::Part;

/// More rows of bf16 weights than this go to cuBLASLt. Other formats get more, because those must be converted first.
pub const MAX_PRODUCT_ROWS: usize = 2;
const MAX_QUANTISED_ROWS: usize = 8;
/// As in `sample.cu`.
const SAMPLE_PARTS: u32 = 32;
const SAMPLE_THREADS: u32 = 512;

/// One step on its way through a program.
pub(crate) struct Run<'a> {
    pub(crate) device: &'a mut Device,
    pub(crate) shape: Shape,
    /// The shape is a bucket, whose products come again and again.
    pub(crate) is_bucket: bool,
    /// Partial slots that each plan of the step uses.
    pub(crate) num_partials: &'a [u32],
    pub(crate) failure: Option<BackendError>,
}

/// A product and where its result goes.
struct Product {
    input: Address,
    m: usize,
    /// Rows that input and output have room for.
    max_m: usize,
    weight: WeightId,
    bias: Option<VectorId>,
    output: Address,
    output_stride: usize,
    accumulate: bool,
    is_f32: bool,
    softcap: Option<f32>,
}

fn unsupported(what: impl Into<String>) -> BackendError {
    BackendError::Unsupported { what: what.into() }
}

fn activation_number(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::Gelu => 2,
    }
}

/// The product kernel for `m` rows.
fn rows_index(m: usize) -> usize {
    PRODUCT_ROWS.iter().position(|rows| m <= *rows as usize).expect("m is at most the largest kernel's rows")
}

/// Rows of a large product: more than there are, so that there are few shapes. What the others hold does not matter.
fn padded_rows(m: usize) -> usize {
    m.next_multiple_of(if m <= 128 { 8 } else { 64 })
}

fn is_small(part: &Part, m: usize) -> bool {
    m <= if part.format == WeightFormat::BF16 { MAX_PRODUCT_ROWS } else { MAX_QUANTISED_ROWS }
}

impl Run<'_> {
    /// Runs an op unless an earlier one failed.
    fn guard(&mut self, op: impl FnOnce(&mut Self) -> Result<(), BackendError>) {
        if self.failure.is_none() {
            self.failure = op(self).err();
        }
    }

    fn tokens(&self) -> usize {
        self.shape.tokens as usize
    }

    fn vector(&self, id: Option<VectorId>) -> Address {
        id.map_or(0, |id| self.device.vectors[id.0 as usize].address())
    }

    /// A bf16 buffer of this width.
    fn buffer(&self, id: BufferId, cols: usize) -> Result<Address, BackendError> {
        let buffer = &self.device.buffers[id.0 as usize];
        if buffer.cols != cols || buffer.is_f32 {
            return Err(unsupported(format!(
                "a buffer of {} columns where {cols} of bf16 are needed",
                buffer.cols
            )));
        }
        Ok(buffer.memory.address())
    }

    fn launch_norm(
        &mut self,
        input: Address,
        norm: Option<&Norm>,
        output: Address,
        cols: usize,
        accumulate: bool,
        gathers: bool,
    ) -> Result<(), BackendError> {
        let (is_layer_norm, bias) = match norm.map(|norm| norm.kind) {
            None | Some(NormKind::Rms) => (0, None),
            Some(NormKind::Layer { bias }) => (1, bias),
        };
        let params = NormParams {
            step: self.device.step.address(),
            input,
            weight: self.vector(norm.map(|norm| norm.weight)),
            bias: self.vector(bias),
            output,
            cols: cols as u32,
            eps: norm.map_or(0.0, |norm| norm.eps),
            is_layer_norm,
            accumulate: u32::from(accumulate),
            gathers_logit_rows: u32::from(gathers),
        };
        let rows = if gathers { self.shape.logit_rows } else { self.shape.tokens };
        if rows == 0 {
            return Ok(());
        }
        // SAFETY: the struct is the kernel's; buffers have the shape's rows.
        unsafe { self.device.gpu.launch(self.device.kernels.norm, (rows, 1), 256, 0, &params) }
    }

    /// The rows that a product reads: the buffer itself, or its norm in scratch.
    fn normed(&mut self, input: BufferId, norm: Option<&Norm>, cols: usize) -> Result<Address, BackendError> {
        let address = self.buffer(input, cols)?;
        let Some(norm) = norm else { return Ok(address) };
        let scratch = self.device.normed.address();
        self.launch_norm(address, Some(norm), scratch, cols, false, false)?;
        Ok(scratch)
    }

    fn product(&mut self, product: &Product) -> Result<(), BackendError> {
        if product.m == 0 {
            return Ok(());
        }
        let num_parts = self.device.weights[product.weight.0 as usize].parts.len();
        let element = if product.is_f32 { 4 } else { 2 };
        let mut all_small = true;
        for number in 0..num_parts {
            let part = &self.device.weights[product.weight.0 as usize].parts[number];
            let output = product.output + (part.first_row * element) as u64;
            if is_small(part, product.m) {
                self.small_product(product, number, output)?;
            } else {
                all_small = false;
                self.large_product(product, number, output)?;
            }
        }
        match product.softcap {
            Some(cap) if !all_small => {
                let count = (product.m * product.output_stride) as u64;
                let params = SoftcapParams { values: product.output, count, cap };
                // SAFETY: the struct is the kernel's; the output has these values.
                unsafe { self.device.gpu.launch(self.device.kernels.softcap, (1024, 1), 256, 0, &params) }
            }
            _ => Ok(()),
        }
    }

    fn small_product(
        &mut self,
        product: &Product,
        number: usize,
        output: Address,
    ) -> Result<(), BackendError> {
        let device = &*self.device;
        let weight = &device.weights[product.weight.0 as usize];
        let part = &weight.parts[number];
        let bias = self.vector(product.bias);
        let all_small = weight.parts.iter().all(|part| is_small(part, product.m));
        let params = ProductParams {
            weight: part.memory.address(),
            row_bytes: part.row_bytes as u64,
            input: product.input,
            bias: if bias == 0 { 0 } else { bias + 4 * part.first_row as u64 },
            output,
            num_rows: part.rows as u32,
            cols: weight.cols as u32,
            m: product.m as u32,
            output_stride: product.output_stride as u32,
            accumulate: u32::from(product.accumulate),
            is_f32: u32::from(product.is_f32),
            // Where a large part follows, the whole row is bent afterwards.
            softcap: if all_small { product.softcap.unwrap_or(0.0) } else { 0.0 },
            activation: 0,
        };
        let function = device.kernels.products(part.format).plain[rows_index(product.m)];
        // SAFETY: the struct is the kernel's; input and output have `m` rows of the weight's sizes.
        unsafe { device.gpu.launch(function, (part.rows.div_ceil(4) as u32, 1), 128, 0, &params) }
    }

    fn large_product(
        &mut self,
        product: &Product,
        number: usize,
        output: Address,
    ) -> Result<(), BackendError> {
        let Device { gpu, gemm, kernels, weights, converted, projected, vectors, .. } = &mut *self.device;
        let weight = &weights[product.weight.0 as usize];
        let part = &weight.parts[number];
        let element = if product.is_f32 { 4 } else { 2 };
        let piece = if part.format == WeightFormat::BF16 {
            part.rows
        } else {
            (converted.bytes() / 2 / weight.cols).min(part.rows)
        };
        for first in (0..part.rows).step_by(piece.max(1)) {
            let rows = piece.min(part.rows - first);
            let mut source = part.memory.address() + (first * part.row_bytes) as u64;
            if part.format != WeightFormat::BF16 {
                let params = ConvertParams {
                    weight: source,
                    row_bytes: part.row_bytes as u64,
                    output: converted.address(),
                    num_rows: rows as u32,
                    cols: weight.cols as u32,
                };
                // SAFETY: the struct is the kernel's; `piece` rows fit the scratch.
                unsafe {
                    gpu.launch(kernels.products(part.format).convert, (rows as u32, 1), 128, 0, &params)
                }?;
                source = converted.address();
            }
            let target = output + (first * element) as u64;
            let is_aligned = |bytes: u64| {
                target.is_multiple_of(bytes)
                    && ((product.output_stride * element) as u64).is_multiple_of(bytes)
            };
            let shape = gemm::Shape {
                m: padded_rows(product.m).min(product.max_m),
                n: rows,
                k: weight.cols,
                output_stride: product.output_stride,
                is_f32: product.is_f32,
                output_alignment: if is_aligned(16) { 16 } else { element as u32 },
            };
            let matrices = gemm::Matrices { weight: source, input: product.input, output: target };
            // A product that adds to its output must not be timed there.
            let scratch = if product.accumulate { projected.address() } else { target };
            let fits = !product.accumulate || shape.m * shape.output_stride * element <= projected.bytes();
            let scratch = Some(scratch).filter(|_| self.is_bucket && fits);
            // SAFETY: the addresses are matrices of the shape's sizes.
            unsafe { gemm.multiply(gpu, shape, matrices, product.accumulate, scratch) }?;
        }
        let Some(bias) = product.bias else { return Ok(()) };
        if part.rows != weight.rows || product.output_stride != weight.rows || product.is_f32 {
            return Err(unsupported("a bias for a weight of several formats"));
        }
        let params = BiasParams {
            values: output,
            bias: vectors[bias.0 as usize].address(),
            rows: product.m as u32,
            width: weight.rows as u32,
        };
        // SAFETY: the struct is the kernel's; the output is `[m, rows]`.
        unsafe { gpu.launch(kernels.add_bias, (512, 1), 256, 0, &params) }
    }

    fn try_embed(&mut self, op: &Embed) -> Result<(), BackendError> {
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let output = self.buffer(op.output, weight.cols)?;
        for part in &weight.parts {
            let params = EmbedParams {
                step: device.step.address(),
                drawn: device.drawn.address(),
                weight: part.memory.address(),
                row_bytes: part.row_bytes as u64,
                output,
                first_row: part.first_row as u32,
                num_rows: part.rows as u32,
                cols: weight.cols as u32,
                scale: op.scale,
            };
            let function = device.kernels.products(part.format).embed;
            // SAFETY: the struct is the kernel's; the output has a row a token.
            unsafe { device.gpu.launch(function, (self.shape.tokens, 1), 128, 0, &params) }?;
        }
        Ok(())
    }

    fn try_norm(&mut self, op: &NormOp) -> Result<(), BackendError> {
        let cols = self.device.buffers[op.input.0 as usize].cols;
        let (input, output) = (self.buffer(op.input, cols)?, self.buffer(op.output, cols)?);
        self.launch_norm(input, Some(&op.norm), output, cols, op.accumulate, false)
    }

    fn try_linear(&mut self, op: &Linear) -> Result<(), BackendError> {
        let (rows, cols) = self.weight_size(op.weight);
        let input = self.normed(op.input, op.norm.as_ref(), cols)?;
        let output = self.buffer(op.output, rows)?;
        self.product(&Product {
            input,
            m: self.tokens(),
            max_m: self.device.max_tokens,
            weight: op.weight,
            bias: op.bias,
            output,
            output_stride: rows,
            accumulate: op.accumulate,
            is_f32: false,
            softcap: None,
        })
    }

    fn weight_size(&self, weight: WeightId) -> (usize, usize) {
        let weight = &self.device.weights[weight.0 as usize];
        (weight.rows, weight.cols)
    }

    /// Projects all rows into scratch, without bias.
    fn project(&mut self, input: Address, weight: WeightId) -> Result<Address, BackendError> {
        let output = self.device.projected.address();
        let (rows, _) = self.weight_size(weight);
        if self.tokens() * rows * 2 > self.device.projected.bytes() {
            return Err(unsupported("a projection wider than the weights that were loaded for one"));
        }
        self.product(&Product {
            input,
            m: self.tokens(),
            max_m: self.device.max_tokens,
            weight,
            bias: None,
            output,
            output_stride: rows,
            accumulate: false,
            is_f32: false,
            softcap: None,
        })?;
        Ok(output)
    }

    fn try_gated(&mut self, op: &GatedLinear) -> Result<(), BackendError> {
        let (rows, cols) = self.weight_size(op.weight);
        let width = rows / 2;
        let input = self.normed(op.input, op.norm.as_ref(), cols)?;
        let output = self.buffer(op.output, width)?;
        let bias = self.vector(op.bias);
        let activation = activation_number(op.activation);
        let m = self.tokens();
        if let [part] = self.device.weights[op.weight.0 as usize].parts.as_slice()
            && is_small(part, m)
        {
            let params = ProductParams {
                weight: part.memory.address(),
                row_bytes: part.row_bytes as u64,
                input,
                bias,
                output,
                num_rows: width as u32,
                cols: cols as u32,
                m: m as u32,
                output_stride: width as u32,
                accumulate: 0,
                is_f32: 0,
                softcap: 0.0,
                activation,
            };
            let function = self.device.kernels.products(part.format).gated[rows_index(m)];
            // SAFETY: the struct is the kernel's; input and output have `m` rows.
            return unsafe {
                self.device.gpu.launch(function, (width.div_ceil(4) as u32, 1), 128, 0, &params)
            };
        }
        let projected = self.project(input, op.weight)?;
        let params =
            ActivateParams { projected, bias, output, rows: m as u32, width: width as u32, activation };
        let blocks = (m * width / 8).div_ceil(256).clamp(1, 2048) as u32;
        // SAFETY: the struct is the kernel's; scratch and output have `m` rows.
        unsafe { self.device.gpu.launch(self.device.kernels.gated_activation, (blocks, 1), 256, 0, &params) }
    }

    fn try_qkv(&mut self, op: &Qkv) -> Result<(), BackendError> {
        for norm in [op.q_norm, op.k_norm].into_iter().flatten() {
            if norm.kind != NormKind::Rms {
                return Err(unsupported("a layer norm of q or k"));
            }
        }
        let (_, cols) = self.weight_size(op.weight);
        let input = self.normed(op.input, op.norm.as_ref(), cols)?;
        let projected = self.project(input, op.weight)?;
        let kv = self.device.kv.as_ref().ok_or_else(|| unsupported("attention without a KV cache"))?;
        let spec = kv.layer_spec(op.layer);
        let query = self.buffer(op.output, op.num_heads * spec.head_dim)?;
        let rope = op.rope.map(|rope| &self.device.ropes[rope.0 as usize]);
        let params = RopeParams {
            step: self.device.step.address(),
            projected,
            bias: self.vector(op.bias),
            q_norm: self.vector(op.q_norm.map(|norm| norm.weight)),
            k_norm: self.vector(op.k_norm.map(|norm| norm.weight)),
            inv_freq: rope.map_or(0, |rope| rope.inv_freq.address()),
            query,
            cache: kv.layers[op.layer].device.address(),
            num_heads: op.num_heads as u32,
            num_kv_heads: spec.num_kv_heads as u32,
            head_dim: spec.head_dim as u32,
            half_rotary: rope.map_or(0, |rope| rope.half),
            interleaved: rope.map_or(0, |rope| u32::from(rope.is_interleaved)),
            block_shift: kv.block_shift,
            cache_type: kv.cache_type(),
            q_eps: op.q_norm.map_or(0.0, |norm| norm.eps),
            k_eps: op.k_norm.map_or(0.0, |norm| norm.eps),
            rope_scale: rope.map_or(1.0, |rope| rope.scale),
        };
        let heads = (op.num_heads + 2 * spec.num_kv_heads).div_ceil(4) as u32;
        // SAFETY: the struct is the kernel's; slots were checked against the cache when the step was submitted.
        unsafe {
            self.device.gpu.launch(
                self.device.kernels.rope_and_cache,
                (self.shape.tokens, heads),
                128,
                0,
                &params,
            )
        }
    }

    fn try_attention(&mut self, op: &Attention) -> Result<(), BackendError> {
        let device = &*self.device;
        let kv = device.kv.as_ref().ok_or_else(|| unsupported("attention without a KV cache"))?;
        let spec = kv.layer_spec(op.layer);
        let width = op.num_heads * spec.head_dim;
        let slots = self.num_partials.get(op.plan).copied().unwrap_or(0) as usize;
        let partial_bytes = device.partials.bytes() / PARTIAL_LSE_SHARE * (PARTIAL_LSE_SHARE - 1);
        if slots * width * 4 > partial_bytes
            || slots * op.num_heads * 4 > device.partials.bytes() - partial_bytes
        {
            return Err(unsupported(format!("a step with {slots} partial results of attention")));
        }
        let params = AttentionParams {
            step: device.step.address(),
            query: self.buffer(op.query, width)?,
            cache: kv.layers[op.layer].device.address(),
            slopes: self.vector(op.alibi),
            output: self.buffer(op.output, width)?,
            partials: device.partials.address(),
            partial_lse: device.partials.address() + partial_bytes as u64,
            plan: op.plan as u32,
            window: op.window.unwrap_or(0),
            num_heads: op.num_heads as u32,
            num_kv_heads: spec.num_kv_heads as u32,
            head_dim: spec.head_dim as u32,
            block_shift: kv.block_shift,
            cache_type: kv.cache_type(),
            scale: op.scale,
            softcap: op.softcap.unwrap_or(0.0),
        };
        let plan = self.shape.plans[op.plan];
        let group = (op.num_heads / spec.num_kv_heads) as u32;
        let (gpu, kernels) = (&device.gpu, &device.kernels);
        let properties = &gpu.properties;
        let fitting = |shared: u32| {
            (properties.shared_bytes_per_multiprocessor / (shared + 1024)).clamp(1, 8)
                * properties.num_multiprocessors
        };
        // SAFETY of all: the struct is the kernels'; pages and queries were checked when the step was submitted.
        match kernels.tiled_attention(spec.head_dim, kv.cache_type() == 1).filter(|_| kv.cache_type() != 0) {
            // SAFETY: see above.
            None => unsafe {
                gpu.launch(kernels.attention_any, (8 * properties.num_multiprocessors, 1), 128, 0, &params)
            }?,
            Some(tiled) => {
                if plan.min_queries > 0 && plan.min_queries * group <= 16 {
                    let grid = (fitting(tiled.few_shared_bytes), 1);
                    // SAFETY: see above.
                    unsafe { gpu.launch(tiled.few, grid, 128, tiled.few_shared_bytes, &params) }?;
                }
                if plan.max_queries * group > 16 {
                    let grid = (fitting(tiled.many_shared_bytes), 1);
                    // SAFETY: see above.
                    unsafe { gpu.launch(tiled.many, grid, 128, tiled.many_shared_bytes, &params) }?;
                }
            }
        }
        if plan.has_merges {
            // SAFETY: see above.
            unsafe {
                gpu.launch(kernels.merge_partials, (4 * properties.num_multiprocessors, 1), 128, 0, &params)
            }?;
        }
        Ok(())
    }

    fn try_logits(&mut self, op: &Logits) -> Result<(), BackendError> {
        let (rows, cols) = self.weight_size(op.weight);
        let input = self.buffer(op.input, cols)?;
        let scratch = self.device.normed.address();
        self.launch_norm(input, op.norm.as_ref(), scratch, cols, false, true)?;
        let buffer = &self.device.buffers[op.output.0 as usize];
        if !buffer.is_f32 || buffer.cols != rows {
            return Err(unsupported("logits in a buffer that is not as wide as the vocabulary"));
        }
        let output = buffer.memory.address();
        self.product(&Product {
            input: scratch,
            m: self.shape.logit_rows as usize,
            max_m: self.device.max_logit_rows,
            weight: op.weight,
            bias: None,
            output,
            output_stride: rows,
            accumulate: false,
            is_f32: true,
            softcap: op.softcap,
        })
    }

    fn try_sample(&mut self, logits: BufferId) -> Result<(), BackendError> {
        let device = &*self.device;
        let buffer = &device.buffers[logits.0 as usize];
        if !buffer.is_f32 {
            return Err(unsupported("sampling from a buffer that is not as wide as the vocabulary"));
        }
        if self.shape.samples == 0 {
            return Ok(());
        }
        let parts = device.sample_parts.address();
        let params = SampleParams {
            step: device.step.address(),
            logits: buffer.memory.address(),
            adjusted: device.adjusted.address(),
            part_max: parts,
            part_best: parts + device.sample_parts.bytes() as u64 / 2,
            drawn: device.drawn.address(),
            results: device.results.address(),
            top: device.top.address(),
            vocab: buffer.cols as u32,
        };
        // SAFETY: the struct is the kernels'; the arrays were made for the largest number of samples.
        unsafe {
            device.gpu.launch(
                device.kernels.sample_prepare,
                (SAMPLE_PARTS, self.shape.samples),
                256,
                0,
                &params,
            )?;
            device.gpu.launch(
                device.kernels.sample_choose,
                (self.shape.samples, 1),
                SAMPLE_THREADS,
                0,
                &params,
            )
        }
    }
}

impl Ops for Run<'_> {
    fn embed(&mut self, op: &Embed) {
        self.guard(|run| run.try_embed(op));
    }

    fn norm(&mut self, op: &NormOp) {
        self.guard(|run| run.try_norm(op));
    }

    fn linear(&mut self, op: &Linear) {
        self.guard(|run| run.try_linear(op));
    }

    fn gated_linear(&mut self, op: &GatedLinear) {
        self.guard(|run| run.try_gated(op));
    }

    fn qkv(&mut self, op: &Qkv) {
        self.guard(|run| run.try_qkv(op));
    }

    fn attention(&mut self, op: &Attention) {
        self.guard(|run| run.try_attention(op));
    }

    fn logits(&mut self, op: &Logits) {
        self.guard(|run| run.try_logits(op));
    }

    fn sample(&mut self, logits: BufferId) {
        self.guard(|run| run.try_sample(logits));
    }
}
