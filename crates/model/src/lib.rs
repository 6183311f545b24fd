//! Models: configurations, weight files, and architectures written once over `Backend`. Being built.

mod config;
mod decoder;
mod error;
mod estimate;
mod tensor_names;
mod weights;

pub use config::{Architecture, LayerConfig, ModelConfig, NameScheme, RopeConfig, RopeScaling};
pub use decoder::{Decoder, LoadProgress, rope_spec};
pub use error::ModelError;
pub use estimate::{kv_bytes_per_token, num_parameters, weight_bytes};
pub use weights::WeightSource;
