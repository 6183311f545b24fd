//! How a weight lies in the device's memory: as in its file, or packed for the tensor cores (`packed.cu`). f16 becomes bf16, as
//! activations are: tensor cores take both of one kind. In full precision all stay as they are.

use baton_backend::quant::grid_factor;
use baton_backend::{Precision, WeightFormat};

/// Rows that are packed together.
pub(crate) const TILE_ROWS: usize = 16;
/// Columns that are packed together.
const RECORD_COLS: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Layout {
    /// Row after row.
    Plain(WeightFormat),
    /// Tiles of 16 rows, in records of 64 columns, of values of so many bits.
    Packed { bits: u32 },
}

impl Layout {
    /// Of a weight that products are made with.
    pub(crate) fn of_product(format: WeightFormat, precision: Precision) -> Self {
        match packed_bits(format) {
            _ if precision == Precision::Full => Self::Plain(format),
            0 if format == WeightFormat::F16 => Self::Plain(WeightFormat::BF16),
            0 => Self::Plain(format),
            bits => Self::Packed { bits },
        }
    }

    /// Rows that lie together, and their bytes; `None` if the format has no rows of that width.
    pub(crate) fn unit(self, cols: usize) -> Option<(usize, usize)> {
        match self {
            Self::Plain(format) => Some((1, format.row_bytes(cols)?)),
            Self::Packed { bits } => {
                let bytes = cols.div_ceil(RECORD_COLS).checked_mul(record_bytes(bits))?;
                Some((TILE_ROWS, bytes))
            }
        }
    }
}

/// What activations are stored as, and what products by cuBLASLt take.
pub(crate) fn activation_format(precision: Precision) -> WeightFormat {
    match precision {
        Precision::Fast => WeightFormat::BF16,
        Precision::Full => WeightFormat::F32,
    }
}

/// What a weight of a file is on the device. The formats of grids have no kernels: they are opened as they are loaded, as e4m3
/// is in full precision.
pub(crate) fn device_format(format: WeightFormat, precision: Precision) -> WeightFormat {
    let is_full_fp8 = format == WeightFormat::F8_E4M3 && precision == Precision::Full;
    if is_full_fp8 || grid_factor(format).is_some() { activation_format(precision) } else { format }
}

/// Bytes that `bytes` of a file take on the device: more where the format is opened.
pub fn loaded_bytes(format: WeightFormat, bytes: u64) -> u64 {
    let opened = device_format(format, Precision::Fast);
    if opened == format {
        return bytes;
    }
    let values = bytes / format.block_bytes() as u64 * format.block_len() as u64;
    values.saturating_mul(opened.block_bytes() as u64)
}

/// How many bits a value of the format is packed into; 0: it is not packed.
pub(crate) fn packed_bits(format: WeightFormat) -> u32 {
    match format {
        WeightFormat::Q4_0 | WeightFormat::Q4_1 | WeightFormat::Q4_K => 4,
        WeightFormat::Q5_0 | WeightFormat::Q5_1 | WeightFormat::Q5_K => 5,
        WeightFormat::Q6_K => 6,
        WeightFormat::Q8_0 => 8,
        _ => 0,
    }
}

/// As in `weights.cuh`: the values, and scales with or without minima.
pub(crate) fn record_bytes(bits: u32) -> usize {
    let scales = if bits == 8 { 64 } else { 128 };
    TILE_ROWS * RECORD_COLS * bits as usize / 8 + scales
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_as_large_as_the_kernels_think() {
        assert_eq!([4, 5, 6, 8].map(record_bytes), [640, 768, 896, 1088]);
    }

    #[test]
    fn a_packed_weight_takes_little_more_than_its_file() {
        for format in WeightFormat::ALL.into_iter().filter(|format| grid_factor(*format).is_none()) {
            let (rows, bytes) = Layout::of_product(format, Precision::Fast).unit(4096).unwrap();
            let in_file = rows * format.row_bytes(4096).unwrap();
            assert!(bytes * 8 <= in_file * 9, "{format}: {bytes} bytes for {in_file}");
        }
        // Those without kernels are bf16, of which the plan knows.
        assert_eq!(device_format(WeightFormat::IQ2_XXS, Precision::Fast), WeightFormat::BF16);
        assert_eq!(device_format(WeightFormat::IQ2_XXS, Precision::Full), WeightFormat::F32);
        assert_eq!(loaded_bytes(WeightFormat::IQ2_XXS, 2 * 66), 2 * 512);
        assert_eq!(loaded_bytes(WeightFormat::Q4_K, 144), 144);
        // The last record is half empty.
        let unit = |format, precision| Layout::of_product(format, precision).unit(96);
        assert_eq!(unit(WeightFormat::Q8_0, Precision::Fast), Some((16, 2 * 1088)));
        assert_eq!(unit(WeightFormat::Q8_0, Precision::Full), Some((1, 3 * 34)));
        assert_eq!(unit(WeightFormat::BF16, Precision::Fast), Some((1, 192)));
    }
}
