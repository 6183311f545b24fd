//! Products with the experts that tokens go to. Slots are sorted by expert, so that the weights of each are read once for all of its
//! tokens; the pieces of work are handed out with those of the experts with most tokens first.
//!
//! Results of slots lie in sorted order between the two ops. What a token's experts give is added in the order of its slots,
//! whoever computed it, so that its result does not depend on the batch.

use baton_backend::{Activation, BackendError, BufferId, ExpertGated, ExpertLinear, Norm, WeightId};

use super::product::{CHUNK_BYTES, MAX_CHUNK, TILE_STRIDE, Tile};
use super::{OpResult, Step, require, wrong};
use crate::buffers::{Matrix, Shared};
use crate::expert_scratch::{ExpertScratch, ExpertUnit};
use crate::kernels::gemm::{MAX_PANELS, PanelArgs};
use crate::kernels::rows::{Epilogue, NormArgs};
use crate::kernels::{Kernels, SplitKernels, SuperKernels};
use crate::pool::Worker;
use crate::quantize::{self, ActivationBlock, LANES, SuperPlaces};
use crate::units::Units;
use crate::weights::formats::{BLOCK, SPLIT_TOKENS};
use crate::weights::{PackedMatrix, Panel, Weight};

/// Units for each thread, so that a slow one does not hold up the rest.
const UNITS_PER_THREAD: usize = 16;
/// Columns of a row that are added up at a time.
const SUM_COLS: usize = 512;

/// The product of a step's slots with their experts.
pub(super) struct Grouped<'a> {
    pub(super) kernels: Kernels,
    pub(super) weight: &'a Weight,
    pub(super) scratch: &'a ExpertScratch,
    /// One row per token, or one per sorted slot.
    input: Matrix,
    num_slots: usize,
    /// From one slot's values of a token to the next one's, where each has its own.
    slot_step: usize,
    norm: Option<NormArgs>,
    split: Option<SplitKernels>,
    supers: Option<SuperKernels>,
    /// Input rows are those of tokens.
    is_by_token: bool,
    /// All slots have the same row: there is one token, and its experts want it in the same form.
    is_shared: bool,
    rows: Matrix,
    row_units: Units,
    rows_per_unit: usize,
    pub(super) units: Units,
}

// SAFETY: the pointers are to buffers of the backend, which outlive the op; writers are told apart by units, and a barrier lies
// between the phases.
unsafe impl Sync for Grouped<'_> {}

