//! The paged KV cache: for each place within a block keys and values of device and host blocks, in the layout of
//! [`crate::kernels::attention`] or, where they are multiplied in pairs, of its pairs. Both tiers are plain memory here; moving a block is a copy.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use baton_backend::{
    BackendError, BlockCopy, CacheShape, Fetch, HostBlocks, KvDtype, KvLayerSpec, KvSpec, StepInput,
};
use half::bf16;

use crate::kernels::Kernels;
use crate::kernels::attention::PANEL_KEYS;
use crate::kernels::rows::Spread;
use crate::memory::{AlignedBytes, SystemMemory};
use crate::pool::Pool;
use crate::units::Units;

/// Bytes of a fetch that are copied before the clock is looked at.
const FETCH_PIECE_BYTES: usize = 1 << 20;

/// The blocks of one layer: those of its array that stand in the tables of its lane.
#[derive(Debug)]
pub struct KvLayer {
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// `head_dim` rounded up to whole vectors.
    pub value_dim: usize,
    /// The layout is that of products in pairs.
    pub is_paired: bool,
    lane: usize,
    device: Arc<Tier>,
}

/// One place within all blocks.
#[derive(Clone, Debug)]
struct Array {
    device: Arc<Tier>,
    host: Arc<Tier>,
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
    arrays: Vec<Array>,
    num_lanes: usize,
    layout: String,
    /// Held by whoever touches blocks of the host tier: a step that moves some, or a reader or writer of [`CpuHostBlocks`].
    host_lock: Arc<Mutex<()>>,
    /// Not done yet; of the first one so many copies are made.
    fetches: VecDeque<Fetch>,
    num_copied: usize,
    /// See [`KvCache::populate`].
    is_populated: bool,
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
        is_paired: impl Fn(usize) -> bool + Copy,
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
        let mut sizes = Vec::with_capacity(spec.arrays().len());
        for layer in spec.arrays() {
            let (keys, values) = block_bytes(spec, *layer).ok_or_else(too_large)?;
            sizes.push((keys, values));
            let array_bytes = keys.checked_add(values).and_then(|block| block.checked_mul(num_blocks));
            needed = array_bytes.and_then(|bytes| needed.checked_add(bytes)).ok_or_else(too_large)?;
        }
        // The arrays are mapped one by one and touched later, so their sum is compared with what is free here.
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
        let mut arrays = Vec::with_capacity(sizes.len());
        for (key_block_bytes, value_block_bytes) in sizes {
            arrays.push(Array {
                device: Arc::new(tier(num_device_blocks, key_block_bytes, value_block_bytes)?),
                host: Arc::new(tier(num_host_blocks, key_block_bytes, value_block_bytes)?),
                key_block_bytes,
                value_block_bytes,
            });
        }
        let layer = |(index, layer): (usize, &KvLayerSpec)| KvLayer {
            num_kv_heads: layer.num_kv_heads,
            head_dim: layer.head_dim,
            value_dim: layer.head_dim.next_multiple_of(16),
            is_paired: is_paired(layer.head_dim),
            lane: spec.lane_of(index),
            device: Arc::clone(&arrays[spec.array_of(index)].device),
        };
        Ok(Self {
            layers: spec.layers.iter().enumerate().map(layer).collect(),
            arrays,
            num_lanes: spec.num_lanes(),
            layout: layout(spec, is_paired),
            host_lock: Arc::default(),
            fetches: VecDeque::new(),
            num_copied: 0,
            is_populated: false,
            dtype: spec.dtype,
            block_size: spec.block_size,
            num_device_blocks,
            num_host_blocks,
        })
    }

    /// What steps are checked against.
    pub fn shape(&self) -> CacheShape {
        CacheShape {
            num_lanes: self.num_lanes,
            num_device_blocks: self.num_device_blocks,
            num_host_blocks: self.num_host_blocks,
            block_size: self.block_size,
        }
    }

    /// Which of them a layer goes by.
    pub fn lane_of(&self, layer: usize) -> usize {
        self.layers[layer].lane
    }

    /// Moves the step's blocks, in the order of the lists, one array a unit. Fetches, which nobody but a waiting request needs, take
    /// their turn until the limit is over, at least a piece of one; `fetched` gets those that are done.
    pub fn move_blocks(
        &mut self,
        input: &StepInput,
        pool: &Pool,
        limit: Option<Duration>,
        fetched: &mut Vec<u64>,
    ) {
        let start = Instant::now();
        self.fetches.extend(input.fetches.iter().cloned());
        let moves_more = !input.swap_out.is_empty() || !input.swap_in.is_empty() || !input.copies.is_empty();
        if !moves_more && self.fetches.is_empty() {
            return;
        }
        let host_lock = Arc::clone(&self.host_lock);
        let _guard = host_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let arrays = &self.arrays;
        let for_arrays = |copy: &(dyn Fn(&Array) + Sync)| {
            let units = Units::new(arrays.len());
            pool.run(&|_| {
                while let Some(unit) = units.take() {
                    copy(&arrays[unit]);
                }
            });
        };
        if moves_more {
            for_arrays(&|array| {
                array.copy(&array.device, &array.host, &input.swap_out);
                array.copy(&array.host, &array.device, &input.swap_in);
                array.copy(&array.device, &array.device, &input.copies);
            });
        }
        let block_bytes: usize = arrays.iter().map(Array::block_bytes).sum();
        let piece = (FETCH_PIECE_BYTES / block_bytes.max(1)).max(1);
        while let Some(fetch) = self.fetches.front() {
            let end = fetch.copies.len().min(self.num_copied + piece);
            let copies = &fetch.copies[self.num_copied..end];
            for_arrays(&|array| array.copy(&array.host, &array.device, copies));
            self.num_copied = end;
            if end == fetch.copies.len() {
                fetched.push(fetch.id);
                self.fetches.pop_front();
                self.num_copied = 0;
            }
            if limit.is_some_and(|limit| start.elapsed() >= limit) {
                break;
            }
        }
    }
}

