//! One function for each kind of file that strangers may hand us: parse the bytes and look at everything that comes out.
//! They must return whatever the bytes are. The seeded mutation tests and the fuzz targets both call them.

use std::path::Path;
use std::sync::Arc;

use baton_backend::SharedBytes;

use crate::quantization::QuantizedWeights;
use crate::{GenerationDefaults, GgufFile, ModelConfig, QuantizationConfig, Safetensors, WeightSource};

/// A GGUF file: header, configuration and every tensor. True if it opened.
pub fn gguf(bytes: &[u8]) -> bool {
    let Ok(file) = GgufFile::from_bytes(Path::new("memory.gguf"), SharedBytes::from_vec(bytes.to_vec()))
    else {
        return false;
    };
    // Most mutations break the configuration; whichever way, it must only be said.
    let _ = ModelConfig::from_gguf(&file);
    touch_all(&file);
    true
}

/// A safetensors file: header and every tensor. True if it opened.
pub fn safetensors(bytes: &[u8]) -> bool {
    let path = Path::new("memory.safetensors");
    let Ok(file) = Safetensors::from_bytes(path, SharedBytes::from_vec(bytes.to_vec())) else { return false };
    touch_all(&file);
    true
}

/// A `quantization_config` and the safetensors file that goes with it: every weight. True if both opened.
pub fn quantised(config: &[u8], weights: &[u8]) -> bool {
    let config =
        serde_json::from_slice(config).ok().and_then(|value| QuantizationConfig::from_json(&value).ok());
    let path = Path::new("memory.safetensors");
    let file = Safetensors::from_bytes(path, SharedBytes::from_vec(weights.to_vec()));
    let (Some(config), Ok(file)) = (config, file) else { return false };
    let weights = QuantizedWeights::new(Arc::new(file), config);
    let _ = weights.formats();
    touch_all(&weights);
    true
}

/// A `config.json` (and the same bytes as a `generation_config.json`). True if it is a usable configuration.
pub fn config_json(bytes: &[u8]) -> bool {
    let _ = GenerationDefaults::from_json(bytes);
    ModelConfig::from_json(bytes, None).is_ok()
}

fn touch_all(weights: &dyn WeightSource) {
    let mut sum = 0_u64;
    for name in weights.names() {
        if let Ok(Some(tensor)) = weights.tensor(&name) {
            let last = tensor.row(tensor.rows() - 1);
            sum = sum.wrapping_add(last.iter().map(|&byte| u64::from(byte)).sum());
        }
    }
    std::hint::black_box((sum, weights.total_bytes()));
}
