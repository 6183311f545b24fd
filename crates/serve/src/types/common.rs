//! Fields and shapes that the generating APIs share.

use std::collections::BTreeMap;
use std::sync::Arc;

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
    /// Keep the smallest set of tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: Option<f32>,
    /// Keep the k most likely tokens; 0 or -1 keeps all.
    pub top_k: Option<i64>,
    /// Drop tokens less likely than this fraction of the most likely one; 0 drops none.
    pub min_p: Option<f32>,
    /// Above 1, tokens of the prompt and the output become less likely.
    pub repetition_penalty: Option<f32>,
    /// llama.cpp's name for it.
    pub repeat_penalty: Option<f32>,
    /// The penalty looks at all tokens: only -1, or nothing where there is no penalty.
    pub repeat_last_n: Option<i64>,
    /// Taken from the logits of tokens that occur in the output.
    #[schemars(range(min = -2.0, max = 2.0))]
    pub presence_penalty: Option<f32>,
    /// Taken from the logits of a token for each time it occurs in the output.
    #[schemars(range(min = -2.0, max = 2.0))]
    pub frequency_penalty: Option<f32>,
    /// Token ids (as strings) with what is added to their logits; or llama.cpp's list of such pairs, in which a text stands for all
    /// of its tokens.
    pub logit_bias: Option<LogitBias>,
    /// The same seed gives the same tokens; without one, a random one.
    pub seed: Option<i64>,
    /// Texts that end the answer. They are not part of it.
    pub stop: Option<Stop>,
    /// Tokens that end the answer, besides those of the model.
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
    /// Do not end before this many tokens.
    pub min_tokens: Option<u32>,
    /// The most tokens of the answer.
    pub max_tokens: Option<u32>,
    /// How many answers.
    pub n: Option<u32>,
    /// Beam search of width `n`.
    pub use_beam_search: Option<bool>,
    /// Of beam search: above 1 favours longer answers.
    pub length_penalty: Option<f32>,
    /// Of beam search: end as soon as there are `n` answers.
    pub early_stopping: Option<bool>,
    /// Report the log-probabilities of the prompt's tokens and of this many alternatives.
    pub prompt_logprobs: Option<u32>,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: Option<bool>,
    /// Report the ids of the prompt and of the answer.
    pub return_token_ids: Option<bool>,
    /// Write tokens in log-probabilities as `token_id:ID`.
    pub return_tokens_as_token_ids: Option<bool>,
    /// Share cached prefixes only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// Prefill/decode disaggregation, as vLLM's routers send it.
    pub kv_transfer_params: Option<KvTransferParams>,
    /// Under `--scheduling-policy priority` the lowest value runs first.
    pub priority: Option<i32>,
    /// The most guesses of the next tokens that a step checks, where the server speculates; 0 is none.
    #[schemars(range(min = 0, max = 64))]
    pub speculative_tokens: Option<u32>,
    /// Send the answer as server-sent events while it is made.
    pub stream: Option<bool>,
    /// What a stream reports besides.
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

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "logit_bias must be an object of token ids and numbers, or a list of such pairs"
)]
pub enum LogitBias {
    Map(BTreeMap<String, f32>),
    Pairs(Vec<(BiasedToken, f32)>),
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum BiasedToken {
    Id(TokenId),
    Text(String),
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
    #[serde(flatten)]
    #[schemars(skip)]
    pub others: Others,
}

/// Keys that nobody asks about. A type that has this field is read from objects only; without it, a list would be read as its
/// fields one by one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Others;

impl<'de> Deserialize<'de> for Others {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde::de::IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

/// Who has computed a prompt, or is going to go on with it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct KvTransferParams {
    /// Another process goes on: the answer says where it finds the KV.
    pub do_remote_decode: Option<bool>,
    /// Another process has computed the prompt: its KV is fetched from there.
    pub do_remote_prefill: Option<bool>,
    /// Where a prefill worker hands KV over.
    pub remote_host: Option<String>,
    /// The port of `remote_host`, as a number or as its text.
    #[serde(deserialize_with = "port")]
    pub remote_port: Option<u16>,
    #[serde(flatten)]
    #[schemars(skip)]
    pub others: Others,
}

/// What comes over gRPC has been a floating-point number on its way, or was written as a text to survive that.
fn port<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<u16>, D::Error> {
    let wrong = || serde::de::Error::custom("remote_port must be a port from 0 to 65535");
    let port = match Option::<serde_json::Value>::deserialize(deserializer)? {
        None => return Ok(None),
        Some(serde_json::Value::String(text)) => text.parse().ok(),
        Some(value) => value.as_u64().and_then(|port| u16::try_from(port).ok()),
    };
    port.map(Some).ok_or_else(wrong)
}

impl KvTransferParams {
    /// The process that has the prompt's KV.
    pub fn remote(&self) -> Option<Arc<str>> {
        let (Some(true), Some(host), Some(port)) =
            (self.do_remote_prefill, &self.remote_host, self.remote_port)
        else {
            return None;
        };
        // Names of hosts are short, and only those that the process was told of are ever asked.
        (host.len() <= 255).then(|| Arc::from(format!("{host}:{port}")))
    }

    pub fn wants_decode_elsewhere(&self) -> bool {
        self.do_remote_decode == Some(true)
    }
}

/// A field whose presence is refused: what it asks for would change the answer and is not built.
pub type Unsupported = Option<serde_json::Value>;

#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptTokensDetails,
    /// Only of models that reason, and of requests that speculate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub struct CompletionTokensDetails {
    pub reasoning_tokens: usize,
    /// Guessed tokens that were right; absent where none were made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_prediction_tokens: Option<usize>,
    /// Guessed tokens that were wrong, or came after a wrong one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejected_prediction_tokens: Option<usize>,
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
