//! What unit tests share with the integration tests.

#[path = "../tests/support/gguf_writer.rs"]
pub(crate) mod gguf_writer;
