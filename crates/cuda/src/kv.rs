//! The paged cache on the device and its swap tier in pinned memory.
//!
//! Each place within a block is one array, `[blocks][K, V][kv_heads][block_size][head_dim]`, so that a block of one head is
//! contiguous. Layers of different lanes share an array; they use different blocks of it.

use std::sync::{Arc, Mutex};

use baton_backend::{BackendError, BlockCopy, CacheShape, KvDtype, KvLayerSpec, KvSpec, StepInput};

use crate::gpu::{DeviceMemory, Element, Fetches, Gpu, map_matrix};
use crate::host_blocks::{CudaHostBlocks, layout};
use crate::params::TensorMap;
use crate::pinned::PinnedMemory;
use crate::swap::max_swaps;

#[derive(Debug)]
pub(crate) struct KvCache {
    spec: KvSpec,
    pub(crate) block_shift: u32,
    pub(crate) arrays: Vec<Array>,
    /// The blocks of the host tier, array after array.
    host: Option<Arc<PinnedMemory>>,
    num_device_blocks: usize,
    num_host_blocks: usize,
}

#[derive(Debug)]
pub(crate) struct Array {
    pub(crate) device: DeviceMemory,
    /// Where its blocks begin in the pinned memory.
    host_offset: usize,
    pub(crate) block_bytes: usize,
}

/// The largest head that a kernel takes: a latent of 512 + 64.
pub(crate) const MAX_HEAD: usize = 576;

/// Says whether there are kernels for such a cache.
pub(crate) fn check_spec(spec: &KvSpec) -> Result<(), BackendError> {
    let unsupported = |what: String| Err(BackendError::Unsupported { what });
    if spec.dtype == KvDtype::Int8 {
        return unsupported(
            "--kv-cache-dtype int8 on an NVIDIA device: use fp8 here; int8 works on the CPU".to_owned(),
        );
    }
    if !spec.block_size.is_power_of_two() || spec.block_size < 8 {
        return unsupported(format!(
            "a KV block of {} tokens: use a power of two from 8 on",
            spec.block_size
        ));
    }
    if let Some(layer) =
        spec.layers.iter().find(|layer| layer.head_dim > MAX_HEAD || !layer.head_dim.is_multiple_of(4))
    {
        return unsupported(format!(
            "attention heads of {}: at most {MAX_HEAD}, a multiple of 4",
            layer.head_dim
        ));
    }
    Ok(())
}

impl KvCache {
    /// `check_spec` has accepted the spec.
    pub(crate) fn new(
        gpu: &Gpu,
        spec: &KvSpec,
        num_device_blocks: usize,
        num_host_blocks: usize,
    ) -> Result<Self, BackendError> {
        let mut host_bytes = 0_usize;
        let new_array = |layer: &KvLayerSpec| {
            let block_bytes = 2 * layer.num_kv_heads * layer.head_dim * spec.block_size * spec.dtype.bytes();
            let bytes = |blocks: usize| block_bytes.checked_mul(blocks).unwrap_or(usize::MAX / 2);
            let host_offset = host_bytes;
            host_bytes = host_bytes.saturating_add(bytes(num_host_blocks));
            let device = gpu.allocate(bytes(num_device_blocks), "the KV cache")?;
            Ok(Array { device, host_offset, block_bytes })
        };
        let arrays = spec.arrays().iter().map(new_array).collect::<Result<_, BackendError>>()?;
        let host = (host_bytes > 0).then(|| gpu.allocate_pinned(host_bytes, "the swap space")).transpose()?;
        let host = host.map(Arc::new);
        Ok(Self {
            spec: spec.clone(),
            block_shift: spec.block_size.trailing_zeros(),
            arrays,
            host,
            num_device_blocks,
            num_host_blocks,
        })
    }

    pub(crate) fn layer_spec(&self, layer: usize) -> KvLayerSpec {
        self.spec.layers[layer]
    }

    /// The array that a layer's blocks lie in.
    pub(crate) fn array(&self, layer: usize) -> &Array {
        &self.arrays[self.spec.array_of(layer)]
    }

    /// Which block tables a layer goes by.
    pub(crate) fn lane_of(&self, layer: usize) -> usize {
        self.spec.lane_of(layer)
    }

    /// Where an array's blocks of the host tier begin; 0 where there are none.
    pub(crate) fn host_address(&self, array: usize) -> u64 {
        let start = self.host.as_ref().map(|host| host.address());
        start.map_or(0, |start| start + self.arrays[array].host_offset as u64)
    }

