//! [`CpuGraph`]: the layers of graph networks on threads and SIMD.
//!
//! A task is cut into tiles of a few targets. A worker reduces the neighbours of a tile into its own scratch, which stays in
//! its second-level cache, multiplies it there and writes the finished rows: nothing of the size of the edges is ever stored.
//! Moves are units of the same kind, so that swapping runs beside the computing.

mod tables;
mod tile;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use baton_backend::graph::{
    ConvTask, GraphDevice, GraphDeviceInfo, GraphStepTimes, HostRows, LinearId, Moves, RowDtype, RowSource,
    TableId,
};
use baton_backend::{BackendError, Tensor};

use crate::backend::{CpuOptions, processor_name};
use crate::buffers::{Buffer, Matrix, Shared};
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::memory::SystemMemory;
use crate::pool::Pool;
use crate::topology::Machine;
use crate::units::Units;
use crate::weights::formats::PANEL_ROWS;
use tables::{Move, Table, Tables};
use tile::{Task, TileScratch};

/// Targets of a tile: enough rows for the product to reuse what it loads, few enough for the second-level cache.
const TILE_TARGETS: usize = 48;
/// Rows that are read back by one unit.
const READ_ROWS: usize = 256;

/// A weight in panels of 16 outputs, `[panels][in][16]`, and its bias.
#[derive(Debug)]
pub(crate) struct GraphLinear {
    rows: usize,
    cols: usize,
    panels: Buffer,
    bias: Option<Buffer>,
}

/// The device. Results depend neither on the number of threads nor on how the work is cut, to the last bit.
#[derive(Debug)]
pub struct CpuGraph {
    isa: Isa,
    kernels: Kernels,
    pool: Pool,
    linears: Vec<GraphLinear>,
    tables: Tables,
    accumulators: Option<Buffer>,
    scratch: Vec<TileScratch>,
}

impl CpuGraph {
    pub fn new(options: CpuOptions) -> Result<Self, BackendError> {
        let isa = Isa::choose(options.isa)?;
        let num_threads = options.threads.unwrap_or_else(|| Machine::read().default_threads());
        if num_threads == 0 || num_threads > 4096 {
            return Err(BackendError::Unsupported { what: format!("{num_threads} threads") });
        }
        let pool = Pool::new(num_threads, options.pin)
            .map_err(|error| BackendError::Device { cause: format!("cannot start threads: {error}") })?;
        let scratch = (0..num_threads).map(|_| TileScratch::new(0, 0)).collect::<Result<_, _>>()?;
        Ok(Self {
            isa,
            kernels: Kernels::new(isa),
            pool,
            linears: Vec::new(),
            tables: Tables::default(),
            accumulators: None,
            scratch,
        })
    }

    /// Runs the moves on all threads; how long it took.
    fn run_moves(&self, moves: &[Move]) -> f64 {
        if moves.is_empty() {
            return 0.0;
        }
        let start = Instant::now();
        let units = Units::new(moves.len());
        self.pool.run(&|_| {
            while let Some(unit) = units.take() {
                moves[unit].run();
            }
        });
        start.elapsed().as_secs_f64()
    }

    fn accumulators(&self) -> Option<Matrix> {
        self.accumulators.as_ref().map(Buffer::matrix)
    }
}

fn device_error(cause: &str) -> BackendError {
    BackendError::Device { cause: cause.to_owned() }
}

impl GraphDevice for CpuGraph {
    fn info(&self) -> GraphDeviceInfo {
        GraphDeviceInfo {
            name: "cpu".to_owned(),
            description: format!("{}, {} threads, {}", processor_name(), self.pool.num_threads(), self.isa),
            free_bytes: SystemMemory::read().free_bytes,
            reads_host_memory: true,
        }
    }

    fn load_linear(&mut self, weight: &Tensor, bias: Option<&[f32]>) -> Result<LinearId, BackendError> {
        let (rows, cols) = (weight.rows(), weight.cols());
        if rows == 0 || cols == 0 || bias.is_some_and(|bias| bias.len() != rows) {
            return Err(BackendError::Unsupported { what: format!("a weight of {rows} x {cols}") });
        }
        let num_panels = rows.div_ceil(PANEL_ROWS);
        let panels = Buffer::new(num_panels * cols, PANEL_ROWS, "a weight")?;
        let matrix = panels.matrix();
        let mut values = vec![0.0; cols];
        for row in 0..rows {
            weight.dequantize_row(row, &mut values);
            for (col, value) in values.iter().enumerate() {
                // SAFETY: the panel of the row has `cols` rows of 16 values.
                unsafe {
                    *matrix.row(row / PANEL_ROWS * cols + col).add(row % PANEL_ROWS) = *value;
                }
            }
        }
        let bias = bias.map(Buffer::from_values).transpose()?;
        for scratch in &mut self.scratch {
            scratch.reserve(cols, num_panels * PANEL_ROWS)?;
        }
        self.linears.push(GraphLinear { rows, cols, panels, bias });
        Ok(LinearId(self.linears.len() as u32 - 1))
    }

