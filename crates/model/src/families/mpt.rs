//! MPT: ALiBi, layer norms without bias, no gate.

use baton_backend::Activation;

use super::{Family, Keys, alibi_slopes};
use crate::config::{Defaults, GgufReader, config_error};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError, QkvLayout};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Mpt,
    classes: &["MptForCausalLM", "MPTForCausalLM", "mpt"],
    gguf: &["mpt"],
    defaults: Defaults {
        tied_embeddings: true,
        norm_eps: 1e-5,
        hidden_act: "gelu",
        mlp_ratio: Some(4),
        ..Defaults::LLAMA
    },
    layers: "transformer.blocks.",
    names: &[
        (Role::TokenEmbedding, "transformer.wte"),
        (Role::OutputNorm, "transformer.norm_f"),
        (Role::AttnNorm, "norm_1"),
        (Role::AttnQkv, "attn.Wqkv"),
        (Role::AttnOutput, "attn.out_proj"),
        (Role::FfnNorm, "norm_2"),
        (Role::FfnUp, "ffn.up_proj"),
        (Role::FfnDown, "ffn.down_proj"),
    ],
    adjust,
    adjust_gguf,
    examples: "MPT-7B, MPT-30B",
    golden: &["mpt"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    keys.refuse_unless("no_bias", true)?;
    let attention = keys.object("attn_config");
    attention.refuse_unless("alibi", true)?;
    attention.refuse_unless("prefix_lm", false)?;
    attention.refuse_unless("qk_ln", false)?;
    if attention.number("clip_qkv")?.is_some_and(|clip| clip != 0.0) {
        return Err(config_error("attn_config.clip_qkv is not supported"));
    }
    if let Some(ratio) = keys.size("expansion_ratio")? {
        config.intermediate_size = config
            .hidden_size
            .checked_mul(ratio)
            .ok_or_else(|| config_error(format!("expansion_ratio is {ratio}, which is too large")))?;
    }
    if let Some(scale) = attention.number("softmax_scale")? {
        config.attention_scale = scale as f32;
    }
    config.without_rope();
    let largest_bias = attention.number("alibi_bias_max")?.unwrap_or(8.0);
    config.alibi_slopes = Some(alibi_slopes(config.num_heads, largest_bias));
    config.layer_norm = true;
    config.norm_bias = false;
    config.gated_mlp = false;
    config.qkv_layout = QkvLayout::Concatenated;
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    if file.f32("attention.clamp_kqv")?.is_some_and(|clamp| clamp > 0.0) {
        return Err(config_error("attention.clamp_kqv is not supported"));
    }
    config.without_rope();
    let largest_bias = file.f32("attention.max_alibi_bias")?.unwrap_or(8.0);
    config.alibi_slopes = Some(alibi_slopes(config.num_heads, f64::from(largest_bias)));
    config.activation = Activation::Gelu;
    Ok(())
}
