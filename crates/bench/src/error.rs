//! Errors, each with what to do about it.

use std::path::Path;

use thiserror::Error;

#[derive(Debug, Error)]
pub enum BenchError {
    /// A file that cannot be read or does not hold what it should.
    #[error("{path}: {cause}")]
    File { path: String, cause: String },
    /// Options that do not go together or do not make sense.
    #[error("{0}")]
    Options(String),
    #[error("{url} {cause}")]
    Server { url: String, cause: String },
    #[error(transparent)]
    Engine(#[from] baton_engine::EngineError),
    /// A step failed on the device, or a child process did not do its work.
    #[error("{0}")]
    Failed(String),
}

impl BenchError {
    pub(crate) fn file(path: &Path, cause: impl std::fmt::Display) -> Self {
        Self::File { path: path.display().to_string(), cause: format!("{cause}") }
    }

    /// Something in one line of a file, counted from 1.
    pub(crate) fn line(path: &Path, line: usize, cause: impl std::fmt::Display) -> Self {
        Self::File { path: path.display().to_string(), cause: format!("line {line}: {cause}") }
    }

    pub(crate) fn options(cause: impl Into<String>) -> Self {
        Self::Options(cause.into())
    }

    pub(crate) fn server(url: impl Into<String>, cause: impl Into<String>) -> Self {
        Self::Server { url: url.into(), cause: cause.into() }
    }
}
