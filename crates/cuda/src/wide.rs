//! Products of 9 to 256 tokens where there is wgmma (`wide.cuh`): of packed weights, of bf16, and of e4m3 with e4m3. How the work is
//! divided between the blocks of a cluster is decided here; who multiplies what is decided in `products`.

use baton_backend::{BackendError, WeightFormat};

use crate::device::Device;
use crate::gpu::{Element, Fetches, map_matrix, map_records};
use crate::layout::{Layout, TILE_ROWS, record_bytes};
use crate::params::{Address, ProductParams, WideProductParams};
use crate::weights::Part;

/// Tokens that the kernels take at once.
pub(crate) const PACKED_TOKENS: [u32; 3] = [64, 128, 256];
pub(crate) const FP8_TOKENS: [u32; 2] = [64, 128];
pub(crate) const BF16_TOKENS: [u32; 3] = [16, 32, 48];

/// Those that e4m3 weights have other kernels for, which take activations as they are, and threads of these.
const FEW_TOKENS: u32 = 8;
const FEW_THREADS: u32 = CONSUMERS + 128 + 32;

/// As in `wide.cuh`: rows of the weight and bytes of columns that a block takes at a time, and parts of the columns.
const BLOCK_ROWS: usize = 128;
const CHUNK_BYTES: usize = 128;
const SPLITS: [usize; 5] = [1, 2, 3, 4, 6];
const CONSUMERS: u32 = 256;
const BF16: Layout = Layout::Plain(WeightFormat::BF16);
/// What a block takes beside its products, in chunks of columns.
const BLOCK_COST: usize = 6;

/// Two barriers a stage, and what it takes to start at a multiple of 1024.
fn ring_bytes(stages: u32, stage_bytes: u32) -> u32 {
    stages * (stage_bytes + 16) + 1024
}

/// Of `packed_wide.cu`.
pub(crate) fn packed_shared_bytes(bits: u32, tokens: u32) -> u32 {
    let records = (BLOCK_ROWS / TILE_ROWS * record_bytes(bits)) as u32;
    let stages = match tokens {
        256 => 4,
        128 => 6,
        _ if bits == 8 => 6,
        _ => 7,
    };
    ring_bytes(stages, tokens * CHUNK_BYTES as u32 + records.next_multiple_of(1024))
}

/// Of `fp8_wide.cu`.
pub(crate) fn fp8_shared_bytes(tokens: u32) -> u32 {
    let stages = if tokens == 64 { 4 } else { 6 };
    ring_bytes(stages, tokens * CHUNK_BYTES as u32 + (BLOCK_ROWS * CHUNK_BYTES) as u32)
}

/// Of `bf16_wide.cu`.
pub(crate) fn bf16_shared_bytes(tokens: u32) -> u32 {
    let stages = if tokens == 16 { 6 } else { 5 };
    ring_bytes(stages, tokens * CHUNK_BYTES as u32 + (BLOCK_ROWS * CHUNK_BYTES) as u32)
}

/// Of the kernels of e4m3 of up to eight tokens: two rows of e4m3 for each, and their scales.
pub(crate) fn few_shared_bytes() -> u32 {
    let stages = 6;
    ring_bytes(stages, 2 * FEW_TOKENS * CHUNK_BYTES as u32 + (BLOCK_ROWS * CHUNK_BYTES) as u32)
        + stages * FEW_TOKENS * 4
}

/// Into how many clusters' parts the columns are divided, such that it takes the fewest rounds of blocks, where a short block takes
/// longer than its part. `at_once` blocks fit the device; of larger clusters fewer, because they must fit its groups.
fn divide(tiles: usize, chunks: usize, at_once: usize) -> usize {
    let time = |splits: usize| {
        let fitting = if splits > 2 { at_once * 9 / 10 } else { at_once };
        (tiles * splits).div_ceil(fitting.max(1)) * (chunks.div_ceil(splits) + BLOCK_COST)
    };
    SPLITS.into_iter().min_by_key(|&splits| time(splits)).expect("there are some")
}

