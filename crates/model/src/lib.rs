//! Models: configurations, weight files, and architectures written once over `Backend`. Being built.
#![deny(unsafe_code)]

mod config;
mod decoder;
mod dummy;
mod error;
mod estimate;
mod files;
mod gguf;
mod mapped_file;
mod safetensors;
mod tensor_names;
#[cfg(test)]
mod test_support;
#[doc(hidden)]
pub mod untrusted;
mod weights;

pub use config::{
    Architecture, GenerationDefaults, LayerConfig, ModelConfig, NameScheme, RopeConfig, RopeScaling,
};
pub use decoder::{Decoder, LoadProgress, rope_spec};
pub use dummy::DummyWeights;
pub use error::ModelError;
pub use estimate::{kv_bytes_per_token, num_parameters, weight_bytes};
pub use files::{GgufVocabFields, LoadFormat, ModelFiles, SourceDescription, TokenizerSource};
pub use gguf::{GgmlType, GgufArray, GgufFile, GgufMetadata, GgufTensor, GgufValue};
pub use safetensors::{Safetensors, SafetensorsEntry};
pub use weights::WeightSource;
