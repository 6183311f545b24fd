//! Random weights for `--load-format dummy`: the right names, shapes and format, and values small enough that a forward
//! pass stays finite. For measuring speed and memory without a checkpoint; the text it gives is noise.
//!
//! Tensors are made when asked for and not kept, so that a large model needs no second copy in memory.

use std::collections::HashMap;

use baton_backend::{SharedBytes, Tensor, WeightFormat};
use half::{bf16, f16};

use crate::tensor_names::{ExpectedTensor, expected_tensors};
use crate::{ModelConfig, ModelError, NameScheme, WeightSource};

/// Uniform values within ±0.0346 have the standard deviation 0.02 that models are initialised with.
const LARGEST: f32 = 0.0346;
/// Distinct values, so that one random byte makes one weight.
const LEVELS: usize = 256;

#[derive(Debug)]
pub struct DummyWeights {
    format: WeightFormat,
    seed: u64,
    /// What makes a norm the identity: 1 less the offset that is added when it is loaded.
    norm_value: f32,
    tensors: Vec<ExpectedTensor>,
    by_name: HashMap<String, usize>,
}

impl DummyWeights {
    /// Weights for a configuration with Hugging Face's names. The same seed gives the same weights.
    pub fn new(config: &ModelConfig, seed: u64) -> Result<Self, ModelError> {
        if config.names != NameScheme::HuggingFace || !config.dtype.is_float() {
            let what = "dummy weights need a config.json; a GGUF file brings its own weights".to_owned();
            return Err(ModelError::Config { what });
        }
        let tensors = expected_tensors(config);
        let by_name =
            tensors.iter().enumerate().map(|(index, tensor)| (tensor.name.clone(), index)).collect();
        let norm_value = 1.0 - config.norm_weight_offset;
        Ok(Self { format: config.dtype, seed, norm_value, tensors, by_name })
    }

    fn values(&self, tensor: &ExpectedTensor) -> Vec<u8> {
        let count = tensor.rows * tensor.cols;
        match self.format {
            WeightFormat::F32 => self.fill(tensor, count, f32::to_le_bytes),
            WeightFormat::F16 => self.fill(tensor, count, |value| f16::from_f32(value).to_le_bytes()),
            _ => self.fill(tensor, count, |value| bf16::from_f32(value).to_le_bytes()),
        }
    }

    fn fill<const N: usize>(
        &self,
        tensor: &ExpectedTensor,
        count: usize,
        encode: impl Fn(f32) -> [u8; N],
    ) -> Vec<u8> {
        if tensor.role.is_norm() {
            return encode(self.norm_value).repeat(count);
        }
        let step = 2.0 * LARGEST / (LEVELS - 1) as f32;
        let levels: Vec<[u8; N]> = (0..LEVELS).map(|level| encode(level as f32 * step - LARGEST)).collect();
        let mut state = self.seed ^ fnv1a(tensor.name.as_bytes());
        let mut bytes = Vec::with_capacity(count * N);
        let mut left = count;
        while left > 0 {
            let random = split_mix(&mut state).to_le_bytes();
            let take = left.min(random.len());
            for &byte in &random[..take] {
                bytes.extend_from_slice(&levels[byte as usize]);
            }
            left -= take;
        }
        bytes
    }
}

impl WeightSource for DummyWeights {
    fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError> {
        let Some(&index) = self.by_name.get(name) else { return Ok(None) };
        let expected = &self.tensors[index];
        let bytes = SharedBytes::from_vec(self.values(expected));
        Tensor::new(self.format, expected.rows, expected.cols, bytes)
            .map(Some)
            .map_err(|cause| ModelError::Tensor { name: name.to_owned(), cause })
    }

    fn names(&self) -> Vec<String> {
        self.tensors.iter().map(|tensor| tensor.name.clone()).collect()
    }

    fn total_bytes(&self) -> u64 {
        let value_bytes = self.format.block_bytes() as u64;
        self.tensors.iter().map(|tensor| tensor.rows as u64 * tensor.cols as u64 * value_bytes).sum()
    }
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
