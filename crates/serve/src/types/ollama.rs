//! The dialect of Ollama's API: `/api/chat`, `/api/generate` and what lists models.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::common::{SamplingFields, Stop};
use super::tools::ChatTool;

/// How to sample. Options of the runner, such as `num_ctx`, are set when the server starts and are passed over.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OllamaOptions {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub seed: Option<i64>,
    /// The most tokens of the answer; below 0 as many as fit.
    pub num_predict: Option<i64>,
    pub stop: Option<Stop>,
    pub repeat_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
}

impl OllamaOptions {
    pub fn fields(self, model: Option<String>, stream: bool) -> SamplingFields {
        SamplingFields {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            stop: self.stop,
            repetition_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            stream: Some(stream),
            model,
            ..SamplingFields::default()
        }
    }
}

/// `POST /api/chat`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["model", "messages"]))]
pub struct OllamaChat {
    pub model: Option<String>,
    pub messages: Vec<Map<String, Value>>,
    pub tools: Option<Vec<ChatTool>>,
    /// `json`, or a JSON schema.
    pub format: Option<Value>,
    pub options: Option<OllamaOptions>,
    /// Unless false, one line of JSON per piece.
    pub stream: Option<bool>,
    /// Whether a model that reasons does.
    pub think: Option<Value>,
}

/// `POST /api/generate`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["model"]))]
pub struct OllamaGenerate {
    pub model: Option<String>,
    pub prompt: Option<String>,
    /// What comes after the answer, for models that fill in the middle.
    pub suffix: Option<String>,
    pub system: Option<String>,
    /// Take the prompt as it stands, without the chat template.
    pub raw: Option<bool>,
    pub format: Option<Value>,
    pub options: Option<OllamaOptions>,
    pub stream: Option<bool>,
    pub think: Option<Value>,
    pub images: Option<Vec<Value>>,
    pub template: Option<String>,
    pub context: Option<Vec<i64>>,
}

/// `POST /api/show`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OllamaShow {
    pub model: Option<String>,
    /// The older name of the same.
    pub name: Option<String>,
}

/// A line of an answer, or a whole one.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct OllamaAnswer {
    pub model: String,
    pub created_at: String,
    /// Of `/api/chat`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<OllamaMessage>,
    /// Of `/api/generate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<String>,
    /// Of `/api/generate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    pub done: bool,
    #[serde(flatten)]
    pub end: Option<OllamaEnd>,
}

#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct OllamaMessage {
    pub role: &'static str,
    pub content: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub thinking: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<OllamaCall>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct OllamaCall {
    pub function: OllamaFunction,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct OllamaFunction {
    pub name: String,
    pub arguments: Value,
}

/// What the last line says. Durations are in nanoseconds.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct OllamaEnd {
    pub done_reason: &'static str,
    pub total_duration: u64,
    pub load_duration: u64,
    pub prompt_eval_count: usize,
    pub prompt_eval_duration: u64,
    pub eval_count: usize,
    pub eval_duration: u64,
}

/// What is known of a model.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct OllamaDetails {
    pub parent_model: String,
    pub format: String,
    pub family: String,
    pub families: Vec<String>,
    pub parameter_size: String,
    pub quantization_level: String,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct OllamaModel {
    pub name: String,
    pub model: String,
    pub modified_at: String,
    pub size: u64,
    pub digest: String,
    pub details: OllamaDetails,
    /// Of `/api/ps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    /// Of `/api/ps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_vram: Option<u64>,
    /// Of `/api/ps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_length: Option<usize>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct OllamaModels {
    pub models: Vec<OllamaModel>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct OllamaInfo {
    pub modelfile: String,
    /// Sampling defaults, one per line.
    pub parameters: String,
    pub template: String,
    pub details: OllamaDetails,
    pub model_info: Map<String, Value>,
    pub capabilities: Vec<&'static str>,
}

/// An error, as Ollama writes it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct OllamaError {
    pub error: String,
}
