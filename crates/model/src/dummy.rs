//! Random weights for `--load-format dummy`: the right names, shapes and format, and values small enough that a forward
//! pass stays finite. For measuring speed and memory without a checkpoint; the text it gives is noise.
//!
//! Tensors are made when asked for and not kept, so that a large model needs no second copy in memory; a backend that can
//! make the values on its device does, and nothing is made here at all.

use std::collections::HashMap;

use baton_backend::{RandomFill, Scales, SharedBytes, Tensor, TensorError, WeightFormat};
use half::{bf16, f16};

use crate::estimate::stored_format;
use crate::tensor_names::{ExpectedTensor, Role, expected_tensors};
use crate::{ModelConfig, ModelError, NameScheme, QuantMethod, QuantizationConfig, WeightSource};

/// Uniform values within ±0.0346 have the standard deviation 0.02 that models are initialised with.
const LARGEST: f32 = 0.0346;
/// Of embeddings where there are experts. What a token is must outweigh what its neighbours have in common, or all tokens go to the
/// same experts, and a step reads fewer weights than one of real tokens.
const LARGEST_ROUTED: f32 = 1.0;

#[derive(Debug)]
pub struct DummyWeights {
    format: WeightFormat,
    seed: u64,
    /// What makes a norm the identity: 1 less the offset that is added when it is loaded.
    norm_value: f32,
    quantization: Option<QuantizationConfig>,
    largest_embedding: f32,
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
        let largest_embedding = if config.experts.is_some() { LARGEST_ROUTED } else { LARGEST };
        let quantization = config.quantization.clone();
        Ok(Self { format: config.dtype, seed, norm_value, quantization, largest_embedding, tensors, by_name })
    }

    fn stored(&self, tensor: &ExpectedTensor) -> WeightFormat {
        stored_format(self.format, self.quantization.as_ref(), tensor)
    }

    fn random(&self, expected: &ExpectedTensor, fill: RandomFill) -> Result<Tensor, TensorError> {
        let (rows, cols) = (expected.rows, expected.cols);
        let tensor = Tensor::random(self.stored(expected), rows, cols, fill)?;
        let method = self.quantization.as_ref().map(|quantization| quantization.method);
        let Some(QuantMethod::Fp8 { block: Some((block_rows, block_cols)), .. }) =
            method.filter(|_| tensor.format() == WeightFormat::F8_E4M3)
        else {
            return Ok(tensor);
        };
        let across = cols.div_ceil(block_cols);
        let scales = vec![fill.e4m3_scale(); rows.div_ceil(block_rows) * across];
        tensor.with_scales(Scales::of_blocks(scales, block_rows, block_cols, across))
    }

    fn norm_bytes(&self, count: usize) -> Vec<u8> {
        match self.format {
            WeightFormat::F32 => self.norm_value.to_le_bytes().repeat(count),
            WeightFormat::F16 => f16::from_f32(self.norm_value).to_le_bytes().repeat(count),
            _ => bf16::from_f32(self.norm_value).to_le_bytes().repeat(count),
        }
    }
}

impl WeightSource for DummyWeights {
    fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError> {
        let Some(&index) = self.by_name.get(name) else { return Ok(None) };
        let expected = &self.tensors[index];
        let (rows, cols) = (expected.rows, expected.cols);
        let tensor = if expected.role.is_norm() && !expected.is_bias {
            Tensor::new(self.format, rows, cols, SharedBytes::from_vec(self.norm_bytes(rows * cols)))
        } else {
            let seed = self.seed ^ fnv1a(name.as_bytes());
            let is_embedding = expected.role == Role::TokenEmbedding;
            let largest = if is_embedding { self.largest_embedding } else { LARGEST };
            self.random(expected, RandomFill { seed, largest })
        };
        tensor.map(Some).map_err(|cause| ModelError::Tensor { name: name.to_owned(), cause })
    }

    fn names(&self) -> Vec<String> {
        self.tensors.iter().map(|tensor| tensor.name.clone()).collect()
    }

    fn formats(&self) -> Result<Vec<WeightFormat>, ModelError> {
        let mut formats = Vec::new();
        for tensor in self.tensors.iter().filter(|tensor| tensor.rows > 1) {
            if !formats.contains(&self.stored(tensor)) {
                formats.push(self.stored(tensor));
            }
        }
        Ok(formats)
    }

    fn total_bytes(&self) -> u64 {
        let bytes = |tensor: &ExpectedTensor| {
            self.stored(tensor).row_bytes(tensor.cols).unwrap_or(0) as u64 * tensor.rows as u64
        };
        self.tensors.iter().map(bytes).sum()
    }
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(architecture: &str, dtype: &str) -> ModelConfig {
        let config = json!({
            "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50, "dtype": dtype,
        });
        ModelConfig::from_json(config.to_string().as_bytes(), None).unwrap()
    }

    fn tensor(weights: &DummyWeights, name: &str) -> Tensor {
        weights.tensor(name).unwrap().unwrap_or_else(|| panic!("no {name}"))
    }

    #[test]
    fn values_have_the_usual_scale() {
        let weights = DummyWeights::new(&config("LlamaForCausalLM", "float32"), 0).unwrap();
        let gate = tensor(&weights, "model.layers.1.mlp.gate_proj.weight");
        assert_eq!((gate.rows(), gate.cols()), (96, 64));
        let (values, _) = gate.bytes().as_chunks::<4>();
        let values: Vec<f32> = values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let deviation = (values.iter().map(|value| value * value).sum::<f32>() / values.len() as f32).sqrt();
        assert!(mean.abs() < 1e-3, "{mean}");
        assert!((deviation - 0.02).abs() < 1e-3, "{deviation}");
        let norm = tensor(&weights, "model.norm.weight");
        assert_eq!(norm.bytes(), 1_f32.to_le_bytes().repeat(64));
    }

    #[test]
    fn the_seed_decides_and_tensors_differ() {
        let make = |seed| DummyWeights::new(&config("Qwen2ForCausalLM", "bfloat16"), seed).unwrap();
        let (q, k) = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.bias");
        assert_eq!(tensor(&make(1), q).bytes(), tensor(&make(1), q).bytes());
        assert_ne!(tensor(&make(1), q).bytes(), tensor(&make(2), q).bytes());
        assert_eq!((tensor(&make(1), k).rows(), tensor(&make(1), k).cols()), (1, 32));
        assert_ne!(tensor(&make(1), q).row(0), tensor(&make(1), q).row(1));
    }

    #[test]
    fn all_that_is_named_is_there_and_counted() {
        for architecture in ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3"] {
            for (dtype, format) in [("float16", WeightFormat::F16), ("bfloat16", WeightFormat::BF16)] {
                let config = config(&format!("{architecture}ForCausalLM"), dtype);
                let weights = DummyWeights::new(&config, 0).unwrap();
                let mut bytes = 0;
                for name in weights.names() {
                    let tensor = tensor(&weights, &name);
                    assert_eq!(tensor.format(), format);
                    bytes += tensor.bytes().len() as u64;
                }
                assert_eq!(weights.total_bytes(), bytes, "{architecture}");
                assert_eq!(weights.tensor("lm_head.weight").unwrap().is_none(), config.tied_embeddings);
            }
        }
    }

    #[test]
    fn gemma_norms_are_zero_because_one_is_added() {
        let weights = DummyWeights::new(&config("Gemma3ForCausalLM", "bfloat16"), 0).unwrap();
        let norm = tensor(&weights, "model.layers.0.pre_feedforward_layernorm.weight");
        assert!(norm.bytes().iter().all(|&byte| byte == 0));
    }
}