impl Grouped<'_> {
    /// Makes all rows ready.
    pub(super) fn prepare(&self, worker: &Worker<'_>) {
        if let Some(split) = &self.split {
            // SAFETY: the kernels are those of this processor; `finish` ends it.
            unsafe { (split.begin)() };
        }
        let num_rows = self.num_rows();
        while let Some(unit) = self.row_units.take() {
            let first = unit * self.rows_per_unit;
            (first..(first + self.rows_per_unit).min(num_rows)).for_each(|row| self.prepare_row(worker, row));
        }
        worker.barrier();
    }

    pub(super) fn finish(&self) {
        if let Some(split) = &self.split {
            // SAFETY: `prepare` began it.
            unsafe { (split.end)() };
        }
    }

    fn num_rows(&self) -> usize {
        if self.is_shared { 1 } else { self.scratch.slots.len() }
    }

    /// The rows of an expert: where they begin in scratch, and how many there are.
    fn place(&self, expert: usize) -> (usize, usize) {
        if self.is_shared {
            (0, 1)
        } else {
            (self.scratch.padded[expert] as usize, self.scratch.num_rows(expert))
        }
    }

    fn blocks(&self, first: usize) -> *mut ActivationBlock {
        // SAFETY: the scratch holds the padded rows of the widest weight.
        unsafe { self.scratch.blocks().add(first * (self.weight.cols / BLOCK)) }
    }

    fn floats(&self, first: usize) -> *mut f32 {
        // SAFETY: as above.
        unsafe { self.scratch.floats.matrix().start().add(first * self.weight.cols) }
    }

    fn supers(&self, first: usize) -> *mut u8 {
        // Without super-blocks the pointer is not used.
        let bytes = SuperPlaces::bytes(first, self.weight.cols).expect("the scratch has as many");
        self.scratch.supers().wrapping_add(bytes)
    }

    fn prepare_row(&self, worker: &Worker<'_>, row: usize) {
        let (slot, expert) = (self.scratch.slots[row] as usize, self.scratch.experts[row] as usize);
        let (first, count) = self.place(expert);
        let number = if self.is_shared { 0 } else { row - self.scratch.first[expert] as usize };
        let matrix = &self.weight.experts[expert];
        let cols = self.weight.cols;
        let source_row = if self.is_by_token { slot / self.num_slots } else { row };
        let start = slot % self.num_slots * self.slot_step;
        // SAFETY: a row has a step for each slot.
        let mut source = unsafe { self.input.row(source_row).add(start).cast_const() };
        let split = self.split.filter(|_| matrix.is_split);
        let copies = matrix.has_floats && split.is_none();
        let target = if copies { self.floats(first + number) } else { self.rows.row(worker.index) };
        // SAFETY: rows have `cols` values; the targets are this row's of the scratch and this worker's row, which nobody else
        // writes.
        unsafe {
            if let Some(norm) = &self.norm {
                (self.kernels.norm_row)(source, cols, norm, target, false);
                source = target;
            } else if copies {
                std::ptr::copy_nonoverlapping(source, target, cols);
            }
            if matrix.has_quants {
                let lanes = quantize::lanes(count);
                let block = quantize::first_block(number, lanes, cols / BLOCK);
                (self.kernels.quantize_row)(source, cols, self.blocks(first).add(block), lanes);
            }
            if let Some(split) = split {
                (split.split_row)(source, cols, self.floats(first), number, num_tiles(count));
            }
            if let Some(supers) = self.supers.filter(|_| matrix.has_supers) {
                (supers.quantize_row)(source, cols, self.supers(first), number, num_tiles(count));
            }
        }
    }

    /// The panels of an expert from `first` on that can be multiplied together: a few neighbours of one part.
    pub(super) fn group(matrix: &PackedMatrix, first: usize, end: usize) -> std::ops::Range<usize> {
        let part = matrix.panels[first].part;
        let same = matrix.panels[first..end].iter().take_while(|panel| panel.part == part);
        first..first + same.take(MAX_PANELS).count()
    }

    pub(super) fn multiply(&self, unit: &ExpertUnit, panels: &[Panel], tile: &mut Tile) {
        let Some(panel) = panels.first() else { return };
        let matrix = &self.weight.experts[unit.expert as usize];
        let (first, count) = self.place(unit.expert as usize);
        let part = &matrix.parts[panel.part as usize];
        let split = self.split.filter(|_| matrix.is_split);
        let args = PanelArgs {
            quants: part.panel_quants(panel.index as usize),
            scales: part.panel_scales(panel.index as usize),
            quants_stride: part.quants_per_panel,
            scales_stride: part.scales_per_panel,
            num_panels: panels.len(),
            cols: self.weight.cols,
            blocks: self.blocks(first),
            lanes: quantize::lanes(count),
            floats: self.floats(first),
            stride: self.weight.cols,
            split_tiles: if split.is_some() { num_tiles(count) } else { 0 },
            supers: self.supers(first),
            super_tiles: num_tiles(count),
            out_stride: TILE_STRIDE,
            target: std::ptr::null(),
            target_stride: 0,
        };
        let kernel = split.map_or_else(|| self.kernels.panel(part.format), |split| split.panels);
        // SAFETY: the panels follow each other in their part and have `cols` columns, all rows are ready (the barrier), the
        // tile has room for a chunk of a whole group, and the kernels are those of this processor.
        unsafe { kernel(&args, unit.first_row as usize, unit.num_rows as usize, tile.panel(0)) };
    }
}

/// Tiles of an expert's rows; zero for a single row.
fn num_tiles(count: usize) -> usize {
    if count == 1 { 0 } else { count.div_ceil(SPLIT_TOKENS) }
}

