//! A request as the engine takes it: token ids, not text.

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
    /// The first so many tokens of the prompt are no secret: requests of every salt share their cached blocks.
    #[serde(default)]
    pub num_public_tokens: u32,
    /// `params.structured_outputs` and `params.token_filter`, compiled. It is there if and only if one of them is.
    #[serde(skip)]
    pub constraint: Option<Arc<dyn Constraint>>,
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
            constraint: None,
        }
    }
}