    fn create_table(
        &mut self,
        device_rows: usize,
        host_rows: usize,
        cols: usize,
        dtype: RowDtype,
    ) -> Result<TableId, BackendError> {
        self.tables.add(Table::zeroed(device_rows, host_rows, cols, dtype)?)
    }

    fn adopt_rows(&mut self, rows: HostRows) -> Result<TableId, BackendError> {
        self.tables.add(Table::adopted(rows))
    }

    fn drop_table(&mut self, table: TableId) {
        self.tables.remove(table);
    }

    fn create_accumulators(&mut self, rows: usize, cols: usize) -> Result<(), BackendError> {
        self.accumulators = Some(Buffer::new(rows, cols, "sums of cut tasks")?);
        Ok(())
    }

    fn run(
        &mut self,
        before: &Moves,
        tasks: &[ConvTask<'_>],
        beside: &Moves,
    ) -> Result<GraphStepTimes, BackendError> {
        let mut moving_seconds = self.run_moves(&self.tables.moves(before)?);
        let moves = self.tables.moves(beside)?;
        let tasks: Vec<Task<'_>> = tasks
            .iter()
            .map(|task| Task::new(task, &self.tables, &self.linears, self.accumulators()))
            .collect::<Result<_, _>>()?;
        let start = Instant::now();
        let mut tiles = Vec::new();
        for (number, task) in tasks.iter().enumerate() {
            tiles.extend((0..task.num_targets()).step_by(TILE_TARGETS).map(|first| (number, first)));
        }
        let units = Units::new(moves.len() + tiles.len());
        let (is_valid, moving_nanos) = (AtomicBool::new(true), AtomicU64::new(0));
        let scratch: Vec<_> = self.scratch.iter().map(TileScratch::views).collect();
        // SAFETY: each worker uses the scratch of its own number alone; tiles write different rows.
        let shared = unsafe { Shared::new((&tasks, &scratch)) };
        self.pool.run(&|worker| {
            let (tasks, scratch) = shared.get();
            while let Some(unit) = units.take() {
                if let Some(copy) = moves.get(unit) {
                    let start = Instant::now();
                    copy.run();
                    moving_nanos.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
                    continue;
                }
                let (task, first) = tiles[unit - moves.len()];
                let count = TILE_TARGETS.min(tasks[task].num_targets() - first);
                if !tasks[task].run_tile(&self.kernels, first, count, &scratch[worker.index]) {
                    is_valid.store(false, Ordering::Relaxed);
                }
            }
        });
        let beside_seconds = moving_nanos.into_inner() as f64 * 1e-9 / self.pool.num_threads() as f64;
        moving_seconds += beside_seconds;
        if !is_valid.into_inner() {
            return Err(device_error("a task names a node that has no row"));
        }
        let computing_seconds = (start.elapsed().as_secs_f64() - beside_seconds).max(0.0);
        Ok(GraphStepTimes { moving_seconds, computing_seconds })
    }

    fn read_rows(
        &mut self,
        source: RowSource<'_>,
        nodes: &[u32],
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let rows = self.tables.rows(&source)?;
        let len = nodes.len().checked_mul(rows.cols);
        if len != Some(out.len()) {
            return Err(device_error("rows are read into memory of another size"));
        }
        let units = Units::new(nodes.len().div_ceil(READ_ROWS));
        let is_valid = AtomicBool::new(true);
        // SAFETY: units write different rows of `out`.
        let shared = unsafe { Shared::new((rows, out.as_mut_ptr())) };
        self.pool.run(&|_| {
            let (rows, out) = shared.get();
            while let Some(unit) = units.take() {
                for i in unit * READ_ROWS..((unit + 1) * READ_ROWS).min(nodes.len()) {
                    // SAFETY: `out` has a row for each node, and the row read was found in the table.
                    unsafe {
                        let row = rows.row(nodes[i]);
                        if row == usize::MAX {
                            is_valid.store(false, Ordering::Relaxed);
                            continue;
                        }
                        (self.kernels.open_node)(rows, row, out.add(i * rows.cols));
                    }
                }
            }
        });
        if is_valid.into_inner() { Ok(()) } else { Err(device_error("a node that is read has no row")) }
    }
}

#[cfg(test)]
mod tests {
    use baton_backend::graph::testing::check_device;

    use super::*;

    #[test]
    fn agrees_with_the_oracle() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for threads in [1, 3] {
                let options = CpuOptions { threads: Some(threads), isa: Some(isa), ..CpuOptions::default() };
                check_device(&mut || Box::new(CpuGraph::new(options).expect("starts")));
            }
        }
    }

    #[test]
    fn a_node_without_a_row_is_an_error() {
        let mut device =
            CpuGraph::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).expect("starts");
        let table = device.create_table(8, 0, 4, RowDtype::F32).expect("a table");
        let pages = [0, u32::MAX];
        let map = baton_backend::graph::RowMap::Pages { pages: &pages, shift: 2 };
        let mut out = [0.0; 4];
        for node in [4, 8, u32::MAX] {
            let error = device.read_rows(RowSource { table, map }, &[node], &mut out).expect_err("no row");
            assert!(error.to_string().contains("has no row"), "{error}");
        }
        device.drop_table(table);
        assert!(device.read_rows(RowSource { table, map }, &[0], &mut out).is_err());
    }
}
