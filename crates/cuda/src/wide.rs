//! Ops of many tokens with a bf16 weight as one launch, where the device has the kernel: the product and what follows it. The
//! others go by `products` and their own kernels.

use baton_backend::{BackendError, GatedLinear, WeightFormat};

use crate::gpu::map_bf16;
use crate::kernels::{GATED_WIDE_SHARED, GATED_WIDTHS};
use crate::ops::{Run, activation_number};
use crate::params::{Address, GatedWideParams};

/// As in `gated_wide.cu`: tokens of a block, columns of a stage, blocks of a cluster.
const TILE_TOKENS: usize = 128;
const CHUNK: usize = 64;
const CLUSTER: usize = 2;
const THREADS: u32 = 384;
/// Tiles of tokens whose input should stay in the second cache.
const GROUP: u32 = 8;
/// The part of the device that must have work in all rounds, in percent. With less, a product and an activation are faster.
pub(crate) const MIN_BUSY: usize = 80;

/// Which of [`GATED_WIDTHS`] keeps `num_clusters` busiest, if that is busy enough.
fn choose_width(tokens: usize, width: usize, num_clusters: usize, min_busy: usize) -> Option<usize> {
    let num_token_tiles = tokens.div_ceil(CLUSTER * TILE_TOKENS);
    let time = |tile: usize| (num_token_tiles * width / tile).div_ceil(num_clusters.max(1)) * tile;
    let fitting = (0..GATED_WIDTHS.len()).filter(|which| width.is_multiple_of(GATED_WIDTHS[*which]));
    let which = fitting.min_by_key(|which| time(GATED_WIDTHS[*which]))?;
    let all = time(GATED_WIDTHS[which]) * num_clusters * CLUSTER * TILE_TOKENS;
    (tokens > 0 && 100 * tokens * width >= min_busy * all).then_some(which)
}

impl Run<'_> {
    /// Says whether it could.
    pub(crate) fn wide_gated(
        &self,
        op: &GatedLinear,
        input: Address,
        output: Address,
    ) -> Result<bool, BackendError> {
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let ([part], Some(functions)) = (weight.parts.as_slice(), device.kernels.gated_wide()) else {
            return Ok(false);
        };
        let (tokens, width, cols) = (self.tokens(), weight.rows / 2, weight.cols);
        let num_clusters = device.gpu.properties.num_multiprocessors as usize / CLUSTER;
        let fits = part.format == WeightFormat::BF16
            && op.bias.is_none()
            && weight.rows.is_multiple_of(2)
            && cols.is_multiple_of(CHUNK);
        let choice = choose_width(tokens, width, num_clusters, device.wide_min_busy).filter(|_| fits);
        let Some(which) = choice else { return Ok(false) };
        let params = GatedWideParams {
            input: map_bf16(input, tokens, cols, TILE_TOKENS as u32)?,
            weight: map_bf16(part.memory.address(), weight.rows, cols, GATED_WIDTHS[which] as u32)?,
            output_map: map_bf16(output, tokens, width, TILE_TOKENS as u32 / 2)?,
            output,
            width: width as u32,
            num_tokens: tokens as u32,
            num_chunks: (cols / CHUNK) as u32,
            group: GROUP,
            activation: activation_number(op.activation),
        };
        let blocks = (num_clusters * CLUSTER) as u32;
        // SAFETY: the struct is the kernel's; input, weight and output have the sizes that the maps say.
        unsafe { device.gpu.launch(functions[which], (blocks, 1), THREADS, GATED_WIDE_SHARED, &params) }?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_width_is_that_of_the_fewest_rounds() {
        // 66 clusters and the 14,336 outputs of the 8B shape: 54.3 rounds of 128, 62.06 of 112.
        assert_eq!(choose_width(8192, 14336, 66, MIN_BUSY), Some(0));
        // Two rounds either way.
        assert_eq!(choose_width(256, 14336, 66, MIN_BUSY), Some(1));
        // As long as for 512 tokens.
        assert_eq!(choose_width(300, 14336, 66, MIN_BUSY), None);
        assert_eq!(choose_width(300, 14336, 66, 1), Some(1));
        assert_eq!(choose_width(2048, 14336 + 8, 66, MIN_BUSY), None);
        assert_eq!(choose_width(0, 14336, 66, MIN_BUSY), None);
    }
}
