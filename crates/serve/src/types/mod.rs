//! What goes over the wire, one file an API. Requests are read leniently: an unknown field is ignored, `null` is the
//! same as absent. Responses have the shapes of OpenAI's API with vLLM's additions.

pub mod chat;
pub mod common;
pub mod completions;
pub mod embeddings;
pub mod graphs;
pub mod llamacpp;
pub mod messages;
pub mod ollama;
pub mod prompt;
pub mod refused;
pub mod rerank;
pub mod responses;
pub mod stats;
pub mod structured;
pub mod text;
pub mod tools;
