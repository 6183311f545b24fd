//! Products of more than a few tokens with bf16 experts as one launch each, where the device has `grouped.cu`: slots are sorted by
//! expert on the device, multiplied tile by tile, and what a token's experts gave is added up. Where experts have few rows
//! (`grouped_few.cu`) the rows are read where they lie; where tiles are large they are copied into the order of experts first.

use baton_backend::{
    BackendError, ExpertGated, ExpertLinear, HeadLinear, NormKind, Op, Program, VectorId, WeightFormat,
    WeightId,
};

use crate::device::Device;
use crate::experts::ExpertMemory;
use crate::gpu::{Fetches, map_bf16};
use crate::layout::Layout;
use crate::ops::{Run, activation_number};
use crate::params::{CombineParams, FewParams, GatherParams, GroupedParams};
use crate::route::Finish;

/// Columns of a stage.
const CHUNK: usize = 64;
const THREADS: u32 = 384;
/// With fewer tokens a warp for each row of each slot is faster.
const MIN_TOKENS: usize = 5;
/// The same for products of heads, whose weights all tokens share.
const MIN_HEAD_TOKENS: usize = 4;
/// Gelu: those after it have no kernels in `grouped.cu`.
const LAST_ACTIVATION: u32 = 2;
/// Experts that one block sorts by: its threads.
const MAX_SORTED: usize = 1024;
/// Rows of an expert from which on the larger tiles pay.
const LARGE_ROWS: usize = 48;
/// The largest tile.
pub(crate) const MAX_TILE: usize = 128;

/// As in `grouped_few.cu`: rows of a tile, rows of weights that come together and of all of a stage, rows of a result that go together,
/// stages, threads.
pub(crate) const FEW_TILE: usize = 64;
const FEW_BOX_ROWS: usize = 64;
const FEW_WEIGHT_ROWS: usize = 128;
const FEW_RESULT_ROWS: usize = 16;
const FEW_STAGES: usize = 8;
const FEW_THREADS: u32 = 256;

/// One of its kernels.
#[derive(Debug)]
pub(crate) struct FewShape {
    pub(crate) name: &'static str,
    /// Results of a tile.
    outputs: usize,
}

pub(crate) const FEW_SHAPES: [FewShape; 2] = [
    FewShape { name: "grouped_few_gated", outputs: 64 },
    FewShape { name: "grouped_few_plain", outputs: 128 },
];

impl FewShape {
    /// As for [`GroupedShape`].
    pub(crate) fn shared_bytes(&self) -> u32 {
        let stage = (FEW_TILE + FEW_WEIGHT_ROWS) * CHUNK * 2;
        (FEW_STAGES * (stage + 16) + FEW_TILE * self.outputs * 2 + 1024) as u32
    }
}

/// One of the kernels of `grouped.cu`.
#[derive(Debug)]
pub(crate) struct GroupedShape {
    pub(crate) name: &'static str,
    /// Of a tile.
    tokens: usize,
    stages: usize,
    is_gated: bool,
}

