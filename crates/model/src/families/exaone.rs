//! EXAONE 3: a llama with other names. EXAONE 4: norms after attention and MLP instead of before, norms of the heads of q and k, and
//! in the large one windows in three layers of four, which alone are rotated.

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError};

const PATTERN: usize = 4;

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Exaone,
    classes: &["ExaoneForCausalLM", "exaone"],
    gguf: &["exaone"],
    defaults: Defaults { norm_eps: 1e-5, ..Defaults::LLAMA },
    layers: "transformer.h.",
    names: &[
        (Role::TokenEmbedding, "transformer.wte"),
        (Role::OutputNorm, "transformer.ln_f"),
        (Role::AttnNorm, "ln_1"),
        (Role::AttnQ, "attn.attention.q_proj"),
        (Role::AttnK, "attn.attention.k_proj"),
        (Role::AttnV, "attn.attention.v_proj"),
        (Role::AttnOutput, "attn.attention.out_proj"),
        (Role::FfnNorm, "ln_2"),
        (Role::FfnGate, "mlp.c_fc_0"),
        (Role::FfnUp, "mlp.c_fc_1"),
        (Role::FfnDown, "mlp.c_proj"),
    ],
    examples: "EXAONE 3.0, 3.5; EXAONE Deep",
    golden: &["exaone"],
    ..Family::LLAMA_LIKE
};

pub(super) const FOURTH: Family = Family {
    architecture: Architecture::Exaone4,
    classes: &["Exaone4ForCausalLM", "exaone4"],
    gguf: &["exaone4"],
    defaults: Defaults { norm_eps: 1e-5, num_kv_heads: Some(8), ..Defaults::LLAMA },
    adjust: adjust_fourth,
    adjust_gguf: adjust_fourth_gguf,
    examples: "EXAONE 4.0 1.2B, 32B",
    golden: &["exaone4"],
    ..Family::LLAMA_LIKE
};

fn adjust_fourth(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    config.pre_norms = false;
    config.post_norms = true;
    config.qk_norm = true;
    let pattern = keys.size("sliding_window_pattern")?.filter(|&pattern| pattern > 0).unwrap_or(PATTERN);
    let slides = keys.set_windows(config, Some(4096), |index| !(index + 1).is_multiple_of(pattern))?;
    if config.layers.iter().any(|layer| layer.window.is_some()) {
        rotate_only(config, &slides);
    }
    Ok(())
}

fn rotate_only(config: &mut ModelConfig, slides: &[bool]) {
    for (layer, slides) in config.layers.iter_mut().zip(slides) {
        layer.rope = slides.then_some(0);
    }
}

fn adjust_fourth_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    let slides = |index: usize| !(index + 1).is_multiple_of(PATTERN);
    file.set_windows(config, slides)?;
    if config.layers.iter().any(|layer| layer.window.is_some()) {
        let slides: Vec<bool> = (0..config.layers.len()).map(slides).collect();
        rotate_only(config, &slides);
    }
    Ok(())
}
