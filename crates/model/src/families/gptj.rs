//! GPT-J: halves in parallel with one norm, neighbours of a part of each head rotated, biases of the MLP and of the head, no gate.

use baton_backend::{Activation, RopeStyle};

use super::{Family, Keys};
use crate::config::{Defaults, config_error};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::GptJ,
    classes: &["GPTJForCausalLM", "gptj"],
    defaults: Defaults { norm_eps: 1e-5, hidden_act: "gelu_new", mlp_ratio: Some(4), ..Defaults::LLAMA },
    layers: "transformer.h.",
    names: &[
        (Role::TokenEmbedding, "transformer.wte"),
        (Role::OutputNorm, "transformer.ln_f"),
        (Role::AttnNorm, "ln_1"),
        (Role::AttnQ, "attn.q_proj"),
        (Role::AttnK, "attn.k_proj"),
        (Role::AttnV, "attn.v_proj"),
        (Role::AttnOutput, "attn.out_proj"),
        (Role::FfnUp, "mlp.fc_in"),
        (Role::FfnDown, "mlp.fc_out"),
    ],
    adjust,
    examples: "GPT-J-6B",
    golden: &["gptj"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.layer_norm = true;
    config.gated_mlp = false;
    config.set_parallel_with_one_norm();
    config.rope_style = RopeStyle::Interleaved;
    config.mlp_bias = true;
    config.head_bias = true;
    if config.activation == Activation::Silu {
        return Err(config_error("a GPT-J with silu is not supported"));
    }
    if let (Some(rotary_dim), Some(rope)) = (keys.size("rotary_dim")?, config.ropes.first_mut()) {
        rope.rotary_dim = rotary_dim;
    }
    Ok(())
}