/// Cuts the panels of all experts that have tokens into units.
pub(super) fn cut_units(scratch: &mut ExpertScratch, weight: &Weight, num_threads: usize, is_gated: bool) {
    let ExpertScratch { units, used, first, .. } = scratch;
    units.clear();
    let count = |expert: u32| (first[expert as usize + 1] - first[expert as usize]) as usize;
    let panels = |expert: u32| {
        let all = weight.experts[expert as usize].panels.len();
        if is_gated { all / 2 } else { all }
    };
    let has_floats = weight.experts.iter().any(|expert| expert.has_floats);
    let whole = SPLIT_TOKENS.max(LANES);
    let chunk = if has_floats {
        (CHUNK_BYTES / (4 * weight.cols).max(1)).clamp(whole, MAX_CHUNK) / whole * whole
    } else {
        MAX_CHUNK
    };
    let work: usize = used.iter().map(|&expert| panels(expert) * count(expert).div_ceil(chunk)).sum();
    let mut at_once = (work / (num_threads * UNITS_PER_THREAD)).max(1);
    if at_once >= MAX_PANELS {
        at_once = at_once.next_multiple_of(MAX_PANELS);
    }
    for &expert in used.iter() {
        let rows = count(expert);
        for first_row in (0..rows).step_by(chunk) {
            for first_panel in (0..panels(expert)).step_by(at_once) {
                units.push(ExpertUnit {
                    expert,
                    first_panel: first_panel as u32,
                    num_panels: at_once.min(panels(expert) - first_panel) as u32,
                    first_row: first_row as u32,
                    num_rows: chunk.min(rows - first_row) as u32,
                });
            }
        }
    }
}

/// What an op on experts begins with.
pub(super) struct ExpertInput {
    pub(super) weight: WeightId,
    pub(super) routing: BufferId,
    pub(super) buffer: BufferId,
    pub(super) norm: Option<Norm>,
    pub(super) is_gated: bool,
    /// See [`Grouped`]; 0 where slots have one row in common, or one each.
    pub(super) slot_step: usize,
}

