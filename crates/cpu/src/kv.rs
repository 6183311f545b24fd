//! The paged KV cache: for each layer keys and values of device and host blocks, in the layout of
//! [`crate::kernels::attention`] or, where they are multiplied in pairs, of its pairs. Both tiers are plain memory here; moving a block is a copy.

use baton_backend::{BackendError, BlockCopy, KvDtype, KvSpec, StepInput};
use half::bf16;

use crate::kernels::Kernels;
use crate::kernels::attention::PANEL_KEYS;
use crate::kernels::rows::Spread;
use crate::memory::{AlignedBytes, SystemMemory};
use crate::pool::Pool;
use crate::units::Units;

/// The blocks of one layer.
#[derive(Debug)]
pub struct KvLayer {
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// `head_dim` rounded up to whole vectors.
    pub value_dim: usize,
    /// The layout is that of products in pairs.
    pub is_paired: bool,
    device: Tier,
    host: Tier,
    key_block_bytes: usize,
    value_block_bytes: usize,
}

#[derive(Debug)]
struct Tier {
    keys: AlignedBytes,
    values: AlignedBytes,
}

#[derive(Debug)]
pub struct KvCache {
    pub layers: Vec<KvLayer>,
    pub dtype: KvDtype,
    pub block_size: usize,
    pub num_device_blocks: usize,
    pub num_host_blocks: usize,
}

/// Says whether there are kernels for such a cache.
pub fn check_spec(spec: &KvSpec) -> Result<(), BackendError> {
    if spec.block_size == 0 || !spec.block_size.is_multiple_of(PANEL_KEYS) {
        return Err(BackendError::Unsupported {
            what: format!(
                "a block size of {}: on the CPU it must be a multiple of {PANEL_KEYS}",
                spec.block_size
            ),
        });
    }
    if spec.dtype == KvDtype::F8E4M3 {
        return Err(BackendError::Unsupported {
            what: "--kv-cache-dtype fp8 on the CPU: use int8 here; fp8 works on NVIDIA devices".to_owned(),
        });
    }
    Ok(())
}

impl KvCache {
    /// `is_paired` says of a head size whether the layer is laid out in pairs.
    pub fn new(
        spec: &KvSpec,
        num_device_blocks: usize,
        num_host_blocks: usize,
        is_paired: impl Fn(usize) -> bool,
    ) -> Result<Self, BackendError> {
        check_spec(spec)?;
        let too_large = || BackendError::Unsupported { what: "a KV cache of that many bytes".to_owned() };
        let num_blocks = num_device_blocks.checked_add(num_host_blocks).ok_or_else(too_large)?;
        // Slots are numbered with u32.
        num_blocks
            .checked_mul(spec.block_size)
            .filter(|&slots| u32::try_from(slots).is_ok())
            .ok_or_else(too_large)?;
        let mut needed = 0usize;
        let mut sizes = Vec::with_capacity(spec.layers.len());
        for layer in &spec.layers {
            let value_dim = layer.head_dim.checked_next_multiple_of(16).ok_or_else(too_large)?;
            let size = |dim: usize| {
                layer
                    .num_kv_heads
                    .checked_mul(spec.block_size)?
                    .checked_mul(dim.checked_mul(spec.dtype.bytes())?.checked_add(spec.dtype.scale_bytes())?)
            };
            let keys = size(layer.head_dim).ok_or_else(too_large)?;
            let values = size(value_dim).ok_or_else(too_large)?;
            sizes.push((value_dim, keys, values));
            let layer_bytes = keys.checked_add(values).and_then(|block| block.checked_mul(num_blocks));
            needed = layer_bytes.and_then(|bytes| needed.checked_add(bytes)).ok_or_else(too_large)?;
        }
        // The layers are mapped one by one and touched later, so their sum is compared with what is free here.
        let free_bytes = SystemMemory::read().free_bytes;
        let what = "the KV cache";
        if needed as u64 > free_bytes {
            let needed_bytes = needed as u64;
            return Err(BackendError::OutOfMemory { what: what.to_owned(), needed_bytes, free_bytes });
        }
        let tier = |blocks: usize, keys: usize, values: usize| -> Result<Tier, BackendError> {
            Ok(Tier {
                keys: AlignedBytes::zeroed(blocks * keys, what)?,
                values: AlignedBytes::zeroed(blocks * values, what)?,
            })
        };
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (layer, (value_dim, keys, values)) in spec.layers.iter().zip(sizes) {
            layers.push(KvLayer {
                num_kv_heads: layer.num_kv_heads,
                head_dim: layer.head_dim,
                value_dim,
                is_paired: is_paired(layer.head_dim),
                device: tier(num_device_blocks, keys, values)?,
                host: tier(num_host_blocks, keys, values)?,
                key_block_bytes: keys,
                value_block_bytes: values,
            });
        }
        Ok(Self {
            layers,
            dtype: spec.dtype,
            block_size: spec.block_size,
            num_device_blocks,
            num_host_blocks,
        })
    }

