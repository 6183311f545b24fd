//! Gate and up of eight tokens and more with a bf16 weight as one launch, where the device has `gated.cu`: the product and
//! its activation. Others go by `products` and the activation's own kernel.

use baton_backend::{Activation, BackendError, GatedLinear};

use crate::compile::SkinnyWeights;
use crate::fp8::Input;
use crate::gpu::{Element, Fetches, map_matrix};
use crate::ops::{Run, activation_number};
use crate::params::{Address, GatedParams};

/// Columns of a stage, and tokens that a warpgroup multiplies.
const CHUNK: usize = 64;
const THREADS: u32 = 384;
/// Tiles of tokens whose input should stay in L2.
const GROUP: u32 = 8;
/// With fewer tokens `skinny` is faster.
const MIN_TOKENS: usize = 8;
/// The part of the device that must have work in all rounds, in percent. With less, a product and an activation are faster.
pub(crate) const MIN_BUSY: usize = 80;

/// One of the kernels of `gated.cu`.
#[derive(Debug)]
pub(crate) struct GatedShape {
    pub(crate) name: &'static str,
    /// Blocks of a cluster.
    cluster: usize,
    /// Outputs of a tile.
    width: usize,
    /// Tokens of a block.
    tokens: usize,
    stages: usize,
}

/// Those that go over any number of tokens, and those that take them all at once.
pub(crate) const GATED_SHAPES: [GatedShape; 4] = [
    GatedShape { name: "gated_many_128", cluster: 2, width: 128, tokens: 128, stages: 4 },
    GatedShape { name: "gated_many_112", cluster: 2, width: 112, tokens: 128, stages: 4 },
    GatedShape { name: "gated_few_128", cluster: 1, width: 128, tokens: 128, stages: 4 },
    GatedShape { name: "gated_few_64", cluster: 1, width: 128, tokens: 64, stages: 5 },
];

impl GatedShape {
    /// Outputs of a warpgroup: two share the tokens, or else the outputs.
    fn outputs(&self) -> usize {
        if self.tokens == 2 * CHUNK { self.width } else { self.width / 2 }
    }

    /// The stages, the results in boxes of 64 by 64, two barriers a stage, and what it takes to start at a multiple of 1024.
    pub(crate) fn shared_bytes(&self) -> u32 {
        let stage = (self.tokens + 2 * self.width) * CHUNK * 2;
        let results = 2 * self.outputs().div_ceil(CHUNK) * CHUNK * CHUNK * 2;
        (self.stages * (stage + 16) + results + 1024) as u32
    }

    fn takes_all(&self) -> bool {
        self.cluster == 1
    }

    /// How long it takes, in outputs of a tile, if it can do this at all.
    fn time(&self, tokens: usize, width: usize, num_blocks: usize) -> Option<usize> {
        let tiles = tokens.div_ceil(self.cluster * self.tokens) * width / self.width;
        let can = width.is_multiple_of(self.width) && (!self.takes_all() || tokens <= self.tokens);
        can.then(|| tiles.div_ceil((num_blocks / self.cluster).max(1)) * self.width)
    }

    /// How much of the device has work all the time, in percent. Where the weights' way from memory is what takes the time, it does
    /// not matter how many tokens they are for.
    fn busy(&self, tokens: usize, width: usize, num_blocks: usize) -> Option<usize> {
        let work = if self.takes_all() { self.tokens } else { tokens } * width;
        Some(100 * work / (self.time(tokens, width, num_blocks)? * num_blocks * self.tokens).max(1))
    }
}

/// The kernel for these tokens, if it keeps enough of the device busy.
fn choose(tokens: usize, width: usize, num_blocks: usize, min_busy: usize) -> Option<usize> {
    if tokens < MIN_TOKENS {
        return None;
    }
    let shapes = || GATED_SHAPES.iter().enumerate();
    let time = |shape: &GatedShape| shape.time(tokens, width, num_blocks);
    let few = shapes().filter(|(_, shape)| shape.takes_all() && time(shape).is_some());
    let many = shapes().filter(|(_, shape)| !shape.takes_all() && time(shape).is_some());
    let (which, shape) =
        few.min_by_key(|(_, shape)| shape.tokens).or_else(|| many.min_by_key(|(_, shape)| time(shape)))?;
    (shape.busy(tokens, width, num_blocks)? >= min_busy).then_some(which)
}

