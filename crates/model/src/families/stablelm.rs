//! StableLM: a llama with layer norms, a part of each head rotated, and in some halves that run in parallel with one norm.

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::{Architecture, ModelConfig, ModelError};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::StableLm,
    classes: &["StableLmForCausalLM", "StableLMEpochForCausalLM", "stablelm", "stablelm_epoch"],
    gguf: &["stablelm"],
    defaults: Defaults {
        max_position_embeddings: 4096,
        norm_eps: 1e-5,
        partial_rotary_factor: 0.25,
        ..Defaults::LLAMA
    },
    adjust,
    adjust_gguf,
    examples: "StableLM 2 1.6B, StableLM Zephyr 3B",
    golden: &["stablelm"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    keys.refuse_unless("qk_layernorm", false)?;
    config.layer_norm = true;
    config.qkv_bias = keys.bool("use_qkv_bias", false)?;
    config.attention_output_bias = false;
    if keys.bool("use_parallel_residual", false)? {
        config.set_parallel_with_one_norm();
    }
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    if file.bool("use_parallel_residual")?.unwrap_or(false) && !file.has_tensor("blk.0.ffn_norm.weight") {
        config.set_parallel_with_one_norm();
    }
    Ok(())
}
