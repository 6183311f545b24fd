//! A weight as it lies in a file: bytes that are shared, never copied, with their format and shape, and for eight-bit floats
//! their scales.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use thiserror::Error;

use crate::quant::dequantize_row;
use crate::{RandomFill, WeightFormat};

/// A range of bytes owned by something else, such as a memory-mapped file.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let len = (*owner).as_ref().len();
        Self { owner, range: 0..len }
    }

    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self::new(Arc::new(bytes))
    }

    /// Bytes that are made when they are first looked at. `make` must give `len` of them.
    pub fn lazy(len: usize, make: impl Fn() -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self { owner: Arc::new(Lazy { bytes: OnceLock::new(), make: Box::new(make) }), range: 0..len }
    }

    /// A part of these bytes, or `None` if it does not lie within them.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let start = self.range.start.checked_add(range.start)?;
        let end = self.range.start.checked_add(range.end)?;
        (start <= end && end <= self.range.end)
            .then(|| Self { owner: Arc::clone(&self.owner), range: start..end })
    }

    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }

    pub fn len(&self) -> usize {
        self.range.len()
    }

    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

struct Lazy {
    bytes: OnceLock<Vec<u8>>,
    make: Box<dyn Fn() -> Vec<u8> + Send + Sync>,
}

impl AsRef<[u8]> for Lazy {
    fn as_ref(&self) -> &[u8] {
        self.bytes.get_or_init(|| (self.make)())
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.len())
    }
}

/// What the values of a tensor are multiplied with: one factor for each block of rows and columns.
#[derive(Clone, Debug)]
pub struct Scales {
    values: Arc<[f32]>,
    /// Where this tensor's rows begin in the matrix that the scales are of.
    first_row: usize,
    block_rows: usize,
    block_cols: usize,
    /// Blocks side by side.
    across: usize,
}

impl Scales {
    /// One factor for all values.
    pub fn of_tensor(scale: f32) -> Self {
        Self::whole(vec![scale], usize::MAX)
    }

    /// One factor a row.
    pub fn of_rows(scales: Vec<f32>) -> Self {
        Self::whole(scales, 1)
    }

    fn whole(values: Vec<f32>, block_rows: usize) -> Self {
        Self { values: values.into(), first_row: 0, block_rows, block_cols: usize::MAX, across: 1 }
    }

    /// `values` are those of blocks, `across` of them side by side.
    pub fn of_blocks(values: Vec<f32>, block_rows: usize, block_cols: usize, across: usize) -> Self {
        Self { values: values.into(), first_row: 0, block_rows, block_cols, across }
    }

    /// The factors of a row, one for each [`Self::block_cols`] columns.
    pub fn row(&self, row: usize) -> &[f32] {
        let block = (self.first_row + row) / self.block_rows;
        &self.values[block * self.across..(block + 1) * self.across]
    }

    /// Columns that share a factor; `None` where all do.
    pub fn block_cols(&self) -> Option<usize> {
        (self.across > 1).then_some(self.block_cols)
    }

    /// Rows and columns that share a factor.
    pub fn blocks(&self) -> (usize, usize) {
        (self.block_rows, self.block_cols)
    }

    fn times(&self, factor: f32) -> Self {
        Self { values: self.values.iter().map(|value| value * factor).collect(), ..*self }
    }

    /// Those of these rows, in this order.
    fn of_gathered(&self, rows: &[usize]) -> Self {
        let values = rows.iter().flat_map(|&row| self.row(row)).copied().collect();
        Self { values, first_row: 0, block_rows: 1, ..*self }
    }

    /// Those of the columns from `start` on, up to `end`; `None` if the first block is cut.
    fn of_columns(&self, start: usize, end: usize) -> Option<Self> {
        if self.across == 1 {
            return Some(self.clone());
        }
        if !start.is_multiple_of(self.block_cols) {
            return None;
        }
        let blocks = start / self.block_cols..end.div_ceil(self.block_cols);
        let values = self.values.chunks(self.across).flat_map(|row| &row[blocks.clone()]).copied().collect();
        Some(Self { values, across: blocks.len(), ..*self })
    }

