//! Nemotron and Minitron: layer norms to whose weights 1 is added, a part of each head rotated, squared relu, no gate.

use baton_backend::Activation;

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::{Architecture, ModelConfig, ModelError};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Nemotron,
    classes: &["NemotronForCausalLM", "nemotron"],
    gguf: &["nemotron"],
    defaults: Defaults {
        max_position_embeddings: 4096,
        norm_eps: 1e-5,
        hidden_act: "relu2",
        partial_rotary_factor: 0.5,
        ..Defaults::LLAMA
    },
    adjust,
    adjust_gguf,
    examples: "Nemotron-4, Minitron 4B, 8B",
    golden: &["nemotron"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.layer_norm = true;
    config.norm_weight_offset = 1.0;
    config.gated_mlp = false;
    config.mlp_bias = keys.bool("mlp_bias", false)?;
    Ok(())
}

/// The converter has added the 1 already.
fn adjust_gguf(config: &mut ModelConfig, _: &GgufReader<'_>) -> Result<(), ModelError> {
    config.activation = Activation::ReluSquared;
    Ok(())
}
