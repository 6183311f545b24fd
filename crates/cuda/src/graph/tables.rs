//! Tables of rows on the device, with pinned host rows, and what moves between them.

use baton_backend::BackendError;
use baton_backend::graph::{HostRows, Moves, RowDtype, RowMap, RowSource, RowValues, TableId, Upload};

use crate::gpu::{DeviceMemory, Event, Function, Gpu, Stream};
use crate::pinned::PinnedMemory;

/// What goes up at a time of a whole table.
pub(super) const CHUNK_BYTES: usize = 32 << 20;

/// As `graph.cu` declares it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct RowsParams {
    start: u64,
    pages: u64,
    num_rows: u64,
    num_pages: u32,
    shift: u32,
    cols: u32,
    is_bf16: u32,
}

#[repr(C)]
struct UploadParams {
    staged: u64,
    rows: u64,
    table: u64,
    row_bytes: u32,
    padding: u32,
}

#[derive(Debug)]
pub(super) struct Table {
    device: DeviceMemory,
    host: Option<PinnedMemory>,
    pub(super) cols: usize,
    dtype: RowDtype,
    device_rows: usize,
    host_rows: usize,
}

fn wrong(cause: &str) -> BackendError {
    BackendError::Device { cause: cause.to_owned() }
}

impl Table {
    pub(super) fn new(
        gpu: &Gpu,
        device_rows: usize,
        host_rows: usize,
        cols: usize,
        dtype: RowDtype,
    ) -> Result<Self, BackendError> {
        let bytes = |rows: usize| {
            let bytes = rows.checked_mul(cols).and_then(|len| len.checked_mul(dtype.bytes()));
            let what = || format!("a table of {rows} rows of {cols}");
            bytes.ok_or_else(|| BackendError::Unsupported { what: what() })
        };
        let device = gpu.allocate(bytes(device_rows)?, "a table of embeddings")?;
        let host = match host_rows {
            0 => None,
            rows => Some(gpu.allocate_pinned(bytes(rows)?, "swapped embeddings")?),
        };
        Ok(Self { device, host, cols, dtype, device_rows, host_rows })
    }

    pub(super) fn bytes(&self) -> usize {
        self.device_rows * self.row_bytes()
    }

    fn row_bytes(&self) -> usize {
        self.cols * self.dtype.bytes()
    }

