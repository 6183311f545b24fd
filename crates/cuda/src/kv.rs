//! The paged cache on the device and its swap tier in pinned memory.
//!
//! Each layer is one array, `[blocks][K, V][kv_heads][block_size][head_dim]`, so that a block of one head is contiguous and
//! the blocks of a layer lie close together.

use baton_backend::{AttentionItem, BackendError, BlockCopy, KvDtype, KvLayerSpec, KvSpec, StepInput};

use crate::gpu::{DeviceMemory, Fetches, Gpu, map_bf16};
use crate::params::TensorMap;
use crate::pinned::PinnedMemory;
use crate::swap::max_swaps;

#[derive(Debug)]
pub(crate) struct KvCache {
    spec: KvSpec,
    pub(crate) block_shift: u32,
    pub(crate) layers: Vec<Layer>,
    /// The blocks that were swapped out, layer after layer.
    host: Option<PinnedMemory>,
    num_device_blocks: usize,
    num_host_blocks: usize,
}

#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) device: DeviceMemory,
    /// Where this layer's begin in the pinned memory.
    host_offset: usize,
    pub(crate) block_bytes: usize,
}

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
        spec.layers.iter().find(|layer| layer.head_dim > 256 || !layer.head_dim.is_multiple_of(4))
    {
        return unsupported(format!("attention heads of {}: at most 256, a multiple of 4", layer.head_dim));
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
        let new_layer = |layer: &KvLayerSpec| {
            let block_bytes = 2 * layer.num_kv_heads * layer.head_dim * spec.block_size * spec.dtype.bytes();
            let bytes = |blocks: usize| block_bytes.checked_mul(blocks).unwrap_or(usize::MAX / 2);
            let host_offset = host_bytes;
            host_bytes = host_bytes.saturating_add(bytes(num_host_blocks));
            let device = gpu.allocate(bytes(num_device_blocks), "the KV cache")?;
            Ok(Layer { device, host_offset, block_bytes })
        };
        let layers = spec.layers.iter().map(new_layer).collect::<Result<_, BackendError>>()?;
        let host = (host_bytes > 0).then(|| gpu.allocate_pinned(host_bytes, "the swap space")).transpose()?;
        Ok(Self {
            spec: spec.clone(),
            block_shift: spec.block_size.trailing_zeros(),
            layers,
            host,
            num_device_blocks,
            num_host_blocks,
        })
    }

    pub(crate) fn layer_spec(&self, layer: usize) -> KvLayerSpec {
        self.spec.layers[layer]
    }

    /// Where a layer's swapped blocks begin; 0 where there is no swap space.
    pub(crate) fn host_address(&self, layer: usize) -> u64 {
        let start = self.host.as_ref().map(PinnedMemory::address);
        start.map_or(0, |start| start + self.layers[layer].host_offset as u64)
    }

    /// A layer of a cache of 16 bits as a matrix, for bulk copies of a block's rows, or of `max_rows` if it has more.
    pub(crate) fn map(&self, layer: usize, max_rows: usize) -> Result<TensorMap, BackendError> {
        let KvLayerSpec { num_kv_heads, head_dim } = self.spec.layers[layer];
        let rows = self.num_slots() * 2 * num_kv_heads;
        let box_rows = self.spec.block_size.min(max_rows) as u32;
        map_bf16(self.layers[layer].device.address(), rows, head_dim, box_rows, Fetches::Pairs)
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.layers.len()
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

    /// Whether the blocks, slots and rows that a step names exist.
    pub(crate) fn check(&self, input: &StepInput) -> Result<(), BackendError> {
        let (device, host) = (self.num_device_blocks() as u32, self.num_host_blocks() as u32);
        let moves =
            |list: &[BlockCopy], from: u32, to: u32| list.iter().all(|copy| copy.from < from && copy.to < to);
        let is_within = input.swap_out.len() + input.swap_in.len() <= max_swaps(self.num_host_blocks())
            && moves(&input.swap_out, device, host)
            && moves(&input.swap_in, host, device)
            && moves(&input.copies, device, device)
            && input.slots.iter().all(|slot| (*slot as usize) < self.num_slots())
            && input.pages.iter().all(|page| *page < device);
        let tokens = input.num_tokens() as u64;
        let items = input.attention.iter().flat_map(|plan| &plan.items);
        let items_are_within = |item: &AttentionItem| {
            let pages = u64::from(item.kv_len).div_ceil(1 << self.block_shift);
            u64::from(item.query_start) + u64::from(item.num_queries) <= tokens
                && u64::from(item.pages_start) + pages <= input.pages.len() as u64
        };
        if is_within && items.into_iter().all(items_are_within) {
            Ok(())
        } else {
            Err(BackendError::Unsupported { what: "a step with blocks or rows that do not exist".to_owned() })
        }
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
        let good = KvSpec { layers: vec![layer], dtype: KvDtype::F16, block_size: 16 };
        check_spec(&good).expect("supported");
        let error = check_spec(&KvSpec { dtype: KvDtype::Int8, ..good.clone() }).expect_err("no kernels");
        assert!(error.to_string().contains("--kv-cache-dtype int8"), "{error}");
        assert!(check_spec(&KvSpec { block_size: 24, ..good.clone() }).is_err());
        let wide = KvLayerSpec { head_dim: 512, ..layer };
        assert!(check_spec(&KvSpec { layers: vec![wide], ..good }).is_err());
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
