//! What all products share: the input rows made ready for a weight, and the walk over panels and tokens.
//!
//! Phase one makes rows ready (gather, normalise, quantise), a barrier follows, phase two multiplies. A single row is
//! made ready by every worker for itself: that takes no longer than waiting for another to do it. A unit of phase
//! two is some panels times some tokens; panels come first in the numbering, so that a worker goes through many panels
//! with the same tokens in its cache. Each group of workers has units of the panels that it packed, and takes others'
//! only when its own are done.

use std::mem::MaybeUninit;

use baton_backend::{BackendError, BufferId, Norm, WeightFormat};

use super::{Step, require};
use crate::buffers::Matrix;
use crate::kernels::gemm::{MAX_PANELS, PanelArgs};
use crate::kernels::rows::NormArgs;
use crate::kernels::{Kernels, SplitKernels, SuperKernels};
use crate::pool::Worker;
use crate::quantize::{self, ActivationBlock, LANES};
use crate::scratch::Scratch;
use crate::units::{GroupUnits, Groups, Units};
use crate::weights::formats::{BLOCK, PANEL_ROWS, SPLIT_TOKENS};
use crate::weights::{PackedMatrix, Panel};

/// The most tokens of a unit: a multiple of [`LANES`].
pub const MAX_CHUNK: usize = 256;
/// Float activations of a unit's tokens should stay in the second-level cache.
pub const CHUNK_BYTES: usize = 640 << 10;
/// From this many rows for each thread on, a worker makes a whole group of interleaved rows ready: their blocks are
/// neighbours, and two cores that write neighbouring lines slow each other down.
const GROUPED_ROWS: usize = 4 * LANES;
/// Units for each thread, so that a slow one does not hold up the rest.
const UNITS_PER_THREAD: usize = 8;
/// The same where a panel's product takes long.
const PROMPT_UNITS_PER_THREAD: usize = 16;

/// Floats of one panel in a [`Tile`]: a chunk of tokens, and room to read a vector from any lane on.
pub const TILE_STRIDE: usize = (MAX_CHUNK + 1) * PANEL_ROWS;

/// The product of some panels with a chunk of tokens, `[panels][tokens, 16]`.
#[repr(align(64))]
pub struct Tile([MaybeUninit<f32>; MAX_PANELS * TILE_STRIDE]);

impl Tile {
    #[allow(clippy::large_stack_arrays)] // A step allocates nothing.
    pub fn new() -> Self {
        Self([MaybeUninit::uninit(); MAX_PANELS * TILE_STRIDE])
    }

    /// The first panel full of ones, for kernels that multiply two panels.
    pub fn ones() -> Self {
        let mut tile = Self::new();
        tile.0[..TILE_STRIDE].fill(MaybeUninit::new(1.0));
        tile
    }

    /// The results of the `index`-th panel.
    pub fn panel(&mut self, index: usize) -> *mut f32 {
        self.0[index * TILE_STRIDE..].as_mut_ptr().cast()
    }
}

/// Input rows and where they are made ready.
pub struct Product<'a> {
    pub kernels: Kernels,
    pub matrix: &'a PackedMatrix,
    pub num_tokens: usize,
    input: Matrix,
    /// Which input row each token is; its own number if `None`.
    gather: Option<&'a [u32]>,
    norm: Option<NormArgs>,
    cols: usize,
    blocks: *mut ActivationBlock,
    lanes: usize,
    /// Rows for float parts: the input itself where nothing is done to it.
    floats: Matrix,
    /// Rows have to be written to `floats`.
    copies_floats: bool,
    /// Rows are split there, and nothing else is done with them.
    split: Option<SplitKernels>,
    /// Rows in super-blocks are written there.
    supers: Option<SuperKernels>,
    scratch: &'a Scratch,
    /// One row per worker, in the order of the weight's columns.
    ordered: Matrix,
    /// One row per worker.
    rows: Matrix,
    /// Each worker has made the only row ready in `rows` and its own blocks.
    is_private: bool,
    private_blocks: *mut ActivationBlock,
    chunk: usize,
    num_panels: usize,
    panels_per_unit: usize,
    groups: &'a Groups,
    rows_per_unit: usize,
    row_units: Units,
    units: GroupUnits,
}