    /// Moves the step's blocks, in the order of the lists, one layer a unit.
    pub fn move_blocks(&mut self, input: &StepInput, pool: &Pool) {
        if input.swap_out.is_empty() && input.swap_in.is_empty() && input.copies.is_empty() {
            return;
        }
        let layers = &self.layers;
        let units = Units::new(layers.len());
        pool.run(&|_| {
            while let Some(unit) = units.take() {
                let layer = &layers[unit];
                layer.copy(&layer.device, &layer.host, &input.swap_out);
                layer.copy(&layer.host, &layer.device, &input.swap_in);
                layer.copy(&layer.device, &layer.device, &input.copies);
            }
        });
    }
}

impl KvLayer {
    /// The device blocks' keys.
    pub fn keys(&self) -> *mut u8 {
        self.device.keys.as_mut_ptr()
    }

    /// The device blocks' values.
    pub fn values(&self) -> *mut u8 {
        self.device.values.as_mut_ptr()
    }

    /// Block numbers were checked against the tiers' sizes when the step came in.
    fn copy(&self, from: &Tier, to: &Tier, copies: &[BlockCopy]) {
        for copy in copies {
            let (source, target) = (copy.from as usize, copy.to as usize);
            // SAFETY: both blocks lie within their tiers, and one worker moves all blocks of this layer. The ranges are
            // equal or disjoint; `copy` allows both.
            unsafe {
                std::ptr::copy(
                    from.keys.as_mut_ptr().add(source * self.key_block_bytes),
                    to.keys.as_mut_ptr().add(target * self.key_block_bytes),
                    self.key_block_bytes,
                );
                std::ptr::copy(
                    from.values.as_mut_ptr().add(source * self.value_block_bytes),
                    to.values.as_mut_ptr().add(target * self.value_block_bytes),
                    self.value_block_bytes,
                );
            }
        }
    }

    /// Writes one head of one token into its slot.
    ///
    /// # Safety
    /// The kernels are those of this processor, `slot` lies within the device blocks, nobody else touches this head of it, and both rows have `head_dim` values.
    pub unsafe fn write(
        &self,
        kernels: &Kernels,
        dtype: KvDtype,
        block_size: usize,
        slot: usize,
        head: usize,
        (key, value): (*const f32, *const f32),
    ) {
        let (block, offset) = (slot / block_size, slot % block_size);
        let head = (block * self.num_kv_heads + head) * block_size;
        // Pairs are of two dimensions of a key, and of two keys of a dimension.
        let pair = 1 + usize::from(self.is_paired);
        let panel = offset / PANEL_KEYS * PANEL_KEYS;
        let first_key = (head + panel) * self.head_dim + offset % PANEL_KEYS * pair;
        let first_value = (head + offset / pair * pair) * self.value_dim + offset % pair;
        let key_spread = if self.is_paired { Spread::Pairs } else { Spread::Even(PANEL_KEYS) };
        let value_spread = Spread::Even(pair);
        // SAFETY: the caller's promise covers all places below; see the layout in `kernels::attention`.
        unsafe {
            macro_rules! write_as {
                ($type:ty, $convert:expr) => {{
                    let keys = self.keys().cast::<$type>().add(first_key);
                    let values = self.values().cast::<$type>().add(first_value);
                    for i in 0..self.head_dim {
                        *keys.add(key_spread.place(i)) = $convert(*key.add(i));
                        *values.add(value_spread.place(i)) = $convert(*value.add(i));
                    }
                }};
            }
            match dtype {
                KvDtype::F32 => write_as!(f32, |x: f32| x),
                KvDtype::F16 => {
                    let keys = self.keys().cast::<u16>().add(first_key);
                    let values = self.values().cast::<u16>().add(first_value);
                    (kernels.write_f16)(key, self.head_dim, keys, key_spread);
                    (kernels.write_f16)(value, self.head_dim, values, value_spread);
                }
                KvDtype::BF16 => write_as!(bf16, bf16::from_f32),
                KvDtype::Int8 => {
                    // The factors of a head follow its quants; see `kernels::int8_cache`.
                    let factors = head * dtype.scale_bytes();
                    let scale_of = |base: *mut u8, dim: usize| {
                        base.add((head + block_size) * dim + factors).cast::<f32>().add(offset)
                    };
                    let keys = self.keys().add(first_key + factors).cast();
                    let values = self.values().add(first_value + factors).cast();
                    let (key_scale, value_scale) =
                        (scale_of(self.keys(), self.head_dim), scale_of(self.values(), self.value_dim));
                    (kernels.write_int8)(key, self.head_dim, keys, key_spread, key_scale);
                    (kernels.write_int8)(value, self.head_dim, values, value_spread, value_scale);
                }
                KvDtype::F8E4M3 => unreachable!("no such cache is made"),
            }
        }
    }
}
