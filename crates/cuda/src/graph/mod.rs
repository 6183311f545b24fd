//! [`CudaGraph`]: the layers of graph networks on a GPU.
//!
//! A task is three launches: neighbours and own rows into one matrix (`graph.cu`), the product by cuBLASLt in f32, and the end
//! of the layer. Its arrays (targets, edges, pages) go up in one copy. Blocks move on a stream of their own, beside the tasks.

mod arrays;
mod tables;

use std::time::Instant;

use baton_backend::graph::{
    ConvTask, GraphDevice, GraphDeviceInfo, GraphStepTimes, HostRows, LinearId, Moves, Reduce, RowDtype,
    RowSource, TableId,
};
use baton_backend::{BackendError, Precision, Tensor};

use crate::compile::{Unit, architecture, cubin};
use crate::gemm::{Gemm, Matrices, Shape};
use crate::gpu::{DeviceMemory, Event, Function, Gpu, Stream};
use crate::kernels::Module;
use crate::options::CudaOptions;
use crate::probe::{StartError, look_for_gemm, probe};
use arrays::{Arrays, Place};
use tables::{CHUNK_BYTES, RowsParams, Staging, Table, Tables};

const THREADS: u32 = 128;
/// Rows of every product, whatever a task has: one algorithm, so that a row has the same bits however the work is cut.
const PRODUCT_ROWS: usize = 4096;

#[repr(C)]
struct ReduceParams {
    neighbours: RowsParams,
    own: RowsParams,
    targets: u64,
    offsets: u64,
    sources: u64,
    degrees: u64,
    scales: u64,
    accumulators: u64,
    output: u64,
    accumulator_cols: u32,
    first_row: u32,
    kind: u32,
    begins: u32,
    ends: u32,
    padding: u32,
}

#[repr(C)]
struct FinishParams {
    values: u64,
    bias: u64,
    targets: u64,
    output: RowsParams,
    relu: u32,
    normalize: u32,
}

#[repr(C)]
struct GatherParams {
    rows: RowsParams,
    nodes: u64,
    output: u64,
}

#[derive(Debug)]
struct Linear {
    rows: usize,
    cols: usize,
    weight: DeviceMemory,
    bias: Option<DeviceMemory>,
}

#[derive(Debug)]
struct Functions {
    reduce: Function,
    finish: Function,
    gather: Function,
    upload: Function,
}

/// Timed points of a step.
#[derive(Debug)]
struct Clock {
    moves: [Event; 4],
    tasks: [Event; 2],
}

/// The device.
#[derive(Debug)]
pub struct CudaGraph {
    // Dropped in this order: the GPU with its context last.
    functions: Functions,
    _module: Module,
    gemm: Gemm,
    linears: Vec<Linear>,
    tables: Tables,
    accumulators: Option<(DeviceMemory, usize, usize)>,
    arrays: Arrays,
    staging: [Staging; 2],
    input: DeviceMemory,
    output: DeviceMemory,
    moved: Event,
    clock: Clock,
    copies: Stream,
    gpu: Gpu,
}

/// What a task needs of its arrays.
struct Placed {
    targets: Place,
    offsets: Place,
    sources: Place,
    /// Edges before the first one of the task.
    first_edge: u32,
    degrees: Option<Place>,
    scales: Option<Place>,
    neighbour_pages: Option<Place>,
    own_pages: Option<Place>,
    output_pages: Option<Place>,
}

fn wrong(cause: &str) -> BackendError {
    BackendError::Device { cause: cause.to_owned() }
}

impl CudaGraph {
    pub fn new(options: &CudaOptions) -> Result<Self, StartError> {
        let devices = probe()?;
        let count = devices.len();
        let properties = devices.into_iter().nth(options.ordinal);
        let properties = properties.ok_or_else(|| BackendError::Unsupported {
            what: format!("cuda:{}: there are {count} devices", options.ordinal),
        })?;
        look_for_gemm()?;
        let cache_dir = options.cache_dir.as_deref();
        let code = cubin(Unit::Graph, &architecture(properties.capability), cache_dir)?;
        let gpu = Gpu::new(properties)?;
        gpu.bind()?;
        let module = Module::load(&code)?;
        let functions = Functions {
            reduce: module.function("graph_reduce")?,
            finish: module.function("graph_finish")?,
            gather: module.function("graph_gather")?,
            upload: module.function("graph_upload")?,
        };
        let timed = || Event::timed();
        Ok(Self {
            functions,
            _module: module,
            gemm: Gemm::new(&gpu, Precision::Full, cache_dir)?,
            linears: Vec::new(),
            tables: Tables::default(),
            accumulators: None,
            arrays: Arrays::new(&gpu)?,
            staging: [Staging::new(&gpu)?, Staging::new(&gpu)?],
            input: gpu.allocate(0, "inputs of a layer")?,
            output: gpu.allocate(0, "outputs of a layer")?,
            moved: Event::new()?,
            clock: Clock { moves: [timed()?, timed()?, timed()?, timed()?], tasks: [timed()?, timed()?] },
            copies: gpu.new_stream()?,
            gpu,
        })
    }

