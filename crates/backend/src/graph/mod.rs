//! What a device must do for a graph network: tables of rows, and one fused op over them.
//!
//! A layer of a graph network is the same op whatever its kind: reduce the rows of a node's neighbours, put the node's
//! own row beside them, multiply, finish ([`ConvTask`]). Rows lie in tables that the engine pages: a map from nodes to
//! rows ([`RowMap`]) is to a table what the block table of a sequence is to the KV cache. The arrays of a step differ from
//! those of a token step in everything but the block moves, so it is a trait beside [`crate::Backend`] and not a part of it.
//!
//! Not here: any real kernel (`cpu`, `cuda`), which nodes are computed when, what is kept (`graph`).

mod reference;
mod rows;
pub mod testing;

pub use reference::ReferenceGraph;
pub use rows::{HostRows, RowDtype, RowValues};

use crate::{BackendError, BlockCopy, Tensor};

/// A table of rows of one width, some of them on the device and some in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TableId(pub u32);

/// A weight with its bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearId(pub u32);

/// What the device is, for logs and the memory plan.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphDeviceInfo {
    /// As users name it in `--device`: `cpu`, `cuda:0`.
    pub name: String,
    /// For people.
    pub description: String,
    pub free_bytes: u64,
    /// It computes on host memory as fast as on its own, so that features are read where they are and need no cache.
    pub reads_host_memory: bool,
}

/// How the rows of a node's neighbours become one. Without neighbours all give zeros, as PyTorch Geometric's do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduce {
    Mean,
    Max,
    /// `scale[i] · (Σ scale[j] · x[j] + scale[i] · x[i])`: GCN's symmetric normalisation with a loop at each node.
    Gcn,
}

/// Where the rows of nodes are in a table.
#[derive(Clone, Copy, Debug)]
pub enum RowMap<'a> {
    /// Node `n` is row `n`.
    Identity,
    /// Node `n` is row `pages[n / size] * size + n % size`, where `size = 1 << shift`.
    Pages { pages: &'a [u32], shift: u32 },
}

impl RowMap<'_> {
    pub fn row(&self, node: u32) -> usize {
        match self {
            Self::Identity => node as usize,
            Self::Pages { pages, shift } => {
                let page = pages[(node >> shift) as usize] as usize;
                (page << shift) + (node as usize & ((1 << shift) - 1))
            }
        }
    }
}

/// Rows of a table by node.
#[derive(Clone, Copy, Debug)]
pub struct RowSource<'a> {
    pub table: TableId,
    pub map: RowMap<'a>,
}

/// Whether the sums of a task are all of its neighbours', or go on from and to other tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partial {
    /// Row of the accumulators that the first target has; the others follow.
    pub first_row: usize,
    /// The sums begin here; else they go on from what an earlier task left.
    pub begins: bool,
    /// The node is finished here; else the sums are left for a later task and no row is written.
    pub ends: bool,
}

/// The nodes of a segment and their edges.
#[derive(Clone, Copy, Debug)]
pub struct Segments<'a> {
    /// `[targets + 1]`, into `sources`: target `i` has `sources[offsets[i]..offsets[i + 1]]`.
    pub offsets: &'a [u32],
    pub sources: &'a [u32],
    /// Neighbours of each target in all tasks together, where they are cut into several. Else the offsets tell.
    pub degrees: Option<&'a [u32]>,
    /// Of each node; for [`Reduce::Gcn`].
    pub scales: Option<&'a [f32]>,
}

/// `output[t] = finish(weight · [reduce(neighbours of t) ; own row of t] + bias)` for some targets `t`.
///
/// Rows are reduced in f32, in the order of the sources with one sum for each column, so that a cut into several tasks changes
/// no bit. No row that the tasks of a step write is read by the same step.
#[derive(Clone, Copy, Debug)]
pub struct ConvTask<'a> {
    /// Columns `[0, width)` of the input.
    pub neighbours: Option<(RowSource<'a>, Reduce, Segments<'a>)>,
    /// The columns after them.
    pub own: Option<RowSource<'a>>,
    /// Nodes.
    pub targets: &'a [u32],
    pub partial: Option<Partial>,
    pub linear: LinearId,
    pub relu: bool,
    /// Divides each row by its Euclidean norm, or by 1e-12 where that is larger.
    pub normalize: bool,
    pub output: RowSource<'a>,
}

/// Whole blocks of rows between the tiers of some tables, and rows from outside.
#[derive(Clone, Debug, Default)]
pub struct Moves {
    /// Blocks of `block_rows` rows of each of `tables`.
    pub block_rows: usize,
    pub tables: Vec<TableId>,
    pub swap_out: Vec<BlockCopy>, // device → host
    pub swap_in: Vec<BlockCopy>,  // host → device
    /// Rows of `(table, values)` to rows of the device: `(from, to)`.
    pub uploads: Vec<Upload>,
}

impl Moves {
    pub fn is_empty(&self) -> bool {
        self.swap_out.is_empty() && self.swap_in.is_empty() && self.uploads.is_empty()
    }

    pub fn clear(&mut self) {
        self.swap_out.clear();
        self.swap_in.clear();
        self.uploads.clear();
    }
}

/// Input rows on their way into a table.
#[derive(Clone, Debug)]
pub struct Upload {
    pub table: TableId,
    pub values: HostRows,
    /// `(row of values, row of the table)`.
    pub rows: Vec<(u32, u32)>,
}

/// How long a step took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GraphStepTimes {
    pub moving_seconds: f64,
    pub computing_seconds: f64,
}

/// A device with weights and tables.
pub trait GraphDevice: Send {
    fn info(&self) -> GraphDeviceInfo;

    /// `[out, in]` of f32, f16 or bf16, and `[out]`.
    fn load_linear(&mut self, weight: &Tensor, bias: Option<&[f32]>) -> Result<LinearId, BackendError>;
    /// Rows of both tiers, with unspecified contents.
    fn create_table(
        &mut self,
        device_rows: usize,
        host_rows: usize,
        cols: usize,
        dtype: RowDtype,
    ) -> Result<TableId, BackendError>;
    /// A table of these rows, which no task writes: host memory as it is on devices that read it, else a copy.
    fn adopt_rows(&mut self, rows: HostRows) -> Result<TableId, BackendError>;
    fn drop_table(&mut self, table: TableId);
    /// Rows for sums of cut tasks, of at most `cols` values. Called once.
    fn create_accumulators(&mut self, rows: usize, cols: usize) -> Result<(), BackendError>;

    /// Moves blocks, then computes the tasks, in any order. Moves `beside` touch no row that the tasks use and may run at
    /// the same time; they are done when this returns.
    fn run(
        &mut self,
        before: &Moves,
        tasks: &[ConvTask<'_>],
        beside: &Moves,
    ) -> Result<GraphStepTimes, BackendError>;
    /// Rows of the device as f32, one after another.
    fn read_rows(
        &mut self,
        source: RowSource<'_>,
        nodes: &[u32],
        out: &mut [f32],
    ) -> Result<(), BackendError>;
}
