//! OLMo 2: norms after attention and MLP instead of before, and norms of q and k over all heads.

use baton_backend::NormSpan;

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader, config_error};
use crate::{Architecture, ModelConfig, ModelError};

pub(super) const SECOND: Family = Family {
    architecture: Architecture::Olmo2,
    classes: &["Olmo2ForCausalLM", "olmo2"],
    gguf: &["olmo2"],
    defaults: Defaults { norm_eps: 1e-5, ..Defaults::LLAMA },
    adjust,
    adjust_gguf,
    examples: "OLMo 2 1B to 32B",
    golden: &["olmo2"],
    ..Family::LLAMA_LIKE
};

/// OLMoE: experts, and the norms of q and k over all heads.
pub(super) const MIXTURE: Family = Family {
    architecture: Architecture::Olmoe,
    classes: &["OlmoeForCausalLM", "olmoe"],
    gguf: &["olmoe"],
    defaults: Defaults { norm_eps: 1e-5, ..Defaults::LLAMA },
    adjust: adjust_mixture,
    adjust_gguf,
    examples: "OLMoE 1B-7B",
    golden: &["olmoe"],
    ..Family::LLAMA_LIKE
};

fn adjust_mixture(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    if keys.number("clip_qkv")?.is_some() {
        return Err(config_error("clip_qkv is not supported"));
    }
    config.qk_norm = true;
    config.qk_norm_span = NormSpan::Row;
    Ok(())
}

fn adjust(config: &mut ModelConfig, _: &Keys) -> Result<(), ModelError> {
    config.pre_norms = false;
    config.post_norms = true;
    config.qk_norm = true;
    config.qk_norm_span = NormSpan::Row;
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, _: &GgufReader<'_>) -> Result<(), ModelError> {
    config.qk_norm_span = NormSpan::Row;
    Ok(())
}