    /// Checks a task and puts its arrays among those that go up.
    fn place(&mut self, task: &ConvTask<'_>) -> Result<Placed, BackendError> {
        let linear =
            self.linears.get(task.linear.0 as usize).ok_or_else(|| wrong("a task has no such weight"))?;
        let mut cols = 0;
        let (arrays, gpu) = (&mut self.arrays, &self.gpu);
        let mut placed = Placed {
            targets: arrays.words(gpu, task.targets)?,
            offsets: Place::default(),
            sources: Place::default(),
            first_edge: 0,
            degrees: None,
            scales: None,
            neighbour_pages: None,
            own_pages: None,
            output_pages: arrays.pages(gpu, &task.output.map)?,
        };
        if let Some((source, reduce, segments)) = &task.neighbours {
            let (offsets, sources) = (segments.offsets, segments.sources);
            let fits = offsets.len() == task.targets.len() + 1
                && offsets.is_sorted()
                && offsets[offsets.len() - 1] as usize <= sources.len()
                && segments.degrees.is_none_or(|degrees| degrees.len() == task.targets.len())
                && (*reduce != Reduce::Gcn || segments.scales.is_some());
            if !fits {
                return Err(wrong("the segments of a task do not fit its targets"));
            }
            let (first, last) = (offsets[0], offsets[offsets.len() - 1]);
            let edges = &sources[first as usize..last as usize];
            self.tables.check_read(source, edges)?;
            if let Some(scales) = segments.scales {
                let nodes = edges.iter().chain(task.targets);
                if nodes.copied().any(|node| node as usize >= scales.len()) {
                    return Err(wrong("a node of a task has no scale"));
                }
                placed.scales = Some(arrays.floats(gpu, scales)?);
                self.tables.check(source, task.targets)?;
            }
            placed.offsets = arrays.words(gpu, offsets)?;
            placed.sources = arrays.words(gpu, edges)?;
            placed.first_edge = first;
            placed.degrees = segments.degrees.map(|degrees| arrays.words(gpu, degrees)).transpose()?;
            placed.neighbour_pages = arrays.pages(gpu, &source.map)?;
            cols += self.tables.get(source.table)?.cols;
        }
        if let Some(own) = &task.own {
            self.tables.check(own, task.targets)?;
            placed.own_pages = arrays.pages(gpu, &own.map)?;
            cols += self.tables.get(own.table)?.cols;
        }
        self.tables.check(&task.output, task.targets)?;
        if cols != linear.cols || self.tables.get(task.output.table)?.cols != linear.rows {
            return Err(wrong("the tables of a task do not fit its weight"));
        }
        if let Some(partial) = task.partial {
            let width =
                task.neighbours.as_ref().map(|(source, _, _)| self.tables.get(source.table).map(|t| t.cols));
            let rows = self.accumulators.as_ref().map_or(0, |(_, rows, _)| *rows);
            let wide = self.accumulators.as_ref().map_or(0, |(_, _, cols)| *cols);
            let fits = partial.first_row.checked_add(task.targets.len()).is_some_and(|end| end <= rows);
            if !fits || width.transpose()?.is_none_or(|width| width > wide) {
                return Err(wrong("a cut task has no accumulators"));
            }
        }
        Ok(placed)
    }

