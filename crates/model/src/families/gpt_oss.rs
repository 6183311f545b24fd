//! gpt-oss: experts with biases behind a bounded gate, attention sinks, and a sliding window in every second layer.
//!
//! The tensors of all experts are one in its checkpoints: see `interleaved`, which takes them apart.

use baton_backend::Activation;

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader, config_error};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError, RopeScaling};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::GptOss,
    classes: &["GptOssForCausalLM", "gpt_oss"],
    gguf: &["gpt-oss"],
    aliases: &[("experts_per_token", "num_experts_per_tok")],
    defaults: Defaults {
        num_heads: Some(64),
        num_kv_heads: Some(8),
        head_dim: Some(64),
        vocab_size: Some(201_088),
        max_position_embeddings: 131_072,
        sliding_window: Some(WINDOW as u64),
        rope_theta: 150_000.0,
        norm_eps: 1e-5,
        ..Defaults::LLAMA
    },
    // Called so although it stands before the experts.
    gguf_names: &[(Role::FfnNorm, "post_attention_norm")],
    adjust,
    adjust_gguf,
    examples: "gpt-oss-20b, gpt-oss-120b",
    golden: &["gpt-oss"],
    ..Family::LLAMA_LIKE
};

const WINDOW: u32 = 128;

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    for (name, only) in
        [("swiglu_alpha", Activation::SWIGLU_ALPHA), ("swiglu_limit", Activation::SWIGLU_LIMIT)]
    {
        if let Some(value) = keys.number(name)?.filter(|value| *value as f32 != only) {
            return Err(config_error(format!("{name} is {value}; only {only} is supported")));
        }
    }
    if config.activation != Activation::Silu {
        return Err(config_error("hidden_act is not silu, which is not supported for gpt-oss"));
    }
    keys.set_windows(config, Some(WINDOW), slides)?;
    let biased = keys.bool("attention_bias", true)?;
    (config.qkv_bias, config.attention_output_bias) = (biased, biased);
    if !keys.is_set("rope_parameters") && !keys.is_set("rope_scaling") {
        let factor = config.max_model_len as f32 / ORIGINAL_LEN as f32;
        stretch(config, if factor > 1.0 { factor } else { 1.0 });
    }
    set_common(config);
    Ok(())
}

/// llama.cpp has by architecture what files do not say.
fn adjust_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    file.set_windows(config, slides)?;
    // There is no key for it; the model was made without.
    for rope in &mut config.ropes {
        if let RopeScaling::Yarn { truncate, .. } = &mut rope.scaling {
            *truncate = false;
        }
    }
    set_common(config);
    Ok(())
}

/// The first layer slides, the second does not.
fn slides(layer: usize) -> bool {
    layer.is_multiple_of(2)
}

fn set_common(config: &mut ModelConfig) {
    config.attention_sinks = true;
    config.activation = Activation::ClampedSwiglu;
    if let Some(experts) = &mut config.experts {
        experts.has_bias = true;
        experts.normalizes = true;
    }
}

/// The context of the first training.
const ORIGINAL_LEN: usize = 4096;

/// What the class assumes where a configuration does not say how the context was stretched.
fn stretch(config: &mut ModelConfig, factor: f32) {
    for rope in &mut config.ropes {
        rope.scaling = RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: ORIGINAL_LEN,
            attention_factor: None,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: None,
            mscale_all_dim: None,
            truncate: false,
        };
    }
}
