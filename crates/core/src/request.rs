//! A request to the engine: token ids, not text.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Constraint, RequestId, SamplingParams, TokenId};

/// What the text layer hands to the engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    pub id: RequestId,
    pub prompt_token_ids: Vec<TokenId>,
    pub params: Arc<SamplingParams>,
    /// The model's end tokens; empty with `ignore_eos`.
    pub eos_token_ids: Arc<[TokenId]>,
    /// Under the `priority` policy the lowest value runs first.
    pub priority: i32,
    /// Whose request it is. Within a priority, tenants take turns.
    #[serde(default)]
    pub tenant: u32,
    /// Requests share cached prefixes only with requests of the same salt.
    pub cache_salt: Option<Arc<str>>,
    /// How many of the prompt's first tokens are public: requests with any salt share their cached blocks.
    #[serde(default)]
    pub num_public_tokens: u32,
    /// `host:port` of another process that has computed the prompt and keeps its KV.
    #[serde(default)]
    pub kv_remote: Option<Arc<str>>,
    /// `params.structured_outputs` and `params.token_filter`, compiled. It is there if and only if one of them is.
    #[serde(skip)]
    pub constraint: Option<Arc<dyn Constraint>>,
    /// What the output is expected to be like, for speculation. It changes how fast the output comes, never what it is.
    #[serde(default)]
    pub prediction: Arc<[TokenId]>,
}

impl Request {
    pub fn new(id: RequestId, prompt_token_ids: Vec<TokenId>, params: SamplingParams) -> Self {
        Self {
            id,
            prompt_token_ids,
            params: Arc::new(params),
            eos_token_ids: Arc::from([]),
            priority: 0,
            tenant: 0,
            cache_salt: None,
            num_public_tokens: 0,
            kv_remote: None,
            constraint: None,
            prediction: Arc::from([]),
        }
    }
}
