//! ERNIE 4.5 without experts: a llama whose heads are rotated by neighbours.

use baton_backend::RopeStyle;

use super::{Family, Keys};
use crate::config::Defaults;
use crate::{Architecture, ModelConfig, ModelError};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Ernie45,
    classes: &["Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "ernie4_5"],
    gguf: &["ernie4_5"],
    defaults: Defaults {
        num_kv_heads: Some(2),
        head_dim: Some(128),
        max_position_embeddings: 131_072,
        tied_embeddings: true,
        norm_eps: 1e-5,
        rope_theta: 500_000.0,
        ..Defaults::LLAMA
    },
    adjust,
    gguf_rope: RopeStyle::Interleaved,
    examples: "ERNIE-4.5-0.3B",
    golden: &["ernie45"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.rope_style = RopeStyle::Interleaved;
    config.set_all_biases(keys.bool("use_bias", false)?);
    Ok(())
}
