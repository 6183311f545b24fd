//! One module a command. Each takes its parsed flags and a writer, and returns an error to be shown.

pub mod bench;
pub mod chat;
pub mod complete;
pub mod docs;
pub mod inspect;
pub mod plan;
pub mod pull;
pub mod serve;
pub mod shell;
