//! Rows in host memory: input features as they were read, in their own precision.

use std::sync::Arc;

use half::bf16;

/// How the values of a table are stored. Sums are f32 always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RowDtype {
    #[default]
    F32,
    BF16,
}

impl RowDtype {
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::BF16 => 2,
        }
    }
}

/// Values, row after row.
#[derive(Clone, Debug)]
pub enum RowValues {
    F32(Arc<Vec<f32>>),
    BF16(Arc<Vec<bf16>>),
}

/// A matrix that is shared and never changed.
#[derive(Clone, Debug)]
pub struct HostRows {
    rows: usize,
    cols: usize,
    values: RowValues,
}

impl HostRows {
    /// `None` where the values are not `rows × cols`.
    pub fn new(rows: usize, cols: usize, values: RowValues) -> Option<Self> {
        let len = match &values {
            RowValues::F32(values) => values.len(),
            RowValues::BF16(values) => values.len(),
        };
        (rows.checked_mul(cols) == Some(len)).then_some(Self { rows, cols, values })
    }

    pub fn from_f32(rows: usize, cols: usize, values: Vec<f32>) -> Option<Self> {
        Self::new(rows, cols, RowValues::F32(Arc::new(values)))
    }

    /// The same values in another precision.
    #[must_use]
    pub fn to_dtype(&self, dtype: RowDtype) -> Self {
        let values = match (&self.values, dtype) {
            (RowValues::F32(values), RowDtype::BF16) => {
                RowValues::BF16(Arc::new(values.iter().map(|value| bf16::from_f32(*value)).collect()))
            }
            (RowValues::BF16(values), RowDtype::F32) => {
                RowValues::F32(Arc::new(values.iter().map(|value| value.to_f32()).collect()))
            }
            (same, _) => same.clone(),
        };
        Self { rows: self.rows, cols: self.cols, values }
    }

    /// Whether both are the same memory.
    pub fn is_same(&self, other: &Self) -> bool {
        match (&self.values, &other.values) {
            (RowValues::F32(a), RowValues::F32(b)) => Arc::ptr_eq(a, b),
            (RowValues::BF16(a), RowValues::BF16(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn values(&self) -> &RowValues {
        &self.values
    }

    pub fn dtype(&self) -> RowDtype {
        match self.values {
            RowValues::F32(_) => RowDtype::F32,
            RowValues::BF16(_) => RowDtype::BF16,
        }
    }

    pub fn bytes(&self) -> usize {
        self.rows * self.cols * self.dtype().bytes()
    }

    /// One row as f32.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        let range = row * self.cols..(row + 1) * self.cols;
        match &self.values {
            RowValues::F32(values) => out.copy_from_slice(&values[range]),
            RowValues::BF16(values) => {
                for (out, value) in out.iter_mut().zip(&values[range]) {
                    *out = value.to_f32();
                }
            }
        }
    }

    /// The number of a row that holds a NaN or an infinity.
    pub fn first_non_finite(&self) -> Option<usize> {
        let place = match &self.values {
            RowValues::F32(values) => values.iter().position(|value| !value.is_finite()),
            RowValues::BF16(values) => values.iter().position(|value| !value.is_finite()),
        };
        place.map(|place| place / self.cols.max(1))
    }
}