impl Step<'_> {
    /// Sorts the slots and cuts the work.
    fn plan_experts(&mut self, op: &ExpertInput) -> Result<usize, BackendError> {
        let num_tokens = self.num_rows();
        let routing = self.buffer(op.routing, num_tokens)?;
        let num_slots = routing.cols / 2;
        let num_threads = self.backend.pool.num_threads();
        let weight = &self.backend.weights[op.weight.0 as usize];
        require(!weight.experts.is_empty(), "a weight was not loaded as experts")?;
        let scratch = &mut self.backend.scratch.experts;
        let is_valid = scratch.sort(routing, num_tokens, num_slots, weight.experts.len());
        require(is_valid, "a token is routed to an expert that there is not")?;
        cut_units(scratch, weight, num_threads, op.is_gated);
        Ok(num_slots)
    }

    pub(super) fn grouped(&self, op: &ExpertInput, num_slots: usize) -> Result<Grouped<'_>, BackendError> {
        let num_tokens = self.num_rows();
        let weight = self.weight(op.weight)?;
        let mut input = self.buffer(op.buffer, num_tokens)?;
        if op.slot_step > 0 {
            let is_wide = input.cols == num_slots * op.slot_step && op.slot_step >= weight.cols;
            require(is_wide, "the input of heads does not have a part for each")?;
        } else if !op.is_gated {
            let is_wide = input.cols == num_slots * weight.cols;
            require(is_wide, "the input of experts does not have a row for each slot")?;
            input = input.reshaped(num_tokens * num_slots, weight.cols).expect("the same size");
        }
        require(
            op.slot_step > 0 || input.cols == weight.cols,
            "the input of experts is not as wide as they are",
        )?;
        let scratch = &self.backend.scratch.experts;
        let form = |expert: &PackedMatrix| {
            (expert.has_floats, expert.has_quants, expert.has_supers, expert.is_split)
        };
        let is_uniform = weight.experts.windows(2).all(|pair| form(&pair[0]) == form(&pair[1]));
        let is_shared = op.is_gated && op.slot_step == 0 && num_tokens == 1 && is_uniform;
        let num_rows = if is_shared { 1 } else { scratch.slots.len() };
        let num_threads = self.backend.pool.num_threads();
        let rows_per_unit = if num_rows >= 4 * LANES * num_threads { LANES } else { 1 };
        let is_split = weight.experts.iter().any(|expert| expert.is_split);
        Ok(Grouped {
            kernels: self.backend.kernels,
            weight,
            scratch,
            input,
            num_slots,
            slot_step: op.slot_step,
            norm: op.norm.map(|norm| self.norm_args(&norm, weight.cols)).transpose()?,
            split: self.backend.kernels.split.filter(|_| is_split),
            supers: self.backend.kernels.supers,
            is_by_token: op.is_gated || op.slot_step > 0,
            is_shared,
            rows: self.backend.scratch.rows.matrix(),
            row_units: Units::new(num_rows.div_ceil(rows_per_unit)),
            rows_per_unit,
            units: Units::new(scratch.units.len()),
        })
    }

    pub(super) fn run_expert_gated(&mut self, op: &ExpertGated) -> OpResult {
        let num_tokens = self.num_rows();
        if num_tokens == 0 {
            return Ok(());
        }
        require(op.input != op.output, "experts cannot write over their input")?;
        let ExpertGated { weight, routing, input: buffer, norm, .. } = *op;
        let input = ExpertInput { weight, routing, buffer, norm, is_gated: true, slot_step: 0 };
        let num_slots = self.plan_experts(&input)?;
        let grouped = self.grouped(&input, num_slots)?;
        let half = grouped.weight.rows / grouped.weight.experts.len() / 2;
        let output = self.buffer(op.output, num_tokens)?;
        require(output.cols == num_slots * half, "the output of experts does not have a row for each slot")?;
        let output = output.reshaped(num_tokens * num_slots, half).expect("the same size");
        let bias = self.optional_vector(op.bias, grouped.weight.rows)?;
        // SAFETY: each panel of an expert and its tokens are written by the one worker that took the unit.
        let shared = unsafe { Shared::new((output, bias)) };
        self.backend.pool.run(&|worker| {
            grouped.prepare(worker);
            let (output, bias) = *shared.get();
            let (mut gate, mut up) = (Tile::new(), Tile::new());
            while let Some(number) = grouped.units.take() {
                let unit = &grouped.scratch.units[number];
                // SAFETY: the shapes were checked above.
                unsafe { gated_unit(&grouped, unit, (output, bias), op.activation, [&mut gate, &mut up]) };
            }
            grouped.finish();
        });
        Ok(())
    }

    pub(super) fn run_expert_linear(&mut self, op: &ExpertLinear) -> OpResult {
        let num_tokens = self.num_rows();
        if num_tokens == 0 {
            return Ok(());
        }
        require(op.input != op.output, "experts cannot write over their input")?;
        let ExpertLinear { weight, routing, input: buffer, .. } = *op;
        let input = ExpertInput { weight, routing, buffer, norm: None, is_gated: false, slot_step: 0 };
        let num_slots = self.plan_experts(&input)?;
        let grouped = self.grouped(&input, num_slots)?;
        let height = grouped.weight.rows / grouped.weight.experts.len();
        let output = self.buffer(op.output, num_tokens)?;
        require(output.cols == height, "the output of experts is not as wide as they are high")?;
        let routing = self.buffer(op.routing, num_tokens)?;
        let products = grouped.scratch.products.matrix().reshaped(num_tokens * num_slots, height);
        let products = products.ok_or_else(|| wrong("the scratch for experts was not made for this"))?;
        let bias = self.optional_vector(op.bias, grouped.weight.rows)?;
        let sums_per_row = height.div_ceil(SUM_COLS);
        let sums = Units::new(num_tokens * sums_per_row);
        // SAFETY: products are written by the worker that took their unit, sums likewise, with a barrier between them.
        let shared = unsafe { Shared::new((output, products, routing, bias)) };
        self.backend.pool.run(&|worker| {
            grouped.prepare(worker);
            let (output, products, routing, bias) = *shared.get();
            let mut tile = Tile::new();
            while let Some(number) = grouped.units.take() {
                let unit = &grouped.scratch.units[number];
                // SAFETY: the shapes were checked above.
                unsafe { linear_unit(&grouped, unit, (products, bias), &mut tile) };
            }
            grouped.finish();
            worker.barrier();
            while let Some(unit) = sums.take() {
                let (token, start) = (unit / sums_per_row, unit % sums_per_row * SUM_COLS);
                let end = (start + SUM_COLS).min(height);
                let rows = &grouped.scratch.rows[token * num_slots..(token + 1) * num_slots];
                // SAFETY: the columns are this unit's alone; all products are there.
                unsafe { add_slots((output, token, start..end), (products, rows), routing, op.accumulate) };
            }
        });
        Ok(())
    }
}

