//! SmolLM3: a llama in which every fourth layer does not rotate.

use baton_backend::RopeStyle;

use super::{Family, Keys};
use crate::config::{Defaults, GgufReader};
use crate::{Architecture, ModelConfig, ModelError};

const INTERVAL: usize = 4;

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::SmolLm3,
    classes: &["SmolLM3ForCausalLM", "smollm3"],
    gguf: &["smollm3"],
    defaults: Defaults {
        num_kv_heads: Some(4),
        max_position_embeddings: 32_768,
        tied_embeddings: true,
        rope_theta: 2_000_000.0,
        ..Defaults::LLAMA
    },
    adjust,
    adjust_gguf,
    gguf_rope: RopeStyle::Interleaved,
    examples: "SmolLM3 3B",
    golden: &["smollm3"],
    ..Family::LLAMA_LIKE
};

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    let interval = keys.size("no_rope_layer_interval")?.filter(|&interval| interval > 0).unwrap_or(INTERVAL);
    let rotates = match keys.flags("no_rope_layers", config.layers.len())? {
        // In spite of its name, 1 is for layers that rotate.
        Some(rotates) => rotates,
        None => (0..config.layers.len()).map(|index| !(index + 1).is_multiple_of(interval)).collect(),
    };
    for (layer, rotates) in config.layers.iter_mut().zip(rotates) {
        layer.rope = rotates.then_some(0);
    }
    if keys.bool("use_sliding_window", false)? {
        keys.set_windows(config, None, |_| true)?;
    }
    Ok(())
}

fn adjust_gguf(config: &mut ModelConfig, _: &GgufReader<'_>) -> Result<(), ModelError> {
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.rope = (!(index + 1).is_multiple_of(INTERVAL)).then_some(0);
    }
    Ok(())
}
