//! Models: configurations, weight files, and architectures written once over `Backend`. Being built.
#![deny(unsafe_code)]

mod config;
mod dummy;
mod error;
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
pub use dummy::DummyWeights;
pub use error::ModelError;
pub use files::{GgufVocabFields, LoadFormat, ModelFiles, SourceDescription, TokenizerSource};
pub use gguf::{GgmlType, GgufArray, GgufFile, GgufMetadata, GgufTensor, GgufValue};
pub use safetensors::{Safetensors, SafetensorsEntry};
pub use weights::WeightSource;
