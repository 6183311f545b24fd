//! One module a command. Each takes its parsed flags and a writer, and returns an error to be shown.

pub mod inspect;
pub mod pull;
pub mod shell;
