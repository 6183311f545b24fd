//! Why a structured output cannot be compiled.

use thiserror::Error;

/// A structured output that cannot be compiled. The message is for the client.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GrammarError {
    #[error("{what} has {bytes} bytes, at most {limit} are allowed")]
    TooLarge { what: &'static str, bytes: usize, limit: usize },
    #[error("choice must hold 1 to {limit} texts, got {count}")]
    NumChoices { count: usize, limit: usize },
    #[error("{what} cannot be used: {reason}")]
    Invalid { what: &'static str, reason: String },
    #[error("no thread could be started to compile it on: {reason}")]
    NoThread { reason: String },
    #[error("structured output is not possible with this model: {reason}")]
    Model { reason: String },
}