    /// Whether all of `rows x cols` values have a factor.
    fn covers(&self, rows: usize, cols: usize) -> bool {
        let down = (self.first_row + rows).div_ceil(self.block_rows.max(1));
        self.block_rows > 0
            && self.block_cols > 0
            && cols.div_ceil(self.block_cols) == self.across
            && down.checked_mul(self.across).is_some_and(|blocks| blocks <= self.values.len())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TensorError {
    #[error("a row of {cols} values is not a whole number of {format} blocks of {block_len}", block_len = .format.block_len())]
    PartialBlock { format: WeightFormat, cols: usize },
    #[error("{rows} x {cols} values of {format} take {expected} bytes, got {got}")]
    WrongSize { format: WeightFormat, rows: usize, cols: usize, expected: usize, got: usize },
    #[error("{rows} x {cols} values of {format} are more bytes than this machine can address")]
    TooLarge { format: WeightFormat, rows: usize, cols: usize },
    #[error("the scales are not those of {rows} x {cols} values of {format}")]
    WrongScales { format: WeightFormat, rows: usize, cols: usize },
    #[error("the order of the columns does not name each of {cols} columns once")]
    WrongColumns { cols: usize },
}

/// A matrix of `rows × cols`, row-major, `rows` being outputs. A vector has one row.
#[derive(Clone, Debug)]
pub struct Tensor {
    format: WeightFormat,
    rows: usize,
    cols: usize,
    bytes: SharedBytes,
    random: Option<RandomFill>,
    scales: Option<Scales>,
    columns: Option<Arc<[u32]>>,
}

impl Tensor {
    /// Checks that the bytes are exactly what the shape and format need.
    pub fn new(
        format: WeightFormat,
        rows: usize,
        cols: usize,
        bytes: SharedBytes,
    ) -> Result<Self, TensorError> {
        if !cols.is_multiple_of(format.block_len()) {
            return Err(TensorError::PartialBlock { format, cols });
        }
        let expected = format
            .row_bytes(cols)
            .and_then(|row| row.checked_mul(rows))
            .ok_or(TensorError::TooLarge { format, rows, cols })?;
        if bytes.len() != expected {
            return Err(TensorError::WrongSize { format, rows, cols, expected, got: bytes.len() });
        }
        Ok(Self { format, rows, cols, bytes, random: None, scales: None, columns: None })
    }

    /// A matrix of f32 values, mostly for tests and small vectors.
    pub fn from_f32(rows: usize, cols: usize, values: &[f32]) -> Result<Self, TensorError> {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::new(WeightFormat::F32, rows, cols, SharedBytes::from_vec(bytes))
    }

    /// A matrix of random values, in a float format or one of [`RandomFill::raw`]. A backend that can make them itself need never
    /// look at the bytes.
    pub fn random(
        format: WeightFormat,
        rows: usize,
        cols: usize,
        fill: RandomFill,
    ) -> Result<Self, TensorError> {
        let too_large = TensorError::TooLarge { format, rows, cols };
        let len = format.row_bytes(cols).and_then(|row| row.checked_mul(rows)).ok_or(too_large)?;
        let bytes = SharedBytes::lazy(len, move || fill.bytes(format, rows * cols));
        let tensor = Self { random: Some(fill), ..Self::new(format, rows, cols, bytes)? };
        if format != WeightFormat::F8_E4M3 {
            return Ok(tensor);
        }
        tensor.with_scales(Scales::of_tensor(fill.e4m3_scale()))
    }

    /// The same values, each times its scale. Only eight-bit floats have scales beside them.
    pub fn with_scales(self, scales: Scales) -> Result<Self, TensorError> {
        let (format, rows, cols) = (self.format, self.rows, self.cols);
        if format != WeightFormat::F8_E4M3 || !scales.covers(rows, cols) {
            return Err(TensorError::WrongScales { format, rows, cols });
        }
        Ok(Self { scales: Some(scales), ..self })
    }

    /// The same bytes, but what stands at column `j` is that of the input's column `columns[j]`.
    pub fn with_columns(self, columns: Arc<[u32]>) -> Result<Self, TensorError> {
        let mut seen = vec![false; self.cols];
        let is_new =
            |&column: &u32| seen.get_mut(column as usize).is_some_and(|seen| !std::mem::replace(seen, true));
        if columns.len() != self.cols || !columns.iter().all(is_new) {
            return Err(TensorError::WrongColumns { cols: self.cols });
        }
        Ok(Self { columns: Some(columns), ..self })
    }

    pub fn scales(&self) -> Option<&Scales> {
        self.scales.as_ref()
    }

    /// Which column of the input each stored column is multiplied with; `None`: they are in order.
    pub fn columns(&self) -> Option<&Arc<[u32]>> {
        self.columns.as_ref()
    }

    /// The values of a row in the order of the input's columns: what a weight means.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        dequantize_row(self.format, self.row(row), out);
        if let Some(scales) = &self.scales {
            for (values, scale) in out.chunks_mut(scales.block_cols).zip(scales.row(row)) {
                for value in values {
                    *value *= scale;
                }
            }
        }
        if let Some(columns) = &self.columns {
            let stored = out.to_vec();
            for (value, &column) in stored.iter().zip(columns.iter()) {
                out[column as usize] = *value;
            }
        }
    }

    /// What the bytes are made from, where they are random.
    pub fn random_fill(&self) -> Option<RandomFill> {
        self.random
    }

    pub fn format(&self) -> WeightFormat {
        self.format
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    /// How many bytes there are, without making any that are random.
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes of one row.
    pub fn row(&self, row: usize) -> &[u8] {
        let len = self.bytes.len() / self.rows;
        &self.bytes()[row * len..(row + 1) * len]
    }

    /// The same values as f32, or an error if that is more than can be addressed.
    pub fn to_f32(&self) -> Result<Self, TensorError> {
        self.converted(WeightFormat::F32, f32::to_le_bytes)
    }

    /// The nearest f16 of all values, or an error if that is more than can be addressed.
    pub fn to_f16(&self) -> Result<Self, TensorError> {
        self.converted(WeightFormat::F16, |value| half::f16::from_f32(value).to_le_bytes())
    }

    /// The nearest bf16 of all values, or an error if that is more than can be addressed.
    pub fn to_bf16(&self) -> Result<Self, TensorError> {
        self.converted(WeightFormat::BF16, |value| half::bf16::from_f32(value).to_le_bytes())
    }

    fn converted<const BYTES: usize>(
        &self,
        format: WeightFormat,
        convert: impl Fn(f32) -> [u8; BYTES],
    ) -> Result<Self, TensorError> {
        if self.format == format && self.scales.is_none() && self.columns.is_none() {
            return Ok(self.clone());
        }
        let (rows, cols) = (self.rows, self.cols);
        let row_bytes = format.row_bytes(cols).filter(|bytes| bytes.checked_mul(rows).is_some());
        let row_bytes = row_bytes.ok_or(TensorError::TooLarge { format, rows, cols })?;
        let (mut bytes, mut values) = (Vec::with_capacity(row_bytes * rows), vec![0.0_f32; cols]);
        for row in 0..rows {
            self.dequantize_row(row, &mut values);
            bytes.extend(values.iter().flat_map(|value| convert(*value)));
        }
        Self::new(format, rows, cols, SharedBytes::from_vec(bytes))
    }

    /// Rows and columns exchanged, of a float format.
    pub fn transposed(&self) -> Result<Self, TensorError> {
        let (rows, cols, format) = (self.rows, self.cols, self.format);
        if !format.is_float() {
            return Err(TensorError::PartialBlock { format, cols: rows });
        }
        let (size, source) = (format.block_bytes(), self.bytes());
        let mut bytes = Vec::with_capacity(source.len());
        for col in 0..cols {
            for row in 0..rows {
                let at = (row * cols + col) * size;
                bytes.extend_from_slice(&source[at..at + size]);
            }
        }
        Self::new(format, cols, rows, SharedBytes::from_vec(bytes))
    }

    /// The same values in rows of another length, of a float format.
    pub fn reshaped(&self, rows: usize, cols: usize) -> Result<Self, TensorError> {
        if !self.format.is_float() && cols != self.cols {
            return Err(TensorError::PartialBlock { format: self.format, cols });
        }
        Self::new(self.format, rows, cols, self.bytes.clone())
    }

    /// These rows, in this order. Every one of them must be there.
    pub fn gather_rows(&self, rows: &[usize]) -> Result<Self, TensorError> {
        let bytes = rows.iter().flat_map(|&row| self.row(row)).copied().collect();
        let gathered = Self::new(self.format, rows.len(), self.cols, SharedBytes::from_vec(bytes))?;
        let scales = self.scales.as_ref().map(|scales| scales.of_gathered(rows));
        Ok(Self { scales, columns: self.columns.clone(), ..gathered })
    }

    /// The same values times a power of two, or `None` where that may not be exact, or columns are in another order: for formats
    /// other than eight-bit floats, bf16 and f32.
    pub fn times_power_of_two(&self, factor: f32) -> Option<Self> {
        match self.format {
            _ if self.columns.is_some() => None,
            WeightFormat::F8_E4M3 => {
                let scales = self.scales.clone().unwrap_or_else(|| Scales::of_tensor(1.0));
                Some(Self { scales: Some(scales.times(factor)), ..self.clone() })
            }
            WeightFormat::BF16 => self.to_f32().ok()?.times_power_of_two(factor)?.to_bf16().ok(),
            WeightFormat::F32 => {
                let values =
                    self.bytes().as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw) * factor);
                let bytes = values.flat_map(f32::to_le_bytes).collect();
                Self::new(self.format, self.rows, self.cols, SharedBytes::from_vec(bytes)).ok()
            }
            _ => None,
        }
    }