// SAFETY: the pointers are to buffers of the backend, which outlive the op; writers are told apart by units (rows in
// phase one) and a barrier lies between the phases.
unsafe impl Sync for Product<'_> {}

/// What a unit of phase two covers.
pub struct ProductUnit {
    pub panels: std::ops::Range<usize>,
    pub first_token: usize,
    pub num_tokens: usize,
}

/// Where the input of a product comes from.
pub struct ProductInput<'a> {
    pub buffer: BufferId,
    pub norm: Option<Norm>,
    pub gather: Option<&'a [u32]>,
    pub num_tokens: usize,
    /// The op writes to the buffer it reads.
    pub in_place: bool,
}

impl<'a> Product<'a> {
    /// `num_panels` are walked over: all, or half of them where they are taken in pairs.
    pub fn new(
        step: &'a Step<'_>,
        input: &ProductInput<'a>,
        matrix: &'a PackedMatrix,
        cols: usize,
        num_panels: usize,
    ) -> Result<Self, BackendError> {
        let num_tokens = input.num_tokens;
        let source = step.buffer(input.buffer, if input.gather.is_some() { 0 } else { num_tokens })?;
        require(source.cols == cols, "the input of a product is not as wide as its weight")?;
        if let Some(gather) = input.gather {
            require(
                gather.iter().all(|&row| (row as usize) < source.rows),
                "a row outside its buffer is gathered",
            )?;
        }
        let norm = input.norm.map(|norm| step.norm_args(&norm, cols)).transpose()?;
        let scratch = &step.backend.scratch;
        let split = step.backend.kernels.split.filter(|_| matrix.is_split);
        let copies_floats = matrix.has_floats
            && (split.is_some() || norm.is_some() || input.gather.is_some() || input.in_place);
        let floats = if copies_floats {
            let all = scratch.floats.matrix();
            let rows = if split.is_some() { num_tokens.next_multiple_of(SPLIT_TOKENS) } else { num_tokens };
            all.reshaped(rows, cols).expect("the scratch holds the largest step of the widest float weight")
        } else {
            source
        };
        let num_threads = step.backend.pool.num_threads();
        let is_private = num_tokens == 1 && num_threads > 1 && !input.in_place;
        // Panels of floats read whole rows at once, those of quants a section of each row at a time.
        let chunk = if matrix.has_floats {
            let whole = if split.is_some() || matrix.has_supers { SPLIT_TOKENS } else { LANES };
            (CHUNK_BYTES / (4 * cols).max(1)).clamp(whole, MAX_CHUNK) / whole * whole
        } else {
            MAX_CHUNK
        };
        let num_chunks = num_tokens.div_ceil(chunk);
        let per_thread = if num_tokens >= 64 { PROMPT_UNITS_PER_THREAD } else { UNITS_PER_THREAD };
        let mut panels_per_unit = (num_panels * num_chunks / (num_threads * per_thread)).clamp(1, num_panels);
        // Whole groups, unless that leaves threads without work.
        if num_panels * num_chunks >= 2 * MAX_PANELS * num_threads {
            panels_per_unit = panels_per_unit.next_multiple_of(MAX_PANELS);
        }
        let groups = step.backend.pool.groups();
        let units = GroupUnits::new(groups, |group| {
            let share = matrix.share(groups, group, num_panels);
            num_chunks * share.num_ranges * share.first.len().div_ceil(panels_per_unit)
        });
        let rows_per_unit = if num_tokens >= GROUPED_ROWS * num_threads { LANES } else { 1 };
        Ok(Self {
            kernels: step.backend.kernels,
            matrix,
            num_tokens,
            input: source,
            gather: input.gather,
            norm,
            cols,
            blocks: scratch.blocks(),
            lanes: quantize::lanes(num_tokens),
            floats,
            copies_floats,
            split,
            supers: step.backend.kernels.supers.filter(|_| matrix.has_supers),
            scratch,
            rows: scratch.rows.matrix(),
            ordered: scratch.ordered.matrix(),
            is_private,
            private_blocks: scratch.private_blocks(),
            chunk,
            num_panels,
            panels_per_unit,
            groups,
            rows_per_unit,
            row_units: Units::new(num_tokens.div_ceil(rows_per_unit)),
            units,
        })
    }

