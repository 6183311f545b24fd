//! GPT-NeoX: layer norms, biases, halves that run in parallel each with its norm, a part of each head rotated, no gate.

use baton_backend::Activation;

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError, QkvLayout};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::GptNeoX,
    classes: &["GPTNeoXForCausalLM", "gpt_neox"],
    gguf: &["gptneox"],
    defaults: Defaults { norm_eps: 1e-5, hidden_act: "gelu", partial_rotary_factor: 0.25, ..Defaults::LLAMA },
    layers: "gpt_neox.layers.",
    names: &[
        (Role::TokenEmbedding, "gpt_neox.embed_in"),
        (Role::OutputNorm, "gpt_neox.final_layer_norm"),
        (Role::Output, "embed_out"),
        (Role::AttnQkv, "attention.query_key_value"),
        (Role::AttnOutput, "attention.dense"),
        (Role::FfnUp, "mlp.dense_h_to_4h"),
        (Role::FfnDown, "mlp.dense_4h_to_h"),
    ],
    adjust,
    adjust_gguf,
    examples: "Pythia, GPT-NeoX-20B, Dolly v2, StableLM alpha",
    golden: &["gpt-neox"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.layer_norm = true;
    config.gated_mlp = false;
    config.parallel_residual = keys.bool("use_parallel_residual", true)?;
    config.qkv_layout = QkvLayout::Grouped;
    let attention_bias = keys.bool("attention_bias", true)?;
    config.qkv_bias = attention_bias;
    config.attention_output_bias = attention_bias;
    config.mlp_bias = true;
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    config.parallel_residual = file.bool("use_parallel_residual")?.unwrap_or(true);
    config.activation = Activation::Gelu;
    Ok(())
}
