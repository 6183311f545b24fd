//! The tensor types of GGUF files: name and size of all known ones, and which of them the backends support.

use baton_backend::WeightFormat;

/// A tensor type with its block: how many values in how many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgmlType {
    id: u32,
    name: &'static str,
    block_len: u64,
    block_bytes: u64,
}

const fn entry(id: u32, name: &'static str, block_len: u64, block_bytes: u64) -> GgmlType {
    GgmlType { id, name, block_len, block_bytes }
}

const MXFP4: &str = "MXFP4";

const KNOWN: [GgmlType; 34] = [
    entry(0, "F32", 1, 4),
    entry(1, "F16", 1, 2),
    entry(2, "Q4_0", 32, 18),
    entry(3, "Q4_1", 32, 20),
    entry(6, "Q5_0", 32, 22),
    entry(7, "Q5_1", 32, 24),
    entry(8, "Q8_0", 32, 34),
    entry(9, "Q8_1", 32, 36),
    entry(10, "Q2_K", 256, 84),
    entry(11, "Q3_K", 256, 110),
    entry(12, "Q4_K", 256, 144),
    entry(13, "Q5_K", 256, 176),
    entry(14, "Q6_K", 256, 210),
    entry(15, "Q8_K", 256, 292),
    entry(16, "IQ2_XXS", 256, 66),
    entry(17, "IQ2_XS", 256, 74),
    entry(18, "IQ3_XXS", 256, 98),
    entry(19, "IQ1_S", 256, 50),
    entry(20, "IQ4_NL", 32, 18),
    entry(21, "IQ3_S", 256, 110),
    entry(22, "IQ2_S", 256, 82),
    entry(23, "IQ4_XS", 256, 136),
    entry(24, "I8", 1, 1),
    entry(25, "I16", 1, 2),
    entry(26, "I32", 1, 4),
    entry(27, "I64", 1, 8),
    entry(28, "F64", 1, 8),
    entry(29, "IQ1_M", 256, 56),
    entry(30, "BF16", 1, 2),
    entry(34, "TQ1_0", 256, 54),
    entry(35, "TQ2_0", 256, 66),
    entry(39, MXFP4, 32, 17),
    entry(40, "NVFP4", 64, 36),
    entry(41, "Q1_0", 128, 18),
];

impl GgmlType {
    /// The type with this number in the file, if it is a known one.
    pub fn from_id(id: u32) -> Option<Self> {
        KNOWN.iter().copied().find(|known| known.id == id)
    }

    /// The type of a format that GGUF files have.
    pub(crate) fn of(format: WeightFormat) -> Self {
        let known = KNOWN.iter().copied().find(|known| known.weight_format() == Some(format));
        known.unwrap_or_else(|| panic!("no GGUF file has {format}"))
    }

    pub(crate) fn id(self) -> u32 {
        self.id
    }

    pub fn name(self) -> &'static str {
        self.name
    }

    pub(super) fn is_mxfp4(self) -> bool {
        self.name == MXFP4
    }

    /// The format that backends get it in, if they do. MXFP4 becomes a format with the same numbers.
    pub fn weight_format(self) -> Option<WeightFormat> {
        Some(match self.name {
            "F32" => WeightFormat::F32,
            "F16" => WeightFormat::F16,
            "BF16" => WeightFormat::BF16,
            "Q4_0" => WeightFormat::Q4_0,
            "Q4_1" => WeightFormat::Q4_1,
            "Q5_0" | MXFP4 => WeightFormat::Q5_0,
            "Q5_1" => WeightFormat::Q5_1,
            "Q8_0" => WeightFormat::Q8_0,
            "Q2_K" => WeightFormat::Q2_K,
            "Q3_K" => WeightFormat::Q3_K,
            "Q4_K" => WeightFormat::Q4_K,
            "Q5_K" => WeightFormat::Q5_K,
            "Q6_K" => WeightFormat::Q6_K,
            "IQ4_NL" => WeightFormat::IQ4_NL,
            "IQ4_XS" => WeightFormat::IQ4_XS,
            "IQ3_S" => WeightFormat::IQ3_S,
            "IQ3_XXS" => WeightFormat::IQ3_XXS,
            "IQ2_S" => WeightFormat::IQ2_S,
            "IQ2_XS" => WeightFormat::IQ2_XS,
            "IQ2_XXS" => WeightFormat::IQ2_XXS,
            "IQ1_M" => WeightFormat::IQ1_M,
            "IQ1_S" => WeightFormat::IQ1_S,
            _ => return None,
        })
    }

    /// Bytes of a tensor whose rows have `dims[0]` values; `None` if a row is not whole blocks or the size overflows.
    pub(super) fn tensor_bytes(self, dims: &[u64]) -> Option<u64> {
        let (&cols, rest) = dims.split_first()?;
        if cols % self.block_len != 0 {
            return None;
        }
        let row_bytes = (cols / self.block_len).checked_mul(self.block_bytes)?;
        rest.iter().try_fold(row_bytes, |bytes, &dim| bytes.checked_mul(dim))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_agree_with_the_backend_formats() {
        let mut seen = 0;
        for known in KNOWN {
            let Some(format) = known.weight_format().filter(|_| !known.is_mxfp4()) else { continue };
            seen += 1;
            assert_eq!(format.to_string(), known.name);
            assert_eq!(known.block_len, format.block_len() as u64);
            assert_eq!(known.block_bytes, format.block_bytes() as u64);
        }
        // No GGUF file has e4m3.
        assert_eq!(seen, WeightFormat::ALL.len() - 1);
    }

    #[test]
    fn tensor_sizes_are_checked() {
        let q4_1 = GgmlType::from_id(3).unwrap();
        assert_eq!(q4_1.tensor_bytes(&[64, 2]), Some(80));
        assert_eq!(q4_1.tensor_bytes(&[33, 2]), None);
        assert_eq!(q4_1.tensor_bytes(&[1 << 40, 1 << 40]), None);
        assert!(GgmlType::from_id(4).is_none());
    }
}