    /// Phase one: makes all rows ready. `also` is run for each row by the same worker.
    pub fn prepare(&self, worker: &Worker<'_>, also: impl Fn(usize)) {
        if let Some(split) = &self.split {
            // SAFETY: the kernels are those of this processor; `take` ends it.
            unsafe { (split.begin)() };
        }
        if self.is_private {
            self.prepare_row(worker.index, 0);
            if worker.index == 0 {
                also(0);
            }
            return;
        }
        while let Some(unit) = self.row_units.take() {
            let first = unit * self.rows_per_unit;
            for row in first..(first + self.rows_per_unit).min(self.num_tokens) {
                self.prepare_row(worker.index, row);
                also(row);
            }
        }
        worker.barrier();
    }

    fn prepare_row(&self, worker: usize, row: usize) {
        let mut source = self.input.row(self.gather.map_or(row, |gather| gather[row] as usize)).cast_const();
        let shared = self.copies_floats && !self.is_private && self.split.is_none();
        let target = if shared { self.floats.row(row) } else { self.rows.row(worker) };
        // SAFETY: rows have `cols` values (checked in `new`); the targets are this row's of `floats` and `blocks` and
        // this worker's of `rows` and `ordered`, which nobody else writes. Columns name each of `cols` columns once.
        unsafe {
            if let Some(norm) = &self.norm {
                (self.kernels.norm_row)(source, self.cols, norm, target, false);
                source = target;
            } else if self.copies_floats && self.split.is_none() {
                std::ptr::copy_nonoverlapping(source, target, self.cols);
            }
            if let Some(columns) = &self.matrix.columns {
                let ordered = self.ordered.row(worker);
                for (place, &column) in columns.iter().enumerate() {
                    *ordered.add(place) = *source.add(column as usize);
                }
                source = ordered;
            }
            if self.matrix.has_quants {
                let first = quantize::first_block(row, self.lanes, self.cols / BLOCK);
                (self.kernels.quantize_row)(source, self.cols, self.blocks(worker).add(first), self.lanes);
            }
            if let Some(split) = &self.split {
                let out = if self.is_private { target } else { self.floats.row(0) };
                (split.split_row)(source, self.cols, out, row, self.num_tiles());
            }
            if let Some(supers) = &self.supers {
                let out = self.supers(worker);
                (supers.quantize_row)(source, self.cols, out, row, self.num_tiles());
            }
        }
    }

    /// Tiles of the rows that all workers share; none where each has its own.
    fn num_tiles(&self) -> usize {
        if self.is_private { 0 } else { self.num_tokens.div_ceil(SPLIT_TOKENS) }
    }

    /// The blocks that `worker` reads.
    fn blocks(&self, worker: usize) -> *mut ActivationBlock {
        if !self.is_private {
            return self.blocks;
        }
        // SAFETY: there is a row of blocks of the widest weight for each worker.
        unsafe { self.private_blocks.add(worker * (self.rows.cols / BLOCK)) }
    }

    /// The super-blocks that `worker` reads.
    fn supers(&self, worker: usize) -> *mut u8 {
        if self.is_private { self.scratch.private_supers(worker) } else { self.scratch.supers() }
    }

    /// The next piece of phase two.
    pub fn take(&self, worker: &Worker<'_>) -> Option<ProductUnit> {
        let taken = self.units.take(worker);
        if let Some(split) = self.split.filter(|_| taken.is_none()) {
            // SAFETY: `prepare` began it.
            unsafe { (split.end)() };
        }
        taken.map(|(owner, unit)| self.unit(owner, unit))
    }

