//! Mixtures of experts: memory for them, and products of few tokens, which read only the experts that were chosen. Those of many tokens
//! are `grouped`'s where the device and the weights allow it. The router is `route`'s.

use baton_backend::{
    BackendError, BufferId, ExpertGated, ExpertLinear, Op, Program, Route, WeightFormat, WeightId,
};

use crate::device::Device;
use crate::gpu::{DeviceMemory, Gpu};
use crate::grouped::MAX_TILE;
use crate::kernels::expert_kernels::{DEEP_CHUNKS, DEEP_COLS, DEEP_RING_BYTES, DEEP_ROWS, DeepProducts};
use crate::layout::Layout;
use crate::ops::{Run, activation_number, unsupported};
use crate::params::{Address, ExpertParams, RouteParams};
use crate::route::{Finish, Mixture};
use crate::weights::Part;

/// Rows of a down projection that a block takes, as in `expert_product.cu`.
const LINEAR_ROWS: u32 = 4;
/// Warps of a block that takes rows of experts, and how many such blocks a multiprocessor holds.
const EXPERT_WARPS: u32 = 8;
const EXPERT_BLOCKS: u32 = 3;
/// Columns that a block can keep in shared memory as f32, without asking for more of it.
const MAX_STAGED: usize = 11_520;
/// Experts of a token, shared ones included.
const MAX_SLOTS: usize = 64;
/// As in `experts.cuh`.
const MAX_ROUTED: usize = 512;
const MAX_CHOSEN: usize = 32;
const MAX_GROUPS: usize = 32;

/// The latents that `attention_latent.cu` is made for: what is rotated, in pairs, and all of it.
const LATENT_HALF: u32 = 32;
const LATENT_DIM: usize = 576;

/// What the mixtures of all programs need.
#[derive(Debug)]
pub(crate) struct ExpertMemory {
    /// Of a router, `[max tokens, rows]` f32.
    pub(crate) products: DeviceMemory,
    /// Blocks that are done of all tokens and of each: 0 between launches.
    pub(crate) arrivals: DeviceMemory,
    /// How many tiles there are, then the expert of each.
    tiles: DeviceMemory,
    /// The row of each slot, and the token of each row.
    pub(crate) places: DeviceMemory,
    pub(crate) sources: DeviceMemory,
    /// Rows in the order of experts, `[rows, hidden]`, and what their gates let through, `[rows, intermediate]`.
    pub(crate) rows: DeviceMemory,
    pub(crate) inner: DeviceMemory,
    /// Of the two above.
    pub(crate) num_rows: usize,
    /// Weights whose products of many tokens are grouped.
    pub(crate) grouped: Vec<WeightId>,
    pub(crate) mixtures: Vec<Mixture>,
}

impl ExpertMemory {
    fn new(gpu: &Gpu) -> Result<Self, BackendError> {
        let nothing = || gpu.allocate(0, "nothing yet");
        Ok(Self {
            products: nothing()?,
            arrivals: nothing()?,
            tiles: nothing()?,
            places: nothing()?,
            sources: nothing()?,
            rows: nothing()?,
            inner: nothing()?,
            num_rows: 0,
            grouped: Vec::new(),
            mixtures: Vec::new(),
        })
    }

    pub(crate) fn num_tiles(&self) -> Address {
        self.tiles.address()
    }

    pub(crate) fn tiles(&self) -> Address {
        self.tiles.address() + 4
    }
}

/// Grows to `bytes`.
fn grow(gpu: &Gpu, memory: &mut DeviceMemory, bytes: Option<usize>) -> Result<bool, BackendError> {
    let bytes = bytes.ok_or_else(|| unsupported("experts of that many tokens"))?;
    if memory.bytes() >= bytes {
        return Ok(false);
    }
    *memory = gpu.allocate(0, "nothing")?;
    *memory = gpu.allocate(bytes, "workspace of experts")?;
    Ok(true)
}

