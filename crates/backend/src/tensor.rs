//! A weight as it lies in a file: bytes that are shared, never copied, with their format and shape.

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

    /// Bytes that are made when they are first looked at.
    fn lazy(len: usize, make: impl Fn() -> Vec<u8> + Send + Sync + 'static) -> Self {
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

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TensorError {
    #[error("a row of {cols} values is not a whole number of {format} blocks of {block_len}", block_len = .format.block_len())]
    PartialBlock { format: WeightFormat, cols: usize },
    #[error("{rows} x {cols} values of {format} take {expected} bytes, got {got}")]
    WrongSize { format: WeightFormat, rows: usize, cols: usize, expected: usize, got: usize },
    #[error("{rows} x {cols} values of {format} are more bytes than this machine can address")]
    TooLarge { format: WeightFormat, rows: usize, cols: usize },
}

/// A matrix of `rows × cols`, row-major, `rows` being outputs. A vector has one row.
#[derive(Clone, Debug)]
pub struct Tensor {
    format: WeightFormat,
    rows: usize,
    cols: usize,
    bytes: SharedBytes,
    random: Option<RandomFill>,
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
        Ok(Self { format, rows, cols, bytes, random: None })
    }

    /// A matrix of f32 values, mostly for tests and small vectors.
    pub fn from_f32(rows: usize, cols: usize, values: &[f32]) -> Result<Self, TensorError> {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::new(WeightFormat::F32, rows, cols, SharedBytes::from_vec(bytes))
    }

    /// A matrix of random values in a float format. A backend that can make them itself need never look at the bytes.
    pub fn random(
        format: WeightFormat,
        rows: usize,
        cols: usize,
        fill: RandomFill,
    ) -> Result<Self, TensorError> {
        let too_large = TensorError::TooLarge { format, rows, cols };
        let len = format.row_bytes(cols).and_then(|row| row.checked_mul(rows)).ok_or(too_large)?;
        let bytes = SharedBytes::lazy(len, move || fill.bytes(format, rows * cols));
        Ok(Self { random: Some(fill), ..Self::new(format, rows, cols, bytes)? })
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
        if self.format == WeightFormat::F32 {
            return Ok(self.clone());
        }
        let (rows, cols, format) = (self.rows, self.cols, WeightFormat::F32);
        let row_bytes = format.row_bytes(cols).filter(|bytes| bytes.checked_mul(rows).is_some());
        let row_bytes = row_bytes.ok_or(TensorError::TooLarge { format, rows, cols })?;
        let (mut bytes, mut values) = (Vec::with_capacity(row_bytes * rows), vec![0.0_f32; cols]);
        for row in 0..rows {
            dequantize_row(self.format, self.row(row), &mut values);
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        Self::new(format, rows, cols, SharedBytes::from_vec(bytes))
    }

    /// Rows `range` as a tensor of their own, sharing the bytes.
    pub fn slice_rows(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.rows {
            return None;
        }
        let row_len = self.bytes.len().checked_div(self.rows)?;
        let bytes = self.bytes.slice(range.start * row_len..range.end * row_len)?;
        Some(Self { format: self.format, rows: range.len(), cols: self.cols, bytes, random: None })
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
        // A part has the bytes of its rows, but is not itself made from the seed.
        let part = tensor.slice_rows(1..3).unwrap();
        assert_eq!((part.row(0), part.random_fill()), (tensor.row(1), None));
    }

    #[test]
    fn rows_share_bytes() {
        let tensor = Tensor::from_f32(3, 2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        assert_eq!(tensor.slice_rows(1..3).unwrap().row(1), tensor.row(2));
        assert!(tensor.slice_rows(1..4).is_none());
        assert!(SharedBytes::from_vec(vec![0; 4]).slice(2..5).is_none());
    }
}