    pub(super) fn params(&self, map: &RowMap<'_>, pages: u64) -> RowsParams {
        let (num_pages, shift) = match map {
            RowMap::Identity => (0, 0),
            RowMap::Pages { pages, shift } => (pages.len() as u32, *shift),
        };
        RowsParams {
            start: self.device.address(),
            pages,
            num_rows: self.device_rows as u64,
            num_pages,
            shift,
            cols: self.cols as u32,
            is_bf16: u32::from(self.dtype == RowDtype::BF16),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Tables(Vec<Option<Table>>);

impl Tables {
    pub(super) fn add(&mut self, table: Table) -> TableId {
        let place = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        if place == self.0.len() {
            self.0.push(None);
        }
        self.0[place] = Some(table);
        TableId(place as u32)
    }

    pub(super) fn remove(&mut self, table: TableId) {
        if let Some(place) = self.0.get_mut(table.0 as usize) {
            *place = None;
        }
    }

    pub(super) fn get(&self, table: TableId) -> Result<&Table, BackendError> {
        let table = self.0.get(table.0 as usize).and_then(Option::as_ref);
        table.ok_or_else(|| wrong("a table is used that does not exist"))
    }

    /// Every node has a row of the device.
    pub(super) fn check(&self, source: &RowSource<'_>, nodes: &[u32]) -> Result<(), BackendError> {
        let num_rows = self.get(source.table)?.device_rows;
        let has_row = |&node: &u32| match source.map {
            RowMap::Identity => (node as usize) < num_rows,
            RowMap::Pages { pages, shift } => pages
                .get((node >> shift) as usize)
                .is_some_and(|page| ((*page as usize) << shift) + (1 << shift) <= num_rows),
        };
        if nodes.iter().all(has_row) { Ok(()) } else { Err(wrong("a task names a node that has no row")) }
    }

    /// The same for nodes that are only read: the kernels read inside the table whatever the pages say, so that a release
    /// build need not look up millions of edges.
    pub(super) fn check_read(&self, source: &RowSource<'_>, nodes: &[u32]) -> Result<(), BackendError> {
        if cfg!(debug_assertions) {
            return self.check(source, nodes);
        }
        let num_nodes = match source.map {
            RowMap::Identity => self.get(source.table)?.device_rows,
            RowMap::Pages { pages, shift } => pages.len() << shift,
        };
        let last = nodes.iter().copied().max().unwrap_or(0) as usize;
        if nodes.is_empty() || last < num_nodes {
            Ok(())
        } else {
            Err(wrong("a task names a node that has no row"))
        }
    }

    /// Starts the copies of whole blocks.
    pub(super) fn swap(&self, stream: Stream, moves: &Moves) -> Result<(), BackendError> {
        if moves.swap_out.is_empty() && moves.swap_in.is_empty() {
            return Ok(());
        }
        for &id in &moves.tables {
            let table = self.get(id)?;
            let host = table.host.as_ref().ok_or_else(|| wrong("a table without host rows is swapped"))?;
            let bytes = moves.block_rows * table.row_bytes();
            let place = |block: u32, rows: usize| {
                let last = (block as usize + 1) * moves.block_rows;
                (last <= rows)
                    .then_some(block as usize * bytes)
                    .ok_or_else(|| wrong("a move lies outside its table"))
            };
            for copy in &moves.swap_out {
                let (from, to) = (place(copy.from, table.device_rows)?, place(copy.to, table.host_rows)?);
                stream.copy_out((&table.device, from), (host, to), bytes)?;
            }
            for copy in &moves.swap_in {
                let (from, to) = (place(copy.from, table.host_rows)?, place(copy.to, table.device_rows)?);
                stream.copy_in((host, from), (&table.device, to), bytes)?;
            }
        }
        Ok(())
    }
}

/// Rows from ordinary memory on their way to the device, and back.
#[derive(Debug)]
pub(super) struct Staging {
    pinned: PinnedMemory,
    device: DeviceMemory,
}

impl Staging {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, BackendError> {
        let what = "rows on their way";
        Ok(Self { pinned: gpu.allocate_pinned(1 << 20, what)?, device: gpu.allocate(1 << 20, what)? })
    }

    pub(super) fn reserve(&mut self, gpu: &Gpu, bytes: usize) -> Result<(), BackendError> {
        if bytes > self.pinned.bytes() || bytes > self.device.bytes() {
            *self = Self {
                pinned: gpu.allocate_pinned(bytes.next_power_of_two(), "rows on their way")?,
                device: gpu.allocate(bytes.next_power_of_two(), "rows on their way")?,
            };
        }
        Ok(())
    }

    /// Values in memory of their own.
    pub(super) fn load(
        &mut self,
        gpu: &Gpu,
        values: &[f32],
        what: &str,
    ) -> Result<DeviceMemory, BackendError> {
        let bytes = 4 * values.len();
        self.reserve(gpu, bytes)?;
        for (word, value) in self.pinned.words_mut().iter_mut().zip(values) {
            *word = value.to_bits();
        }
        let memory = gpu.allocate(bytes, what)?;
        gpu.upload(&self.pinned, &memory, 0, bytes)?;
        gpu.synchronize()?;
        Ok(memory)
    }

    /// Waits for the device and reads the first values of its memory.
    pub(super) fn read(
        &mut self,
        gpu: &Gpu,
        from: &DeviceMemory,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let bytes = 4 * out.len();
        self.reserve(gpu, bytes)?;
        gpu.download(from, &self.pinned, bytes)?;
        gpu.synchronize()?;
        let words = self.pinned.words();
        in_parts(out, |first, part| {
            for (value, word) in part.iter_mut().zip(&words[first..]) {
                *value = f32::from_bits(*word);
            }
        });
        Ok(())
    }

    /// Starts uploads: rows side by side in one copy, then a kernel that puts each in its place.
    pub(super) fn upload(
        &mut self,
        gpu: &Gpu,
        stream: Stream,
        function: Function,
        tables: &Tables,
        uploads: &[Upload],
    ) -> Result<(), BackendError> {
        let sizes: Result<Vec<(usize, usize)>, BackendError> = uploads
            .iter()
            .map(|upload| Ok((upload.rows.len(), tables.get(upload.table)?.row_bytes())))
            .collect();
        let sizes = sizes?;
        let span = |&(rows, row_bytes): &(usize, usize)| {
            (rows * 4).next_multiple_of(256) + (rows * row_bytes).next_multiple_of(256)
        };
        self.reserve(gpu, sizes.iter().map(span).sum())?;
        let mut first = 0;
        for (upload, size) in uploads.iter().zip(&sizes) {
            let table = tables.get(upload.table)?;
            let row_bytes = size.1;
            let values = upload.values.to_dtype(table.dtype);
            if values.cols() != table.cols {
                return Err(wrong("rows of another width are uploaded"));
            }
            let rows_at = first + (size.0 * row_bytes).next_multiple_of(256);
            let bytes = self.pinned.as_mut_slice();
            for (number, &(from, to)) in upload.rows.iter().enumerate() {
                let (from, cols) = (from as usize, values.cols());
                if from >= values.rows() || to as usize >= table.device_rows {
                    return Err(wrong("an upload lies outside its table"));
                }
                let range = from * cols..(from + 1) * cols;
                let target = &mut bytes[first + number * row_bytes..][..row_bytes];
                match values.values() {
                    RowValues::F32(all) => write(target, all[range].iter().map(|value| value.to_le_bytes())),
                    RowValues::BF16(all) => write(target, all[range].iter().map(|value| value.to_le_bytes())),
                }
                bytes[rows_at + 4 * number..][..4].copy_from_slice(&to.to_le_bytes());
            }
            let len = span(size);
            stream.copy_in((&self.pinned, first), (&self.device, first), len)?;
            let params = UploadParams {
                staged: self.device.address() + first as u64,
                rows: self.device.address() + rows_at as u64,
                table: table.device.address(),
                row_bytes: row_bytes as u32,
                padding: 0,
            };
            if size.0 > 0 {
                // SAFETY: rows and table were checked; the staged rows are on the same stream before it.
                unsafe { gpu.launch_on(stream, function, (size.0 as u32, 1), 128, 0, &params)? };
            }
            first += len;
        }
        Ok(())
    }
}

/// Fills a table with all rows, through both stagings alternately: while one is on its way, the other is written.
pub(super) fn fill(
    staging: &[Staging; 2],
    stream: Stream,
    table: &Table,
    rows: &HostRows,
) -> Result<(), BackendError> {
    let sent = [Event::new()?, Event::new()?];
    let bytes = table.bytes();
    for (number, first) in (0..bytes).step_by(CHUNK_BYTES).enumerate() {
        let which = number % 2;
        if number >= 2 {
            sent[which].wait()?;
        }
        let len = CHUNK_BYTES.min(bytes - first);
        // SAFETY: nothing is on its way from this memory: the last copy was waited for.
        let target = unsafe { std::slice::from_raw_parts_mut(staging[which].pinned.as_ptr(), len) };
        in_parts(target, |at, part| {
            let start = (first + at) / rows.dtype().bytes();
            match rows.values() {
                RowValues::F32(all) => write(part, all[start..].iter().map(|value| value.to_le_bytes())),
                RowValues::BF16(all) => write(part, all[start..].iter().map(|value| value.to_le_bytes())),
            }
        });
        stream.copy_in((&staging[which].pinned, 0), (&table.device, first), len)?;
        sent[which].record_on(stream)?;
    }
    stream.synchronize()
}

/// Works on parts of a large slice at the same time; each is told where it begins.
fn in_parts<T: Send>(all: &mut [T], work: impl Fn(usize, &mut [T]) + Sync) {
    const PART_BYTES: usize = 4 << 20;
    let part = PART_BYTES / size_of::<T>();
    if all.len() <= part {
        return work(0, all);
    }
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let share = all.len().div_ceil(num_threads).max(part / 4).next_multiple_of(64);
    std::thread::scope(|scope| {
        for (number, part) in all.chunks_mut(share).enumerate() {
            let work = &work;
            scope.spawn(move || work(number * share, part));
        }
    });
}

fn write<const N: usize>(target: &mut [u8], values: impl Iterator<Item = [u8; N]>) {
    for (bytes, value) in target.as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *bytes = value;
    }
}