impl Device {
    /// Kernels and memory for the mixtures of a program.
    pub(crate) fn prepare_experts(
        &mut self,
        program: &Program,
        max_tokens: usize,
    ) -> Result<(), BackendError> {
        let mut formats: Vec<WeightFormat> = Vec::new();
        for op in &program.ops {
            let weight = match op {
                Op::Route(op) => {
                    check_route(op, self.weights[op.weight.0 as usize].rows)?;
                    op.weight
                }
                Op::ExpertGated(op) => {
                    self.check_experts(op)?;
                    op.weight
                }
                Op::ExpertLinear(op) => op.weight,
                Op::HeadLinear(op) => op.weight,
                _ => continue,
            };
            for part in &self.weights[weight.0 as usize].parts {
                // A packed router goes by the products of dense layers.
                if let Layout::Plain(format) = part.layout
                    && !formats.contains(&format)
                {
                    formats.push(format);
                }
            }
        }
        for op in &program.ops {
            if let Op::LatentKv(op) = op
                && self.ropes[op.rope.0 as usize].half == LATENT_HALF
                && self.buffers[op.latent.0 as usize].cols == LATENT_DIM
                && !self.latent_layers.contains(&op.layer)
            {
                self.latent_layers.push(op.layer);
            }
        }
        if !program
            .ops
            .iter()
            .any(|op| matches!(op, Op::Route(_) | Op::ExpertGated(_) | Op::HeadLinear(_) | Op::LatentKv(_)))
        {
            return Ok(());
        }
        self.kernels.prepare_experts(&formats)?;
        let mut memory = match self.experts.take() {
            Some(memory) => memory,
            None => ExpertMemory::new(&self.gpu)?,
        };
        memory.grouped.extend(self.grouped_weights(program));
        memory.mixtures.extend(Mixture::find(program));
        let sized = program.ops.iter().try_for_each(|op| self.size_experts(&mut memory, op, max_tokens));
        self.experts = Some(memory);
        sized
    }

    fn check_experts(&self, op: &ExpertGated) -> Result<(), BackendError> {
        let cols = self.weights[op.weight.0 as usize].cols;
        let slots = self.buffers[op.routing.0 as usize].cols / 2;
        if cols > MAX_STAGED || slots > MAX_SLOTS {
            return Err(unsupported(format!(
                "{slots} experts per token with {cols} columns: at most {MAX_SLOTS} with {MAX_STAGED}"
            )));
        }
        Ok(())
    }

    fn size_experts(
        &self,
        memory: &mut ExpertMemory,
        op: &Op,
        max_tokens: usize,
    ) -> Result<(), BackendError> {
        let gpu = &self.gpu;
        let mul = |a: usize, b: usize| a.checked_mul(b);
        match op {
            Op::Route(op) => {
                let rows = self.weights[op.weight.0 as usize].rows;
                grow(gpu, &mut memory.products, mul(max_tokens, rows).and_then(|count| mul(count, 4)))?;
                if grow(gpu, &mut memory.arrivals, mul(max_tokens + 1, 4))? {
                    memory.arrivals.clear(gpu)?;
                }
            }
            Op::ExpertGated(op) => {
                let weight = &self.weights[op.weight.0 as usize];
                let slots = self.buffers[op.routing.0 as usize].cols / 2;
                let count = mul(max_tokens, slots);
                grow(gpu, &mut memory.places, count.and_then(|count| mul(count, 4)))?;
                if !memory.grouped.contains(&op.weight) {
                    return Ok(());
                }
                // Each expert fills its last tile up.
                let rows = mul(weight.num_experts, MAX_TILE)
                    .zip(count)
                    .and_then(|(all, count)| all.checked_add(count));
                memory.num_rows = memory.num_rows.max(rows.unwrap_or(usize::MAX));
                let bytes = |cols: usize| mul(memory.num_rows, cols).and_then(|count| mul(count, 2));
                let (rows_bytes, inner_bytes) = (bytes(weight.cols), bytes(weight.expert_rows() / 2));
                let tiles = count.map(|count| 4 * (count / 64 + weight.num_experts + 1));
                grow(gpu, &mut memory.tiles, tiles)?;
                grow(gpu, &mut memory.sources, mul(memory.num_rows, 4))?;
                grow(gpu, &mut memory.rows, rows_bytes)?;
                grow(gpu, &mut memory.inner, inner_bytes)?;
            }
            _ => {}
        }
        Ok(())
    }
}

