//! A weight as it lies in a file: bytes that are shared, never copied, with their format and shape.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use thiserror::Error;

use crate::WeightFormat;

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
        Ok(Self { format, rows, cols, bytes })
    }

    /// A matrix of f32 values, mostly for tests and small vectors.
    pub fn from_f32(rows: usize, cols: usize, values: &[f32]) -> Result<Self, TensorError> {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::new(WeightFormat::F32, rows, cols, SharedBytes::from_vec(bytes))
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

    /// The bytes of one row.
    pub fn row(&self, row: usize) -> &[u8] {
        let len = self.bytes.len() / self.rows;
        &self.bytes()[row * len..(row + 1) * len]
    }

    /// Rows `range` as a tensor of their own, sharing the bytes.
    pub fn slice_rows(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.rows {
            return None;
        }
        let row_len = self.bytes.len().checked_div(self.rows)?;
        let bytes = self.bytes.slice(range.start * row_len..range.end * row_len)?;
        Some(Self { format: self.format, rows: range.len(), cols: self.cols, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn rows_share_bytes() {
        let tensor = Tensor::from_f32(3, 2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        assert_eq!(tensor.slice_rows(1..3).unwrap().row(1), tensor.row(2));
        assert!(tensor.slice_rows(1..4).is_none());
        assert!(SharedBytes::from_vec(vec![0; 4]).slice(2..5).is_none());
    }
}