impl Device {
    /// Whether a part of a weight has kernels for so many tokens here.
    pub(crate) fn has_wide(&self, part: &Part, m: usize) -> bool {
        // Rows are copied from multiples of 16 bytes on, and two results are stored at a time.
        let is_aligned = part.layout != BF16
            || (part.rows.is_multiple_of(2) && (part.unit_bytes / part.unit_rows).is_multiple_of(16));
        let kernels = self.kernels.wide(part.layout).filter(|_| is_aligned);
        kernels.is_some_and(|kernels| kernels.find(m as u32).is_some())
    }

    /// Launches a product if it is one for these kernels: `params` as for those of fewer tokens, of e4m3 the scales of the input.
    /// `is_gated`: of gate and up.
    pub(crate) fn wide_product(
        &self,
        part: &Part,
        params: &ProductParams,
        input_scales: Option<Address>,
        is_gated: bool,
    ) -> Result<bool, BackendError> {
        let (m, cols) = (params.m as usize, params.cols as usize);
        let Some(kernels) = self.kernels.wide(part.layout).filter(|_| self.has_wide(part, m)) else {
            return Ok(false);
        };
        let which = kernels.find(params.m).expect("looked at before");
        // Two results are stored at a time.
        let is_even = |count: u32| count.is_multiple_of(2);
        let is_whole = is_even(params.num_rows) && is_even(params.output_stride);
        let fits = params.is_f32 != 0 || (is_whole && params.output.is_multiple_of(4));
        let Some(function) = kernels.functions[which][usize::from(is_gated)].filter(|_| fits) else {
            return Ok(false);
        };
        let tokens = kernels.tokens[which];
        let (element, element_bytes) =
            if input_scales.is_some() { (Element::Fp8, 1) } else { (Element::Bf16, 2) };
        let chunks = (cols * element_bytes).div_ceil(CHUNK_BYTES);
        let tiles = (params.num_rows as usize).div_ceil(if is_gated { BLOCK_ROWS / 2 } else { BLOCK_ROWS });
        let num_multiprocessors = self.gpu.properties.num_multiprocessors as usize;
        // Of the kernels of few tokens two blocks fit a multiprocessor.
        let is_few = tokens <= 64;
        let splits = divide(tiles, chunks, num_multiprocessors * if is_few { 2 } else { 1 });
        let map =
            |address, rows, box_rows| map_matrix(address, rows, cols, box_rows, element, Fetches::Lines);
        let input = map(params.input, m, tokens)?;
        let rows = if is_gated { BLOCK_ROWS / 2 } else { BLOCK_ROWS };
        let (weight, shared_bytes, is_small) = match part.layout {
            Layout::Packed { bits } => {
                let box_tiles = (rows / TILE_ROWS) as u32;
                let tiles = part.rows.div_ceil(TILE_ROWS);
                let record = record_bytes(bits);
                let weight = map_records(params.weight, tiles, part.unit_bytes, record, box_tiles)?;
                (weight, packed_shared_bytes(bits, tokens), is_few)
            }
            BF16 => (map(params.weight, part.rows, rows as u32)?, bf16_shared_bytes(tokens), true),
            Layout::Plain(_) => {
                (map(params.weight, part.rows, BLOCK_ROWS as u32)?, fp8_shared_bytes(tokens), true)
            }
        };
        let wide = WideProductParams {
            input,
            weight,
            product: *params,
            input_scales: input_scales.unwrap_or(0),
            weight_scales: part.scales_address(),
            norm: 0,
            chunks: chunks as u32,
            eps: 0.0,
        };
        let blocks = ((tiles * splits) as u32, splits as u32);
        // A warp fetches; where registers are few, it has a warpgroup to give them.
        let threads = CONSUMERS + if is_small { 32 } else { 128 };
        // SAFETY: the struct is the kernel's; input, weight and output have the sizes that it says.
        unsafe { self.gpu.launch_clusters(function, blocks, threads, shared_bytes, &wide) }?;
        Ok(true)
    }

