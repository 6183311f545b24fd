//! Weights on the device, in the format of their file or packed, and how they get there: through two pinned buffers, so that
//! reading the file and copying overlap. What is packed goes through a buffer of the device.

use baton_backend::{BackendError, Precision, RandomFill, Tensor, WeightFormat, WeightUse};

use crate::gpu::{DeviceMemory, Event, Gpu};
use crate::kernels::Kernels;
use crate::layout::{Layout, activation_format};
use crate::params::{Address, ConvertParams, FillParams, PackParams};
use crate::pinned::PinnedMemory;

const STAGING_BYTES: usize = 16 << 20;

/// A matrix, or several of different formats one below the other.
#[derive(Debug)]
pub(crate) struct Weight {
    pub(crate) parts: Vec<Part>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) layout: Layout,
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    /// Rows that lie together, and their bytes.
    pub(crate) unit_rows: usize,
    pub(crate) unit_bytes: usize,
    pub(crate) memory: DeviceMemory,
}

#[derive(Debug)]
pub(crate) struct Staging {
    buffers: [(PinnedMemory, Event); 2],
    next: usize,
    /// What is to be packed.
    unpacked: Option<DeviceMemory>,
}

impl Staging {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, BackendError> {
        let buffer =
            || Ok::<_, BackendError>((gpu.allocate_pinned(STAGING_BYTES, "staging")?, Event::new()?));
        Ok(Self { buffers: [buffer()?, buffer()?], next: 0, unpacked: None })
    }

    /// Copies the rows of a tensor and packs or converts them into `part`, from one of its rows on.
    fn repack(
        &mut self,
        gpu: &Gpu,
        kernels: &Kernels,
        tensor: &Tensor,
        part: &Part,
        first_row: usize,
    ) -> Result<(), BackendError> {
        let (cols, format) = (tensor.cols(), tensor.format());
        let row_bytes = format.row_bytes(cols).expect("a tensor's rows are whole blocks");
        let at_once = (STAGING_BYTES / row_bytes).max(1);
        if self.unpacked.as_ref().is_none_or(|memory| memory.bytes() < at_once * row_bytes) {
            self.unpacked = Some(gpu.allocate(STAGING_BYTES.max(row_bytes), "weights to be packed")?);
        }
        let unpacked = self.unpacked.take().expect("just made");
        let launch = |first_row: usize, num_rows: u32| {
            let source = unpacked.address();
            // SAFETY of both: the struct is the kernel's; source and target have these rows. The next copy waits for it.
            match part.layout {
                Layout::Packed { .. } => {
                    let params = PackParams {
                        source,
                        row_bytes: row_bytes as u64,
                        target: part.memory.address(),
                        tile_bytes: part.unit_bytes as u64,
                        first_row: first_row as u32,
                        num_rows,
                        cols: cols as u32,
                    };
                    // SAFETY: see above.
                    unsafe { gpu.launch(kernels.pack(format), (num_rows, 1), 128, 0, &params) }
                }
                Layout::Plain(_) => {
                    let params = ConvertParams {
                        weight: source,
                        unit_bytes: row_bytes as u64,
                        output: part.memory.address() + (first_row * part.unit_bytes) as u64,
                        num_rows,
                        cols: cols as u32,
                    };
                    let convert = kernels.convert(Layout::Plain(format));
                    // SAFETY: see above.
                    unsafe { gpu.launch(convert, (num_rows, 1), 128, 0, &params) }
                }
            }
        };
        let mut result = Ok(());
        for (number, rows) in tensor.bytes().chunks(at_once * row_bytes).enumerate() {
            result = self
                .copy(gpu, rows, &unpacked, 0)
                .and_then(|()| launch(first_row + number * at_once, (rows.len() / row_bytes) as u32));
            if result.is_err() {
                break;
            }
        }
        self.unpacked = Some(unpacked);
        result
    }

    /// Copies `bytes` to `offset` of `to`; the last pieces may still be on their way.
    pub(crate) fn copy(
        &mut self,
        gpu: &Gpu,
        bytes: &[u8],
        to: &DeviceMemory,
        offset: usize,
    ) -> Result<(), BackendError> {
        for (number, piece) in bytes.chunks(STAGING_BYTES).enumerate() {
            let (pinned, event) = &mut self.buffers[self.next];
            self.next ^= 1;
            event.wait()?;
            pinned.as_mut_slice()[..piece.len()].copy_from_slice(piece);
            gpu.upload(pinned, to, offset + number * STAGING_BYTES, piece.len())?;
            event.record(gpu)?;
        }
        Ok(())
    }
}

