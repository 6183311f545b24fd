//! Weights on the device, in the format of their file or packed, and how they get there: through two pinned buffers, so that
//! reading the file and copying overlap. What is packed goes through a buffer of the device.

use baton_backend::{BackendError, Precision, RandomFill, RawFill, Tensor, WeightFormat, WeightUse};

use crate::fp8::PartScales;
use crate::gpu::{DeviceMemory, Event, Gpu};
use crate::kernels::Kernels;
use crate::layout::{Layout, activation_format};
use crate::params::{Address, ConvertParams, FillBytesParams, FillParams, PackParams};
use crate::pinned::PinnedMemory;

const STAGING_BYTES: usize = 16 << 20;

/// A matrix, or several of different formats one below the other.
#[derive(Debug)]
pub(crate) struct Weight {
    pub(crate) parts: Vec<Part>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Which column of the input each column is multiplied with; `None`: they are in order.
    pub(crate) columns: Option<DeviceMemory>, // [cols] u32
    /// Of a weight that is no experts 1.
    pub(crate) num_experts: usize,
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
    /// Of e4m3, whose scales lie behind its values: blocks of them side by side, 0 where each row has one.
    pub(crate) across: Option<usize>,
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
                        first_row: 0,
                        across: 0,
                        scales: 0,
                    };
                    let convert = kernels.convert(Layout::Plain(format));
                    // SAFETY: see above.
                    unsafe { gpu.launch(convert, (num_rows, 1), 128, 0, &params) }
                }
            }
        };
        let mut result = Ok(());
        // Eight bytes of a random tensor are made at a time.
        let random = tensor.random_fill().filter(|_| (at_once * row_bytes).is_multiple_of(8));
        let random = random.and_then(|fill| Some((fill, fill.raw(format)?)));
        for start in (0..tensor.rows()).step_by(at_once) {
            let rows = at_once.min(tensor.rows() - start);
            let bytes = start * row_bytes..(start + rows) * row_bytes;
            let ready = match &random {
                Some((fill, raw)) => fill_bytes(gpu, kernels, unpacked.address(), bytes, fill.seed, raw),
                None => self.copy(gpu, &tensor.bytes()[bytes], &unpacked, 0),
            };
            result = ready.and_then(|()| launch(first_row + start, rows as u32));
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
                // Nothing is packed: an expert begins where its rows do.
                WeightUse::Experts(_) => match Layout::of_product(format, kernels.precision()) {
                    Layout::Packed { .. } => Layout::Plain(format),
                    plain @ Layout::Plain(_) => plain,
                },
                WeightUse::Linear | WeightUse::EmbeddingAndLinear => {
                    Layout::of_product(format, kernels.precision())
                }
            };
            let rows: usize = run.iter().map(Tensor::rows).sum();
            let (unit_rows, unit_bytes) = layout.unit(cols).expect("a tensor's rows are whole blocks");
            let scales = PartScales::new(run);
            let scale_bytes = scales.as_ref().map_or(Vec::new(), PartScales::bytes);
            let value_bytes = rows.div_ceil(unit_rows) * unit_bytes;
            let memory = gpu.allocate(value_bytes + scale_bytes.len(), "a weight")?;
            staging.copy(gpu, &scale_bytes, &memory, value_bytes)?;
            let across = scales.map(|scales| scales.across);
            let part = Part { layout, first_row, rows, unit_rows, unit_bytes, memory, across };
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
        let columns = match tensors.first().and_then(Tensor::columns) {
            Some(columns) => {
                let bytes: Vec<u8> = columns.iter().flat_map(|column| column.to_le_bytes()).collect();
                let memory = gpu.allocate(bytes.len(), "the order of columns")?;
                staging.copy(gpu, &bytes, &memory, 0)?;
                Some(memory)
            }
            None => None,
        };
        let num_experts = if let WeightUse::Experts(count) = usage { count.max(1) } else { 1 };
        Ok(Self { parts, rows: first_row, cols, columns, num_experts })
    }

    /// Rows of one expert.
    pub(crate) fn expert_rows(&self) -> usize {
        self.rows / self.num_experts
    }

    pub(crate) fn bytes(&self) -> usize {
        let columns = self.columns.as_ref().map_or(0, DeviceMemory::bytes);
        self.parts.iter().map(|part| part.memory.bytes()).sum::<usize>() + columns
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
    if let Some(raw) = fill.raw(tensor.format()) {
        let bytes = tensor.num_bytes();
        assert!(offset + bytes <= to.bytes(), "a tensor fits the memory of its weight");
        fill_bytes(gpu, kernels, to.address() + offset as u64, 0..bytes, fill.seed, &raw)?;
        return Ok(true);
    }
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

/// Makes bytes of a random tensor of a block format, or of e4m3.
fn fill_bytes(
    gpu: &Gpu,
    kernels: &Kernels,
    output: Address,
    bytes: std::ops::Range<usize>,
    seed: u64,
    raw: &RawFill,
) -> Result<(), BackendError> {
    let mut header = [0; 16];
    header[..raw.header.len()].copy_from_slice(&raw.header);
    let params = FillBytesParams {
        output,
        first: bytes.start as u64,
        count: bytes.len() as u64,
        seed,
        block_bytes: raw.block_bytes as u32,
        header_bytes: raw.header.len() as u32,
        mask: u32::from(raw.mask),
        reserved: 0,
        header,
    };
    let blocks = (bytes.len().div_ceil(8 * 256) as u32).clamp(1, 32 * gpu.properties.num_multiprocessors);
    // SAFETY: the struct is the kernel's; the callers give a range that has these bytes.
    unsafe { gpu.launch(kernels.core().fill_bytes, (blocks, 1), 256, 0, &params) }
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
