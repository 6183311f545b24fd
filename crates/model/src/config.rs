//! What a model is, whatever file said so: the one description that the decoder, the memory plan and the tools read.

mod generation;
mod gguf;
#[cfg(test)]
mod gguf_tests;
mod hugging_face;
mod hugging_face_rope;
mod limits;
mod raw;
#[cfg(test)]
mod tests;

use std::collections::HashSet;

use baton_backend::{Activation, KvDtype, KvLayerSpec, KvSpec, RopeStyle, WeightFormat};
use baton_core::TokenId;
use serde::Serialize;

pub use generation::GenerationDefaults;

/// Model families. All are one parametrised decoder; the name is kept for people and for the weights' names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma3,
}

/// Which names the tensors have in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NameScheme {
    HuggingFace,
    Gguf,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub architecture: Architecture,
    pub names: NameScheme,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
    /// One entry a layer.
    pub layers: Vec<LayerConfig>,
    /// Rotary tables; `LayerConfig::rope` points into it.
    pub ropes: Vec<RopeConfig>,
    pub rope_style: RopeStyle,
    pub norm_eps: f32,
    /// Added to every norm weight as it is loaded: 1 for gemma checkpoints of Hugging Face, else 0.
    pub norm_weight_offset: f32,
    pub activation: Activation,
    /// Multiplies q · k.
    pub attention_scale: f32,
    pub attention_softcap: Option<f32>,
    pub logit_softcap: Option<f32>,
    /// Multiplies the embeddings (gemma: √hidden).
    pub embed_scale: f32,
    /// RMS norm over each head of q and k.
    pub qk_norm: bool,
    /// Norms after attention and MLP, before the residual (gemma).
    pub post_norms: bool,
    pub qkv_bias: bool,
    pub attention_output_bias: bool,
    pub mlp_bias: bool,
    pub tied_embeddings: bool,
    /// The longest sequence the checkpoint was made for, scaling included.
    pub max_model_len: usize,
    /// The format the checkpoint's matrices have, or that dummy weights get.
    pub dtype: WeightFormat,
    pub bos_token_id: Option<TokenId>,
    pub eos_token_ids: Vec<TokenId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerConfig {
    /// Sliding window: keys further back are not seen.
    pub window: Option<u32>,
    /// Index into `ModelConfig::ropes`.
    pub rope: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RopeConfig {
    pub theta: f32,
    /// How many of a head's dimensions are rotated; `head_dim` unless the model says less.
    pub rotary_dim: usize,
    pub scaling: RopeScaling,
}

/// How a checkpoint was stretched beyond its original context. Parameters have transformers' names.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    None,
    Linear {
        factor: f32,
    },
    Dynamic {
        factor: f32,
        original_max_position_embeddings: usize,
    },
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_max_position_embeddings: usize,
    },
    Yarn {
        factor: f32,
        original_max_position_embeddings: usize,
        attention_factor: Option<f32>,
        beta_fast: f32,
        beta_slow: f32,
        mscale: Option<f32>,
        mscale_all_dim: Option<f32>,
        truncate: bool,
    },
    /// Divisors of the frequencies given outright (GGUF `rope_freqs.weight`).
    Factors {
        divisors: Vec<f32>,
    },
}

impl ModelConfig {
    /// What the KV cache keeps for this model.
    pub fn kv_spec(&self, dtype: KvDtype, block_size: usize) -> KvSpec {
        let layer = KvLayerSpec { num_kv_heads: self.num_kv_heads, head_dim: self.head_dim };
        KvSpec { layers: vec![layer; self.layers.len()], dtype, block_size }
    }

    /// The distinct attention kinds (full = `None`, each window), in the order of `StepInput::attention`.
    pub fn attention_kinds(&self) -> Vec<Option<u32>> {
        let mut kinds = Vec::new();
        for layer in &self.layers {
            if !kinds.contains(&layer.window) {
                kinds.push(layer.window);
            }
        }
        kinds
    }
}

/// The ids in the order they came, each once.
fn distinct(ids: impl IntoIterator<Item = TokenId>) -> Vec<TokenId> {
    let mut seen = HashSet::new();
    ids.into_iter().filter(|&id| seen.insert(id)).collect()
}