    /// What a unit of a group of workers' share is.
    fn unit(&self, owner: usize, unit: usize) -> ProductUnit {
        let share = self.matrix.share(self.groups, owner, self.num_panels);
        let units_per_range = share.first.len().div_ceil(self.panels_per_unit);
        let units_per_chunk = share.num_ranges * units_per_range;
        let (chunk, group) = (unit / units_per_chunk, unit % units_per_chunk);
        let (range, group) = (group / units_per_range, group % units_per_range);
        let first_panel = share.first.start + group * self.panels_per_unit;
        let last_panel = (first_panel + self.panels_per_unit).min(share.first.end);
        let first_token = chunk * self.chunk;
        ProductUnit {
            panels: range * share.period + first_panel..range * share.period + last_panel,
            first_token,
            num_tokens: self.chunk.min(self.num_tokens - first_token),
        }
    }

    /// The next panels of a unit that can be multiplied together: a few neighbours of one part.
    pub fn group(&self, range: &std::ops::Range<usize>) -> Option<std::ops::Range<usize>> {
        let part = self.matrix.panels[..range.end].get(range.start)?.part;
        let same = self.matrix.panels[range.clone()].iter().take_while(|panel| panel.part == part);
        Some(range.start..range.start + same.take(MAX_PANELS).count())
    }

    /// Multiplies a group of panels with a unit's tokens. The results will go to the columns of `target` from `column`
    /// on; that is only a hint.
    pub fn multiply(
        &self,
        worker: &Worker<'_>,
        panels: &[Panel],
        unit: &ProductUnit,
        tile: &mut Tile,
        target: Option<(&Matrix, usize)>,
    ) {
        let Some(panel) = panels.first() else { return };
        let part = &self.matrix.parts[panel.part as usize];
        let format: WeightFormat = part.format;
        let args = PanelArgs {
            quants: part.panel_quants(panel.index as usize),
            scales: part.panel_scales(panel.index as usize),
            quants_stride: part.quants_per_panel,
            scales_stride: part.scales_per_panel,
            num_panels: panels.len(),
            cols: self.cols,
            blocks: self.blocks(worker.index),
            lanes: self.lanes,
            floats: if self.is_private && self.copies_floats {
                self.rows.row(worker.index)
            } else {
                self.floats.row(0)
            },
            stride: self.floats.cols,
            split_tiles: self.num_tiles(),
            supers: self.supers(worker.index),
            super_tiles: self.num_tiles(),
            out_stride: TILE_STRIDE,
            target: target.map_or(std::ptr::null(), |(target, column)| {
                target.start().wrapping_add(column).cast_const().cast()
            }),
            target_stride: target.map_or(0, |(target, _)| 4 * target.cols),
        };
        let kernel = self.split.map_or_else(|| self.kernels.panel(format), |split| split.panels);
        // SAFETY: the panels follow each other in their part and have `cols` columns, all rows are ready (the barrier),
        // the tile has room for a chunk of a whole group, and the kernels are those of this processor.
        unsafe { kernel(&args, unit.first_token, unit.num_tokens, tile.panel(0)) };
    }
}

#[cfg(test)]
mod tests {
    use baton_backend::testing::{Random, random_tensor};
    use baton_backend::{Backend, StepInput, StepLimits, StepOutput, Tensor, WeightUse};

    use super::*;
    use crate::backend::{CpuBackend, CpuOptions};
    use crate::pool::Pool;

    const COLS: usize = 64;
    const MAX_TOKENS: usize = 600;