impl Weight {
    /// Neighbours of one format become one part, so that a kernel sees them as one matrix.
    pub(crate) fn load(
        gpu: &Gpu,
        kernels: &Kernels,
        staging: &mut Staging,
        tensors: &[Tensor],
        usage: WeightUse,
    ) -> Result<Self, BackendError> {
        let cols = tensors.first().map_or(0, Tensor::cols);
        if cols == 0 || tensors.iter().any(|tensor| tensor.cols() != cols) {
            let widths: Vec<_> = tensors.iter().map(Tensor::cols).collect();
            return Err(BackendError::Unsupported {
                what: format!("a weight whose parts have widths {widths:?}: they must be equal and not 0"),
            });
        }
        if !cols.is_multiple_of(8) {
            return Err(BackendError::Unsupported {
                what: format!("a weight of {cols} columns: use a multiple of 8"),
            });
        }
        let mut parts = Vec::new();
        let mut first_row = 0;
        for run in tensors.chunk_by(|a, b| a.format() == b.format()) {
            let format = run[0].format();
            let layout = match usage {
                WeightUse::Embedding => Layout::Plain(format),
                WeightUse::Linear | WeightUse::EmbeddingAndLinear => {
                    Layout::of_product(format, kernels.precision())
                }
            };
            let rows: usize = run.iter().map(Tensor::rows).sum();
            let (unit_rows, unit_bytes) = layout.unit(cols).expect("a tensor's rows are whole blocks");
            let memory = gpu.allocate(rows.div_ceil(unit_rows) * unit_bytes, "a weight")?;
            let part = Part { layout, first_row, rows, unit_rows, unit_bytes, memory };
            let mut row = 0;
            for tensor in run {
                let offset = row * unit_bytes;
                if layout != Layout::Plain(format) {
                    staging.repack(gpu, kernels, tensor, &part, row)?;
                } else if !fill_random(gpu, kernels, tensor, &part.memory, offset)? {
                    staging.copy(gpu, tensor.bytes(), &part.memory, offset)?;
                }
                row += tensor.rows();
            }
            parts.push(part);
            first_row += rows;
        }
        Ok(Self { parts, rows: first_row, cols })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.memory.bytes()).sum()
    }

    /// Values to convert at once for large products, `None` where all are as activations are.
    pub(crate) fn largest_converted(&self, precision: Precision) -> Option<usize> {
        let plain = Layout::Plain(activation_format(precision));
        let parts = self.parts.iter().filter(|part| part.layout != plain);
        parts.map(|part| part.rows * self.cols).max()
    }
}

/// Makes random values where they are needed. False if the tensor has other values or another format.
fn fill_random(
    gpu: &Gpu,
    kernels: &Kernels,
    tensor: &Tensor,
    to: &DeviceMemory,
    offset: usize,
) -> Result<bool, BackendError> {
    let Some(fill) = tensor.random_fill() else { return Ok(false) };
    let (format, element) = match tensor.format() {
        WeightFormat::F32 => (0, 4),
        WeightFormat::F16 => (1, 2),
        WeightFormat::BF16 => (2, 2),
        _ => return Ok(false),
    };
    let count = tensor.rows() * tensor.cols();
    assert!(offset + count * element <= to.bytes(), "a tensor fits the memory of its weight");
    launch_fill(gpu, kernels, to.address() + offset as u64, count, format, fill)?;
    Ok(true)
}

/// Fills a whole range of memory with random bf16 values.
pub(crate) fn fill(
    gpu: &Gpu,
    kernels: &Kernels,
    memory: &DeviceMemory,
    fill: RandomFill,
) -> Result<(), BackendError> {
    launch_fill(gpu, kernels, memory.address(), memory.bytes() / 2, 2, fill)
}

fn launch_fill(
    gpu: &Gpu,
    kernels: &Kernels,
    output: Address,
    count: usize,
    format: u32,
    fill: RandomFill,
) -> Result<(), BackendError> {
    let params = FillParams {
        output,
        count: count as u64,
        seed: fill.seed,
        step: fill.step(),
        largest: fill.largest,
        format,
    };
    let blocks = (count.div_ceil(8 * 256) as u32).clamp(1, 32 * gpu.properties.num_multiprocessors);
    // SAFETY: the struct is the kernel's; the callers give a range that has these values.
    unsafe { gpu.launch(kernels.core().fill_random, (blocks, 1), 256, 0, &params) }
}
