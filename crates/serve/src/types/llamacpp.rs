//! The dialect of llama.cpp's server: `/completion`, `/infill`, `/props`, `/slots`.

use baton_core::TokenId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::prompt::Prompts;

/// The fields of `/completion` and `/infill` besides [`super::common::SamplingFields`] and the shapes of outputs.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LlamaFields {
    /// A text or token ids, or a list of either, which has a list of answers.
    pub prompt: Option<Prompts>,
    /// The most tokens of the answer; -1 as many as fit.
    pub n_predict: Option<i64>,
    /// Report log-probabilities, with this many alternatives.
    pub n_probs: Option<u32>,
    pub return_tokens: Option<bool>,
    /// Of a whole answer, only these fields; `generation_settings/n_predict` is one of a field.
    pub response_fields: Option<Vec<String>>,
    /// Of `/infill`: what comes before.
    pub input_prefix: Option<String>,
    /// Of `/infill`: what comes after.
    pub input_suffix: Option<String>,
    /// Of `/infill`: other files, which are put before.
    pub input_extra: Option<Vec<ExtraFile>>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ExtraFile {
    pub filename: String,
    pub text: String,
}

/// A whole answer, or the last event of a stream.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LlamaAnswer {
    pub index: usize,
    pub content: String,
    pub tokens: Vec<TokenId>,
    pub id_slot: usize,
    pub stop: bool,
    pub model: String,
    pub tokens_predicted: usize,
    pub tokens_evaluated: usize,
    pub tokens_cached: usize,
    pub generation_settings: LlamaSettings,
    pub prompt: String,
    pub has_new_line: bool,
    pub truncated: bool,
    /// `eos`, `limit`, `word` or `none`.
    pub stop_type: &'static str,
    pub stopping_word: String,
    pub timings: LlamaTimings,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_probabilities: Option<Vec<LlamaProbability>>,
}

/// A piece of a stream.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LlamaChunk {
    pub index: usize,
    pub content: String,
    pub tokens: Vec<TokenId>,
    pub stop: bool,
    pub id_slot: usize,
    pub tokens_predicted: usize,
    pub tokens_evaluated: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_probabilities: Option<Vec<LlamaProbability>>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LlamaProbability {
    pub id: TokenId,
    pub token: String,
    pub bytes: Vec<u8>,
    pub logprob: f32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub top_logprobs: Vec<LlamaProbability>,
}

#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct LlamaTimings {
    pub cache_n: usize,
    pub prompt_n: usize,
    pub prompt_ms: f64,
    pub prompt_per_token_ms: f64,
    pub prompt_per_second: f64,
    pub predicted_n: usize,
    pub predicted_ms: f64,
    pub predicted_per_token_ms: f64,
    pub predicted_per_second: f64,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LlamaSettings {
    pub n_ctx: usize,
    pub n_predict: i64,
    pub max_tokens: i64,
    pub seed: u64,
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repeat_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub stop: Vec<String>,
    pub ignore_eos: bool,
    pub stream: bool,
    pub n_probs: u32,
    /// As asked, and for `ignore_eos` the tokens that end answers.
    pub logit_bias: Vec<LlamaBias>,
}

/// What is added to a token's logit; null is minus infinity.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct LlamaBias {
    pub token: TokenId,
    pub bias: Option<f32>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LlamaProps {
    pub default_generation_settings: LlamaDefaults,
    pub total_slots: usize,
    pub model_path: String,
    pub model_alias: String,
    pub chat_template: String,
    pub bos_token: String,
    pub eos_token: String,
    pub build_info: &'static str,
    pub modalities: LlamaModalities,
    pub is_sleeping: bool,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LlamaDefaults {
    pub params: LlamaSettings,
    pub n_ctx: usize,
}

#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub struct LlamaModalities {
    pub vision: bool,
    pub audio: bool,
}

/// A place in a step. Requests are not bound to one: as many are shown at work as there are requests running.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LlamaSlot {
    pub id: usize,
    pub n_ctx: usize,
    pub is_processing: bool,
}

/// The answer of `/apply-template`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct AppliedTemplate {
    pub prompt: String,
}
