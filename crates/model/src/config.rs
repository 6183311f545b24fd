//! The configuration of a model, whatever file it came from. The decoder, the memory plan and the tools all read this one.

mod encoder;
mod experts;
mod generation;
mod gguf;
mod gguf_experts;
#[cfg(test)]
mod gguf_tests;
mod gpt2;
mod hugging_face;
mod hugging_face_rope;
mod latent;
mod limits;
mod raw;
#[cfg(test)]
mod tests;

use std::collections::HashSet;

use baton_backend::{Activation, KvDtype, KvLayerSpec, KvSpec, NormSpan, RopeStyle, WeightFormat};
use baton_core::{MAX_SPECULATIVE_TOKENS, TokenId};
use serde::Serialize;

use crate::QuantizationConfig;
pub use encoder::{EncoderConfig, Pooling};
pub use experts::ExpertConfig;
pub use generation::GenerationDefaults;
pub(crate) use gguf::Reader as GgufReader;
pub(crate) use hugging_face::Defaults;
pub use latent::LatentConfig;
pub(crate) use limits::config_error;

/// Model families. All are one parametrised decoder; the name is kept for people and for the weights' names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma3,
    Gpt2,
    DeepseekV2,
    DeepseekV3,
    Mixtral,
    Qwen2Moe,
    Qwen3Moe,
    // Those below are tables in `families`.
    Arcee,
    Baichuan,
    Bert,
    Bloom,
    Cohere,
    Cohere2,
    Ernie45,
    Exaone,
    Exaone4,
    Falcon,
    /// Of 40B and more: a norm for each half of a layer.
    FalconNew,
    Gemma,
    Gemma2,
    Glm,
    Glm4,
    Granite,
    GptBigCode,
    GptJ,
    GptNeoX,
    GptOss,
    GraniteMoe,
    InternLm2,
    Mpt,
    Nemotron,
    NomicBert,
    Olmo2,
    Olmoe,
    Opt,
    Phi,
    Phi3,
    Roberta,
    SeedOss,
    SmolLm3,
    StableLm,
    StarCoder2,
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
    /// One entry per layer.
    pub layers: Vec<LayerConfig>,
    /// Rotary tables; `LayerConfig::rope` points into it.
    pub ropes: Vec<RopeConfig>,
    pub rope_style: RopeStyle,
    /// Positions are rows of a table that is added to the embeddings (gpt2), `[max_model_len, hidden]`.
    pub learned_positions: bool,
    /// What is added to a position before its row is looked up: the first rows of the table are for padding (opt).
    pub position_offset: usize,
    /// Norms subtract the mean (gpt2 and most before llama).
    pub layer_norm: bool,
    /// Layer norms have a bias.
    pub norm_bias: bool,
    /// Norms before attention and MLP; all but olmo2.
    pub pre_norms: bool,
    /// A norm of the embeddings (bloom).
    pub embed_norm: bool,
    /// Attention and MLP read the same input and are both added to it.
    pub parallel_residual: bool,
    /// A parallel layer has one norm for both halves.
    pub shared_norm: bool,
    /// The MLP multiplies its activation with a second product.
    pub gated_mlp: bool,
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
    /// Multiplies what attention and MLP add to the residual stream (granite).
    pub residual_scale: f32,
    /// Multiplies the logits (cohere, granite).
    pub logit_scale: f32,
    /// One slope a head where distances are added to the scores of attention.
    pub alibi_slopes: Option<Vec<f32>>,
    /// Every head has a score that takes its part of the softmax without a value (gpt-oss).
    pub attention_sinks: bool,
    /// Norms of q and k, taken over `qk_norm_span`.
    pub qk_norm: bool,
    pub qk_norm_span: NormSpan,
    /// Norms after attention and MLP, before the residual (gemma).
    pub post_norms: bool,
    pub qkv_bias: bool,
    pub attention_output_bias: bool,
    pub mlp_bias: bool,
    pub head_bias: bool,
    /// The head's rows are scaled to length 1 (baichuan2).
    pub normalized_head: bool,
    pub qkv_layout: QkvLayout,
    /// Gate and up are one tensor of the file.
    pub fused_gate_up: bool,
    /// The mixture of the layers that have one in place of an MLP.
    pub experts: Option<ExpertConfig>,
    /// Attention is over latents, of which `head_dim` is the size and which is the only kv head.
    pub latent: Option<LatentConfig>,
    pub tied_embeddings: bool,
    /// The longest sequence the checkpoint was made for, scaling included.
    pub max_model_len: usize,
    /// The longest text that an encoder takes, where that is less.
    pub max_encoded_len: Option<usize>,
    /// The model is an encoder: it gives vectors or scores, and no tokens.
    pub encoder: Option<EncoderConfig>,
    /// The format the checkpoint's matrices have, or that dummy weights get.
    pub dtype: WeightFormat,
    /// How the checkpoint's linear layers are quantised.
    pub quantization: Option<QuantizationConfig>,
    pub bos_token_id: Option<TokenId>,
    pub eos_token_ids: Vec<TokenId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerConfig {
    /// Sliding window: keys further back are not seen.
    pub window: Option<u32>,
    /// Index into `ModelConfig::ropes`; none where q and k are not rotated.
    pub rope: Option<usize>,
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
    /// Divisors of the frequencies for short and for long contexts (phi3). Which are used is decided by the longest sequence served.
    LongRope {
        short: Vec<f32>,
        long: Vec<f32>,
        original_max_position_embeddings: usize,
        /// Multiplies cos and sin.
        attention_factor: f32,
    },
    /// Divisors of the frequencies given outright (GGUF `rope_freqs.weight`).
    Factors {
        divisors: Vec<f32>,
    },
}