pub(crate) const GROUPED_SHAPES: [GroupedShape; 3] = [
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

    /// Sorts the slots, if the router has not.
    fn sort_slots(&self, op: &ExpertGated) -> Result<(), BackendError> {
        if self.finish_before(op.weight) == Some(Finish::Sorted) {
            return Ok(());
        }
        let device = &*self.device;
        let params = self.sort_params(op.weight, op.routing);
        // SAFETY: the struct is the kernel's; the memory was made for the largest step of the program.
        unsafe { device.gpu.launch(device.kernels.experts().sort, (1, 1), 1024, 0, &params) }
    }

    /// Copies the normed rows into the order of experts.
    fn gather_rows(&self, op: &ExpertGated) -> Result<(), BackendError> {
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let memory = device.experts.as_ref().expect("made when the program was compiled");
        let (_, num_slots) = self.routing(op.routing);
        let tokens = self.shape.tokens;
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
        // SAFETY: the struct is the kernel's; the memory was made for the largest step of the program.
        unsafe { device.gpu.launch(device.kernels.experts().gather, (tokens, 1), 256, 0, &gather) }
    }

    /// True where the rows of an op can be normed on their way.
    pub(crate) fn is_rms(op: &ExpertGated) -> bool {
        op.norm.is_none_or(|norm| norm.kind == NormKind::Rms)
    }

    pub(crate) fn grouped_gated(&mut self, op: &ExpertGated, tile: usize) -> Result<(), BackendError> {
        self.sort_slots(op)?;
        let width = self.device.weights[op.weight.0 as usize].expert_rows() / 2;
        let activation = activation_number(op.activation);
        if tile == FEW_TILE {
            let input = self.normed_for_experts(op.weight, op.input, op.norm.as_ref())?;
            let output = self.expert_memory().inner.address();
            return self.few_product(op.weight, [input, output], width, (0, activation));
        }
        self.gather_rows(op)?;
        let memory = self.expert_memory();
        let (input, output) = (memory.rows.address(), memory.inner.address());
        self.grouped_product(op.weight, [input, output], width, 0, activation)
    }

    pub(crate) fn grouped_linear(&mut self, op: &ExpertLinear, tile: usize) -> Result<(), BackendError> {
        let width = self.device.weights[op.weight.0 as usize].expert_rows();
        let memory = self.expert_memory();
        // The rows that were gathered are not needed any more.
        let (input, output) = (memory.inner.address(), memory.rows.address());
        if tile == FEW_TILE {
            self.few_product(op.weight, [input, output], width, (1, 0))?;
        } else {
            self.grouped_product(op.weight, [input, output], width, 2, 0)?;
        }
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

    pub(crate) fn is_grouped_heads(&self, op: HeadLinear) -> bool {
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        matches!(weight.parts.as_slice(), [part] if part.layout == Layout::Plain(WeightFormat::BF16))
            && !device.kernels.experts().grouped.is_empty()
            && self.tokens() >= MIN_HEAD_TOKENS
            && weight.expert_rows().is_multiple_of(CHUNK)
            && weight.cols.is_multiple_of(CHUNK)
    }

    /// A product of heads with many tokens, if it is of whole boxes: each head is an expert, whose rows are all tokens.
    pub(crate) fn grouped_heads(&self, op: HeadLinear) -> Result<bool, BackendError> {
        if !self.is_grouped_heads(op) {
            return Ok(false);
        }
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let (heads, rows, cols) = (weight.num_experts, weight.expert_rows(), weight.cols);
        let (tokens, part) = (self.tokens(), &weight.parts[0]);
        let which = 1 + usize::from(tokens >= MAX_TILE);
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

    fn expert_memory(&self) -> &ExpertMemory {
        self.device.experts.as_ref().expect("made when the program was compiled")
    }

    /// A product of tiles of few rows; `which` of [`FEW_SHAPES`], with an activation.
    fn few_product(
        &self,
        weight: WeightId,
        [input, output]: [u64; 2],
        width: usize,
        (which, activation): (usize, u32),
    ) -> Result<(), BackendError> {
        let device = &*self.device;
        let memory = self.expert_memory();
        let weight = &device.weights[weight.0 as usize];
        let shape = &FEW_SHAPES[which];
        let cols = weight.cols;
        let map = |address, rows, cols, box_rows: usize| {
            map_bf16(address, rows, cols, box_rows as u32, Fetches::Pairs)
        };
        let params = FewParams {
            weight: map(weight.parts[0].memory.address(), weight.rows, cols, FEW_BOX_ROWS)?,
            output_map: map(output, memory.num_rows, width, FEW_RESULT_ROWS)?,
            num_tiles: memory.num_tiles(),
            tiles: memory.tiles(),
            sources: memory.sources.address(),
            input,
            width: width as u32,
            expert_rows: weight.expert_rows() as u32,
            cols: cols as u32,
            num_chunks: cols.div_ceil(CHUNK) as u32,
            activation,
        };
        let function = device.kernels.experts().grouped_few[which];
        let blocks = device.gpu.properties.num_multiprocessors;
        // SAFETY: the struct is the kernel's; input, weight and output have the sizes that the maps say.
        unsafe { device.gpu.launch(function, (blocks, 1), FEW_THREADS, shape.shared_bytes(), &params) }
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
        assert!(FEW_SHAPES.iter().all(|shape| shape.shared_bytes() <= 227 << 10));
    }
}
