//! What can go wrong between a name and a file, and what to do about it.

use std::fmt;
use std::path::Path;

/// What kind of failure it is, for those who act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The name, the revision or the file does not exist.
    NotFound,
    /// The hub wants a token, or the token is not enough.
    Denied,
    /// The hub cannot be reached, is too slow or answers nonsense.
    Network,
    /// What came is not what was announced.
    Damaged,
    /// A file or directory of this machine.
    Io,
    /// What was asked for makes no sense.
    Usage,
}

/// A failure, in words for the user, with a hint where there is one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct HubError {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
}

impl HubError {
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: None }
    }

    /// The same with what can be done about it.
    #[must_use]
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    pub(crate) fn io(what: &str, path: &Path, cause: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Io, format!("cannot {what} {}: {cause}", path.display()))
    }
}