    fn launch_task(&mut self, task: &ConvTask<'_>, placed: &Placed) -> Result<(), BackendError> {
        let linear = &self.linears[task.linear.0 as usize];
        let num_targets = task.targets.len();
        let at = |place: Option<Place>| place.map_or(0, |place| self.arrays.address(place));
        let none = RowsParams::default();
        let neighbours = match &task.neighbours {
            Some((source, _, _)) => {
                self.tables.get(source.table)?.params(&source.map, at(placed.neighbour_pages))
            }
            None => none,
        };
        let own = match &task.own {
            Some(own) => self.tables.get(own.table)?.params(&own.map, at(placed.own_pages)),
            None => none,
        };
        let kind = match task.neighbours.as_ref().map(|(_, reduce, _)| *reduce) {
            Some(Reduce::Max) => 1,
            Some(Reduce::Gcn) => 2,
            Some(Reduce::Mean) | None => 0,
        };
        let partial = task.partial;
        let sources = at(Some(placed.sources)).wrapping_sub(4 * u64::from(placed.first_edge));
        let accumulators = self.accumulators.as_ref().filter(|_| partial.is_some());
        let reduce = ReduceParams {
            neighbours,
            own,
            targets: at(Some(placed.targets)),
            offsets: at(Some(placed.offsets)),
            sources,
            degrees: at(placed.degrees),
            scales: at(placed.scales),
            accumulators: accumulators.map_or(0, |(memory, _, _)| memory.address()),
            output: self.input.address(),
            accumulator_cols: accumulators.map_or(0, |(_, _, cols)| *cols as u32),
            first_row: partial.map_or(0, |partial| partial.first_row as u32),
            kind,
            begins: u32::from(partial.is_none_or(|partial| partial.begins)),
            ends: u32::from(partial.is_none_or(|partial| partial.ends)),
            padding: 0,
        };
        let grid = (num_targets as u32, 1);
        // SAFETY: every node, page and row of the task was checked; the workspaces are large enough for it.
        unsafe { self.gpu.launch(self.functions.reduce, grid, THREADS, 0, &reduce)? };
        if partial.is_some_and(|partial| !partial.ends) {
            return Ok(());
        }
        let alignment = if linear.rows.is_multiple_of(4) { 16 } else { 4 };
        let shape = Shape {
            m: PRODUCT_ROWS,
            n: linear.rows,
            k: linear.cols,
            output_stride: linear.rows,
            is_f32: true,
            is_fp8: false,
            output_alignment: alignment,
        };
        for first in (0..num_targets).step_by(PRODUCT_ROWS) {
            let matrices = Matrices {
                weight: linear.weight.address(),
                input: self.input.address() + 4 * (first * linear.cols) as u64,
                output: self.output.address() + 4 * (first * linear.rows) as u64,
                scales: None,
            };
            // SAFETY: the workspaces hold a whole number of such products.
            unsafe { self.gemm.multiply(&self.gpu, shape, matrices, false, None)? };
        }
        let finish = FinishParams {
            values: self.output.address(),
            bias: linear.bias.as_ref().map_or(0, DeviceMemory::address),
            targets: at(Some(placed.targets)),
            output: self.tables.get(task.output.table)?.params(&task.output.map, at(placed.output_pages)),
            relu: u32::from(task.relu),
            normalize: u32::from(task.normalize),
        };
        // SAFETY: as above.
        unsafe { self.gpu.launch(self.functions.finish, grid, THREADS, 0, &finish) }
    }

    /// Workspaces for the largest task.
    fn reserve(&mut self, tasks: &[ConvTask<'_>]) -> Result<(), BackendError> {
        let linears = &self.linears;
        let largest = |size: fn(&Linear) -> usize| {
            let of_task = |task: &ConvTask<'_>| {
                let rows = task.targets.len().next_multiple_of(PRODUCT_ROWS);
                linears.get(task.linear.0 as usize).map_or(0, |linear| 4 * rows * size(linear))
            };
            tasks.iter().map(of_task).max().unwrap_or(0)
        };
        let (input, output) = (largest(|linear| linear.cols), largest(|linear| linear.rows));
        if input > self.input.bytes() {
            self.input = self.gpu.allocate(input, "inputs of a layer")?;
        }
        if output > self.output.bytes() {
            self.output = self.gpu.allocate(output, "outputs of a layer")?;
        }
        Ok(())
    }

    fn start_moves(&mut self, moves: &Moves, which: usize) -> Result<(), BackendError> {
        self.clock.moves[2 * which].record_on(self.copies)?;
        self.tables.swap(self.copies, moves)?;
        self.staging[which].upload(
            &self.gpu,
            self.copies,
            self.functions.upload,
            &self.tables,
            &moves.uploads,
        )?;
        self.clock.moves[2 * which + 1].record_on(self.copies)
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            self.copies.destroy();
        }
    }
}

impl GraphDevice for CudaGraph {
    fn info(&self) -> GraphDeviceInfo {
        GraphDeviceInfo {
            name: format!("cuda:{}", self.gpu.properties.ordinal),
            description: self.gpu.properties.name.clone(),
            free_bytes: self.gpu.free_bytes(),
            reads_host_memory: false,
        }
    }

