//! Phi 1 to 2: halves in parallel with one norm, biases everywhere, the head included, a part of each head rotated, no gate.
//! Phi 3 and 4: a llama with fused tensors, a window in some, and contexts stretched by a factor for each frequency.

use baton_backend::Activation;

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError, QkvLayout};

pub(super) const SECOND: Family = Family {
    architecture: Architecture::Phi,
    classes: &["PhiForCausalLM", "phi"],
    gguf: &["phi2"],
    defaults: Defaults {
        norm_eps: 1e-5,
        hidden_act: "gelu_new",
        partial_rotary_factor: 0.5,
        ..Defaults::LLAMA
    },
    names: &[
        (Role::OutputNorm, "model.final_layernorm"),
        (Role::AttnOutput, "self_attn.dense"),
        (Role::FfnUp, "mlp.fc1"),
        (Role::FfnDown, "mlp.fc2"),
    ],
    adjust: adjust_second,
    adjust_gguf: adjust_second_gguf,
    examples: "Phi-1, Phi-1.5, Phi-2",
    golden: &["phi"],
    ..Family::LLAMA_LIKE
};

pub(super) const THIRD: Family = Family {
    architecture: Architecture::Phi3,
    classes: &["Phi3ForCausalLM", "phi3"],
    gguf: &["phi3"],
    defaults: Defaults { max_position_embeddings: 4096, norm_eps: 1e-5, ..Defaults::LLAMA },
    names: &[(Role::FfnGateUp, "mlp.gate_up_proj")],
    // Gate and up under the name of up.
    gguf_names: &[(Role::FfnGateUp, "ffn_up")],
    adjust: adjust_third,
    adjust_gguf: adjust_third_gguf,
    examples: "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    golden: &["phi3", "phi3-longrope"],
    ..Family::LLAMA_LIKE
};

fn adjust_second(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    keys.refuse_unless("qk_layernorm", false)?;
    config.layer_norm = true;
    config.gated_mlp = false;
    config.set_parallel_with_one_norm();
    config.set_all_biases(true);
    config.head_bias = true;
    Ok(())
}

fn adjust_second_gguf(config: &mut ModelConfig, _: &GgufReader<'_>) -> Result<(), ModelError> {
    config.set_parallel_with_one_norm();
    config.activation = Activation::GeluTanh;
    Ok(())
}

fn adjust_third(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.qkv_layout = QkvLayout::Concatenated;
    config.fused_gate_up = true;
    keys.set_windows(config, None, |_| true)?;
    Ok(())
}

fn adjust_third_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    config.gated_mlp = true;
    config.fused_gate_up = !file.has_tensor("blk.0.ffn_gate.weight");
    file.set_windows(config, |_| true)
}
