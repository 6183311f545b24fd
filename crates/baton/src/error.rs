//! What can go wrong, and what to do about it.

use baton_backend::BackendError;
use baton_cluster::ClusterError;
use baton_core::ParamError;
use baton_cuda::StartError;
use baton_engine::EngineError;
use baton_grammar::GrammarError;
use baton_hub::HubError;
use baton_model::ModelError;
use baton_text::TextError;

/// Everything that this crate can fail with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model could not be found or fetched.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The model's files cannot be used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The engine refused to start, or refused or failed a request.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Text could not become tokens, or tokens text.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The wanted shape of the output cannot be compiled.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The CPU backend could not be started.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The GPU backend could not be started.
    #[error(transparent)]
    Gpu(#[from] StartError),
    /// A store of KV cannot be used.
    #[error(transparent)]
    Store(#[from] ClusterError),
    /// A sampling parameter is out of its range.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// What was asked for cannot be done with this model.
    #[error("{message}")]
    Usage {
        /// What is wrong.
        message: String,
        /// What to do about it.
        hint: String,
    },
}

impl Error {
    /// What to do about it, where that is known.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Hub(error) => error.hint(),
            Self::Usage { hint, .. } => Some(hint),
            _ => None,
        }
    }

    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), hint: hint.into() }
    }
}
