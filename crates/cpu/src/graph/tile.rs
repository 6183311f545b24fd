//! One tile of a task: neighbours reduced, own rows beside them, the product, the finished rows.

use baton_backend::BackendError;
use baton_backend::graph::{ConvTask, Partial, Reduce, Segments};

use super::tables::Tables;
use super::{GraphLinear, TILE_TARGETS};
use crate::buffers::{Buffer, Matrix};
use crate::kernels::Kernels;
use crate::kernels::floats::{FloatArgs, multiply_opened};
use crate::kernels::graph::{FinishArgs, MAX, MEAN, ReduceArgs, Rows, WEIGHTED};
use crate::weights::formats::PANEL_ROWS;

/// A worker's own memory.
#[derive(Debug)]
pub struct TileScratch {
    input: Buffer,  // [TILE_TARGETS, widest input]
    output: Buffer, // [TILE_TARGETS, widest output, in whole panels]
}

impl TileScratch {
    pub fn new(input: usize, output: usize) -> Result<Self, BackendError> {
        let buffer = |cols| Buffer::new(TILE_TARGETS, cols, "scratch of a tile");
        Ok(Self { input: buffer(input)?, output: buffer(output)? })
    }

    pub fn reserve(&mut self, input: usize, output: usize) -> Result<(), BackendError> {
        self.input.reserve(TILE_TARGETS * input, "scratch of a tile")?;
        self.output.reserve(TILE_TARGETS * output, "scratch of a tile")
    }

    pub fn views(&self) -> (Matrix, Matrix) {
        (self.input.matrix(), self.output.matrix())
    }
}

struct Neighbours<'a> {
    rows: Rows,
    reduce: Reduce,
    segments: Segments<'a>,
}

/// A task whose parts were found and checked.
pub struct Task<'a> {
    neighbours: Option<Neighbours<'a>>,
    own: Option<Rows>,
    targets: &'a [u32],
    partial: Option<Partial>,
    accumulators: Option<Matrix>,
    linear: &'a GraphLinear,
    relu: bool,
    normalize: bool,
    output: Rows,
    output_start: *mut u8,
}

impl<'a> Task<'a> {
    pub fn new(
        task: &ConvTask<'a>,
        tables: &Tables,
        linears: &'a [GraphLinear],
        accumulators: Option<Matrix>,
    ) -> Result<Self, BackendError> {
        let wrong = |cause: &str| BackendError::Device { cause: cause.to_owned() };
        let linear = linears.get(task.linear.0 as usize).ok_or_else(|| wrong("a task has no such weight"))?;
        let mut cols = 0;
        let mut neighbours = None;
        if let Some((source, reduce, segments)) = &task.neighbours {
            let rows = tables.rows(source)?;
            cols += rows.cols;
            check_segments(segments, task.targets.len()).map_err(wrong)?;
            if *reduce == Reduce::Gcn && segments.scales.is_none() {
                return Err(wrong("a task of GCN has no scales"));
            }
            neighbours = Some(Neighbours { rows, reduce: *reduce, segments: *segments });
        }
        let own = task.own.as_ref().map(|own| tables.rows(own)).transpose()?;
        cols += own.map_or(0, |own| own.cols);
        let table = tables.get(task.output.table)?;
        if cols != linear.cols || table.cols != linear.rows {
            return Err(wrong("the tables of a task do not fit its weight"));
        }
        let width = neighbours.as_ref().map_or(0, |neighbours| neighbours.rows.cols);
        if let Some(partial) = task.partial {
            let rows = accumulators.filter(|rows| rows.cols >= width).map_or(0, |rows| rows.rows);
            let end = partial.first_row.checked_add(task.targets.len());
            if neighbours.is_none() || end.is_none_or(|end| end > rows) {
                return Err(wrong("a cut task has no accumulators"));
            }
        }
        Ok(Self {
            neighbours,
            own,
            targets: task.targets,
            partial: task.partial,
            accumulators,
            linear,
            relu: task.relu,
            normalize: task.normalize,
            output: tables.rows(&task.output)?,
            output_start: table.start_mut().ok_or_else(|| wrong("a task writes adopted rows"))?,
        })
    }

    pub fn num_targets(&self) -> usize {
        self.targets.len()
    }

    /// Targets `first..first + count`. False where a node has no row.
    pub fn run_tile(
        &self,
        kernels: &Kernels,
        first: usize,
        count: usize,
        scratch: &(Matrix, Matrix),
    ) -> bool {
        let cols = self.linear.cols;
        let input = scratch.0.start();
        for i in 0..count {
            // SAFETY: the scratch has a row of `cols` values for each target of a tile, and nobody else uses it.
            let row = unsafe { input.add(i * cols) };
            if !self.prepare(kernels, first + i, row) {
                return false;
            }
        }
        if self.partial.is_some_and(|partial| !partial.ends) {
            return true;
        }
        let padded = self.linear.rows.next_multiple_of(PANEL_ROWS);
        let output = scratch.1.start();
        let args = FloatArgs {
            panels: self.linear.panels.matrix().start().cast_const().cast(),
            panel_stride: cols * PANEL_ROWS * 4,
            num_panels: padded / PANEL_ROWS,
            cols,
            rows: input,
            stride: cols,
            num_rows: count,
            out: output,
            out_stride: padded,
            out_panel_stride: PANEL_ROWS,
            accumulate: false,
        };
        // SAFETY: the panels have `cols` columns, the input `count` rows of them, the output as many of `padded`; the
        // kernels are those of this processor.
        unsafe { multiply_opened(&args, kernels.multiply_chunk) };
        (0..count).all(|i| {
            // SAFETY: the output has a row of `padded` values for each target of a tile.
            let values = unsafe { output.add(i * padded) };
            self.finish(kernels, self.targets[first + i], values)
        })
    }

