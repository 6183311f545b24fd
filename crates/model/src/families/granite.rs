//! Granite: a llama whose embeddings, attention, residual stream and logits are scaled.

use baton_backend::RopeStyle;

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader, config_error};
use crate::{Architecture, ModelConfig, ModelError};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Granite,
    classes: &["GraniteForCausalLM", "granite"],
    gguf: &["granite"],
    defaults: Defaults { norm_eps: 1e-6, ..Defaults::LLAMA },
    adjust,
    adjust_gguf,
    gguf_rope: RopeStyle::Interleaved,
    examples: "Granite 3.0 to 3.3 2B, 8B; Granite Code",
    golden: &["granite"],
    ..Family::LLAMA_LIKE
};

/// Experts in place of the MLP.
pub(super) const MIXTURE: Family = Family {
    architecture: Architecture::GraniteMoe,
    classes: &["GraniteMoeForCausalLM", "granitemoe"],
    gguf: &["granitemoe"],
    examples: "Granite 3.0 and 3.1 1B-A400M, 3B-A800M",
    golden: &["granite-moe"],
    ..FAMILY
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    let factor = |name: &str| keys.number(name).map(|factor| factor.unwrap_or(1.0) as f32);
    config.embed_scale = factor("embedding_multiplier")?;
    config.attention_scale = factor("attention_multiplier")?;
    config.residual_scale = factor("residual_multiplier")?;
    config.logit_scale = inverse(factor("logits_scaling")?)?;
    config.mlp_bias = keys.bool("mlp_bias", false)?;
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    let set = |name: &str| Ok::<_, ModelError>(file.f32(name)?.filter(|&factor| factor != 0.0));
    config.embed_scale = set("embedding_scale")?.unwrap_or(1.0);
    config.attention_scale = set("attention.scale")?.unwrap_or(config.attention_scale);
    config.residual_scale = set("residual_scale")?.unwrap_or(1.0);
    config.logit_scale = inverse(set("logit_scale")?.unwrap_or(1.0))?;
    Ok(())
}

fn inverse(factor: f32) -> Result<f32, ModelError> {
    if factor == 0.0 {
        return Err(config_error("logits_scaling is 0; logits are divided by it"));
    }
    Ok(1.0 / factor)
}