/// Bytes that the system is asked for at a time, of each part of the cache: a huge page.
const POPULATED_BYTES: usize = 1 << 21;

/// What the first requests need is had as fast as the system gives it, all else where nothing better is to be done.
const URGENT_BYTES: usize = 1 << 30;

/// Has the system give all memory of the cache, the first blocks first, until it is done or the cache is gone.
fn populate(tiers: &[Weak<Tier>]) {
    let (mut start, mut num_bytes) = (0, 0);
    loop {
        #[cfg(target_os = "linux")]
        if num_bytes >= URGENT_BYTES {
            // SAFETY: changes the priority of this thread alone.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
        }
        let mut is_done = true;
        for tier in tiers {
            let Some(tier) = tier.upgrade() else { return };
            for part in [&tier.keys, &tier.values] {
                is_done &= !part.populate(start..start + POPULATED_BYTES);
            }
        }
        if is_done {
            return;
        }
        start += POPULATED_BYTES;
        num_bytes += 2 * POPULATED_BYTES * tiers.len();
    }
}

impl KvCache {
    /// Takes the memory of the cache from the system, beside the steps. Otherwise it is taken when it is first used: where KV is not
    /// computed but comes from elsewhere, that would take longer than all the rest.
    pub fn populate(&mut self) {
        if std::mem::replace(&mut self.is_populated, true) {
            return;
        }
        let tiers: Vec<Weak<Tier>> = self
            .arrays
            .iter()
            .flat_map(|array| [Arc::downgrade(&array.host), Arc::downgrade(&array.device)])
            .collect();
        // Without a thread for it everything is as it was.
        let _ =
            std::thread::Builder::new().name("baton-kv-memory".to_owned()).spawn(move || populate(&tiers));
    }

    /// The host tier for others than the steps.
    pub fn host_blocks(&self) -> CpuHostBlocks {
        CpuHostBlocks {
            arrays: self.arrays.clone(),
            layout: self.layout.clone(),
            lock: Arc::clone(&self.host_lock),
            num_blocks: self.num_host_blocks,
        }
    }
}

/// Keys and values of each array, one array after the other.
fn layout(spec: &KvSpec, is_paired: impl Fn(usize) -> bool) -> String {
    let array = |array: &KvLayerSpec| {
        let order = if is_paired(array.head_dim) { "pairs" } else { "panels" };
        format!("{}x{} {order}", array.num_kv_heads, array.head_dim)
    };
    let arrays: Vec<String> = spec.arrays().iter().map(array).collect();
    format!("cpu {PANEL_KEYS} keys {:?} {} tokens: {}", spec.dtype, spec.block_size, arrays.join(", "))
}

/// The host tier as bytes, shared with the cache.
#[derive(Debug)]
pub struct CpuHostBlocks {
    arrays: Vec<Array>,
    layout: String,
    lock: Arc<Mutex<()>>,
    num_blocks: usize,
}

