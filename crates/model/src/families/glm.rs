//! GLM 4: half of each head rotated by neighbours, biases of q, k and v, gate and up in one tensor; the newer ones have norms after
//! attention and MLP as well.

use baton_backend::RopeStyle;

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Glm,
    classes: &["GlmForCausalLM", "glm"],
    gguf: &["chatglm"],
    defaults: Defaults {
        num_kv_heads: Some(2),
        head_dim: Some(128),
        max_position_embeddings: 131_072,
        norm_eps: 1.5625e-7,
        partial_rotary_factor: 0.5,
        ..Defaults::LLAMA
    },
    names: &[(Role::FfnGateUp, "mlp.gate_up_proj")],
    gguf_names: &[(Role::FfnGateUp, "ffn_up")],
    adjust,
    adjust_gguf,
    gguf_rope: RopeStyle::Interleaved,
    examples: "glm-4-9b-chat-hf, glm-edge",
    golden: &["glm"],
    ..Family::LLAMA_LIKE
};

pub(super) const FOURTH: Family = Family {
    architecture: Architecture::Glm4,
    classes: &["Glm4ForCausalLM", "glm4"],
    gguf: &["glm4"],
    names: &[
        (Role::FfnGateUp, "mlp.gate_up_proj"),
        (Role::FfnNorm, "post_attention_layernorm"),
        (Role::PostAttnNorm, "post_self_attn_layernorm"),
        (Role::PostFfnNorm, "post_mlp_layernorm"),
    ],
    adjust: adjust_fourth,
    examples: "GLM-4-0414 9B, 32B; GLM-Z1",
    golden: &["glm4"],
    ..FAMILY
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.rope_style = RopeStyle::Interleaved;
    config.fused_gate_up = true;
    config.qkv_bias = keys.bool("attention_bias", false)?;
    config.attention_output_bias = false;
    Ok(())
}

fn adjust_fourth(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.post_norms = true;
    adjust(config, keys)
}

fn adjust_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    config.gated_mlp = true;
    config.fused_gate_up = !file.has_tensor("blk.0.ffn_gate.weight");
    Ok(())
}
