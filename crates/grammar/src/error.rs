//! Why the shape of an output cannot be had.

use thiserror::Error;

/// A structured output that cannot be compiled. The message is for whoever asked for it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GrammarError {
    #[error("{what} has {bytes} bytes, at most {limit} are allowed")]
    TooLarge { what: &'static str, bytes: usize, limit: usize },
    #[error("choice must hold 1 to {limit} texts, got {count}")]
    NumChoices { count: usize, limit: usize },
    #[error("{what} cannot be used: {reason}")]
    Invalid { what: &'static str, reason: String },
    #[error("{what} took longer than {seconds} s to compile: make it simpler")]
    TooSlow { what: &'static str, seconds: u64 },
    #[error("as many structured outputs as may be compiled at a time are being compiled: try again later")]
    Busy,
    #[error("structured output is not possible with this model: {reason}")]
    Model { reason: String },
}
