//! `/tokenize`, `/detokenize`, `/v1/models` and the small operational answers.

use baton_core::TokenId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::tools::ChatTool;

/// Either `prompt` or `messages`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TokenizeRequest {
    /// The name of the model, as `/v1/models` lists it.
    pub model: Option<String>,
    /// The text; or else `messages`.
    pub prompt: Option<String>,
    /// llama.cpp's name for a prompt.
    pub content: Option<String>,
    /// What was said so far.
    pub messages: Option<Vec<Map<String, Value>>>,
    /// Functions that the model may call, which the chat template shows it.
    pub tools: Option<Vec<ChatTool>>,
    /// Add what the model wants at the beginning; by default for a prompt and not for messages.
    pub add_special_tokens: Option<bool>,
    /// llama.cpp's name for it, with `content`, where it is false by default.
    pub add_special: Option<bool>,
    /// With `content`: tokens are objects with `id` and `piece`.
    pub with_pieces: Option<bool>,
    /// End the prompt with the beginning of an answer.
    pub add_generation_prompt: Option<bool>,
    /// The last message is the beginning of the answer.
    pub continue_final_message: Option<bool>,
    /// Variables for the chat template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Report the text of each token too.
    pub return_token_strs: Option<bool>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TokenizeResponse {
    pub count: usize,
    pub max_model_len: usize,
    pub tokens: Tokens,
    pub token_strs: Option<Vec<String>>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Tokens {
    Ids(Vec<TokenId>),
    Pieces(Vec<TokenPiece>),
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TokenPiece {
    pub id: TokenId,
    pub piece: String,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["tokens"]))]
pub struct DetokenizeRequest {
    /// The name of the model, as `/v1/models` lists it.
    pub model: Option<String>,
    /// The token ids.
    pub tokens: Option<Vec<TokenId>>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DetokenizeResponse {
    pub prompt: String,
    /// The same under llama.cpp's name.
    pub content: String,
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
    /// Whether it is in memory; others are loaded when a request names them.
    pub loaded: bool,
    /// Not known of a model that is not loaded.
    pub max_model_len: Option<usize>,
    /// What a request that says nothing gets.
    pub default_sampling_params: Option<DefaultSampling>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DefaultSampling {
    pub temperature: f32,
    pub top_p: f32,
    pub top_k: u32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// Where they come from, such as `the catalogue`; empty where they are neutral.
    pub source: String,
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
    /// The class of Hugging Face's library that reads a tokenizer of any kind.
    pub tokenizer_class: &'static str,
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
