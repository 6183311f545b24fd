//! How many bytes a KV block takes. `kv` and `sched` never ask what is inside a block; this is where it is said.

use serde::{Deserialize, Serialize};

/// Storage of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    F32,
    F16,
    BF16,
    /// Whole numbers from -127 to 127 and one f32 factor for each token's key and each token's value of a head: its
    /// largest magnitude / 127.
    Int8,
    /// Eight bits, four of them exponent; keys and values are stored unscaled.
    #[serde(rename = "fp8_e4m3")]
    F8E4M3,
}

impl KvDtype {
    /// Of one value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Int8 | Self::F8E4M3 => 1,
        }
    }

    /// Of the factor that stands beside one head of one token's key, and again beside its value; 0 without.
    pub fn scale_bytes(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 | Self::F8E4M3 => 0,
            Self::Int8 => 4,
        }
    }

    /// Of one head of one token's key, or of its value.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        head_dim * self.bytes() + self.scale_bytes()
    }
}

/// What one layer keeps for a token: `num_kv_heads × head_dim` keys and as many values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayerSpec {
    pub num_kv_heads: usize,
    pub head_dim: usize,
}

/// What a block keeps: `block_size` tokens of every layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSpec {
    pub layers: Vec<KvLayerSpec>,
    pub dtype: KvDtype,
    pub block_size: usize,
}

impl KvSpec {
    /// Bytes of one token over all layers.
    pub fn bytes_per_token(&self) -> usize {
        self.layers.iter().map(|layer| 2 * layer.num_kv_heads * self.dtype.head_bytes(layer.head_dim)).sum()
    }

    pub fn bytes_per_block(&self) -> usize {
        self.bytes_per_token() * self.block_size
    }
}
