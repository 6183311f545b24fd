//! The ops of a step as launches. A launch covers the rows of the step's [`Shape`]; kernels that must not touch more rows
//! than the step has read its counts from the uploaded header.

use baton_backend::{
    Activation, Attention, BackendError, BufferId, Embed, GatedLinear, Linear, Logits, Norm, NormKind,
    NormOp, Op, Qkv, VectorId,
};

use crate::backend::PARTIAL_LSE_SHARE;
use crate::device::Device;
use crate::gpu::{Function, Gpu};
use crate::graphs::{MAX_CHECKED_ROWS, Shape};
use crate::kernels::RESERVED_SHARED;
use crate::params::{
    ActivateParams, Address, AttentionParams, EmbedParams, KeepParams, NormParams, ProductParams, RopeParams,
    SampleParams, WideParams,
};
use crate::probe::Properties;
use crate::products::Product;

/// Keys of a tile, as in `attention_wide.cu`.
const WIDE_KEYS: usize = 64;

/// The largest head that attention_any takes; attention_large takes [`MAX_HEAD`](crate::kv::MAX_HEAD).
const SMALL_HEAD: usize = 256;

/// As in `sample.cuh`.
const SAMPLE_PARTS: u32 = 32;
const SAMPLE_THREADS: u32 = 512;

/// Of a row whose blocks search together: three times 256 sums.
const BINS_BYTES: usize = 3 * 256 * 8;
/// What the blocks of a row tell each other beside that: three sums and counts for each part, and six words.
const MEETING_BYTES: usize = 3 * SAMPLE_PARTS as usize * (8 + 4) + 24;

/// Rows whose best tokens are collected, and bytes for each: the largest keys of spans, and the list.
const MAX_CANDIDATES_ROWS: usize = 512;
const SPANS_BYTES: usize = 256 * 4;
const LIST_BYTES: usize = 512 * 8;

/// What the most rows need that have several blocks comes first, then of those that have a list, then of every row.
pub(crate) fn row_sync_bytes(max_samples: usize, properties: &Properties) -> usize {
    BINS_BYTES * properties.num_multiprocessors as usize
        + (SPANS_BYTES + LIST_BYTES) * MAX_CANDIDATES_ROWS
        + MEETING_BYTES * max_samples
}

/// One step on its way through a program.
pub(crate) struct Run<'a> {
    pub(crate) device: &'a mut Device,
    pub(crate) shape: Shape,
    /// The shape is a bucket, whose products come again and again.
    pub(crate) is_bucket: bool,
    /// The launches are recorded, to be replayed after everything before them is done.
    pub(crate) is_recording: bool,
    /// The rows without logits were dropped: the shape's tokens are those with logits.
    pub(crate) keeps_logit_rows: bool,
    /// Partial slots that each plan of the step uses.
    pub(crate) num_partials: &'a [u32],
    /// What is to be launched after the program if a sample wants it.
    pub(crate) scoring: Option<Scoring>,
}

/// The launch that finds log-probabilities and the most likely tokens of a step's samples.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scoring {
    kernel: Function,
    grid: (u32, u32),
    params: SampleParams,
}

impl Scoring {
    pub(crate) fn launch(&self, gpu: &Gpu) -> Result<(), BackendError> {
        // SAFETY: the struct is the kernel's; its arrays live as long as the device, and the step has sampled with them.
        unsafe { gpu.launch(self.kernel, self.grid, SAMPLE_THREADS, 0, &self.params) }
    }
}

pub(crate) fn unsupported(what: impl Into<String>) -> BackendError {
    BackendError::Unsupported { what: what.into() }
}

pub(crate) fn activation_number(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::Gelu => 2,
        Activation::Relu => 3,
        Activation::ReluSquared => 4,
        Activation::ClampedSwiglu => 5,
    }
}