    /// The input row of a target. False where a node has no row.
    fn prepare(&self, kernels: &Kernels, target: usize, row: *mut f32) -> bool {
        let node = self.targets[target];
        let mut width = 0;
        if let Some(neighbours) = &self.neighbours {
            width = neighbours.rows.cols;
            if !self.reduce(kernels, neighbours, target, row) {
                return false;
            }
            if let Some(partial) = self.partial.filter(|partial| !partial.ends) {
                let sums = self.accumulators.map(|rows| rows.row(partial.first_row + target));
                // SAFETY: the accumulators were checked to have this row and to be wide enough; a target is one
                // tile's.
                unsafe { std::ptr::copy_nonoverlapping(row, sums.unwrap_or(row), width) };
                return true;
            }
        }
        if let Some(own) = &self.own {
            // SAFETY: the row was found in the table, and the input is as wide as both together.
            unsafe {
                let from = own.row(node);
                if from == usize::MAX {
                    return false;
                }
                (kernels.open_node)(own, from, row.add(width));
            }
        }
        true
    }

    fn reduce(&self, kernels: &Kernels, neighbours: &Neighbours<'_>, target: usize, sums: *mut f32) -> bool {
        let Neighbours { rows, reduce, segments } = neighbours;
        let kind = match reduce {
            Reduce::Mean => MEAN,
            Reduce::Max => MAX,
            Reduce::Gcn => WEIGHTED,
        };
        // SAFETY: `sums` has room for a row of the table.
        let values = unsafe { std::slice::from_raw_parts_mut(sums, rows.cols) };
        match (self.partial, self.accumulators) {
            (Some(partial), Some(accumulators)) if !partial.begins => {
                // SAFETY: the accumulators were checked to have this row and to be wide enough.
                unsafe {
                    let from = accumulators.row(partial.first_row + target);
                    std::ptr::copy_nonoverlapping(from, sums, rows.cols);
                }
            }
            _ => values.fill(if kind == MAX { f32::NEG_INFINITY } else { 0.0 }),
        }
        let range = segments.offsets[target] as usize..segments.offsets[target + 1] as usize;
        let args = ReduceArgs {
            rows: *rows,
            sources: segments.sources[range.clone()].as_ptr(),
            count: range.len(),
            count_ahead: segments.sources.len() - range.start,
            scales: segments.scales.map_or(std::ptr::null(), <[f32]>::as_ptr),
            num_scales: segments.scales.map_or(0, <[f32]>::len),
            sums,
        };
        // SAFETY: the sources, pages and scales are slices with these lengths, which the kernel keeps to.
        if !unsafe { (kernels.reduce_neighbours)(&args, kind) } {
            return false;
        }
        if self.partial.is_some_and(|partial| !partial.ends) {
            return true;
        }
        let degree = segments.degrees.map_or(range.len(), |degrees| degrees[target] as usize);
        match reduce {
            Reduce::Mean if degree > 1 => values.iter_mut().for_each(|value| *value /= degree as f32),
            Reduce::Max if degree == 0 => values.fill(0.0),
            Reduce::Gcn => {
                let scale = segments.scales.and_then(|scales| scales.get(self.targets[target] as usize));
                let Some(&scale) = scale else { return false };
                let own =
                    ReduceArgs { sources: &raw const self.targets[target], count: 1, count_ahead: 0, ..args };
                // SAFETY: as above, with one source.
                if !unsafe { (kernels.reduce_neighbours)(&own, kind) } {
                    return false;
                }
                for value in values.iter_mut() {
                    *value *= scale;
                }
            }
            Reduce::Mean | Reduce::Max => {}
        }
        true
    }

    fn finish(&self, kernels: &Kernels, node: u32, values: *mut f32) -> bool {
        // SAFETY: the map is a slice with its length.
        let row = unsafe { self.output.row(node) };
        if row == usize::MAX {
            return false;
        }
        let args = FinishArgs {
            values,
            bias: self
                .linear
                .bias
                .as_ref()
                .map_or(std::ptr::null(), |bias| bias.matrix().start().cast_const()),
            cols: self.linear.rows,
            normalize: self.normalize,
            relu: self.relu,
            // SAFETY: the row was found in the table.
            out: unsafe { self.output_start.add(row * self.output.row_bytes()) },
            is_bf16: self.output.is_bf16,
        };
        // SAFETY: the values and the bias are padded to whole vectors, the row in the table has as many columns, and no
        // other tile writes it.
        unsafe { (kernels.finish_node)(&args) };
        true
    }
}

fn check_segments(segments: &Segments<'_>, num_targets: usize) -> Result<(), &'static str> {
    let fits = segments.offsets.len() == num_targets + 1
        && segments.offsets.is_sorted()
        && segments.offsets.last().is_some_and(|&last| last as usize <= segments.sources.len())
        && segments.degrees.is_none_or(|degrees| degrees.len() == num_targets);
    if fits { Ok(()) } else { Err("the segments of a task do not fit its targets") }
}

impl std::fmt::Debug for Task<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Task({} targets)", self.targets.len())
    }
}
