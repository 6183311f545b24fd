//! Setting the device up: weights, buffers, programs and the cache, and the memory that steps take besides.

use baton_backend::{
    AttentionTuning, Backend, BackendError, BufferId, BufferShape, DeviceInfo, KvSpec, Precision, Program,
    ProgramId, RopeId, RopeSpec, RopeStyle, Sharing, StepLimits, StepMemory, Tensor, VectorId, WeightFormat,
    WeightId, WeightShape, WeightUse,
};

use super::{CudaBackend, PARTIAL_LSE_SHARE, Slot};
use crate::device::{Buffer, Device, Rope};
use crate::fp8::usable;
use crate::gpu::DeviceMemory;
use crate::kv::KvCache;
use crate::layout::TILE_ROWS;
use crate::ops::{row_sync_bytes, unsupported};
use crate::output::{MAX_TOP, RESULT_WORDS};
use crate::pack::{Packed, capacity_words};
use crate::swap::Swapper;
use crate::weights::{Part, Weight};

/// Values of a weight that are converted at once for a large product.
const MAX_CONVERTED: usize = 64 << 20;
const SAMPLE_PARTS: usize = 32;
const MAX_SMALL_HEAD: usize = 32768;

impl CudaBackend {
    /// Grows the scratch of products to the weights and limits known so far.
    fn size_scratch(&mut self) -> Result<(), BackendError> {
        let Some(limits) = self.limits else { return Ok(()) };
        let (rows, cols) = self.widest_linear;
        let max_rows = limits.max_tokens.max(limits.max_logit_rows);
        let element = self.device.activation_bytes();
        let Device { gpu, normed, projected, converted, ordered, codes, code_scales, .. } = &mut self.device;
        // Large products have some rows more than there are.
        let padded = max_rows.next_multiple_of(64);
        for (memory, bytes) in [
            (ordered, max_rows * self.widest_ordered * element),
            (codes, padded * self.widest_fp8),
            (code_scales, if self.widest_fp8 > 0 { 4 * padded } else { 0 }),
            (normed, max_rows * cols * element),
            (projected, limits.max_tokens * rows * element),
            (converted, self.largest_converted.min(MAX_CONVERTED.max(TILE_ROWS * cols)) * element),
        ] {
            if memory.bytes() < bytes {
                *memory = gpu.allocate(0, "nothing")?;
                *memory = gpu.allocate(bytes, "workspace")?;
            }
        }
        Ok(())
    }

    fn new_buffer(&mut self, shape: BufferShape) -> Result<BufferId, BackendError> {
        let BufferShape { rows, cols, is_logits } = shape;
        let what = format!("a buffer of {rows} x {cols}");
        let element = self.device.element_bytes(is_logits);
        let bytes = rows.checked_mul(cols).and_then(|values| values.checked_mul(element));
        let bytes = bytes.ok_or_else(|| unsupported(what.clone()))?;
        let memory = self.device.gpu.allocate(bytes, &what)?;
        self.device.buffers.push(Buffer { memory, rows, cols, is_logits });
        Ok(self.handles.add_buffer(shape))
    }

    /// Of a step in a cache with so many lanes.
    fn step_bytes(&self, limits: &StepLimits, lanes: usize) -> usize {
        // Each split of a context has one partial per query; even the narrowest model's fill what there is.
        4 * capacity_words(limits, self.partial_bytes / 16384, lanes)
    }

    /// Makes room for the pages and slots of all lanes. How many there are is known when the cache is.
    fn size_lanes(&mut self, lanes: usize) -> Result<(), BackendError> {
        let Some(limits) = self.limits else { return Ok(()) };
        let step_bytes = self.step_bytes(&limits, lanes);
        if step_bytes <= self.device.step.bytes() {
            return Ok(());
        }
        self.device.step = self.device.gpu.allocate(step_bytes, "the step")?;
        for slot in self.slots.iter_mut().flatten() {
            slot.step = self.device.gpu.allocate_pinned(step_bytes, "the step")?;
        }
        Ok(())
    }

    /// What attention needs besides its cache.
    fn size_attention(&mut self, cache: &KvSpec) -> Result<(), BackendError> {
        let Device { gpu, kernels, partials, arrivals, max_tokens, .. } = &mut self.device;
        kernels.make_ready()?;
        let most_heads = cache.layers.iter().map(|layer| layer.num_kv_heads).max().unwrap_or(0);
        for (memory, bytes) in [(partials, self.partial_bytes), (arrivals, 4 * *max_tokens * most_heads)] {
            if memory.bytes() < bytes {
                *memory = gpu.allocate(bytes, "partial results of attention")?;
            }
        }
        Ok(())
    }
}

