//! Activations, vectors and scratch: plain f32 in aligned memory, handed to workers as raw matrices.
//!
//! Workers of one op write disjoint parts of the same buffer at the same time, which references cannot say; so ops
//! work on [`Matrix`], a pointer with its shape, and each op states why its writes are disjoint.

use baton_backend::BackendError;

use crate::memory::AlignedBytes;

/// `rows × cols` of f32 inside a [`Buffer`], free to be sent to workers.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    start: *mut f32,
    pub rows: usize,
    pub cols: usize,
}

// SAFETY: a matrix is only a pointer with a shape; whoever reads or writes through it proves that it is alive and that
// no other worker touches the same part.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// The first value of a row.
    pub fn row(&self, row: usize) -> *mut f32 {
        debug_assert!(row < self.rows);
        // SAFETY: the row lies within the buffer.
        unsafe { self.start.add(row * self.cols) }
    }

    /// The first value of all.
    pub fn start(&self) -> *mut f32 {
        self.start
    }

    /// The same memory in another shape, if it is large enough.
    pub fn reshaped(&self, rows: usize, cols: usize) -> Option<Self> {
        (rows.checked_mul(cols)? <= self.rows * self.cols).then_some(Self { start: self.start, rows, cols })
    }

    pub fn same_memory(&self, other: &Self) -> bool {
        self.start == other.start
    }
}

/// Owned f32 values.
#[derive(Debug)]
pub struct Buffer {
    bytes: AlignedBytes,
    rows: usize,
    cols: usize,
}

impl Buffer {
    pub fn new(rows: usize, cols: usize, what: &str) -> Result<Self, BackendError> {
        let len = rows.checked_mul(cols).and_then(|len| len.checked_mul(4)).ok_or_else(|| {
            BackendError::Unsupported { what: format!("{what} of {rows} x {cols}: it is too large") }
        })?;
        Ok(Self { bytes: AlignedBytes::zeroed(len, what)?, rows, cols })
    }

    pub fn matrix(&self) -> Matrix {
        Matrix { start: self.bytes.as_mut_ptr().cast(), rows: self.rows, cols: self.cols }
    }

    /// Grows to at least `len` values, losing what was there.
    pub fn reserve(&mut self, len: usize, what: &str) -> Result<(), BackendError> {
        if len > self.rows * self.cols {
            *self = Self::new(1, len, what)?;
        }
        Ok(())
    }

    pub fn as_slice(&self) -> &[f32] {
        // SAFETY: `rows * cols` values were allocated, and no op runs while the owner is borrowed outside a step.
        unsafe { std::slice::from_raw_parts(self.bytes.as_mut_ptr().cast(), self.rows * self.cols) }
    }

    /// A vector, padded with zeros to whole vectors of 16.
    pub fn from_values(values: &[f32]) -> Result<Self, BackendError> {
        let buffer = Self::new(1, values.len().next_multiple_of(16), "a vector")?;
        // SAFETY: the buffer was just made and is at least as long as `values`.
        unsafe {
            std::ptr::copy_nonoverlapping(values.as_ptr(), buffer.bytes.as_mut_ptr().cast(), values.len());
        }
        Ok(buffer)
    }
}

/// Lets workers share something that holds raw pointers.
#[derive(Clone, Copy, Debug)]
pub struct Shared<T>(T);

// SAFETY: made only by the unsafe `Shared::new`, whose caller vouches for the users.
unsafe impl<T> Sync for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Shared<T> {}

impl<T> Shared<T> {
    /// # Safety
    /// Workers that use the value must not race through its pointers.
    pub unsafe fn new(value: T) -> Self {
        Self(value)
    }

    pub fn get(&self) -> &T {
        &self.0
    }
}
