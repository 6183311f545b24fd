//! BLOOM: ALiBi, a norm of the embeddings, layer norms, biases, no gate.

use baton_backend::Activation;

use super::{Family, Keys, alibi_slopes};
use crate::config::{Defaults, GgufReader};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError, QkvLayout};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Bloom,
    classes: &["BloomForCausalLM", "bloom"],
    gguf: &["bloom"],
    defaults: Defaults {
        tied_embeddings: true,
        norm_eps: 1e-5,
        hidden_act: "gelu_pytorch_tanh",
        mlp_ratio: Some(4),
        ..Defaults::LLAMA
    },
    layers: "transformer.h.",
    optional_prefix: "transformer.",
    names: &[
        (Role::TokenEmbedding, "transformer.word_embeddings"),
        (Role::EmbedNorm, "transformer.word_embeddings_layernorm"),
        (Role::OutputNorm, "transformer.ln_f"),
        (Role::AttnQkv, "self_attention.query_key_value"),
        (Role::AttnOutput, "self_attention.dense"),
        (Role::FfnUp, "mlp.dense_h_to_4h"),
        (Role::FfnDown, "mlp.dense_4h_to_h"),
    ],
    adjust,
    adjust_gguf,
    examples: "BLOOM, BLOOMZ",
    golden: &["bloom"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    keys.refuse_unless("apply_residual_connection_post_layernorm", false)?;
    config.without_rope();
    config.alibi_slopes = Some(alibi_slopes(config.num_heads, 8.0));
    config.layer_norm = true;
    config.embed_norm = true;
    config.gated_mlp = false;
    config.qkv_layout = QkvLayout::Grouped;
    config.set_all_biases(true);
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, _: &GgufReader<'_>) -> Result<(), ModelError> {
    config.without_rope();
    config.alibi_slopes = Some(alibi_slopes(config.num_heads, 8.0));
    config.activation = Activation::GeluTanh;
    Ok(())
}
