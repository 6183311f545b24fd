//! GPT-BigCode: a GPT-2 with one key-value head.

use baton_backend::Activation;

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError, QkvLayout};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::GptBigCode,
    classes: &["GPTBigCodeForCausalLM", "gpt_bigcode"],
    gguf: &["starcoder"],
    defaults: Defaults {
        max_position_embeddings: 1024,
        tied_embeddings: true,
        norm_eps: 1e-5,
        hidden_act: "gelu_pytorch_tanh",
        mlp_ratio: Some(4),
        ..Defaults::LLAMA
    },
    layers: "transformer.h.",
    names: &[
        (Role::TokenEmbedding, "transformer.wte"),
        (Role::PositionEmbedding, "transformer.wpe"),
        (Role::OutputNorm, "transformer.ln_f"),
        (Role::AttnNorm, "ln_1"),
        (Role::AttnQkv, "attn.c_attn"),
        (Role::AttnOutput, "attn.c_proj"),
        (Role::FfnNorm, "ln_2"),
        (Role::FfnUp, "mlp.c_fc"),
        (Role::FfnDown, "mlp.c_proj"),
    ],
    adjust,
    adjust_gguf,
    examples: "StarCoder, SantaCoder",
    golden: &["gpt-bigcode"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    keys.refuse_unless("scale_attn_weights", true)?;
    keys.refuse_unless("add_cross_attention", false)?;
    config.without_rope();
    config.learned_positions = true;
    config.layer_norm = true;
    config.gated_mlp = false;
    config.set_all_biases(true);
    if keys.bool("multi_query", true)? {
        config.num_kv_heads = 1;
    }
    config.qkv_layout = QkvLayout::Grouped;
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, _: &GgufReader<'_>) -> Result<(), ModelError> {
    config.without_rope();
    config.activation = Activation::GeluTanh;
    Ok(())
}