/// How a file stores the projections to queries, keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum QkvLayout {
    /// Three tensors.
    #[default]
    Separate,
    /// One tensor: all of q, all of k, all of v.
    Concatenated,
    /// One tensor: for each key-value head its query heads, its key head, its value head.
    Grouped,
}

impl Default for ModelConfig {
    /// A llama without sizes: families say in what they differ from it.
    fn default() -> Self {
        Self {
            architecture: Architecture::Llama,
            names: NameScheme::HuggingFace,
            hidden_size: 0,
            intermediate_size: 0,
            num_heads: 0,
            num_kv_heads: 0,
            head_dim: 0,
            vocab_size: 0,
            layers: Vec::new(),
            ropes: Vec::new(),
            rope_style: RopeStyle::Half,
            learned_positions: false,
            position_offset: 0,
            layer_norm: false,
            norm_bias: true,
            pre_norms: true,
            embed_norm: false,
            parallel_residual: false,
            shared_norm: false,
            gated_mlp: true,
            norm_eps: 1e-6,
            norm_weight_offset: 0.0,
            activation: Activation::Silu,
            attention_scale: 1.0,
            attention_softcap: None,
            logit_softcap: None,
            embed_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            alibi_slopes: None,
            attention_sinks: false,
            qk_norm: false,
            qk_norm_span: NormSpan::Head,
            post_norms: false,
            qkv_bias: false,
            attention_output_bias: false,
            mlp_bias: false,
            head_bias: false,
            normalized_head: false,
            qkv_layout: QkvLayout::Separate,
            fused_gate_up: false,
            experts: None,
            latent: None,
            tied_embeddings: false,
            max_model_len: 0,
            max_encoded_len: None,
            encoder: None,
            dtype: WeightFormat::BF16,
            quantization: None,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
        }
    }
}

impl ModelConfig {
    /// What the KV cache keeps for this model.
    pub fn kv_spec(&self, dtype: KvDtype, block_size: usize) -> KvSpec {
        joint_kv_spec(&[self], dtype, block_size)
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

/// One cache for several models, a target and its draft: the layers of each follow those of the one before, and those that see alike
/// share block tables.
pub fn joint_kv_spec(models: &[&ModelConfig], dtype: KvDtype, block_size: usize) -> KvSpec {
    let layer =
        |model: &ModelConfig| KvLayerSpec { num_kv_heads: model.num_kv_heads, head_dim: model.head_dim };
    let layers = models.iter().flat_map(|model| std::iter::repeat_n(layer(model), model.layers.len()));
    let windows: Vec<Option<u32>> =
        models.iter().flat_map(|model| model.layers.iter().map(|layer| layer.window)).collect();
    let mut spec = KvSpec::new(layers.collect(), &windows, dtype, block_size);
    spec.num_kept_behind = if models.len() > 1 { MAX_SPECULATIVE_TOKENS } else { 0 };
    spec
}

/// The ids in the order they came, each once.
fn distinct(ids: impl IntoIterator<Item = TokenId>) -> Vec<TokenId> {
    let mut seen = HashSet::new();
    ids.into_iter().filter(|&id| seen.insert(id)).collect()
}