    fn load_linear(&mut self, weight: &Tensor, bias: Option<&[f32]>) -> Result<LinearId, BackendError> {
        let (rows, cols) = (weight.rows(), weight.cols());
        if rows == 0 || cols == 0 || bias.is_some_and(|bias| bias.len() != rows) {
            return Err(BackendError::Unsupported { what: format!("a weight of {rows} x {cols}") });
        }
        let mut values = vec![0.0; rows * cols];
        for (row, target) in values.chunks_exact_mut(cols).enumerate() {
            weight.dequantize_row(row, target);
        }
        let weight = self.staging[0].load(&self.gpu, &values, "a weight")?;
        let bias = bias.map(|bias| self.staging[0].load(&self.gpu, bias, "a bias")).transpose()?;
        self.linears.push(Linear { rows, cols, weight, bias });
        Ok(LinearId(self.linears.len() as u32 - 1))
    }

    fn create_table(
        &mut self,
        device_rows: usize,
        host_rows: usize,
        cols: usize,
        dtype: RowDtype,
    ) -> Result<TableId, BackendError> {
        let table = Table::new(&self.gpu, device_rows, host_rows, cols, dtype)?;
        Ok(self.tables.add(table))
    }

    fn adopt_rows(&mut self, rows: HostRows) -> Result<TableId, BackendError> {
        let table = Table::new(&self.gpu, rows.rows(), 0, rows.cols(), rows.dtype())?;
        for staging in &mut self.staging {
            staging.reserve(&self.gpu, table.bytes().min(CHUNK_BYTES))?;
        }
        tables::fill(&self.staging, self.copies, &table, &rows)?;
        Ok(self.tables.add(table))
    }

    fn drop_table(&mut self, table: TableId) {
        self.tables.remove(table);
    }

    fn create_accumulators(&mut self, rows: usize, cols: usize) -> Result<(), BackendError> {
        let memory = self.gpu.allocate(4 * rows * cols, "sums of cut tasks")?;
        self.accumulators = Some((memory, rows, cols));
        Ok(())
    }

    fn run(
        &mut self,
        before: &Moves,
        tasks: &[ConvTask<'_>],
        beside: &Moves,
    ) -> Result<GraphStepTimes, BackendError> {
        self.gpu.bind()?;
        let start = Instant::now();
        self.start_moves(before, 0)?;
        self.moved.record_on(self.copies)?;
        self.gpu.stream.wait_for(&self.moved)?;
        self.reserve(tasks)?;
        self.arrays.clear();
        let placed = tasks.iter().map(|task| self.place(task)).collect::<Result<Vec<_>, _>>()?;
        self.arrays.upload(&self.gpu)?;
        let planning_seconds = start.elapsed().as_secs_f64();
        self.clock.tasks[0].record(&self.gpu)?;
        for (task, placed) in tasks.iter().zip(&placed) {
            self.launch_task(task, placed)?;
        }
        self.clock.tasks[1].record(&self.gpu)?;
        self.start_moves(beside, 1)?;
        self.copies.synchronize()?;
        self.gpu.synchronize()?;
        let [first, first_end, second, second_end] = &self.clock.moves;
        let moving = first_end.since(first)? + second_end.since(second)?;
        let computing = self.clock.tasks[1].since(&self.clock.tasks[0])?;
        // Edges and pages on their way up are moving as well.
        let moving_seconds = moving.as_secs_f64() + planning_seconds;
        Ok(GraphStepTimes { moving_seconds, computing_seconds: computing.as_secs_f64() })
    }

    fn read_rows(
        &mut self,
        source: RowSource<'_>,
        nodes: &[u32],
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        self.gpu.bind()?;
        self.tables.check(&source, nodes)?;
        let cols = self.tables.get(source.table)?.cols;
        if nodes.len().checked_mul(cols) != Some(out.len()) {
            return Err(wrong("rows are read into memory of another size"));
        }
        if nodes.is_empty() {
            return Ok(());
        }
        if 4 * out.len() > self.output.bytes() {
            self.output = self.gpu.allocate(4 * out.len(), "outputs of a layer")?;
        }
        self.arrays.clear();
        let place = self.arrays.words(&self.gpu, nodes)?;
        let pages = self.arrays.pages(&self.gpu, &source.map)?;
        self.arrays.upload(&self.gpu)?;
        let pages = pages.map_or(0, |pages| self.arrays.address(pages));
        let params = GatherParams {
            rows: self.tables.get(source.table)?.params(&source.map, pages),
            nodes: self.arrays.address(place),
            output: self.output.address(),
        };
        // SAFETY: the nodes were checked, and the output is large enough.
        unsafe { self.gpu.launch(self.functions.gather, (nodes.len() as u32, 1), THREADS, 0, &params)? };
        self.staging[0].read(&self.gpu, &self.output, out)
    }
}
