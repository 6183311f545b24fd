//! Arcee: a llama with squared relu and no gate.

use baton_backend::{Activation, RopeStyle};

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::{Architecture, ModelConfig, ModelError};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Arcee,
    classes: &["ArceeForCausalLM", "arcee"],
    gguf: &["arcee"],
    defaults: Defaults {
        norm_eps: 1e-5,
        hidden_act: "relu2",
        max_position_embeddings: 4096,
        ..Defaults::LLAMA
    },
    adjust,
    adjust_gguf,
    gguf_rope: RopeStyle::Interleaved,
    examples: "AFM-4.5B",
    golden: &["arcee"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.gated_mlp = false;
    config.mlp_bias = keys.bool("mlp_bias", false)?;
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, _: &GgufReader<'_>) -> Result<(), ModelError> {
    config.activation = Activation::ReluSquared;
    Ok(())
}
