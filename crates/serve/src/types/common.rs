//! Fields and shapes that the generating APIs share.

use std::collections::BTreeMap;

use baton_core::TokenId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How to continue, for every API that generates: OpenAI's fields and vLLM's extras.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SamplingFields {
    /// 0 takes the most likely token.
    #[schemars(range(min = 0.0, max = 2.0))]
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    /// Keep the k most likely tokens; 0 or -1 keeps all.
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// llama.cpp's name for it.
    pub repeat_penalty: Option<f32>,
    /// The penalty looks at all tokens: only -1, or nothing where there is no penalty.
    pub repeat_last_n: Option<i64>,
    #[schemars(range(min = -2.0, max = 2.0))]
    pub presence_penalty: Option<f32>,
    #[schemars(range(min = -2.0, max = 2.0))]
    pub frequency_penalty: Option<f32>,
    /// Token ids (as strings) with what is added to their logits.
    pub logit_bias: Option<BTreeMap<String, f32>>,
    pub seed: Option<i64>,
    pub stop: Option<Stop>,
    pub stop_token_ids: Option<Vec<TokenId>>,
    /// Texts that are never written.
    pub bad_words: Option<Vec<String>>,
    /// Draw only these tokens, and the end.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// Keep only the last so many tokens of the prompt; -1 keeps as many as there is room for.
    pub truncate_prompt_tokens: Option<i64>,
    /// Keep the stop text at the end of the output.
    pub include_stop_str_in_output: Option<bool>,
    /// Go on past the model's end tokens.
    pub ignore_eos: Option<bool>,
    pub min_tokens: Option<u32>,
    pub max_tokens: Option<u32>,
    /// How many answers.
    pub n: Option<u32>,
    /// Beam search of width `n`.
    pub use_beam_search: Option<bool>,
    pub length_penalty: Option<f32>,
    pub early_stopping: Option<bool>,
    /// Report the log-probabilities of the prompt's tokens and of this many alternatives.
    pub prompt_logprobs: Option<u32>,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: Option<bool>,
    pub return_token_ids: Option<bool>,
    /// Write tokens in log-probabilities as `token_id:ID`.
    pub return_tokens_as_token_ids: Option<bool>,
    /// Share cached prefixes only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// Under `--scheduling-policy priority` the lowest value runs first.
    pub priority: Option<i32>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    /// Noted nowhere.
    pub user: Option<String>,
    /// The name of the model, as `/v1/models` lists it.
    pub model: Option<String>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "stop must be a string or a list of strings")]
pub enum Stop {
    One(String),
    Many(Vec<String>),
}

impl Stop {
    pub fn into_list(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StreamOptions {
    /// A last chunk with the usage of the whole request.
    pub include_usage: Option<bool>,
    /// The usage so far in every chunk.
    pub continuous_usage_stats: Option<bool>,
}

/// A field whose presence is refused: what it asks for would change the answer and is not built.
pub type Unsupported = Option<serde_json::Value>;

#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptTokensDetails,
    /// Only of models that reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub struct CompletionTokensDetails {
    pub reasoning_tokens: usize,
}

#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub struct PromptTokensDetails {
    /// Tokens whose KV came from the prefix cache.
    pub cached_tokens: usize,
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
            completion_tokens_details: None,
        }
    }
}

/// The text or token that ended an answer; absent for the model's own end and for the length.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum StopReason {
    Token(TokenId),
    Text(String),
}

/// A prompt token, in vLLM's shape: a map from token id to this.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PromptLogprob {
    pub logprob: f32,
    pub rank: u32,
    pub decoded_token: String,
}

/// One entry a prompt token; the first one has none.
pub type PromptLogprobs = Vec<Option<BTreeMap<String, PromptLogprob>>>;
