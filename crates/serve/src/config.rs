//! The server's settings. Each field is a flag of `baton serve`; defaults are those of the command line.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use baton_text::{ReasoningFormat, ToolFormat};
use serde_json::{Map, Value};

use crate::graphs::GraphServing;
use crate::models::MoreModels;
use crate::otlp::Endpoint;
use crate::public::PublicPrefix;
use crate::system::SystemPrompt;
use crate::tls::TlsFiles;

/// Where a parser is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ParserChoice<F> {
    /// By the chat template.
    #[default]
    Auto,
    Off,
    Fixed(F),
}

#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Loopback unless told otherwise.
    pub host: IpAddr,
    /// 0 takes any free port.
    pub port: u16,
    /// Without keys everybody may ask.
    pub api_keys: Vec<String>,
    /// Without them, plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Beginnings of prompts whose cached blocks all keys share.
    pub public_prefixes: Vec<PublicPrefix>,
    /// Computed and pinned before the server is ready.
    pub system_prompts: Vec<SystemPrompt>,
    /// Chats that bring no system message get the prompt of their model.
    pub inject_system_prompt: bool,
    /// The collector of traces, if requests are to be traced.
    pub otlp_traces_endpoint: Option<Endpoint>,
    /// Web pages that may call this server from a browser; empty turns CORS off, `*` allows all.
    pub allowed_origins: Vec<String>,
    /// Names this server answers to besides those of its own machine; `*` is every name.
    pub allowed_hosts: Vec<String>,
    /// What a proxy puts before every path; empty for nothing.
    pub root_path: String,
    /// Tokens in log-probabilities are written as `token_id:ID` unless a request says otherwise.
    pub tokens_as_ids: bool,
    /// Every stream ends with its usage, whether or not it was asked for.
    pub force_include_usage: bool,
    /// Whether `/` shows the web console.
    pub console: bool,
    pub max_body_bytes: usize,
    /// The most objects, arrays and texts in a request body.
    pub max_body_items: usize,
    /// Of all request bodies that are held at one time, with what they are parsed into, before they become tokens.
    pub max_bodies_bytes: usize,
    pub max_connections: usize,
    /// Where KV is handed over to other processes, if it is.
    pub kv_transfer: Option<SocketAddr>,
    /// The most alternatives a position may report.
    pub max_logprobs: u32,
    /// The most continuations of one HTTP request: prompts × `n`.
    pub max_choices: usize,
    /// How long a client may take to send a request's head, and then its body.
    pub read_timeout: Duration,
    /// How long a client that sends no more may wait for an answer that has not begun.
    pub half_close_timeout: Duration,
    /// How long a request may wait for the shape of its output to be compiled.
    pub compile_timeout: Duration,
    /// How long accepted requests may go on after a signal to stop.
    pub shutdown_timeout: Duration,
    /// A step that takes longer than this means that the device or the engine is stuck.
    pub stall_timeout: Duration,
    /// How the model writes calls of functions.
    pub tool_call_parser: ParserChoice<ToolFormat>,
    /// How the model writes its reasoning.
    pub reasoning_parser: ParserChoice<ReasoningFormat>,
    /// Variables of chat templates that requests do not set.
    pub chat_template_kwargs: Map<String, Value>,
    /// Answers of `/v1/responses` that are kept for later requests.
    pub max_stored_responses: usize,
    pub max_stored_bytes: usize,
    /// How long they are kept.
    pub stored_response_ttl: Duration,
    /// Models that are loaded when they are asked for, besides the one that is there from the start.
    pub more_models: Option<MoreModels>,
    /// The graph engine, if there is one.
    pub graph: Option<GraphServing>,
    /// Lines of the log that could not be written, counted by whoever writes it; for `/metrics`.
    pub num_lost_log_lines: Option<Arc<AtomicU64>>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 8000,
            api_keys: Vec::new(),
            tls: None,
            public_prefixes: Vec::new(),
            system_prompts: Vec::new(),
            inject_system_prompt: true,
            otlp_traces_endpoint: None,
            allowed_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            root_path: String::new(),
            tokens_as_ids: false,
            force_include_usage: false,
            console: true,
            max_body_bytes: 16 << 20,
            max_body_items: 1 << 18,
            max_bodies_bytes: 256 << 20,
            max_connections: 4096,
            kv_transfer: None,
            max_logprobs: 20,
            max_choices: 1024,
            read_timeout: Duration::from_secs(60),
            half_close_timeout: Duration::from_secs(5),
            compile_timeout: Duration::from_secs(30),
            shutdown_timeout: Duration::from_secs(30),
            stall_timeout: Duration::from_secs(120),
            tool_call_parser: ParserChoice::Auto,
            reasoning_parser: ParserChoice::Auto,
            chat_template_kwargs: Map::new(),
            max_stored_responses: 1024,
            max_stored_bytes: 64 << 20,
            stored_response_ttl: Duration::from_secs(3600),
            more_models: None,
            graph: None,
            num_lost_log_lines: None,
        }
    }
}
