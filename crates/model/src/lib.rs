//! Models: configurations, weight files, and architectures written once over `Backend`. Being built.
#![deny(unsafe_code)]

mod config;
mod decoder;
mod dummy;
mod encoder;
mod error;
mod estimate;
mod expert_names;
mod export;
mod families;
mod files;
mod gguf;
mod interleaved;
mod mapped_file;
mod quantization;
mod safetensors;
mod tensor_names;
#[cfg(test)]
mod test_support;
#[doc(hidden)]
pub mod untrusted;
mod weights;

pub use config::{
    Architecture, EncoderConfig, ExpertConfig, GenerationDefaults, LatentConfig, LayerConfig, ModelConfig,
    NameScheme, Pooling, QkvLayout, RopeConfig, RopeScaling, joint_kv_spec,
};
pub use decoder::{Decoder, LoadProgress, rope_spec};
pub use dummy::DummyWeights;
pub use encoder::Encoder;
pub use error::ModelError;
pub use estimate::{kv_bytes_per_token, num_parameters, weight_bytes};
pub use export::{ExportFormat, quantize};
pub use families::models_page;
pub use files::{GgufVocabFields, LoadFormat, ModelFiles, SourceDescription, TokenizerSource};
pub use gguf::{GgmlType, GgufArray, GgufFile, GgufMetadata, GgufTensor, GgufValue};
pub use quantization::{QuantMethod, QuantizationConfig, RoundTo, RoundedWeights};
pub use safetensors::{Safetensors, SafetensorsEntry};
pub use weights::{KvScales, WeightSource};