    /// The host tier for others than the steps.
    pub(crate) fn host_blocks(&self) -> Option<CudaHostBlocks> {
        Some(CudaHostBlocks {
            memory: Arc::clone(self.host.as_ref()?),
            arrays: self.arrays.iter().map(|array| (array.host_offset, array.block_bytes)).collect(),
            num_blocks: self.num_host_blocks,
            layout: layout(&self.spec),
            lock: Mutex::default(),
        })
    }

    /// A layer of a cache of 16 bits as a matrix, for bulk copies of a block's rows, or of `max_rows` if it has more.
    pub(crate) fn map(&self, layer: usize, max_rows: usize) -> Result<TensorMap, BackendError> {
        let KvLayerSpec { num_kv_heads, head_dim } = self.spec.layers[layer];
        let rows = self.num_slots() * 2 * num_kv_heads;
        let box_rows = self.spec.block_size.min(max_rows) as u32;
        map_matrix(
            self.array(layer).device.address(),
            rows,
            head_dim,
            box_rows,
            Element::Bf16,
            Fetches::Pairs,
        )
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.spec.layers.len()
    }

    pub(crate) fn dtype(&self) -> KvDtype {
        self.spec.dtype
    }

    /// As the kernels number it.
    pub(crate) fn cache_type(&self) -> u32 {
        match self.spec.dtype {
            KvDtype::F32 => 0,
            KvDtype::F16 => 1,
            KvDtype::BF16 => 2,
            KvDtype::F8E4M3 => 3,
            KvDtype::Int8 => unreachable!("`check_spec` refuses it"),
        }
    }

    pub(crate) fn num_slots(&self) -> usize {
        self.num_device_blocks * self.spec.block_size
    }

    pub(crate) fn num_device_blocks(&self) -> usize {
        self.num_device_blocks
    }

    pub(crate) fn num_host_blocks(&self) -> usize {
        self.num_host_blocks
    }

    /// What steps are checked against.
    pub(crate) fn shape(&self) -> CacheShape {
        CacheShape {
            num_lanes: self.spec.num_lanes(),
            num_device_blocks: self.num_device_blocks,
            num_host_blocks: self.num_host_blocks,
            block_size: self.spec.block_size,
        }
    }

    /// Whether the swaps of a step fit into the lists there is memory for.
    pub(crate) fn check_swaps(&self, input: &StepInput) -> Result<(), BackendError> {
        let num_fetched: usize = input.fetches.iter().map(|fetch| fetch.copies.len()).sum();
        let num_swaps = input.swap_out.len() + input.swap_in.len() + num_fetched;
        let most = max_swaps(self.num_device_blocks(), self.num_host_blocks());
        if num_swaps <= most {
            return Ok(());
        }
        Err(BackendError::Device { cause: format!("a step with {num_swaps} swaps, of {most} at most") })
    }
}

/// Cuts a list of copies wherever one reads what an earlier one of the same piece writes: a piece is done in parallel.
pub(crate) fn independent_runs(copies: &[BlockCopy]) -> Vec<std::ops::Range<usize>> {
    let mut runs = Vec::new();
    let mut start = 0;
    for (i, copy) in copies.iter().enumerate() {
        let earlier = &copies[start..i];
        if earlier.iter().any(|other| other.to == copy.from || other.to == copy.to || other.from == copy.to) {
            runs.push(start..i);
            start = i;
        }
    }
    if start < copies.len() {
        runs.push(start..copies.len());
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_without_kernels_are_refused_by_name() {
        let layer = KvLayerSpec { num_kv_heads: 2, head_dim: 64 };
        check_spec(&KvSpec::full(layer, 1, KvDtype::F16, 16)).expect("supported");
        let error = check_spec(&KvSpec::full(layer, 1, KvDtype::Int8, 16)).expect_err("no kernels");
        assert!(error.to_string().contains("--kv-cache-dtype int8"), "{error}");
        assert!(check_spec(&KvSpec::full(layer, 1, KvDtype::F16, 24)).is_err());
        let wide = KvLayerSpec { head_dim: 1024, ..layer };
        assert!(check_spec(&KvSpec::full(wide, 1, KvDtype::F16, 16)).is_err());
    }

    #[test]
    fn chained_copies_are_done_one_after_another() {
        let copies = |pairs: &[(u32, u32)]| -> Vec<BlockCopy> {
            pairs.iter().map(|&(from, to)| BlockCopy { from, to }).collect()
        };
        assert!(independent_runs(&[]).is_empty());
        assert_eq!(independent_runs(&copies(&[(0, 1), (0, 2), (3, 4)])), vec![0..3; 1]);
        assert_eq!(independent_runs(&copies(&[(0, 1), (1, 2), (5, 6), (6, 0)])), [0..1, 1..3, 3..4]);
        assert_eq!(independent_runs(&copies(&[(0, 1), (2, 0)])), [0..1, 1..2]);
    }
}