impl Backend for CudaBackend {
    fn device(&self) -> DeviceInfo {
        let info = self.device.gpu.properties.info(self.device.gpu.free_bytes());
        let partial_bytes = self.partial_bytes / PARTIAL_LSE_SHARE * (PARTIAL_LSE_SHARE - 1);
        // Without tensor cores a query costs the same whoever reads the keys.
        let is_fast = self.device.kernels.precision() == Precision::Fast;
        let sharing = if is_fast { info.attention.sharing } else { Sharing::default() };
        let decode_rows = if is_fast { info.attention.decode_rows } else { 0 };
        let attention = AttentionTuning { partial_bytes, sharing, decode_rows, ..info.attention };
        DeviceInfo { activation_bytes: self.device.activation_bytes(), attention, ..info }
    }

    fn load_weight(&mut self, parts: &[Tensor], usage: WeightUse) -> Result<WeightId, BackendError> {
        let shape = WeightShape::new(parts, usage)?;
        self.device.gpu.bind()?;
        self.open_gemm()?;
        let precision = self.device.kernels.precision();
        let parts = usable(parts, usage, precision)?;
        for part in &parts {
            self.device.kernels.prepare_format(part.format())?;
        }
        let has_fp8 = parts.iter().any(|part| part.format() == WeightFormat::F8_E4M3);
        let Device { gpu, kernels, .. } = &self.device;
        let weight = Weight::load(gpu, kernels, &mut self.staging, &parts, usage)?;
        if matches!(usage, WeightUse::Linear | WeightUse::EmbeddingAndLinear) {
            // A head writes logits, never scratch; a small one is not worth knowing.
            let has_vocabulary = self.limits.is_some_and(|limits| limits.vocab_size == weight.rows);
            let is_head =
                weight.rows > MAX_SMALL_HEAD && (has_vocabulary || usage == WeightUse::EmbeddingAndLinear);
            self.widest_linear.0 = self.widest_linear.0.max(if is_head { 0 } else { weight.rows });
            self.widest_linear.1 = self.widest_linear.1.max(weight.cols);
            self.largest_converted =
                self.largest_converted.max(weight.largest_converted(kernels.precision()).unwrap_or(0));
            if has_fp8 {
                for kind in weight.parts.iter().filter_map(Part::skinny_weights) {
                    self.device.kernels.prepare_skinny(kind)?;
                }
                self.device.gemm.as_mut().expect("opened above").look_for_fp8();
                self.widest_fp8 = self.widest_fp8.max(weight.cols);
            }
            if weight.columns.is_some() {
                self.widest_ordered = self.widest_ordered.max(weight.cols);
            }
            self.size_scratch()?;
        }
        self.device.weights.push(weight);
        Ok(self.handles.add_weight(shape))
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        let memory = self.device.gpu.allocate(size_of_val(values), "a vector")?;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.staging.copy(&self.device.gpu, &bytes, &memory, 0)?;
        self.device.vectors.push(memory);
        Ok(self.handles.add_vector(values.len()))
    }

    fn create_rope(&mut self, spec: &RopeSpec) -> Result<RopeId, BackendError> {
        let inv_freq = self.device.gpu.allocate(4 * spec.inv_freq.len(), "a rotary table")?;
        let bytes: Vec<u8> = spec.inv_freq.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.staging.copy(&self.device.gpu, &bytes, &inv_freq, 0)?;
        self.device.ropes.push(Rope {
            inv_freq,
            half: spec.inv_freq.len() as u32,
            scale: spec.scale,
            is_interleaved: spec.style == RopeStyle::Interleaved,
        });
        Ok(self.handles.add_rope(spec))
    }

