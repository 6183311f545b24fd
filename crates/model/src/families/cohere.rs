//! Cohere: halves in parallel with one layer norm without bias, neighbours rotated, scaled logits. The second generation has windows,
//! and rotates in those layers only.

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::{Architecture, ModelConfig, ModelError};
use baton_backend::{NormSpan, RopeStyle};

/// Of four layers the last one sees everything.
const PATTERN: usize = 4;

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Cohere,
    classes: &["CohereForCausalLM", "cohere"],
    gguf: &["command-r"],
    defaults: Defaults {
        max_position_embeddings: 8192,
        tied_embeddings: true,
        norm_eps: 1e-5,
        ..Defaults::LLAMA
    },
    adjust,
    adjust_gguf,
    gguf_rope: RopeStyle::Interleaved,
    examples: "Command R, Command R+, Aya 23",
    golden: &["cohere", "cohere-plus"],
    ..Family::LLAMA_LIKE
};

pub(super) const SECOND: Family = Family {
    architecture: Architecture::Cohere2,
    classes: &["Cohere2ForCausalLM", "cohere2"],
    gguf: &["cohere2"],
    adjust: adjust_second,
    adjust_gguf: adjust_second_gguf,
    examples: "Command R7B, Command A, Aya Expanse",
    golden: &["cohere2"],
    ..FAMILY
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.layer_norm = true;
    config.norm_bias = false;
    config.set_parallel_with_one_norm();
    config.rope_style = RopeStyle::Interleaved;
    config.logit_scale = keys.number("logit_scale")?.unwrap_or(0.0625) as f32;
    config.qk_norm = keys.bool("use_qk_norm", false)?;
    config.qk_norm_span = NormSpan::EachHead;
    Ok(())
}

fn adjust_second(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    adjust(config, keys)?;
    let pattern = keys.size("sliding_window_pattern")?.or(keys.size("_sliding_window_pattern")?);
    let pattern = pattern.filter(|&pattern| pattern > 0).unwrap_or(PATTERN);
    let slides = keys.set_windows(config, Some(4096), |index| !(index + 1).is_multiple_of(pattern))?;
    rotate_only(config, &slides);
    Ok(())
}

fn rotate_only(config: &mut ModelConfig, slides: &[bool]) {
    for (layer, slides) in config.layers.iter_mut().zip(slides) {
        layer.rope = slides.then_some(0);
    }
}

fn adjust_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    config.set_parallel_with_one_norm();
    config.logit_scale = file.f32("logit_scale")?.unwrap_or(1.0);
    config.qk_norm_span = NormSpan::EachHead;
    Ok(())
}

fn adjust_second_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    adjust_gguf(config, file)?;
    let slides = |index: usize| !(index + 1).is_multiple_of(PATTERN);
    file.set_windows(config, slides)?;
    let slides: Vec<bool> = (0..config.layers.len()).map(slides).collect();
    rotate_only(config, &slides);
    Ok(())
}
