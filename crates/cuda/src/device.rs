//! What the ops of a step use: weights, buffers, scratch, kernels.

use baton_backend::BackendError;

use crate::experts::ExpertMemory;
use crate::gemm::Gemm;
use crate::gpu::{DeviceMemory, Gpu};
use crate::kernels::{Kernels, TiledAttention};
use crate::kv::KvCache;
use crate::layout::activation_format;
use crate::ranges::Ranges;
use crate::weights::Weight;

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) weights: Vec<Weight>,
    pub(crate) vectors: Vec<DeviceMemory>,
    pub(crate) ropes: Vec<Rope>,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) kv: Option<KvCache>,
    /// The uploaded step.
    pub(crate) step: DeviceMemory,
    /// Normed inputs of products, `[max rows, widest input]`.
    pub(crate) normed: DeviceMemory,
    /// The same in the order of a weight's columns, where one has its own.
    pub(crate) ordered: DeviceMemory,
    /// Inputs of products as e4m3, and the scale of each row.
    pub(crate) codes: DeviceMemory,
    pub(crate) code_scales: DeviceMemory,
    /// Results of projections that another kernel goes over, `[max tokens, widest output]`.
    pub(crate) projected: DeviceMemory,
    /// A piece of a weight as bf16.
    pub(crate) converted: DeviceMemory,
    pub(crate) partials: DeviceMemory,
    /// How many partials of each merge and kv head are there: 0 between launches.
    pub(crate) arrivals: DeviceMemory,
    pub(crate) adjusted: DeviceMemory,     // [max samples, vocab] f32
    pub(crate) sample_parts: DeviceMemory, // [2, max samples, parts]
    pub(crate) drawn: DeviceMemory,        // [max samples]
    pub(crate) row_syncs: DeviceMemory,    // as in `row_sync_bytes`
    pub(crate) results: DeviceMemory,      // [max samples, RESULT_WORDS]
    pub(crate) top: DeviceMemory,          // [max samples, MAX_TOP, 2]
    /// Layers of the cache whose values are the first 512 of keys of 576.
    pub(crate) latent_layers: Vec<usize>,
    /// Of programs with experts.
    pub(crate) experts: Option<ExpertMemory>,
    /// Rows of bf16 weights that the skinny kernels take.
    pub(crate) skinny_rows: usize,
    pub(crate) gated_min_busy: usize,
    /// Rows of bf16 weights that our own kernels without tensor cores take.
    pub(crate) small_bf16_rows: usize,
    pub(crate) max_tokens: usize,
    pub(crate) max_logit_rows: usize,
    pub(crate) ranges: Ranges,
    pub(crate) kernels: Kernels,
    /// There with the first weight.
    pub(crate) gemm: Option<Gemm>,
    pub(crate) gpu: Gpu,
}

impl Device {
    pub(crate) fn activation_bytes(&self) -> usize {
        activation_format(self.kernels.precision()).block_bytes()
    }

    /// The tensor-core attention of a layer of the cache, where there is one for it.
    pub(crate) fn tiled_attention(&mut self, layer: usize) -> Result<Option<TiledAttention>, BackendError> {
        let Some(kv) = &self.kv else { return Ok(None) };
        self.kernels.tiled_attention(kv.layer_spec(layer).head_dim, kv.dtype())
    }

    /// With more decodes than this their kv heads are more than the blocks of attention that the device runs at once.
    pub(crate) fn min_narrow_items(&self) -> usize {
        let kv_heads = self.kv.as_ref().map_or(1, |kv| kv.layer_spec(0).num_kv_heads.max(1));
        2 * self.gpu.properties.num_multiprocessors as usize / kv_heads
    }

    /// Of a logit or an activation.
    pub(crate) fn element_bytes(&self, is_f32: bool) -> usize {
        if is_f32 { 4 } else { self.activation_bytes() }
    }
}

#[derive(Debug)]
pub(crate) struct Rope {
    pub(crate) inv_freq: DeviceMemory,
    pub(crate) half: u32,
    pub(crate) scale: f32,
    pub(crate) is_interleaved: bool,
}

#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) memory: DeviceMemory,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// f32; all else is as the precision wants it.
    pub(crate) is_logits: bool,
}
