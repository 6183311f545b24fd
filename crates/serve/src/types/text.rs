//! `/tokenize`, `/detokenize`, `/v1/models` and the small operational answers.

use baton_core::TokenId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Either `prompt` or `messages`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TokenizeRequest {
    pub model: Option<String>,
    pub prompt: Option<String>,
    pub messages: Option<Vec<Map<String, Value>>>,
    /// Add what the model wants at the beginning; by default for a prompt and not for messages.
    pub add_special_tokens: Option<bool>,
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    pub return_token_strs: Option<bool>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TokenizeResponse {
    pub count: usize,
    pub max_model_len: usize,
    pub tokens: Vec<TokenId>,
    pub token_strs: Option<Vec<String>>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["tokens"]))]
pub struct DetokenizeRequest {
    pub model: Option<String>,
    pub tokens: Option<Vec<TokenId>>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DetokenizeResponse {
    pub prompt: String,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ModelList {
    pub object: &'static str,
    pub data: Vec<ModelCard>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ModelCard {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    pub root: String,
    pub parent: Option<String>,
    pub max_model_len: usize,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct Version {
    pub version: &'static str,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct RouterLoad {
    /// Generation requests being served.
    pub load: usize,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TokenizerInfo {
    pub vocab_size: usize,
    pub model_max_length: usize,
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    pub chat_template: Option<String>,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct Load {
    /// Generation requests being served.
    pub server_load: usize,
}
