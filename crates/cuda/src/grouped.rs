//! Products of many tokens with bf16 experts as one launch each, where the device has `grouped.cu`: slots are sorted by expert on
//! the device, rows are copied into that order, multiplied tile by tile, and what a token's experts gave is added up.

use baton_backend::{
    BackendError, ExpertGated, ExpertLinear, HeadLinear, NormKind, Op, Program, VectorId, WeightFormat,
    WeightId,
};

use crate::device::Device;
use crate::gpu::{Fetches, map_bf16};
use crate::layout::Layout;
use crate::ops::{Run, activation_number};
use crate::params::{CombineParams, GatherParams, GroupedParams, SortParams};

/// Columns of a stage.
const CHUNK: usize = 64;
const THREADS: u32 = 384;
/// With fewer tokens a warp for each row of each slot is faster.
const MIN_TOKENS: usize = 5;
/// The same for products of heads, whose weights all tokens share.
const MIN_HEAD_TOKENS: usize = 16;
/// Gelu: those after it have no kernels in `grouped.cu`.
const LAST_ACTIVATION: u32 = 2;
/// Experts that one block sorts by: its threads.
const MAX_SORTED: usize = 1024;
/// Rows of an expert from which on the larger tiles pay.
const LARGE_ROWS: usize = 48;
/// The largest tile.
pub(crate) const MAX_TILE: usize = 128;

/// One of the kernels of `grouped.cu`.
#[derive(Debug)]
pub(crate) struct GroupedShape {
    pub(crate) name: &'static str,
    /// Of a tile.
    tokens: usize,
    stages: usize,
    is_gated: bool,
}

pub(crate) const GROUPED_SHAPES: [GroupedShape; 4] = [
    GroupedShape { name: "grouped_gated_64", tokens: 64, stages: 5, is_gated: true },
    GroupedShape { name: "grouped_gated_128", tokens: 128, stages: 4, is_gated: true },
    GroupedShape { name: "grouped_plain_64", tokens: 64, stages: 4, is_gated: false },
    GroupedShape { name: "grouped_plain_128", tokens: 128, stages: 3, is_gated: false },
];

impl GroupedShape {
    /// Rows of weights that come together.
    fn box_rows(&self) -> usize {
        if self.tokens == 128 { 128 } else { 64 }
    }

    /// The stages, the results of two warpgroups, two barriers a stage, and what it takes to start at a multiple of 1024.
    pub(crate) fn shared_bytes(&self) -> u32 {
        let stage = (self.tokens + 256) * CHUNK * 2;
        let outputs = if self.is_gated { self.box_rows() } else { 2 * self.box_rows() };
        (self.stages * (stage + 16) + 2 * outputs * CHUNK * 2 + 1024) as u32
    }
}

impl Device {
    /// The weights of a program whose products can be grouped: those of a mixture both or none, because the one leaves its results
    /// in the order that the other wants them in.
    pub(crate) fn grouped_weights(&self, program: &Program) -> Vec<WeightId> {
        let fits = |id: WeightId, bias: Option<VectorId>| {
            let weight = &self.weights[id.0 as usize];
            let [part] = weight.parts.as_slice() else { return false };
            part.layout == Layout::Plain(WeightFormat::BF16)
                && bias.is_none()
                && weight.num_experts <= MAX_SORTED
        };
        let mut grouped = Vec::new();
        if self.kernels.experts().grouped.is_empty() {
            return grouped;
        }
        for op in &program.ops {
            let Op::ExpertGated(gated) = op else { continue };
            let reads = |op: &&Op| matches!(op, Op::ExpertLinear(linear) if linear.input == gated.output);
            let mut readers = program.ops.iter().filter(reads);
            let all_fit = readers.all(|op| match op {
                Op::ExpertLinear(linear) => fits(linear.weight, linear.bias),
                _ => true,
            });
            let is_made = activation_number(gated.activation) <= LAST_ACTIVATION;
            if all_fit && is_made && fits(gated.weight, gated.bias) {
                grouped.push(gated.weight);
                grouped.extend(program.ops.iter().filter(reads).filter_map(Op::weight));
            }
        }
        grouped
    }
}

