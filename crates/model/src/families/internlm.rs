//! InternLM 2: a llama with names of its own and q, k and v in one tensor, group by group.

use baton_backend::RopeStyle;

use super::{Family, Keys};
use crate::config::Defaults;
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError, QkvLayout};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::InternLm2,
    classes: &["InternLM2ForCausalLM", "internlm2"],
    gguf: &["internlm2"],
    defaults: Defaults { norm_eps: 1e-5, ..Defaults::LLAMA },
    names: &[
        (Role::TokenEmbedding, "model.tok_embeddings"),
        (Role::Output, "output"),
        (Role::AttnNorm, "attention_norm"),
        (Role::AttnQkv, "attention.wqkv"),
        (Role::AttnOutput, "attention.wo"),
        (Role::FfnNorm, "ffn_norm"),
        (Role::FfnGate, "feed_forward.w1"),
        (Role::FfnUp, "feed_forward.w3"),
        (Role::FfnDown, "feed_forward.w2"),
    ],
    adjust,
    gguf_rope: RopeStyle::Interleaved,
    examples: "InternLM2, InternLM2.5 (the third is a llama)",
    golden: &["internlm2"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.qkv_layout = QkvLayout::Grouped;
    let biased = keys.bool("bias", false)?;
    config.qkv_bias = biased;
    config.attention_output_bias = biased;
    Ok(())
}
