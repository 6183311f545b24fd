//! `/v1/completions`.

use std::collections::BTreeMap;

use baton_core::TokenId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

use super::common::{PromptLogprobs, StopReason, Unsupported, Usage};
use super::prompt::Prompts;

/// The fields of a completion besides [`super::common::SamplingFields`].
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["prompt"]))]
pub struct CompletionFields {
    /// A text, token ids, or a list of either.
    pub prompt: Option<Prompts>,
    /// Begin the output with the prompt.
    pub echo: Option<bool>,
    /// How many to sample; the best `n` are returned.
    pub best_of: Option<u32>,
    /// Report log-probabilities, with this many alternatives.
    pub logprobs: Option<u32>,
    /// Add what the model wants at the beginning of a prompt.
    pub add_special_tokens: Option<bool>,
    /// Not built: refused where it asks for something.
    pub suffix: Unsupported,
    /// Not built: refused where it asks for something.
    pub prompt_embeds: Unsupported,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CompletionResponse {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<CompletionChoice>,
    pub usage: Usage,
    pub system_fingerprint: &'static str,
    /// Where a decode worker finds the KV, if one goes on with the answer; else null.
    pub kv_transfer_params: Option<serde_json::Value>,
}

/// The same in a whole answer and in a chunk.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CompletionChoice {
    pub index: usize,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<StopReason>,
    pub prompt_logprobs: Option<PromptLogprobs>,
    pub prompt_token_ids: Option<Vec<TokenId>>,
    pub token_ids: Option<Vec<TokenId>>,
}

/// Parallel lists, one entry per token.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    pub token_logprobs: Vec<Option<f32>>,
    pub top_logprobs: Vec<Option<Alternatives>>,
    /// Where the token begins in the text, in characters.
    pub text_offset: Vec<usize>,
}

/// What else a token could have been: an object of tokens and log-probabilities, the token itself first, as vLLM's clients
/// expect it.
#[derive(Clone, Debug, Default, JsonSchema)]
#[schemars(with = "BTreeMap<String, f32>")]
pub struct Alternatives(Vec<(String, f32)>);

impl FromIterator<(String, f32)> for Alternatives {
    /// Of tokens that are written alike, the first one is kept.
    fn from_iter<I: IntoIterator<Item = (String, f32)>>(tokens: I) -> Self {
        let mut kept: Vec<(String, f32)> = Vec::new();
        for (token, logprob) in tokens {
            if kept.iter().all(|(other, _)| *other != token) {
                kept.push((token, logprob));
            }
        }
        Self(kept)
    }
}

impl Serialize for Alternatives {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CompletionChunk<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: &'a [CompletionChoice],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    pub system_fingerprint: &'static str,
}
