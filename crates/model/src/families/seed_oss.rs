//! Seed-OSS: a llama with biases of q, k and v.

use super::{Family, Keys};
use crate::config::Defaults;
use crate::{Architecture, ModelConfig, ModelError};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::SeedOss,
    classes: &["SeedOssForCausalLM", "seed_oss"],
    gguf: &["seed_oss"],
    defaults: Defaults {
        num_kv_heads: Some(8),
        head_dim: Some(128),
        max_position_embeddings: 524_288,
        ..Defaults::LLAMA
    },
    // The norm before the MLP, which the converter names after its place.
    gguf_names: &[(crate::tensor_names::Role::FfnNorm, "post_attention_norm")],
    adjust,
    examples: "Seed-OSS 36B",
    golden: &["seed-oss"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.qkv_bias = keys.bool("attention_bias", true)?;
    config.attention_output_bias = keys.bool("attention_out_bias", false)?;
    config.mlp_bias = keys.bool("mlp_bias", false)?;
    Ok(())
}
