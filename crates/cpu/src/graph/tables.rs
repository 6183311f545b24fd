//! Tables of rows, in memory of their own or adopted, and copies between their tiers.

use baton_backend::BackendError;
use baton_backend::graph::{HostRows, Moves, RowDtype, RowMap, RowSource, RowValues, TableId};

use crate::kernels::graph::Rows;
use crate::memory::AlignedBytes;

#[derive(Debug)]
enum Memory {
    /// Device rows, then host rows.
    Own(AlignedBytes),
    Adopted(HostRows),
}

#[derive(Debug)]
pub struct Table {
    memory: Memory,
    pub cols: usize,
    pub dtype: RowDtype,
    pub device_rows: usize,
    host_rows: usize,
}

impl Table {
    pub fn zeroed(
        device_rows: usize,
        host_rows: usize,
        cols: usize,
        dtype: RowDtype,
    ) -> Result<Self, BackendError> {
        let rows = device_rows.checked_add(host_rows);
        let bytes = rows.and_then(|rows| rows.checked_mul(cols)?.checked_mul(dtype.bytes()));
        let what = format!("a table of {device_rows} + {host_rows} rows of {cols}");
        let bytes = bytes.ok_or_else(|| BackendError::Unsupported { what: what.clone() })?;
        let memory = Memory::Own(AlignedBytes::zeroed(bytes, &what)?);
        Ok(Self { memory, cols, dtype, device_rows, host_rows })
    }

    pub fn adopted(rows: HostRows) -> Self {
        let (cols, dtype, device_rows) = (rows.cols(), rows.dtype(), rows.rows());
        Self { memory: Memory::Adopted(rows), cols, dtype, device_rows, host_rows: 0 }
    }

    fn start(&self) -> *const u8 {
        match &self.memory {
            Memory::Own(bytes) => bytes.as_mut_ptr().cast_const(),
            Memory::Adopted(rows) => match rows.values() {
                RowValues::F32(values) => values.as_ptr().cast(),
                RowValues::BF16(values) => values.as_ptr().cast(),
            },
        }
    }

    /// Where rows are written; `None` for adopted memory.
    pub fn start_mut(&self) -> Option<*mut u8> {
        match &self.memory {
            Memory::Own(bytes) => Some(bytes.as_mut_ptr()),
            Memory::Adopted(_) => None,
        }
    }

    pub fn row_bytes(&self) -> usize {
        self.cols * self.dtype.bytes()
    }
}

/// A copy of some rows.
#[derive(Clone, Debug)]
pub struct Move {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
    /// What is read, where it is not a table.
    _values: Option<HostRows>,
}

// SAFETY: the moves of a list write different rows and read none that another one writes, which the engine promises and
// `run` relies on for values only: all of them lie within their tables.
unsafe impl Send for Move {}
// SAFETY: as above.
unsafe impl Sync for Move {}

impl Move {
    pub fn run(&self) {
        // SAFETY: both ends were checked to lie within memory that outlives the step. `copy`, because nothing but the
        // engine's promise says that they do not overlap.
        unsafe { std::ptr::copy(self.from, self.to, self.bytes) };
    }
}

#[derive(Debug, Default)]
pub struct Tables(Vec<Option<Table>>);

impl Tables {
    pub fn add(&mut self, table: Table) -> Result<TableId, BackendError> {
        // The place of a table that was dropped, so that graphs may come and go for ever.
        let place = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        let id = u32::try_from(place)
            .map_err(|_| BackendError::Unsupported { what: "that many tables".to_owned() })?;
        if place == self.0.len() {
            self.0.push(None);
        }
        self.0[place] = Some(table);
        Ok(TableId(id))
    }

    pub fn remove(&mut self, table: TableId) {
        if let Some(place) = self.0.get_mut(table.0 as usize) {
            *place = None;
        }
    }

    pub fn get(&self, table: TableId) -> Result<&Table, BackendError> {
        let table = self.0.get(table.0 as usize).and_then(Option::as_ref);
        table.ok_or_else(|| BackendError::Device { cause: "a table is used that does not exist".to_owned() })
    }

    /// The device rows of a source, for kernels.
    pub fn rows(&self, source: &RowSource<'_>) -> Result<Rows, BackendError> {
        let table = self.get(source.table)?;
        let (pages, num_pages, shift) = match source.map {
            RowMap::Identity => (std::ptr::null(), 0, 0),
            RowMap::Pages { pages, shift } => (pages.as_ptr(), pages.len(), shift.min(31)),
        };
        Ok(Rows {
            start: table.start(),
            num_rows: table.device_rows,
            cols: table.cols,
            is_bf16: table.dtype == RowDtype::BF16,
            pages,
            num_pages,
            shift,
        })
    }

    /// Every copy of a list, checked.
    pub fn moves(&self, moves: &Moves) -> Result<Vec<Move>, BackendError> {
        let outside = || BackendError::Device { cause: "a move lies outside its table".to_owned() };
        let mut copies = Vec::new();
        for &id in &moves.tables {
            let table = self.get(id)?;
            let start = table.start_mut().ok_or_else(outside)?;
            let size = moves.block_rows;
            let place = |block: u32, first: usize, rows: usize| {
                let row = (block as usize).checked_mul(size).filter(|row| row + size <= rows)?;
                Some((first + row) * table.row_bytes())
            };
            let device = |block| place(block, 0, table.device_rows);
            let host = |block| place(block, table.device_rows, table.host_rows);
            let out = moves.swap_out.iter().map(|copy| Some((device(copy.from)?, host(copy.to)?)));
            let back = moves.swap_in.iter().map(|copy| Some((host(copy.from)?, device(copy.to)?)));
            for places in out.chain(back) {
                let (from, to) = places.ok_or_else(outside)?;
                // SAFETY: both lie within the table.
                let (from, to) = unsafe { (start.add(from).cast_const(), start.add(to)) };
                copies.push(Move { from, to, bytes: size * table.row_bytes(), _values: None });
            }
        }
        for upload in &moves.uploads {
            let table = self.get(upload.table)?;
            let start = table.start_mut().ok_or_else(outside)?;
            let values = upload.values.to_dtype(table.dtype);
            let source = Table::adopted(values.clone());
            for &(from, to) in &upload.rows {
                let (from, to) = (from as usize, to as usize);
                if values.cols() != table.cols || from >= values.rows() || to >= table.device_rows {
                    return Err(outside());
                }
                let bytes = table.row_bytes();
                // SAFETY: both rows lie within their memory.
                let (from, to) = unsafe { (source.start().add(from * bytes), start.add(to * bytes)) };
                copies.push(Move { from, to, bytes, _values: Some(values.clone()) });
            }
        }
        Ok(copies)
    }
}
