//! Gemma 1 and 2. The third is read by `config` itself.

use baton_backend::{Activation, RopeStyle};

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError};

/// Gemma 2 of 27B, known by its number of layers, scales attention by its hidden size instead of its head size.
const LAYERS_OF_27B: usize = 46;

pub(super) const FIRST: Family = Family {
    architecture: Architecture::Gemma,
    classes: &["GemmaForCausalLM", "gemma"],
    gguf: &["gemma"],
    defaults: Defaults {
        head_dim: Some(256),
        max_position_embeddings: 8192,
        tied_embeddings: true,
        hidden_act: "gelu_pytorch_tanh",
        ..Defaults::LLAMA
    },
    adjust,
    adjust_gguf,
    gguf_rope: RopeStyle::Half,
    examples: "Gemma 2B, 7B; CodeGemma",
    golden: &["gemma"],
    ..Family::LLAMA_LIKE
};

pub(super) const SECOND: Family = Family {
    architecture: Architecture::Gemma2,
    classes: &["Gemma2ForCausalLM", "gemma2"],
    gguf: &["gemma2"],
    names: &[(Role::FfnNorm, "pre_feedforward_layernorm")],
    adjust: adjust_second,
    adjust_gguf: adjust_second_gguf,
    examples: "Gemma 2 2B, 9B, 27B",
    golden: &["gemma2"],
    ..FIRST
};

fn adjust(config: &mut ModelConfig, _: &Keys) -> Result<(), ModelError> {
    config.norm_weight_offset = 1.0;
    config.embed_scale = (config.hidden_size as f64).sqrt() as f32;
    // Published files say gelu and mean the one with tanh.
    config.activation = Activation::GeluTanh;
    Ok(())
}

fn adjust_second(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    adjust(config, keys)?;
    config.post_norms = true;
    config.attention_scale = keys.number("query_pre_attn_scalar")?.unwrap_or(256.0).powf(-0.5) as f32;
    let cap = |name: &str, default: f64| {
        // Null switches it off.
        if keys.is_null(name) {
            return Ok::<_, ModelError>(None);
        }
        Ok(Some(keys.number(name)?.unwrap_or(default) as f32))
    };
    config.attention_softcap = cap("attn_logit_softcapping", 50.0)?;
    config.logit_softcap = cap("final_logit_softcapping", 30.0)?;
    keys.set_windows(config, Some(4096), |index| index.is_multiple_of(2))?;
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, _: &GgufReader<'_>) -> Result<(), ModelError> {
    config.embed_scale = (config.hidden_size as f64).sqrt() as f32;
    config.activation = Activation::GeluTanh;
    Ok(())
}

fn adjust_second_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    adjust_gguf(config, file)?;
    config.attention_softcap = Some(file.f32("attn_logit_softcapping")?.unwrap_or(50.0));
    config.logit_softcap = Some(file.f32("final_logit_softcapping")?.unwrap_or(30.0));
    if config.layers.len() == LAYERS_OF_27B {
        config.attention_scale = ((config.hidden_size / config.num_heads.max(1)) as f64).powf(-0.5) as f32;
    }
    file.set_windows(config, |index| index.is_multiple_of(2))
}
