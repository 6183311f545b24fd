//! The OpenAI-compatible server.
//!
//! HTTP requests come in here and become token ids (`text`) and engine requests (`engine`); the engine's tokens come
//! back, become text, and leave as JSON or as server-sent events. This is the only crate that knows HTTP. It holds no
//! model code and changes no request's state: it submits, reads, and lets go.
//!
//! The way of a request: `routes` (table of routes) → `access` (log, count) → `auth` → `body` (limits) → `types` →
//! `params` and `prepare` (off the async threads) → `generation` → `sse` or one JSON answer. All chat dialects (chat,
//! responses, messages) become one `conversation::ChatRequest` and read the same events.
#![forbid(unsafe_code)]

mod access;
mod activity;
mod answer;
mod auth;
mod blocks;
mod body;
mod budget;
mod chat_format;
mod config;
mod connections;
mod console;
mod conversation;
mod cors;
pub mod describe;
mod error;
mod examples;
mod frontend;
mod generation;
mod graphs;
mod ids;
mod logprobs;
mod metrics;
mod model;
mod models;
mod openapi;
mod origin;
mod otlp;
mod params;
mod prepare;
mod public;
mod refusals;
mod routes;
mod scope;
mod server;
mod sse;
mod state;
mod store;
mod structured;
mod system;
mod tls;
mod tools;
mod trace;
mod turns;
pub mod types;
mod watchdog;
mod wording;
mod workers;

pub use auth::{Tenant, TenantId};
pub use config::{ParserChoice, ServerConfig};
pub use error::{ApiError, ErrorBody, ErrorDetail};
pub use frontend::{Frontend, MessageLimits, PlainRequest, ServedFacts};
pub use generation::{Generation, Update};
pub use graphs::GraphServing;
pub use model::{ModelText, ServedModel};
pub use models::{AvailableModel, ModelSource, MoreModels};
pub use otlp::{Endpoint as OtlpEndpoint, EndpointError};
pub use public::{PublicContent, PublicPrefix, PublicPrefixError};
pub use server::{Reserved, ServeError, Server};
pub use system::{SystemPrompt, SystemPromptError};
pub use tls::{TlsError, TlsFiles};
pub use workers::THREAD_NAME as TEXT_THREAD_NAME;

/// What answers say made them.
const FINGERPRINT: &str = concat!("baton-", env!("CARGO_PKG_VERSION"));