    /// The same for up to eight tokens of bf16 with e4m3 weights, normed on the way with a weight and an epsilon.
    pub(crate) fn few_product(
        &self,
        part: &Part,
        params: &ProductParams,
        norm: Option<(Address, f32)>,
        is_gated: bool,
    ) -> Result<bool, BackendError> {
        let few = self.kernels.wide(part.layout).and_then(|kernels| kernels.few.as_ref());
        let is_even = params.num_rows.is_multiple_of(2) && params.output_stride.is_multiple_of(2);
        let fits = part.across == Some(0) && is_even && (1..=FEW_TOKENS).contains(&params.m);
        let Some(few) = few.filter(|_| fits) else { return Ok(false) };
        let cols = params.cols as usize;
        let chunks = cols / CHUNK_BYTES;
        let tiles = (params.num_rows as usize).div_ceil(if is_gated { BLOCK_ROWS / 2 } else { BLOCK_ROWS });
        let splits = divide(tiles, chunks, 2 * self.gpu.properties.num_multiprocessors as usize);
        let box_rows = if is_gated { BLOCK_ROWS / 2 } else { BLOCK_ROWS };
        // The factor of a norm is known where all columns are.
        let splits = if norm.is_some() { 1 } else { splits };
        let weight =
            map_matrix(params.weight, part.rows, cols, box_rows as u32, Element::Fp8, Fetches::Lines)?;
        let (norm, eps) = norm.unwrap_or_default();
        let wide = WideProductParams {
            input: weight,
            weight,
            product: *params,
            input_scales: 0,
            weight_scales: part.scales_address(),
            norm,
            chunks: chunks as u32,
            eps,
        };
        let function = few[usize::from(norm != 0)][usize::from(is_gated)];
        let blocks = ((tiles * splits) as u32, splits as u32);
        // SAFETY: the struct is the kernel's; input, weight and output have the sizes that it says.
        unsafe { self.gpu.launch_clusters(function, blocks, FEW_THREADS, few_shared_bytes(), &wide) }?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_divided_such_that_every_multiprocessor_has_some() {
        // The 8B: gate and up, qkv, o, down, on 132 multiprocessors, two blocks each and one.
        assert_eq!([(224, 64), (48, 64), (32, 64), (32, 224)].map(|(t, c)| divide(t, c, 264)), [1, 4, 6, 6]);
        assert_eq!([(224, 64), (48, 64), (32, 64), (32, 224)].map(|(t, c)| divide(t, c, 132)), [1, 2, 3, 3]);
        // Little to divide.
        assert_eq!((divide(1, 2, 132), divide(1, 64, 1)), (2, 1));
    }

    #[test]
    fn rings_fit_a_multiprocessor_and_hold_the_sums() {
        for bits in [4, 5, 6, 8] {
            for tokens in PACKED_TOKENS {
                let bytes = packed_shared_bytes(bits, tokens);
                let blocks = if tokens == 64 { 2 } else { 1 };
                assert!(
                    bytes <= 227 << 10 && blocks * (bytes + 1024) <= 228 << 10,
                    "{bits} {tokens}: {bytes}"
                );
                assert!(bytes > CONSUMERS * tokens / 8 * 16 + 2048, "{bits} {tokens}: {bytes}");
            }
        }
        for tokens in BF16_TOKENS {
            assert!((bf16_shared_bytes(tokens) + 1024) * 2 <= 228 << 10);
            assert!(bf16_shared_bytes(tokens) > CONSUMERS * tokens / 8 * 16 + 2048);
        }
        assert!((few_shared_bytes() + 128 + 1024) * 2 <= 228 << 10);
        assert!(fp8_shared_bytes(64) * 2 + 2048 <= 228 << 10 && fp8_shared_bytes(128) <= 227 << 10);
    }
}