fn check_route(op: &Route, rows: usize) -> Result<(), BackendError> {
    let num_experts = rows - usize::from(op.has_shared_gate);
    let groups = op.groups.map_or(0, |groups| groups.count);
    if num_experts > MAX_ROUTED || op.top_k > MAX_CHOSEN || groups > MAX_GROUPS {
        return Err(unsupported(format!(
            "a choice of {} from {num_experts} experts in {groups} groups: at most {MAX_CHOSEN} from {MAX_ROUTED} in \
             {MAX_GROUPS}",
            op.top_k
        )));
    }
    Ok(())
}

impl Run<'_> {
    /// A buffer of routings and how many experts a token has in it.
    pub(crate) fn routing(&self, id: BufferId) -> (Address, usize) {
        let buffer = &self.device.buffers[id.0 as usize];
        (buffer.memory.address(), buffer.cols / 2)
    }

    pub(crate) fn expert_gated(&mut self, op: &ExpertGated) -> Result<(), BackendError> {
        let tokens = self.shape.tokens;
        if tokens == 0 {
            return Ok(());
        }
        if !Self::is_rms(op) {
            return Err(unsupported("experts after a layer norm"));
        }
        let (routing, num_slots) = self.routing(op.routing);
        if let Some(tile) = self.grouped_tile(op.weight, num_slots) {
            return self.grouped_gated(op, tile);
        }
        let found = self.found_route(op.weight)?;
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let rows = weight.expert_rows();
        let params = ExpertParams {
            step: device.step.address(),
            weight: 0,
            row_bytes: 0,
            input: self.buffer(op.input, weight.cols)?,
            norm: self.vector(op.norm.map(|norm| norm.weight)),
            bias: self.vector(op.bias),
            routing,
            output: self.buffer(op.output, num_slots * rows / 2)?,
            num_rows: (rows / 2) as u32,
            cols: weight.cols as u32,
            num_tokens: tokens,
            num_slots: num_slots as u32,
            first_expert: 0,
            num_experts: 0,
            activation: activation_number(op.activation),
            accumulate: 0,
            block_rows: self.gated_rows(tokens * num_slots as u32, (rows / 2) as u32),
            eps: op.norm.map_or(0.0, |norm| norm.eps),
            finds: u32::from(found.is_some()),
            route: found.unwrap_or_default(),
        };
        for part in &weight.parts {
            let (params, format) = of_part(&params, part, rows)?;
            let grid = (tokens * num_slots as u32, params.num_rows.div_ceil(params.block_rows));
            let function = match self.next {
                Some(Op::ExpertLinear(next)) => self.deep_products(next).map(|(deep, _)| deep.gated),
                _ => None,
            };
            let function = function.unwrap_or(device.kernels.expert_products(format).gated);
            let threads = 32 * EXPERT_WARPS;
            // SAFETY: the struct is the kernel's; the output has a row for each slot of the shape's tokens.
            unsafe { device.gpu.launch(function, grid, threads, 4 * params.cols, &params) }?;
        }
        Ok(())
    }

    pub(crate) fn expert_linear(&mut self, op: &ExpertLinear) -> Result<(), BackendError> {
        let tokens = self.shape.tokens;
        if tokens == 0 {
            return Ok(());
        }
        let (routing, num_slots) = self.routing(op.routing);
        if let Some(tile) = self.grouped_tile(op.weight, num_slots) {
            return self.grouped_linear(op, tile);
        }
        let found = self.found_route(op.weight)?;
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let rows = weight.expert_rows();
        let params = ExpertParams {
            step: device.step.address(),
            weight: 0,
            row_bytes: 0,
            input: self.buffer(op.input, num_slots * weight.cols)?,
            norm: 0,
            bias: self.vector(op.bias),
            routing,
            output: self.buffer(op.output, rows)?,
            num_rows: rows as u32,
            cols: weight.cols as u32,
            num_tokens: tokens,
            num_slots: num_slots as u32,
            first_expert: 0,
            num_experts: 0,
            activation: 0,
            accumulate: u32::from(op.accumulate),
            block_rows: LINEAR_ROWS,
            eps: 0.0,
            finds: u32::from(found.is_some()),
            route: found.unwrap_or_default(),
        };
        for (number, part) in weight.parts.iter().enumerate() {
            let (mut params, format) = of_part(&params, part, rows)?;
            // What the experts of the first part gave is there already.
            params.accumulate |= u32::from(number > 0);
            if let Some((deep, chunks)) = self.deep_products(op) {
                let function = deep.linear[chunks - 1];
                let grid = (params.num_rows.div_ceil(DEEP_ROWS), 1);
                // SAFETY: as below.
                unsafe { device.gpu.launch(function, grid, 32 * EXPERT_WARPS, DEEP_RING_BYTES, &params) }?;
                continue;
            }
            let grid = (tokens, params.num_rows.div_ceil(LINEAR_ROWS));
            let function = device.kernels.expert_products(format).linear;
            // SAFETY: the struct is the kernel's; input and output have the shape's tokens.
            unsafe { device.gpu.launch(function, grid, 32 * EXPERT_WARPS, 0, &params) }?;
        }
        Ok(())
    }

    /// The kernels for one token, and pieces of a row, if they take so many slots and columns.
    fn deep_products(&self, op: &ExpertLinear) -> Option<(DeepProducts, usize)> {
        let weight = &self.device.weights[op.weight.0 as usize];
        let [Part { layout: Layout::Plain(format), .. }] = weight.parts.as_slice() else { return None };
        let chunks = weight.cols.div_ceil(DEEP_COLS);
        let fits = self.shape.tokens == 1
            && op.bias.is_none()
            && [1, 2, 4, 8].contains(&self.routing(op.routing).1)
            && weight.cols.is_multiple_of(8)
            && chunks <= DEEP_CHUNKS;
        let deep = self.device.kernels.expert_products(*format).deep.filter(|_| fits);
        deep.map(|deep| (deep, chunks))
    }

    /// Rows of a gate that a block takes, so that the blocks of all slots are about one round of the device.
    fn gated_rows(&self, slots: u32, rows: u32) -> u32 {
        let round = EXPERT_BLOCKS * self.device.gpu.properties.num_multiprocessors;
        let of_warp = (slots * rows).div_ceil(round * EXPERT_WARPS).max(1);
        of_warp * EXPERT_WARPS
    }

    /// What a product needs that finds its experts in the router's products by itself.
    fn found_route(&self, experts: WeightId) -> Result<Option<RouteParams>, BackendError> {
        let mixture = self.mixture(|mixture| mixture.has(experts));
        let finds = |mixture: &Mixture| self.route_finish(mixture) == Finish::Products;
        mixture.filter(finds).map(|mixture| self.route_params(&mixture.route)).transpose()
    }
}

/// The same for the experts of one part, and their format.
fn of_part(
    params: &ExpertParams,
    part: &Part,
    rows: usize,
) -> Result<(ExpertParams, WeightFormat), BackendError> {
    let Layout::Plain(format) = part.layout else { return Err(unsupported("packed experts")) };
    if !part.first_row.is_multiple_of(rows) || !part.rows.is_multiple_of(rows) {
        return Err(unsupported("an expert whose gate and up have different formats"));
    }
    let params = ExpertParams {
        weight: part.memory.address(),
        row_bytes: part.unit_bytes as u64,
        first_expert: (part.first_row / rows) as u32,
        num_experts: (part.rows / rows) as u32,
        ..*params
    };
    Ok((params, format))
}