impl Run<'_> {
    /// Rows of a tile, if products with these experts are grouped.
    pub(crate) fn grouped_tile(&self, id: WeightId, num_slots: usize) -> Option<usize> {
        let device = &*self.device;
        let weight = &device.weights[id.0 as usize];
        let tokens = self.tokens();
        let memory = device.experts.as_ref().expect("made when the program was compiled");
        let can = memory.grouped.contains(&id) && tokens >= MIN_TOKENS;
        let is_large = tokens * num_slots >= LARGE_ROWS * weight.num_experts;
        can.then_some(if is_large { 128 } else { 64 })
    }

    /// Sorts the slots, and copies the normed rows into that order.
    pub(crate) fn gather_rows(&mut self, op: &ExpertGated, tile: usize) -> Result<(), BackendError> {
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let memory = device.experts.as_ref().expect("made when the program was compiled");
        let (routing, num_slots) = self.routing(op.routing);
        let tokens = self.shape.tokens;
        let kernels = device.kernels.experts();
        let sort = SortParams {
            step: device.step.address(),
            routing,
            num_tiles: memory.num_tiles(),
            tiles: memory.tiles(),
            places: memory.places.address(),
            num_tokens: tokens,
            num_slots: num_slots as u32,
            num_experts: weight.num_experts as u32,
            tile_rows: tile as u32,
        };
        let gather = GatherParams {
            step: device.step.address(),
            input: self.buffer(op.input, weight.cols)?,
            norm: self.vector(op.norm.map(|norm| norm.weight)),
            places: memory.places.address(),
            output: memory.rows.address(),
            num_tokens: tokens,
            num_slots: num_slots as u32,
            cols: weight.cols as u32,
            eps: op.norm.map_or(0.0, |norm| norm.eps),
        };
        // SAFETY: the structs are the kernels'; the memory was made for the largest step of the program.
        unsafe {
            device.gpu.launch(kernels.sort, (1, 1), 1024, 0, &sort)?;
            device.gpu.launch(kernels.gather, (tokens, 1), 256, 0, &gather)
        }
    }

    /// True where the rows of an op can be normed on their way.
    pub(crate) fn is_rms(op: &ExpertGated) -> bool {
        op.norm.is_none_or(|norm| norm.kind == NormKind::Rms)
    }

    pub(crate) fn grouped_gated(&mut self, op: &ExpertGated, tile: usize) -> Result<(), BackendError> {
        self.gather_rows(op, tile)?;
        let width = self.device.weights[op.weight.0 as usize].expert_rows() / 2;
        let memory = self.device.experts.as_ref().expect("made when the program was compiled");
        let (input, output) = (memory.rows.address(), memory.inner.address());
        let activation = activation_number(op.activation);
        self.grouped_product(op.weight, [input, output], width, usize::from(tile == 128), activation)
    }

    pub(crate) fn grouped_linear(&mut self, op: &ExpertLinear, tile: usize) -> Result<(), BackendError> {
        let width = self.device.weights[op.weight.0 as usize].expert_rows();
        let memory = self.device.experts.as_ref().expect("made when the program was compiled");
        // The rows that were gathered are not needed any more.
        let (input, output) = (memory.inner.address(), memory.rows.address());
        self.grouped_product(op.weight, [input, output], width, 2 + usize::from(tile == 128), 0)?;
        let device = &*self.device;
        let memory = device.experts.as_ref().expect("made when the program was compiled");
        let (routing, num_slots) = self.routing(op.routing);
        let combine = CombineParams {
            step: device.step.address(),
            input: output,
            places: memory.places.address(),
            routing,
            output: self.buffer(op.output, width)?,
            num_tokens: self.shape.tokens,
            num_slots: num_slots as u32,
            cols: width as u32,
            accumulate: u32::from(op.accumulate),
        };
        let function = device.kernels.experts().combine;
        // SAFETY: the struct is the kernel's; every slot has a row.
        unsafe { device.gpu.launch(function, (self.shape.tokens, 1), 256, 0, &combine) }
    }

    /// A product of heads with many tokens, if it is of whole boxes: each head is an expert, whose rows are all tokens.
    pub(crate) fn grouped_heads(&self, op: HeadLinear) -> Result<bool, BackendError> {
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let (heads, rows, cols) = (weight.num_experts, weight.expert_rows(), weight.cols);
        let tokens = self.tokens();
        let [part] = weight.parts.as_slice() else { return Ok(false) };
        let can = part.layout == Layout::Plain(WeightFormat::BF16)
            && !device.kernels.experts().grouped.is_empty()
            && tokens >= MIN_HEAD_TOKENS
            && rows.is_multiple_of(CHUNK)
            && cols.is_multiple_of(CHUNK);
        if !can {
            return Ok(false);
        }
        let which = 2 + usize::from(tokens >= MAX_TILE);
        let shape = &GROUPED_SHAPES[which];
        let (input, output) = (&device.buffers[op.input.0 as usize], &device.buffers[op.output.0 as usize]);
        let map = |address, rows, cols, box_rows: usize| {
            map_bf16(address, rows, cols, box_rows as u32, Fetches::Pairs)
        };
        let params = GroupedParams {
            input: map(input.memory.address(), input.rows, input.cols, shape.tokens)?,
            weight: map(part.memory.address(), weight.rows, cols, shape.box_rows())?,
            output_map: map(output.memory.address(), output.rows, output.cols, CHUNK)?,
            num_tiles: 0,
            tiles: 0,
            width: rows as u32,
            expert_rows: rows as u32,
            tiles_of_head: tokens.div_ceil(shape.tokens) as u32,
            num_heads: heads as u32,
            input_step: (input.cols / heads) as u32,
            output_step: (output.cols / heads) as u32,
            num_chunks: (cols / CHUNK) as u32,
            activation: 0,
        };
        let function = device.kernels.experts().grouped[which];
        let blocks = device.gpu.properties.num_multiprocessors;
        // SAFETY: the struct is the kernel's; input, weight and output have the sizes that the maps say.
        unsafe { device.gpu.launch(function, (blocks, 1), THREADS, shape.shared_bytes(), &params) }?;
        Ok(true)
    }

    fn grouped_product(
        &self,
        weight: WeightId,
        [input, output]: [u64; 2],
        width: usize,
        which: usize,
        activation: u32,
    ) -> Result<(), BackendError> {
        let device = &*self.device;
        let memory = device.experts.as_ref().expect("made when the program was compiled");
        let weight = &device.weights[weight.0 as usize];
        let shape = &GROUPED_SHAPES[which];
        let (rows, cols) = (memory.num_rows, weight.cols);
        let map = |address, rows, cols, box_rows: usize| {
            map_bf16(address, rows, cols, box_rows as u32, Fetches::Pairs)
        };
        let params = GroupedParams {
            input: map(input, rows, cols, shape.tokens)?,
            weight: map(weight.parts[0].memory.address(), weight.rows, cols, shape.box_rows())?,
            output_map: map(output, rows, width, CHUNK)?,
            num_tiles: memory.num_tiles(),
            tiles: memory.tiles(),
            width: width as u32,
            expert_rows: weight.expert_rows() as u32,
            tiles_of_head: 0,
            num_heads: 0,
            input_step: 0,
            output_step: 0,
            num_chunks: cols.div_ceil(CHUNK) as u32,
            activation,
        };
        let function = device.kernels.experts().grouped[which];
        let blocks = device.gpu.properties.num_multiprocessors;
        // SAFETY: the struct is the kernel's; input, weight and output have the sizes that the maps say.
        unsafe { device.gpu.launch(function, (blocks, 1), THREADS, shape.shared_bytes(), &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_fits_the_shared_memory_of_a_block() {
        assert!(GROUPED_SHAPES.iter().all(|shape| shape.shared_bytes() <= 227 << 10));
    }
}