/// # Safety
/// The output has a row for each slot, of half as many columns as the expert has rows; the bias has a value for each row of all
/// experts, or is null.
unsafe fn gated_unit(
    grouped: &Grouped<'_>,
    unit: &ExpertUnit,
    (output, bias): (Matrix, *const f32),
    activation: Activation,
    [gate, up]: [&mut Tile; 2],
) {
    let expert = unit.expert as usize;
    let matrix = &grouped.weight.experts[expert];
    let (num_pairs, half) = (matrix.panels.len() / 2, output.cols);
    let first_row = grouped.scratch.first[expert] as usize + unit.first_row as usize;
    let (mut panel, end) = (unit.first_panel as usize, (unit.first_panel + unit.num_panels) as usize);
    while panel < end {
        let group = Grouped::group(matrix, panel, end);
        panel = group.end;
        grouped.multiply(unit, &matrix.panels[group.clone()], gate);
        grouped.multiply(unit, &matrix.panels[num_pairs + group.start..num_pairs + group.end], up);
        for (i, panel) in matrix.panels[group].iter().enumerate() {
            let row = panel.row as usize;
            // SAFETY: promised by the caller; the expert's panels pair (see `PackedMatrix::panels`).
            unsafe {
                let bias_at = |row: usize| {
                    if bias.is_null() { bias } else { bias.add(expert * 2 * half + row) }
                };
                let epilogue = Epilogue {
                    bias: bias_at(row),
                    out: output.row(first_row).add(row),
                    stride: half,
                    num_rows: panel.num_rows as usize,
                    accumulate: false,
                    softcap: None,
                };
                let (count, up_bias) = (unit.num_rows as usize, bias_at(half + row));
                (grouped.kernels.finish_gated)(
                    &epilogue,
                    up_bias,
                    activation,
                    gate.panel(i),
                    up.panel(i),
                    count,
                );
            }
        }
    }
}

/// # Safety
/// The products have a row for each slot, of as many columns as the expert has rows; the bias has a value for each row of all
/// experts, or is null.
unsafe fn linear_unit(
    grouped: &Grouped<'_>,
    unit: &ExpertUnit,
    (products, bias): (Matrix, *const f32),
    tile: &mut Tile,
) {
    let expert = unit.expert as usize;
    let matrix = &grouped.weight.experts[expert];
    let first_row = grouped.scratch.first[expert] as usize + unit.first_row as usize;
    let (mut panel, end) = (unit.first_panel as usize, (unit.first_panel + unit.num_panels) as usize);
    while panel < end {
        let group = Grouped::group(matrix, panel, end);
        panel = group.end;
        grouped.multiply(unit, &matrix.panels[group.clone()], tile);
        for (i, panel) in matrix.panels[group].iter().enumerate() {
            let row = panel.row as usize;
            // SAFETY: promised by the caller.
            unsafe {
                let epilogue = Epilogue {
                    bias: if bias.is_null() { bias } else { bias.add(expert * products.cols + row) },
                    out: products.row(first_row).add(row),
                    stride: products.cols,
                    num_rows: panel.num_rows as usize,
                    accumulate: false,
                    softcap: None,
                };
                (grouped.kernels.finish_panel)(&epilogue, tile.panel(i), unit.num_rows as usize);
            }
        }
    }
}

/// Adds what the experts of a token gave, in the order of its slots.
///
/// # Safety
/// All matrices have the columns and rows that are named, and nobody else uses those of the output.
unsafe fn add_slots(
    (output, token, columns): (Matrix, usize, std::ops::Range<usize>),
    (products, rows): (Matrix, &[u32]),
    routing: Matrix,
    accumulate: bool,
) {
    let mut sums = [0.0_f32; SUM_COLS];
    let sums = &mut sums[..columns.len()];
    for (slot, &row) in rows.iter().enumerate() {
        // SAFETY: promised by the caller.
        let (weight, product) = unsafe {
            let weight = *routing.row(token).add(rows.len() + slot);
            let start = products.row(row as usize).add(columns.start).cast_const();
            (weight, std::slice::from_raw_parts(start, columns.len()))
        };
        sums.iter_mut().zip(product).for_each(|(sum, value)| *sum += weight * value);
    }
    // SAFETY: promised by the caller.
    let out = unsafe { std::slice::from_raw_parts_mut(output.row(token).add(columns.start), columns.len()) };
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = if accumulate { *out + *sum } else { *sum };
    }
}