    fn set_limits(&mut self, limits: &StepLimits) -> Result<(), BackendError> {
        assert!(self.limits.is_none(), "set_limits is called once");
        let samples = limits.max_samples.max(1);
        let gpu = &self.device.gpu;
        let step_bytes = self.step_bytes(limits, 1);
        self.device.step = gpu.allocate(step_bytes, "the step")?;
        self.device.adjusted = gpu.allocate(4 * samples * limits.vocab_size, "adjusted logits")?;
        self.device.sample_parts = gpu.allocate(2 * 4 * samples * SAMPLE_PARTS, "sampling")?;
        self.device.drawn = gpu.allocate(4 * samples, "sampling")?;
        self.device.row_syncs = gpu.allocate(row_sync_bytes(samples, &gpu.properties), "sampling")?;
        let result_bytes = 4 * samples * RESULT_WORDS;
        self.device.results = gpu.allocate(result_bytes, "sampling")?;
        let top_bytes = 8 * samples * MAX_TOP;
        self.device.top = gpu.allocate(top_bytes, "sampling")?;
        let slot = || {
            Ok::<_, BackendError>(Slot {
                step: gpu.allocate_pinned(step_bytes, "the step")?,
                packed: Packed::default(),
                results: gpu.allocate_pinned(result_bytes, "sampling")?,
                top: gpu.allocate_pinned(top_bytes, "sampling")?,
            })
        };
        self.slots = Some([slot()?, slot()?]);
        self.limits = Some(*limits);
        self.device.max_tokens = limits.max_tokens;
        self.device.max_logit_rows = limits.max_logit_rows;
        self.size_scratch()
    }

    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, BackendError> {
        if !cols.is_multiple_of(8) {
            return Err(unsupported(format!("a buffer of {rows} x {cols}: use a multiple of 8 columns")));
        }
        self.new_buffer(BufferShape { rows, cols, is_logits: false })
    }

    fn create_logits(&mut self, rows: usize, vocab_size: usize) -> Result<BufferId, BackendError> {
        self.new_buffer(BufferShape { rows, cols: vocab_size, is_logits: true })
    }

    fn compile(&mut self, program: &Program) -> Result<ProgramId, BackendError> {
        let id = self.programs.compile(program, &self.handles)?;
        if let Some(limits) = self.limits {
            self.device.gpu.bind()?;
            self.device.prepare_experts(program, limits.max_tokens)?;
        }
        Ok(id)
    }

    fn check_kv_spec(&self, spec: &KvSpec) -> Result<(), BackendError> {
        crate::kv::check_spec(spec)
    }

    fn profile_run(&mut self, program: ProgramId, cache: &KvSpec) -> Result<StepMemory, BackendError> {
        self.device.gpu.bind()?;
        self.programs.get(program)?.needs.check_cache(cache)?;
        self.size_lanes(cache.num_lanes())?;
        self.size_attention(cache)?;
        // Steps of nothing, which touch no block.
        self.device.kv = Some(KvCache::new(&self.device.gpu, cache, 1, 0)?);
        let graph_bytes = self.profile_steps(program)?;
        self.device.kv = None;
        let buffers: usize = self.device.buffers.iter().map(|buffer| buffer.memory.bytes()).sum();
        let taken_bytes = self.free_at_start.saturating_sub(self.device.gpu.free_bytes());
        let workspace_bytes = taken_bytes.saturating_sub(self.weight_bytes()).saturating_sub(buffers as u64);
        Ok(StepMemory { workspace_bytes, graph_bytes })
    }

    fn create_kv_cache(
        &mut self,
        spec: &KvSpec,
        num_device_blocks: usize,
        num_host_blocks: usize,
    ) -> Result<(), BackendError> {
        assert!(self.device.kv.is_none(), "create_kv_cache is called once");
        crate::kv::check_spec(spec)?;
        self.programs.set_cache(spec)?;
        self.device.gpu.bind()?;
        self.size_lanes(spec.num_lanes())?;
        self.size_attention(spec)?;
        self.device.kv = Some(KvCache::new(&self.device.gpu, spec, num_device_blocks, num_host_blocks)?);
        if num_host_blocks > 0 {
            let kv = self.device.kv.as_ref().expect("just made");
            self.swapper = Some(Swapper::new(&self.device.gpu, kv)?);
        }
        self.device.gpu.synchronize()
    }

    fn warm_up(&mut self, program: ProgramId) -> Result<(), BackendError> {
        self.device.gpu.bind()?;
        let compiled = self.programs.get(program)?;
        let ops = compiled.ops.as_slice();
        for bucket in self.buckets() {
            self.record((program, bucket), &[], ops)?;
        }
        self.device.gpu.synchronize()
    }

    fn weight_bytes(&self) -> u64 {
        let weights: usize = self.device.weights.iter().map(Weight::bytes).sum();
        let vectors: usize = self.device.vectors.iter().map(DeviceMemory::bytes).sum();
        (weights + vectors) as u64
    }
}
