//! Baichuan: a llama with q, k and v in one tensor. 13B has ALiBi instead of rotary embedding; the second generation's head has rows
//! of length 1.

use baton_backend::RopeStyle;

use super::{Family, Keys, alibi_slopes};
use crate::config::{Defaults, GgufReader};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError, QkvLayout};

const VOCAB_OF_SECOND: usize = 125_696;
const HIDDEN_OF_7B: usize = 4096;
const LAYERS_OF_13B: usize = 40;

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Baichuan,
    classes: &["BaichuanForCausalLM", "BaiChuanForCausalLM", "baichuan"],
    gguf: &["baichuan"],
    defaults: Defaults { max_position_embeddings: 4096, ..Defaults::LLAMA },
    names: &[(Role::AttnQkv, "self_attn.W_pack")],
    adjust,
    adjust_gguf,
    gguf_rope: RopeStyle::Interleaved,
    examples: "Baichuan 7B, 13B; Baichuan2",
    golden: &["baichuan", "baichuan-alibi"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.qkv_layout = QkvLayout::Concatenated;
    // The first 7B has a class of its own; all others of that size say it by their width.
    if keys.class() != "BaiChuanForCausalLM" && config.hidden_size != HIDDEN_OF_7B {
        config.without_rope();
        config.alibi_slopes = Some(alibi_slopes(config.num_heads, 8.0));
    }
    config.normalized_head = config.vocab_size == VOCAB_OF_SECOND || keys.bool("norm_head", false)?;
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, _: &GgufReader<'_>) -> Result<(), ModelError> {
    if config.layers.len() == LAYERS_OF_13B {
        config.without_rope();
        config.alibi_slopes = Some(alibi_slopes(config.num_heads, 8.0));
    }
    Ok(())
}
