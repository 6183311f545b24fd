//! What can be wrong with a model, said so that the user knows what to do.

use std::path::PathBuf;

use baton_backend::{BackendError, TensorError};
use thiserror::Error;

#[derive(Debug, Error)]
pub enum ModelError {
    #[error("cannot read {path}: {cause}")]
    Io { path: PathBuf, cause: std::io::Error },
    #[error("{path} is not a usable model file: {cause}")]
    Malformed { path: PathBuf, cause: String },
    #[error("{what}")]
    Config { what: String },
    #[error("architecture {name:?} is not supported; docs/models.md lists those that are")]
    UnknownArchitecture { name: String },
    #[error("the checkpoint has no tensor {name:?}; it may be incomplete or of another architecture")]
    MissingTensor { name: String },
    #[error("tensor {name:?} is {got}, expected {expected}")]
    WrongShape { name: String, expected: String, got: String },
    #[error("tensor {name:?}: {cause}")]
    Tensor { name: String, cause: TensorError },
    #[error(transparent)]
    Backend(#[from] BackendError),
}
