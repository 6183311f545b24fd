//! Models: configurations, weight files, and architectures written once over `Backend`. Being built.

mod config;
mod error;
mod tensor_names;
mod weights;

pub use config::{Architecture, LayerConfig, ModelConfig, NameScheme, RopeConfig, RopeScaling};
pub use error::ModelError;
pub use weights::WeightSource;
