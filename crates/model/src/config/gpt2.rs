//! `config.json` of GPT-2, whose keys have names of their own: learned positions, layer norms, biases everywhere, an MLP without
//! a gate, and a head that is the embedding.

use baton_backend::WeightFormat;

use super::limits::config_error;
use super::raw::RawConfig;
use super::{Architecture, LayerConfig, ModelConfig, NameScheme, QkvLayout};
use crate::ModelError;

/// What is the same in every GPT-2, wherever its sizes come from.
pub(super) struct Gpt2Sizes {
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    pub(super) num_layers: usize,
    pub(super) num_heads: usize,
    pub(super) vocab_size: usize,
    pub(super) max_model_len: usize,
}

impl ModelConfig {
    /// Of `model_type` gpt2. The reader of the file fills in what it knows better.
    pub(super) fn gpt2(sizes: &Gpt2Sizes) -> Result<Self, ModelError> {
        let Gpt2Sizes { hidden_size, num_heads, .. } = *sizes;
        let head_dim =
            hidden_size.checked_div(num_heads).filter(|head_dim| head_dim * num_heads == hidden_size);
        let head_dim = head_dim.ok_or_else(|| {
            config_error(format!("a hidden size of {hidden_size} is not a multiple of {num_heads} heads"))
        })?;
        Ok(Self {
            architecture: Architecture::Gpt2,
            names: NameScheme::HuggingFace,
            hidden_size,
            intermediate_size: sizes.intermediate_size,
            num_heads,
            num_kv_heads: num_heads,
            head_dim,
            vocab_size: sizes.vocab_size,
            layers: vec![LayerConfig { window: None, rope: None }; sizes.num_layers],
            learned_positions: true,
            layer_norm: true,
            gated_mlp: false,
            norm_eps: 1e-5,
            activation: baton_backend::Activation::GeluTanh,
            attention_scale: (head_dim as f64).powf(-0.5) as f32,
            qkv_bias: true,
            attention_output_bias: true,
            mlp_bias: true,
            experts: None,
            latent: None,
            qkv_layout: QkvLayout::Concatenated,
            tied_embeddings: true,
            max_model_len: sizes.max_model_len,
            dtype: WeightFormat::F32,
            ..Self::default()
        })
    }
}

/// What no kernel here does is refused: left out, it would give wrong answers that look right.
pub(super) fn refuse_unsupported(raw: &RawConfig) -> Result<(), ModelError> {
    let switches = [
        ("scale_attn_weights", raw.scale_attn_weights == Some(false)),
        ("scale_attn_by_inverse_layer_idx", raw.scale_attn_by_inverse_layer_idx == Some(true)),
        ("add_cross_attention", raw.add_cross_attention == Some(true)),
    ];
    match switches.iter().find(|(_, is_odd)| *is_odd) {
        Some((name, _)) => Err(config_error(format!("GPT-2 with an unusual {name:?} is not supported"))),
        None => Ok(()),
    }
}