    /// A backend with workers of these groups, with the weight and its input.
    fn backend(groups: &[usize], parts: &[Tensor]) -> (CpuBackend, BufferId) {
        let options = CpuOptions { threads: Some(groups.len()), ..CpuOptions::default() };
        let mut backend = CpuBackend::new(options).expect("starts");
        backend.pool = Pool::with_groups(groups).expect("threads");
        let limits = StepLimits {
            max_tokens: MAX_TOKENS,
            max_seqs: 1,
            max_logit_rows: 1,
            max_samples: 1,
            max_model_len: MAX_TOKENS,
            vocab_size: 1,
        };
        backend.set_limits(&limits).expect("limits");
        backend.load_weight(parts, WeightUse::Linear).expect("loads");
        let input = backend.create_buffer(MAX_TOKENS, COLS).expect("creates");
        (backend, input)
    }

    /// The group of each panel in a product that walks over `1 / halves` of them, after checking that the units of all groups
    /// are every panel with every token once.
    fn groups_of_panels(groups: &[usize], parts: &[Tensor], num_tokens: usize, halves: usize) -> Vec<usize> {
        let (mut backend, buffer) = backend(groups, parts);
        let (step_input, mut output) = (StepInput::default(), StepOutput::default());
        let step = Step::new(&mut backend, &step_input, &mut output);
        let input = ProductInput { buffer, norm: None, gather: None, num_tokens, in_place: false };
        let matrix = step.backend.weights[0].packed.as_ref().expect("packed");
        let num_panels = matrix.panels.len() / halves;
        let product = Product::new(&step, &input, matrix, COLS, num_panels).expect("valid");
        let mut times = vec![0; num_panels * num_tokens];
        let mut group_of = vec![usize::MAX; num_panels];
        for group in 0..step.backend.pool.groups().num_groups() {
            let mut last_token = 0;
            for number in 0..product.units.len_of(group) {
                let unit = product.unit(group, number);
                assert!(!unit.panels.is_empty() && unit.first_token >= last_token, "panels come first");
                last_token = unit.first_token;
                for panel in unit.panels {
                    assert!(group_of[panel] == usize::MAX || group_of[panel] == group, "panel {panel}");
                    group_of[panel] = group;
                    for token in unit.first_token..unit.first_token + unit.num_tokens {
                        times[panel * num_tokens + token] += 1;
                    }
                }
            }
        }
        assert!(times.iter().all(|&times| times == 1), "{num_tokens} tokens on {groups:?}");
        group_of
    }

    #[test]
    fn panels_are_multiplied_where_they_were_packed() {
        let mut random = Random::new(3);
        let mut tensor = |format, rows| random_tensor(format, rows, COLS, 1.0, &mut random);
        let cases = [
            vec![tensor(WeightFormat::Q8_0, 960)],
            vec![
                tensor(WeightFormat::BF16, 16),
                tensor(WeightFormat::Q4_0, 500),
                tensor(WeightFormat::Q8_0, 300),
            ],
            // An odd number of rows does not pair.
            vec![tensor(WeightFormat::F16, 400), tensor(WeightFormat::F16, 33)],
            vec![tensor(WeightFormat::Q8_0, 2)],
        ];
        for (parts, groups) in cases.iter().flat_map(|parts| {
            [&[0, 0][..], &[0, 1], &[1, 0, 0, 1], &[0, 0, 0, 4], &[0, 1, 2, 3, 4]]
                .map(|groups| (parts, groups))
        }) {
            let (backend, _) = backend(groups, parts);
            let matrix = backend.weights[0].packed.as_ref().expect("packed");
            let packed_on: Vec<usize> = matrix.groups_of_panels(&backend.pool);
            let rows: usize = parts.iter().map(Tensor::rows).sum();
            for num_tokens in [1, 7, MAX_TOKENS] {
                assert_eq!(groups_of_panels(groups, parts, num_tokens, 1), packed_on, "plain on {groups:?}");
                if rows.is_multiple_of(2) {
                    let pairs = groups_of_panels(groups, parts, num_tokens, 2);
                    let (gate, up) = packed_on.split_at(pairs.len());
                    assert_eq!((gate, up), (&pairs[..], &pairs[..]), "gated on {groups:?}");
                }
            }
        }
    }
}
