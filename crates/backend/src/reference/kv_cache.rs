//! The paged cache: for each layer, keys and values of every slot, in f32 that has been rounded to the cache's dtype.

use half::{bf16, f16};

use crate::{BlockCopy, CacheShape, KvDtype, KvLayerSpec, KvSpec, StepInput, e4m3_from_f32, e4m3_to_f32};

#[derive(Debug)]
pub(super) struct KvCache {
    spec: KvSpec,
    device: Vec<LayerCache>,
    host: Vec<LayerCache>,
    num_device_blocks: usize,
    num_host_blocks: usize,
}

#[derive(Clone, Debug)]
struct LayerCache {
    keys: Vec<f32>,   // [blocks, block_size, kv_heads, head_dim]
    values: Vec<f32>, // [blocks, block_size, kv_heads, head_dim]
}

impl KvCache {
    pub(super) fn new(spec: &KvSpec, num_device_blocks: usize, num_host_blocks: usize) -> Self {
        let tier = |num_blocks: usize| {
            let new_layer = |layer: &KvLayerSpec| {
                // NaN, so that attending to a slot nobody wrote shows.
                let cells =
                    vec![f32::NAN; num_blocks * spec.block_size * layer.num_kv_heads * layer.head_dim];
                LayerCache { keys: cells.clone(), values: cells }
            };
            spec.layers.iter().map(new_layer).collect()
        };
        Self {
            spec: spec.clone(),
            device: tier(num_device_blocks),
            host: tier(num_host_blocks),
            num_device_blocks,
            num_host_blocks,
        }
    }

    pub(super) fn block_size(&self) -> usize {
        self.spec.block_size
    }

    /// What steps are checked against.
    pub(super) fn shape(&self) -> CacheShape {
        CacheShape {
            num_lanes: self.spec.num_lanes(),
            num_device_blocks: self.num_device_blocks,
            num_host_blocks: self.num_host_blocks,
            block_size: self.spec.block_size,
        }
    }

    pub(super) fn lane_of(&self, layer: usize) -> usize {
        self.spec.lane_of(layer)
    }

    pub(super) fn layer_spec(&self, layer: usize) -> KvLayerSpec {
        let num_layers = self.spec.layers.len();
        assert!(layer < num_layers, "layer {layer} of a KV cache of {num_layers} layers");
        self.spec.layers[layer]
    }

    /// `key` and `value` are `[kv_heads, head_dim]`.
    pub(super) fn write(&mut self, layer: usize, slot: usize, key: &[f32], value: &[f32]) {
        let (dtype, head_dim) = (self.spec.dtype, self.spec.layers[layer].head_dim);
        let cells = slot * key.len()..(slot + 1) * key.len();
        let cache = &mut self.device[layer];
        for (to, from) in [(&mut cache.keys, key), (&mut cache.values, value)] {
            let heads = to[cells.clone()].chunks_exact_mut(head_dim);
            for (to, from) in heads.zip(from.chunks_exact(head_dim)) {
                to.copy_from_slice(from);
                round_head(dtype, to);
            }
        }
    }

    /// Key and value of one head in one slot, `[head_dim]` each.
    pub(super) fn read(&self, layer: usize, slot: usize, kv_head: usize) -> (&[f32], &[f32]) {
        let KvLayerSpec { num_kv_heads, head_dim } = self.spec.layers[layer];
        let start = (slot * num_kv_heads + kv_head) * head_dim;
        let cache = &self.device[layer];
        (&cache.keys[start..start + head_dim], &cache.values[start..start + head_dim])
    }

    /// The step's moves, in the order of its lists.
    pub(super) fn move_blocks(&mut self, input: &StepInput) {
        for layer in 0..self.spec.layers.len() {
            let KvLayerSpec { num_kv_heads, head_dim } = self.spec.layers[layer];
            let len = self.spec.block_size * num_kv_heads * head_dim;
            let (device, host) = (&mut self.device[layer], &mut self.host[layer]);
            for block in &input.swap_out {
                copy_between(&device.keys, &mut host.keys, *block, len);
                copy_between(&device.values, &mut host.values, *block, len);
            }
            let fetched = input.fetches.iter().flat_map(|fetch| &fetch.copies);
            for block in input.swap_in.iter().chain(fetched) {
                copy_between(&host.keys, &mut device.keys, *block, len);
                copy_between(&host.values, &mut device.values, *block, len);
            }
            for block in &input.copies {
                let from = block.from as usize * len..(block.from as usize + 1) * len;
                device.keys.copy_within(from.clone(), block.to as usize * len);
                device.values.copy_within(from, block.to as usize * len);
            }
        }
    }
}

fn copy_between(from: &[f32], to: &mut [f32], block: BlockCopy, len: usize) {
    let (source, target) = (block.from as usize * len, block.to as usize * len);
    to[target..target + len].copy_from_slice(&from[source..source + len]);
}

/// Rounds one head of a key or value to what the cache can hold.
fn round_head(dtype: KvDtype, head: &mut [f32]) {
    let largest = head.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    for x in head {
        *x = match dtype {
            KvDtype::F32 => *x,
            KvDtype::F16 => f16::from_f32(*x).to_f32(),
            KvDtype::BF16 => bf16::from_f32(*x).to_f32(),
            KvDtype::F8E4M3 => e4m3_to_f32(e4m3_from_f32(*x)),
            KvDtype::Int8 => (*x * inverse).round_ties_even() * (largest / 127.0),
        };
    }
}
