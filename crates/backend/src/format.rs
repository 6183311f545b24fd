//! How the numbers of a weight are stored: plain floats, eight-bit floats with scales beside them, and the GGUF block formats.

use serde::{Deserialize, Serialize};

/// A storage format of weights. Names are those of GGUF and safetensors files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(non_camel_case_types)]
pub enum WeightFormat {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    IQ3_S,
    IQ3_XXS,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ1_M,
    IQ1_S,
    /// e4m3; a [`Tensor`](crate::Tensor) may have scales for its rows or blocks beside the values.
    F8_E4M3,
}

impl WeightFormat {
    pub const ALL: [Self; 23] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::IQ3_S,
        Self::IQ3_XXS,
        Self::IQ2_S,
        Self::IQ2_XS,
        Self::IQ2_XXS,
        Self::IQ1_M,
        Self::IQ1_S,
        Self::F8_E4M3,
    ];

    /// Values in one block. A row is a whole number of blocks.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 | Self::F8_E4M3 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::IQ4_NL => 32,
            _ => 256,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F8_E4M3 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 | Self::IQ4_NL => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2_K => 84,
            Self::Q3_K | Self::IQ3_S => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
            Self::IQ4_XS => 136,
            Self::IQ3_XXS => 98,
            Self::IQ2_S => 82,
            Self::IQ2_XS => 74,
            Self::IQ2_XXS => 66,
            Self::IQ1_M => 56,
            Self::IQ1_S => 50,
        }
    }

    /// Bytes of a row of `cols` values; `None` if it is not a whole number of blocks or overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        cols.is_multiple_of(self.block_len())
            .then(|| (cols / self.block_len()).checked_mul(self.block_bytes()))
            .flatten()
    }

    /// True for the floating-point formats that products are made with as they are.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }
}

impl std::fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(self, f)
    }
}
