//! The keys of `config.json` that are read, as written there. Everything else is skipped.

// Two levels of `Option` tell a key that is null from one that is absent.
#![allow(clippy::option_option)]

use serde::{Deserialize, Deserializer};

use super::experts::RawExperts;
use super::latent::RawLatent;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RawConfig {
    pub(super) architectures: Option<Vec<String>>,
    pub(super) model_type: Option<String>,
    pub(super) text_config: Option<Box<RawConfig>>,
    pub(super) quantization_config: Option<serde_json::Value>,
    pub(super) compression_config: Option<serde_json::Value>,

    pub(super) hidden_size: Option<u64>,
    pub(super) intermediate_size: Option<u64>,
    pub(super) num_hidden_layers: Option<u64>,
    pub(super) num_attention_heads: Option<u64>,
    #[serde(deserialize_with = "null_is_present")]
    pub(super) num_key_value_heads: Option<Option<u64>>,
    pub(super) head_dim: Option<u64>,
    pub(super) vocab_size: Option<u64>,
    pub(super) rms_norm_eps: Option<f64>,
    pub(super) hidden_act: Option<String>,
    pub(super) hidden_activation: Option<String>,
    pub(super) attention_bias: Option<bool>,
    pub(super) mlp_bias: Option<bool>,
    pub(super) tie_word_embeddings: Option<bool>,
    pub(super) torch_dtype: Option<String>,
    pub(super) dtype: Option<String>,
    pub(super) bos_token_id: Option<i64>,
    pub(super) eos_token_id: Option<OneOrMany>,

    pub(super) max_position_embeddings: Option<u64>,
    pub(super) n_positions: Option<u64>,
    pub(super) max_seq_len: Option<u64>,
    pub(super) seq_length: Option<u64>,
    pub(super) model_max_length: Option<u64>,
    pub(super) max_target_positions: Option<u64>,
    pub(super) max_sequence_length: Option<u64>,
    pub(super) max_seq_length: Option<u64>,
    pub(super) seq_len: Option<u64>,

    #[serde(deserialize_with = "null_is_present")]
    pub(super) sliding_window: Option<Option<u64>>,
    pub(super) use_sliding_window: Option<bool>,
    pub(super) max_window_layers: Option<u64>,
    pub(super) layer_types: Option<Vec<String>>,
    pub(super) sliding_window_pattern: Option<u64>,
    #[serde(rename = "_sliding_window_pattern")]
    pub(super) private_sliding_window_pattern: Option<u64>,
    pub(super) use_bidirectional_attention: Option<bool>,
    pub(super) query_pre_attn_scalar: Option<f64>,
    pub(super) attn_logit_softcapping: Option<f64>,
    pub(super) final_logit_softcapping: Option<f64>,

    // GPT-2.
    pub(super) n_embd: Option<u64>,
    pub(super) n_layer: Option<u64>,
    pub(super) n_head: Option<u64>,
    pub(super) n_inner: Option<u64>,
    pub(super) layer_norm_epsilon: Option<f64>,
    pub(super) activation_function: Option<String>,
    pub(super) scale_attn_weights: Option<bool>,
    pub(super) scale_attn_by_inverse_layer_idx: Option<bool>,
    pub(super) add_cross_attention: Option<bool>,

    #[serde(flatten)]
    pub(super) experts: RawExperts,
    #[serde(flatten)]
    pub(super) latent: RawLatent,

    pub(super) rope_theta: Option<f64>,
    pub(super) rope_local_base_freq: Option<f64>,
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) original_max_position_embeddings: Option<u64>,
    pub(super) rope_scaling: Option<RawRope>,
    pub(super) rope_parameters: Option<RawRope>,
}

/// `rope_scaling` of transformers 4 and `rope_parameters` of 5, flat or by layer type.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RawRope {
    pub(super) rope_type: Option<String>,
    #[serde(rename = "type")]
    pub(super) legacy_type: Option<String>,
    pub(super) rope_theta: Option<f64>,
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) factor: Option<f64>,
    pub(super) original_max_position_embeddings: Option<u64>,
    pub(super) low_freq_factor: Option<f64>,
    pub(super) high_freq_factor: Option<f64>,
    pub(super) attention_factor: Option<f64>,
    pub(super) beta_fast: Option<f64>,
    pub(super) beta_slow: Option<f64>,
    pub(super) mscale: Option<f64>,
    pub(super) mscale_all_dim: Option<f64>,
    pub(super) truncate: Option<bool>,
    pub(super) short_factor: Option<Vec<f64>>,
    pub(super) long_factor: Option<Vec<f64>>,
    pub(super) full_attention: Option<Box<RawRope>>,
    pub(super) sliding_attention: Option<Box<RawRope>>,
}

/// A number or a list of them.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(i64),
    Many(Vec<i64>),
}

impl OneOrMany {
    pub(super) fn as_slice(&self) -> &[i64] {
        match self {
            Self::One(id) => std::slice::from_ref(id),
            Self::Many(ids) => ids,
        }
    }
}

/// Tells `null` (`Some(None)`) from an absent key (`None`).
fn null_is_present<'de, D, T>(deserializer: D) -> Result<Option<Option<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(deserializer).map(Some)
}
