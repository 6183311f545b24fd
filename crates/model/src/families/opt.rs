//! OPT: learned positions behind two rows for padding, layer norms, biases, relu, no gate.

use baton_backend::Activation;

use super::{Family, Keys};
use crate::config::{Defaults, config_error};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Opt,
    classes: &["OPTForCausalLM", "opt"],
    aliases: &[("ffn_dim", "intermediate_size")],
    defaults: Defaults { tied_embeddings: true, norm_eps: 1e-5, hidden_act: "relu", ..Defaults::LLAMA },
    layers: "model.decoder.layers.",
    optional_prefix: "model.",
    names: &[
        (Role::TokenEmbedding, "model.decoder.embed_tokens"),
        (Role::PositionEmbedding, "model.decoder.embed_positions"),
        (Role::OutputNorm, "model.decoder.final_layer_norm"),
        (Role::AttnNorm, "self_attn_layer_norm"),
        (Role::AttnOutput, "self_attn.out_proj"),
        (Role::FfnNorm, "final_layer_norm"),
        (Role::FfnUp, "fc1"),
        (Role::FfnDown, "fc2"),
    ],
    adjust,
    examples: "OPT 125M to 66B (not 350M, whose norms come last)",
    golden: &["opt"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    keys.refuse_unless("do_layer_norm_before", true)?;
    keys.refuse_unless("layer_norm_elementwise_affine", true)?;
    keys.refuse_unless("_remove_final_layer_norm", false)?;
    if keys.size("word_embed_proj_dim")?.is_some_and(|width| width != config.hidden_size) {
        return Err(config_error(
            "an OPT whose embeddings are projected (word_embed_proj_dim) is not supported",
        ));
    }
    config.without_rope();
    config.learned_positions = true;
    config.position_offset = 2;
    config.layer_norm = true;
    config.gated_mlp = false;
    config.set_all_biases(keys.bool("enable_bias", true)?);
    // Older files say nothing of it.
    if !keys.is_set("hidden_act") {
        config.activation = Activation::Relu;
    }
    Ok(())
}