impl Run<'_> {
    pub(crate) fn run(&mut self, op: &Op) -> Result<(), BackendError> {
        // Of a recorded step only the whole is launched.
        let _range = (!self.is_recording).then(|| self.device.ranges.enter(|| op.name().to_owned()));
        match op {
            Op::Embed(op) => self.embed(op),
            Op::AddPositions(op) => self.add_positions(*op),
            Op::Norm(op) => self.norm(op),
            Op::Linear(op) => self.linear(op),
            Op::ActivatedLinear(op) => self.activated_linear(op),
            Op::GatedLinear(op) => self.gated(op),
            Op::Route(op) => self.route(op),
            Op::ExpertGated(op) => self.expert_gated(op),
            Op::ExpertLinear(op) => self.expert_linear(op),
            Op::HeadLinear(op) => self.head_linear(*op),
            Op::LatentKv(op) => self.latent_kv(op),
            Op::Qkv(op) => self.qkv(op),
            Op::Attention(op) => self.attention(op),
            Op::EncoderAttention(op) => self.encoder_attention(op),
            Op::KeepLogitRows(op) => self.keep(&op.buffers),
            Op::Logits(op) => self.logits(op),
            Op::Sample(op) => self.sample(op.logits),
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.shape.tokens as usize
    }

    pub(crate) fn vector(&self, id: Option<VectorId>) -> Address {
        id.map_or(0, |id| self.device.vectors[id.0 as usize].address())
    }

    /// A buffer of activations of this width.
    pub(crate) fn buffer(&self, id: BufferId, cols: usize) -> Result<Address, BackendError> {
        let buffer = &self.device.buffers[id.0 as usize];
        if buffer.cols != cols || buffer.is_logits {
            return Err(unsupported(format!(
                "a buffer of {} columns where {cols} of activations are needed",
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
        unsafe { self.device.gpu.launch(self.device.kernels.core().norm, (rows, 1), 256, 0, &params) }
    }

    /// The rows that a product reads: the buffer itself, or its norm in scratch.
    pub(crate) fn normed(
        &mut self,
        input: BufferId,
        norm: Option<&Norm>,
        cols: usize,
    ) -> Result<Address, BackendError> {
        let address = self.buffer(input, cols)?;
        let Some(norm) = norm else { return Ok(address) };
        let scratch = self.device.normed.address();
        self.launch_norm(address, Some(norm), scratch, cols, false, false)?;
        Ok(scratch)
    }

    fn embed(&mut self, op: &Embed) -> Result<(), BackendError> {
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let output = self.buffer(op.output, weight.cols)?;
        for part in &weight.parts {
            let params = EmbedParams {
                step: device.step.address(),
                drawn: device.drawn.address(),
                weight: part.memory.address(),
                unit_bytes: part.unit_bytes as u64,
                output,
                first_row: part.first_row as u32,
                num_rows: part.rows as u32,
                cols: weight.cols as u32,
                scale: op.scale,
                adds_positions: 0,
            };
            let function = device.kernels.embed(part.layout);
            // SAFETY: the struct is the kernel's; the output has a row per token.
            unsafe { device.gpu.launch(function, (self.shape.tokens, 1), 128, 0, &params) }?;
        }
        Ok(())
    }

    fn norm(&mut self, op: &NormOp) -> Result<(), BackendError> {
        let cols = self.device.buffers[op.input.0 as usize].cols;
        let (input, output) = (self.buffer(op.input, cols)?, self.buffer(op.output, cols)?);
        self.launch_norm(input, Some(&op.norm), output, cols, op.accumulate, false)
    }

    pub(crate) fn linear(&mut self, op: &Linear) -> Result<(), BackendError> {
        if self.skinny_linear(op)? {
            return Ok(());
        }
        let (rows, _) = self.weight_size(op.weight);
        let input = self.prepared(op.input, op.norm.as_ref(), op.weight)?;
        let output = self.buffer(op.output, rows)?;
        self.product(&Product {
            input: input.address,
            is_fp8: input.is_fp8,
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

    fn gated(&mut self, op: &GatedLinear) -> Result<(), BackendError> {
        let whole = self.whole_gated_kernel(op);
        if whole.is_none() && self.skinny_gated(op)? {
            return Ok(());
        }
        let (rows, cols) = self.weight_size(op.weight);
        let width = rows / 2;
        let input = self.prepared(op.input, op.norm.as_ref(), op.weight)?;
        let output = self.buffer(op.output, width)?;
        if let Some(which) = whole {
            return self.whole_gated(op, which, input, output);
        }
        let bias = self.vector(op.bias);
        let activation = activation_number(op.activation);
        let m = self.tokens();
        if let [part] = self.device.weights[op.weight.0 as usize].parts.as_slice()
            && self.device.is_small(part, m, false)
            && width.is_multiple_of(part.unit_rows)
        {
            let params = ProductParams {
                weight: part.memory.address(),
                unit_bytes: part.unit_bytes as u64,
                input: input.address,
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
            if self.device.wide_product(part, &params, None, true)? {
                return Ok(());
            }
            let kernel = self.device.kernels.products(part.layout, m).gated;
            // SAFETY: the struct is the kernel's; input and output have `m` rows.
            return unsafe { self.launch_product(&kernel, &params) };
        }
        let projected = self.project(input, op.weight)?;
        let params =
            ActivateParams { projected, bias, output, rows: m as u32, width: width as u32, activation };
        let blocks = (m * width / 8).div_ceil(256).clamp(1, 2048) as u32;
        // SAFETY: the struct is the kernel's; scratch and output have `m` rows.
        unsafe {
            self.device.gpu.launch(self.device.kernels.core().gated_activation, (blocks, 1), 256, 0, &params)
        }
    }

    fn qkv(&mut self, op: &Qkv) -> Result<(), BackendError> {
        if self.skinny_qkv(op)? {
            return Ok(());
        }
        let (_, cols) = self.weight_size(op.weight);
        let skinny = self.skinny_project(self.buffer(op.input, cols)?, op.norm.as_ref(), op.weight)?;
        let projected = if let Some(projected) = skinny {
            projected
        } else {
            let input = self.prepared(op.input, op.norm.as_ref(), op.weight)?;
            self.project(input, op.weight)?
        };
        let kv = self.device.kv.as_ref().ok_or_else(|| unsupported("attention without a KV cache"))?;
        let spec = kv.layer_spec(op.layer);
        let query = self.buffer(op.output, op.num_heads * spec.head_dim)?;
        // Norms that the rotary kernels do not know are done before, with the bias.
        let is_normed = Self::has_other_head_norms(op);
        if is_normed {
            self.norm_heads(op, projected, spec.num_kv_heads, spec.head_dim)?;
        }
        let unless_normed = |vector: Option<VectorId>| self.vector(vector.filter(|_| !is_normed));
        let rope = op.rope.map(|rope| &self.device.ropes[rope.0 as usize]);
        let params = RopeParams {
            step: self.device.step.address(),
            projected,
            bias: unless_normed(op.bias),
            q_norm: unless_normed(op.q_norm.map(|norm| norm.weight)),
            k_norm: unless_normed(op.k_norm.map(|norm| norm.weight)),
            inv_freq: rope.map_or(0, |rope| rope.inv_freq.address()),
            query,
            cache: kv.array(op.layer).device.address(),
            num_heads: op.num_heads as u32,
            num_kv_heads: spec.num_kv_heads as u32,
            head_dim: spec.head_dim as u32,
            half_rotary: rope.map_or(0, |rope| rope.half),
            interleaved: rope.map_or(0, |rope| u32::from(rope.is_interleaved)),
            block_shift: kv.block_shift,
            cache_type: kv.cache_type(),
            lane: kv.lane_of(op.layer) as u32,
            q_eps: op.q_norm.map_or(0.0, |norm| norm.eps),
            k_eps: op.k_norm.map_or(0.0, |norm| norm.eps),
            rope_scale: rope.map_or(1.0, |rope| rope.scale),
        };
        let heads = (op.num_heads + 2 * spec.num_kv_heads) as u32;
        let (gpu, kernels) = (&self.device.gpu, &self.device.kernels);
        let is_whole =
            rope.is_none_or(|rope| !rope.is_interleaved && 2 * rope.half as usize == spec.head_dim);
        let (function, grid, threads) = if is_whole && [64, 128, 256].contains(&spec.head_dim) {
            (kernels.core().rope_whole_heads, (self.shape.tokens, 1), 256)
        } else {
            (kernels.core().rope_and_cache, (self.shape.tokens, heads.div_ceil(4)), 128)
        };
        // SAFETY: the struct is the kernels'; slots were checked against the cache when the step was submitted.
        unsafe { gpu.launch(function, grid, threads, 0, &params) }
    }

    fn attention(&mut self, op: &Attention) -> Result<(), BackendError> {
        let plan = self.shape.plans[op.plan];
        if plan.max_queries == 0 && !plan.shares {
            return Ok(());
        }
        let tiled = self.device.tiled_attention(op.layer)?;
        let latent = self.latent_attention(op)?;
        let device = &*self.device;
        let kv = device.kv.as_ref().ok_or_else(|| unsupported("attention without a KV cache"))?;
        let spec = kv.layer_spec(op.layer);
        // Heads of 256 have no registers left for them, and no model has both.
        if op.sinks.is_some() && tiled.is_some() && spec.head_dim > 128 {
            return Err(unsupported(format!("attention sinks with heads of {}", spec.head_dim)));
        }
        // What a sequence writes before a query, at most, and where branches of guesses have pages of their own the rest of these.
        let new_keys = if plan.max_queries > 1 { MAX_CHECKED_ROWS - 1 + (1 << kv.block_shift) } else { 0 };
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
            cache: kv.array(op.layer).device.address(),
            slopes: self.vector(op.alibi),
            sinks: self.vector(op.sinks),
            output: self.buffer(op.output, width)?,
            partials: device.partials.address(),
            partial_lse: device.partials.address() + partial_bytes as u64,
            arrivals: device.arrivals.address(),
            plan: op.plan as u32,
            window: op.window.unwrap_or(0),
            num_heads: op.num_heads as u32,
            num_kv_heads: spec.num_kv_heads as u32,
            head_dim: spec.head_dim as u32,
            block_shift: kv.block_shift,
            cache_type: kv.cache_type(),
            scale: op.scale,
            softcap: op.softcap.unwrap_or(0.0),
            is_decode: if self.is_bucket && self.is_recording { 1 + new_keys } else { 0 },
            is_shared: 0,
        };
        let group = (op.num_heads / spec.num_kv_heads) as u32;
        let (gpu, kernels) = (&device.gpu, &device.kernels);
        let properties = &gpu.properties;
        let fitting = |shared: u32| {
            (properties.shared_bytes_per_multiprocessor / (shared + RESERVED_SHARED)).clamp(1, 8)
                * properties.num_multiprocessors
        };
        // SAFETY of all: the struct is the kernels'; pages and queries were checked when the step was submitted.
        match tiled {
            // SAFETY: see above.
            None => unsafe {
                let blocks = 8 * properties.num_multiprocessors;
                let core = kernels.core();
                let (attend, merge) = if spec.head_dim > SMALL_HEAD {
                    (core.attention_large, core.merge_large)
                } else {
                    (core.attention_any, core.merge_partials)
                };
                match latent {
                    Some(kernels) => self.attend_latents(kernels, &params, plan.max_queries)?,
                    None => gpu.launch(attend, (blocks, 1), 128, 0, &params)?,
                }
                gpu.launch(merge, (blocks / 2, 1), 128, 0, &params)?;
            },
            Some(tiled) => {
                let launch_many = |params: AttentionParams| {
                    let (threads, shared_bytes) = (tiled.many_threads, tiled.many_shared_bytes);
                    // One block of attention_wide has all registers of a multiprocessor.
                    let blocks =
                        if tiled.is_wide { properties.num_multiprocessors } else { fitting(shared_bytes) };
                    // SAFETY: see above.
                    unsafe {
                        if tiled.is_wide {
                            let cache = kv.map(op.layer, WIDE_KEYS)?;
                            let params = WideParams { cache, attention: params };
                            gpu.launch(tiled.many, (blocks, 1), threads, shared_bytes, &params)
                        } else {
                            gpu.launch(tiled.many, (blocks, 1), threads, shared_bytes, &params)
                        }
                    }
                };
                // What is shared comes first: the items of single sequences merge it with their own.
                if plan.shares {
                    launch_many(AttentionParams { is_shared: 1, ..params })?;
                }
                if plan.max_queries * group > 16 {
                    launch_many(params)?;
                }
                if plan.min_queries > 0 && plan.min_queries * group <= 16 {
                    let grid = (fitting(tiled.few_shared_bytes), 1);
                    // SAFETY: see above.
                    unsafe { gpu.launch(tiled.few, grid, 128, tiled.few_shared_bytes, &params) }?;
                }
            }
        }
        Ok(())
    }

    fn keep(&mut self, buffers: &[BufferId]) -> Result<(), BackendError> {
        if self.keeps_logit_rows || !self.shape.can_keep {
            return Ok(());
        }
        for id in buffers.iter().filter(|_| self.shape.logit_rows > 0) {
            let buffer = &self.device.buffers[id.0 as usize];
            // Buffers have a multiple of 8 columns.
            let row_units = (buffer.cols * self.device.activation_bytes() / 16) as u32;
            let params =
                KeepParams { step: self.device.step.address(), values: buffer.memory.address(), row_units };
            let (function, grid) = (self.device.kernels.core().keep_rows, (row_units.div_ceil(128), 1));
            // SAFETY: the struct is the kernel's; rows with logits are rows of the step, which the buffer has.
            unsafe { self.device.gpu.launch(function, grid, 128, 0, &params) }?;
        }
        self.keeps_logit_rows = true;
        self.shape.tokens = self.shape.logit_rows;
        Ok(())
    }

    fn logits(&mut self, op: &Logits) -> Result<(), BackendError> {
        let Some(bias) = op.bias else { return self.unbiased_logits(op) };
        if op.softcap.is_some() {
            return Err(unsupported("logits with a bias and a softcap"));
        }
        self.unbiased_logits(op)?;
        let logits = &self.device.buffers[op.output.0 as usize];
        self.add_logit_bias(logits.memory.address(), bias, logits.cols)
    }

    fn unbiased_logits(&mut self, op: &Logits) -> Result<(), BackendError> {
        if !self.keeps_logit_rows && self.skinny_logits(op)? {
            return Ok(());
        }
        let (rows, cols) = self.weight_size(op.weight);
        let input = self.buffer(op.input, cols)?;
        let scratch = self.device.normed.address();
        self.launch_norm(input, op.norm.as_ref(), scratch, cols, false, !self.keeps_logit_rows)?;
        let buffer = &self.device.buffers[op.output.0 as usize];
        if !buffer.is_logits || buffer.cols != rows {
            return Err(unsupported("logits in a buffer that is not as wide as the vocabulary"));
        }
        let output = buffer.memory.address();
        let input = self.ordered(scratch, op.weight, self.shape.logit_rows)?;
        self.product(&Product {
            input: input.address,
            is_fp8: false,
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

    fn sample(&mut self, logits: BufferId) -> Result<(), BackendError> {
        if !self.device.buffers[logits.0 as usize].is_logits {
            return Err(unsupported("sampling from a buffer that is not as wide as the vocabulary"));
        }
        if self.shape.samples == 0 {
            return Ok(());
        }
        let sampler = self.device.kernels.sampler()?;
        let device = &*self.device;
        let buffer = &device.buffers[logits.0 as usize];
        let parts = device.sample_parts.address();
        let num_multiprocessors = device.gpu.properties.num_multiprocessors;
        let bins = device.row_syncs.address();
        let spans = bins + BINS_BYTES as u64 * u64::from(num_multiprocessors);
        let candidates = spans + (SPANS_BYTES * MAX_CANDIDATES_ROWS) as u64;
        let params = SampleParams {
            step: device.step.address(),
            logits: buffer.memory.address(),
            adjusted: device.adjusted.address(),
            part_max: parts,
            part_best: parts + device.sample_parts.bytes() as u64 / 2,
            drawn: device.drawn.address(),
            results: device.results.address(),
            top: device.top.address(),
            row_syncs: candidates + (LIST_BYTES * MAX_CANDIDATES_ROWS) as u64,
            bins,
            spans,
            candidates,
            vocab: buffer.cols as u32,
            max_shared_rows: num_multiprocessors,
            max_listed_rows: MAX_CANDIDATES_ROWS as u32,
        };
        // Blocks of a row wait for each other, so all of them must fit the device at once: two fit a multiprocessor.
        let blocks_of_row = (2 * num_multiprocessors / self.shape.samples).clamp(1, SAMPLE_PARTS);
        let grid = (blocks_of_row, self.shape.samples);
        // SAFETY: the struct is the kernels'; the arrays were made for the largest number of samples.
        unsafe {
            device.gpu.launch(sampler.prepare, (SAMPLE_PARTS, self.shape.samples), 256, 0, &params)?;
            device.gpu.launch(sampler.choose, grid, SAMPLE_THREADS, 0, &params)?;
        }
        self.scoring = Some(Scoring { kernel: sampler.score, grid, params });
        Ok(())
    }
}