impl Run<'_> {
    /// Which kernel does this, if one does.
    pub(crate) fn whole_gated_kernel(&self, op: &GatedLinear) -> Option<usize> {
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let [part] = weight.parts.as_slice() else { return None };
        let kind = part.skinny_weights().filter(|kind| *kind != SkinnyWeights::Fp8Blocks)?;
        let is_fp8 = kind == SkinnyWeights::Fp8Rows;
        let is_wanted =
            !is_fp8 || (self.multiplies_fp8(op.weight) && self.tokens() > device.skinny_rows(kind));
        let fits = is_wanted
            && op.bias.is_none()
            && !matches!(
                op.activation,
                Activation::Relu | Activation::ReluSquared | Activation::ClampedSwiglu
            )
            && weight.rows.is_multiple_of(2)
            && weight.cols.is_multiple_of(kind.unit())
            && !device.kernels.gated(is_fp8).is_empty();
        if !fits {
            return None;
        }
        choose(self.tokens(), weight.rows / 2, self.num_blocks(), device.gated_min_busy)
    }

    /// Whole clusters.
    fn num_blocks(&self) -> usize {
        self.device.gpu.properties.num_multiprocessors as usize / 2 * 2
    }

    /// The input is normed already.
    pub(crate) fn whole_gated(
        &self,
        op: &GatedLinear,
        which: usize,
        input: Input,
        output: Address,
    ) -> Result<(), BackendError> {
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let part = &weight.parts[0];
        let (tokens, width, cols) = (self.tokens(), weight.rows / 2, weight.cols);
        let shape = &GATED_SHAPES[which];
        let fetches = if shape.takes_all() { Fetches::Lines } else { Fetches::Pairs };
        let (element, chunk) = if input.is_fp8 { (Element::Fp8, 2 * CHUNK) } else { (Element::Bf16, CHUNK) };
        let map = |address, rows, cols, box_rows, element| {
            map_matrix(address, rows, cols, box_rows as u32, element, fetches)
        };
        let params = GatedParams {
            input: map(input.address, tokens, cols, shape.tokens, element)?,
            weight: map(part.memory.address(), weight.rows, cols, shape.outputs(), element)?,
            output_map: map(output, tokens, width, CHUNK, Element::Bf16)?,
            output,
            width: width as u32,
            num_tokens: tokens as u32,
            num_chunks: (cols / chunk) as u32,
            group: GROUP,
            activation: activation_number(op.activation),
            input_scales: device.code_scales.address(),
            weight_scales: part.scales_address(),
        };
        let all = self.num_blocks();
        let blocks = if shape.takes_all() { all.min(width / shape.width) } else { all };
        let function = device.kernels.gated(input.is_fp8)[which];
        // SAFETY: the struct is the kernel's; input, weight and output have the sizes that the maps say.
        unsafe { device.gpu.launch(function, (blocks as u32, 1), THREADS, shape.shared_bytes(), &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The 8B shape on a device of 132 multiprocessors.
    fn choose_8b(tokens: usize, min_busy: usize) -> Option<&'static str> {
        choose(tokens, 14336, 132, min_busy).map(|which| GATED_SHAPES[which].name)
    }

    #[test]
    fn the_kernel_is_that_of_the_fewest_rounds() {
        assert_eq!(choose_8b(7, MIN_BUSY), None);
        assert_eq!(choose_8b(8, MIN_BUSY), Some("gated_few_64"));
        assert_eq!(choose_8b(65, MIN_BUSY), Some("gated_few_128"));
        // 54.3 rounds of 128, 62.06 of 112; with 256 tokens two either way.
        assert_eq!(choose_8b(8192, MIN_BUSY), Some("gated_many_128"));
        assert_eq!(choose_8b(256, MIN_BUSY), Some("gated_many_112"));
        // As long as for 512.
        assert_eq!(choose_8b(300, MIN_BUSY), None);
        assert_eq!(choose_8b(300, 1), Some("gated_many_112"));
        assert_eq!(choose_8b(0, 1), None);
        // Half of the device would have nothing to do; a width that is no whole tiles.
        assert_eq!(choose(32, 8192, 132, MIN_BUSY), None);
        assert_eq!(choose(32, 8200, 132, 1), None);
        assert_eq!(choose(2048, 14344, 132, 1), None);
    }

    #[test]
    fn every_shape_fits_the_shared_memory_of_a_block() {
        assert!(GATED_SHAPES.iter().all(|shape| shape.shared_bytes() <= 227 << 10));
    }
}
