//! Falcon: halves in parallel. 7B has one norm and one key-value head; 40B and more have two norms and groups of heads; RW has
//! ALiBi, biases, and one half after the other.

use baton_backend::Activation;

use super::{Family, Keys, alibi_slopes};
use crate::config::{Defaults, GgufReader, config_error};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError, QkvLayout};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Falcon,
    classes: &["FalconForCausalLM", "RWForCausalLM", "falcon", "RefinedWebModel", "RefinedWeb"],
    gguf: &["falcon"],
    aliases: &[("ffn_hidden_size", "intermediate_size"), ("activation", "hidden_act")],
    defaults: Defaults {
        tied_embeddings: true,
        norm_eps: 1e-5,
        hidden_act: "gelu",
        mlp_ratio: Some(4),
        ..Defaults::LLAMA
    },
    layers: "transformer.h.",
    names: NAMES,
    adjust,
    adjust_gguf,
    examples: "Falcon 7B, 11B, RW",
    golden: &["falcon", "falcon-alibi"],
    ..Family::LLAMA_LIKE
};

pub(super) const NEW: Family = Family {
    architecture: Architecture::FalconNew,
    classes: &[],
    gguf: &[],
    names: &[
        (Role::TokenEmbedding, "transformer.word_embeddings"),
        (Role::OutputNorm, "transformer.ln_f"),
        (Role::AttnNorm, "ln_attn"),
        (Role::FfnNorm, "ln_mlp"),
        (Role::AttnQkv, "self_attention.query_key_value"),
        (Role::AttnOutput, "self_attention.dense"),
        (Role::FfnUp, "mlp.dense_h_to_4h"),
        (Role::FfnDown, "mlp.dense_4h_to_h"),
    ],
    gguf_names: &[(Role::AttnNorm, "attn_norm_2"), (Role::FfnNorm, "attn_norm")],
    examples: "Falcon 40B, 180B",
    golden: &["falcon-new"],
    ..FAMILY
};

const NAMES: &[(Role, &str)] = &[
    (Role::TokenEmbedding, "transformer.word_embeddings"),
    (Role::OutputNorm, "transformer.ln_f"),
    (Role::AttnQkv, "self_attention.query_key_value"),
    (Role::AttnOutput, "self_attention.dense"),
    (Role::FfnUp, "mlp.dense_h_to_4h"),
    (Role::FfnDown, "mlp.dense_4h_to_h"),
];

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    let is_new = keys.bool("new_decoder_architecture", false)?;
    let is_multi_query = keys.bool("multi_query", true)?;
    let kv_heads = match keys.size("num_kv_heads")? {
        Some(kv_heads) => Some(kv_heads),
        None => keys.size("n_head_kv")?,
    };
    config.num_kv_heads = match (is_new, is_multi_query) {
        (true, _) => kv_heads.unwrap_or(config.num_heads),
        (false, true) => 1,
        (false, false) => config.num_heads,
    };
    config.qkv_layout = QkvLayout::Grouped;
    config.layer_norm = true;
    config.gated_mlp = false;
    config.set_all_biases(keys.bool("bias", false)?);
    config.parallel_residual = is_new || keys.bool("parallel_attn", true)?;
    let num_norms = keys.size("num_ln_in_parallel_attn")?.unwrap_or(2);
    config.shared_norm = config.parallel_residual && !(is_new && num_norms == 2);
    if is_new && num_norms == 2 {
        config.architecture = Architecture::FalconNew;
    }
    if keys.bool("alibi", false)? {
        config.without_rope();
        // The slopes are added before the scores are scaled.
        let scale = config.attention_scale;
        let slopes = alibi_slopes(config.num_heads, 8.0);
        config.alibi_slopes = Some(slopes.into_iter().map(|slope| slope * scale).collect());
    }
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    config.activation = Activation::Gelu;
    config.parallel_residual = true;
    if file.has_tensor("blk.0.attn_norm_2.weight") {
        config.architecture = Architecture::FalconNew;
        config.shared_norm = false;
    } else {
        config.shared_norm = true;
    }
    if config.ropes.is_empty() {
        return Err(config_error("a GGUF file of Falcon without rotary embedding is not supported"));
    }
    Ok(())
}