    /// Columns `range`, or `None` where that cuts through a block or the columns are in another order.
    pub fn slice_cols(&self, range: Range<usize>) -> Option<Self> {
        let is_whole = |col: usize| col.is_multiple_of(self.format.block_len());
        if range.is_empty() || range.end > self.cols || !is_whole(range.start) || !is_whole(range.end) {
            return None;
        }
        let scales = match &self.scales {
            Some(scales) => Some(scales.of_columns(range.start, range.end)?),
            None => None,
        };
        let bytes = self.format.row_bytes(range.start)?..self.format.row_bytes(range.end)?;
        let bytes = (0..self.rows).flat_map(|row| &self.row(row)[bytes.clone()]).copied().collect();
        let part = Self::new(self.format, self.rows, range.len(), SharedBytes::from_vec(bytes)).ok()?;
        self.columns.is_none().then_some(Self { scales, ..part })
    }

    /// Rows `range` as a tensor of their own, sharing the bytes.
    pub fn slice_rows(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.rows {
            return None;
        }
        let row_len = self.bytes.len().checked_div(self.rows)?;
        let bytes = self.bytes.slice(range.start * row_len..range.end * row_len)?;
        let mut part = Self { rows: range.len(), bytes, random: None, ..self.clone() };
        if let Some(scales) = &mut part.scales {
            scales.first_row += range.start;
        }
        Some(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_becomes_f32() {
        let mut random = crate::testing::Random::new(3);
        for format in WeightFormat::ALL {
            let tensor = crate::testing::random_tensor(format, 3, 512, 1.0, &mut random);
            let same = tensor.to_f32().unwrap();
            assert_eq!((same.format(), same.rows(), same.cols()), (WeightFormat::F32, 3, 512));
            for row in 0..3 {
                let mut values = vec![0.0; 512];
                dequantize_row(format, tensor.row(row), &mut values);
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                assert_eq!(same.row(row), bytes, "{format}");
            }
        }
        assert_eq!(Tensor::from_f32(0, 8, &[]).unwrap().to_f32().unwrap().rows(), 0);
    }

    #[test]
    fn sizes_are_checked() {
        let bytes = |n| SharedBytes::from_vec(vec![0; n]);
        assert!(Tensor::new(WeightFormat::Q4_1, 2, 64, bytes(80)).is_ok());
        assert_eq!(
            Tensor::new(WeightFormat::Q4_1, 2, 64, bytes(79)).unwrap_err().to_string(),
            "2 x 64 values of Q4_1 take 80 bytes, got 79"
        );
        assert_eq!(
            Tensor::new(WeightFormat::Q4_1, 2, 33, bytes(80)).unwrap_err().to_string(),
            "a row of 33 values is not a whole number of Q4_1 blocks of 32"
        );
        assert!(matches!(
            Tensor::new(WeightFormat::F32, usize::MAX, 4, bytes(4)),
            Err(TensorError::TooLarge { .. })
        ));
    }

    #[test]
    fn random_values_are_made_from_the_seed() {
        let fill = RandomFill { seed: 7, largest: 1.0 };
        let tensor = Tensor::random(WeightFormat::F32, 3, 20, fill).unwrap();
        assert_eq!((tensor.bytes().len(), tensor.random_fill()), (240, Some(fill)));
        let values: Vec<f32> =
            tensor.bytes().as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
        // The first number of splitmix64 from 7 on is 0x63cb_e1e4_5932_0dd7; its lowest byte is the first level.
        assert_eq!(values[0].to_bits(), (0xd7 as f32 * fill.step() - 1.0).to_bits());
        assert_eq!(values[1].to_bits(), (0x0d as f32 * fill.step() - 1.0).to_bits());
        assert!(values.iter().all(|value| value.abs() <= 1.0));
        for format in [
            WeightFormat::F8_E4M3,
            WeightFormat::Q4_0,
            WeightFormat::Q4_1,
            WeightFormat::Q4_K,
            WeightFormat::Q5_0,
        ] {
            let tensor = Tensor::random(format, 2, 512, RandomFill { seed: 9, largest: 0.25 }).unwrap();
            let mut values = vec![0.0; 512];
            tensor.dequantize_row(1, &mut values);
            let (largest, mean) = values
                .iter()
                .fold((0.0_f32, 0.0), |(most, sum), value| (most.max(value.abs()), sum + value / 512.0));
            assert!((0.2..0.26).contains(&largest) && mean.abs() < 0.05, "{format}: {largest}, {mean}");
        }
        // A part has the bytes of its rows, but is not itself made from the seed.
        let part = tensor.slice_rows(1..3).unwrap();
        assert_eq!((part.row(0), part.random_fill()), (tensor.row(1), None));
    }

    #[test]
    fn floats_are_transposed() {
        let tensor = Tensor::from_f32(2, 3, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        let turned = tensor.transposed().unwrap();
        assert_eq!((turned.rows(), turned.cols()), (3, 2));
        let expected = Tensor::from_f32(3, 2, &[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]).unwrap();
        assert_eq!(turned.bytes(), expected.bytes());
        let quantised = Tensor::new(WeightFormat::Q8_0, 1, 32, SharedBytes::from_vec(vec![0; 34])).unwrap();
        assert!(quantised.transposed().is_err());
    }

    #[test]
    fn scales_and_columns_are_part_of_the_values() {
        let eight_bits = |rows, cols, codes: &[u8]| {
            Tensor::new(WeightFormat::F8_E4M3, rows, cols, SharedBytes::from_vec(codes.to_vec())).unwrap()
        };
        // 1, 2, -1, 0.5 in each row.
        let tensor = eight_bits(3, 4, &[0x38, 0x40, 0xb8, 0x30].repeat(3));
        let row = |tensor: &Tensor, row| {
            let mut values = vec![0.0; tensor.cols()];
            tensor.dequantize_row(row, &mut values);
            values
        };
        assert_eq!(
            row(&tensor.clone().with_scales(Scales::of_tensor(3.0)).unwrap(), 2),
            [3.0, 6.0, -3.0, 1.5]
        );
        let rows = tensor.clone().with_scales(Scales::of_rows(vec![1.0, 2.0, 4.0])).unwrap();
        assert_eq!(row(&rows.slice_rows(1..3).unwrap(), 1), [4.0, 8.0, -4.0, 2.0]);
        let blocks = Scales::of_blocks(vec![1.0, 10.0, 2.0, 20.0], 2, 3, 2);
        let blocks = tensor.clone().with_scales(blocks).unwrap();
        assert_eq!(row(&blocks, 1), [1.0, 2.0, -1.0, 5.0]);
        assert_eq!(row(&blocks.slice_rows(2..3).unwrap(), 0), [2.0, 4.0, -2.0, 10.0]);
        assert_eq!(
            blocks.to_f32().unwrap().row(2),
            [2.0_f32, 4.0, -2.0, 10.0].map(f32::to_le_bytes).concat()
        );
        assert_eq!(row(&blocks.gather_rows(&[2, 0]).unwrap(), 0), [2.0, 4.0, -2.0, 10.0]);
        assert_eq!(
            row(&blocks.slice_rows(1..3).unwrap().gather_rows(&[1]).unwrap(), 0)[3].to_bits(),
            10_f32.to_bits()
        );
        assert_eq!(row(&blocks.slice_cols(3..4).unwrap(), 2), [10.0]);
        assert_eq!(row(&blocks.slice_cols(0..2).unwrap(), 2), [2.0, 4.0]);
        assert_eq!(row(&rows.slice_cols(1..3).unwrap(), 2), [8.0, -4.0]);
        assert_eq!(row(&rows.times_power_of_two(0.5).unwrap(), 2), [2.0, 4.0, -2.0, 1.0]);
        let bf16 = blocks.to_bf16().unwrap();
        assert_eq!(row(&bf16.times_power_of_two(4.0).unwrap(), 2), [8.0, 16.0, -8.0, 40.0]);
        assert!(blocks.to_f16().unwrap().times_power_of_two(4.0).is_none());
        assert!(blocks.slice_cols(2..4).is_none() && blocks.slice_cols(3..5).is_none());
        for wrong in [Scales::of_rows(vec![1.0; 2]), Scales::of_blocks(vec![1.0; 6], 2, 2, 3)] {
            assert!(tensor.clone().with_scales(wrong).is_err());
        }
        let moved = tensor.clone().with_columns([2, 0, 3, 1].into()).unwrap();
        assert_eq!(row(&moved, 0), [2.0, 0.5, 1.0, -1.0]);
        assert_eq!(row(&moved.gather_rows(&[1]).unwrap(), 0), [2.0, 0.5, 1.0, -1.0]);
        assert!(moved.slice_cols(0..2).is_none());
        assert!(tensor.clone().with_columns([0, 1, 2, 2].into()).is_err());
        assert!(tensor.with_columns([0, 1, 2].into()).is_err());
    }

    #[test]
    fn rows_share_bytes() {
        let tensor = Tensor::from_f32(3, 2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        assert_eq!(tensor.slice_rows(1..3).unwrap().row(1), tensor.row(2));
        assert!(tensor.slice_rows(1..4).is_none());
        assert!(SharedBytes::from_vec(vec![0; 4]).slice(2..5).is_none());
    }
}