impl CpuHostBlocks {
    /// Calls `copy` with each piece of a block and as many bytes of its image.
    fn for_pieces(&self, block: u32, len: usize, mut copy: impl FnMut(*mut u8, std::ops::Range<usize>)) {
        assert!((block as usize) < self.num_blocks, "there is no host block {block}");
        assert_eq!(len, self.block_bytes(), "the bytes of a host block");
        let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut start = 0;
        for array in &self.arrays {
            let pieces =
                [(&array.host.keys, array.key_block_bytes), (&array.host.values, array.value_block_bytes)];
            for (bytes, block_bytes) in pieces {
                // SAFETY: the block is one of the tier's, which has so many bytes for each.
                let piece = unsafe { bytes.as_mut_ptr().add(block as usize * block_bytes) };
                copy(piece, start..start + block_bytes);
                start += block_bytes;
            }
        }
    }
}

impl HostBlocks for CpuHostBlocks {
    fn layout(&self) -> &str {
        &self.layout
    }

    fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    fn block_bytes(&self) -> usize {
        self.arrays.iter().map(Array::block_bytes).sum()
    }

    fn read(&self, block: u32, to: &mut [u8]) {
        self.for_pieces(block, to.len(), |piece, range| {
            let to = &mut to[range];
            // SAFETY: the piece is as long as its range, and the lock keeps writers away.
            unsafe { std::ptr::copy_nonoverlapping(piece, to.as_mut_ptr(), to.len()) };
        });
    }

    fn write(&self, block: u32, from: &[u8]) {
        self.for_pieces(block, from.len(), |piece, range| {
            let from = &from[range];
            // SAFETY: the piece is as long as its range, and the lock keeps all others away.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), piece, from.len()) };
        });
    }
}

/// Of the keys and of the values of one layer in a block; `None` if that is no number.
fn block_bytes(spec: &KvSpec, layer: KvLayerSpec) -> Option<(usize, usize)> {
    let size = |dim: usize| {
        let head_bytes = dim.checked_mul(spec.dtype.bytes())?.checked_add(spec.dtype.scale_bytes())?;
        layer.num_kv_heads.checked_mul(spec.block_size)?.checked_mul(head_bytes)
    };
    Some((size(layer.head_dim)?, size(layer.head_dim.checked_next_multiple_of(16)?)?))
}

impl Array {
    fn block_bytes(&self) -> usize {
        self.key_block_bytes + self.value_block_bytes
    }

    /// Block numbers were checked against the tiers' sizes when the step came in.
    fn copy(&self, from: &Tier, to: &Tier, copies: &[BlockCopy]) {
        for copy in copies {
            let (source, target) = (copy.from as usize, copy.to as usize);
            // SAFETY: both blocks lie within their tiers, and one worker moves all blocks of this array. The ranges are
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fetch_takes_its_turn_and_is_whole_when_it_is_told_of() {
        const NUM_BLOCKS: u32 = 12;
        let layer = KvLayerSpec { num_kv_heads: 8, head_dim: 128 };
        let spec = KvSpec::full(layer, 4, KvDtype::F32, PANEL_KEYS);
        let num_blocks = NUM_BLOCKS as usize;
        let mut kv = KvCache::new(&spec, num_blocks, 2 * num_blocks, |_| false).expect("a cache");
        let (host, pool) = (kv.host_blocks(), Pool::new(2, false).expect("threads"));
        let content = |block: u32| vec![block as u8 + 1; host.block_bytes()];
        assert!(host.block_bytes() * num_blocks > 3 * FETCH_PIECE_BYTES);
        (0..NUM_BLOCKS).for_each(|block| host.write(block, &content(block)));
        let copies =
            |from: u32, to: u32| (0..NUM_BLOCKS).map(move |i| BlockCopy { from: from + i, to: to + i });
        let fetch = Fetch { id: 7, copies: copies(0, 0).collect() };
        let (mut input, mut fetched) =
            (StepInput { fetches: vec![fetch], ..StepInput::default() }, Vec::new());
        let mut num_steps = 0;
        while fetched.is_empty() {
            kv.move_blocks(&input, &pool, Some(Duration::ZERO), &mut fetched);
            input.fetches.clear();
            num_steps += 1;
        }
        assert_eq!(fetched, [7]);
        assert!(num_steps > 3, "{num_steps} steps");
        // Back to other blocks of the host, where they can be looked at; and a second fetch, at once.
        input.swap_out = copies(0, NUM_BLOCKS).collect();
        input.fetches = vec![Fetch { id: 8, copies: copies(0, 0).take(5).collect() }];
        kv.move_blocks(&input, &pool, None, &mut fetched);
        assert_eq!(fetched, [7, 8]);
        let mut bytes = vec![0; host.block_bytes()];
        for block in 0..NUM_BLOCKS {
            host.read(NUM_BLOCKS + block, &mut bytes);
            assert_eq!(bytes, content(block), "block {block}");
        }
    }
}
