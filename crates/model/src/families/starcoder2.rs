//! StarCoder2: layer norms, biases, no gate, a window in some.

use baton_backend::Activation;

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::StarCoder2,
    classes: &["Starcoder2ForCausalLM", "starcoder2"],
    gguf: &["starcoder2"],
    defaults: Defaults {
        num_kv_heads: Some(2),
        max_position_embeddings: 4096,
        tied_embeddings: true,
        norm_eps: 1e-5,
        hidden_act: "gelu_pytorch_tanh",
        ..Defaults::LLAMA
    },
    names: &[(Role::FfnUp, "mlp.c_fc"), (Role::FfnDown, "mlp.c_proj")],
    adjust,
    adjust_gguf,
    examples: "StarCoder2 3B, 7B, 15B",
    golden: &["starcoder2"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.layer_norm = true;
    config.gated_mlp = false;
    config.set_all_biases(keys.bool("use_bias", true)?);
    keys.set_windows(config, None, |_| true)?;
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    config.activation = Activation::GeluTanh;
    file.set_windows(config, |_| true)
}
