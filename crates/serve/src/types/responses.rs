//! `/v1/responses`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::common::{Others, Unsupported};

/// The fields of a request besides [`super::common::SamplingFields`].
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["input"]))]
pub struct ResponseFields {
    /// A text, or a list of items: messages, earlier calls and their results, reasoning.
    pub input: Option<ResponseInput>,
    /// The system message; not carried over from the previous response.
    pub instructions: Option<String>,
    /// The most tokens of the answer.
    pub max_output_tokens: Option<u32>,
    /// Goes on from a stored response.
    pub previous_response_id: Option<String>,
    /// Keep the response for later requests, as by default.
    pub store: Option<bool>,
    /// Answer at once, and make the response meanwhile.
    pub background: Option<bool>,
    /// Functions that the model may call.
    pub tools: Option<Vec<ResponseTool>>,
    /// Whether the model may, must or must not call a function, or which one it must.
    pub tool_choice: Option<ResponseToolChoice>,
    /// Allow more than one call in an answer.
    pub parallel_tool_calls: Option<bool>,
    /// The shape of the answer.
    pub text: Option<TextOptions>,
    /// How much the model may reason.
    pub reasoning: Option<ReasoningOptions>,
    /// Given back with the response.
    pub metadata: Option<Map<String, Value>>,
    /// `disabled`: what is too long is refused; `auto`: its beginning is left out.
    pub truncation: Option<String>,
    /// `message.output_text.logprobs` for log-probabilities.
    pub include: Option<Vec<String>>,
    /// How many alternatives they have.
    pub top_logprobs: Option<u32>,
    /// Variables for the chat template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Not built: refused where it asks for something.
    pub prompt: Unsupported,
    /// Not built: refused where it asks for something.
    pub conversation: Unsupported,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "input must be a text or a list of items")]
pub enum ResponseInput {
    Text(String),
    Items(Vec<Map<String, Value>>),
}

/// A function.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct ResponseTool {
    /// `function` is the only type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its name.
    #[serde(default)]
    pub name: String,
    /// What it is for, for the model.
    #[serde(default)]
    pub description: Option<String>,
    /// The JSON schema of its arguments.
    #[serde(default)]
    pub parameters: Option<Map<String, Value>>,
    /// Keep the schema strictly.
    #[serde(default)]
    pub strict: Option<bool>,
    #[serde(flatten, skip_serializing)]
    #[schemars(skip)]
    pub others: Others,
}

#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "tool_choice must be \"none\", \"auto\", \"required\" or {\"type\": \"function\", \"name\": …}"
)]
pub enum ResponseToolChoice {
    Mode(String),
    Named {
        #[serde(rename = "type")]
        kind: String,
        name: String,
    },
    /// `allowed_tools`: only these, in the mode `auto` or `required`.
    Allowed {
        #[serde(rename = "type")]
        kind: String,
        mode: String,
        tools: Vec<Map<String, Value>>,
    },
}

#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct TextOptions {
    /// What the answer must be like.
    pub format: Option<TextFormat>,
    #[serde(flatten, skip_serializing)]
    #[schemars(skip)]
    pub others: Others,
}

#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TextFormat {
    Text,
    JsonObject,
    JsonSchema {
        #[serde(default)]
        name: Option<String>,
        schema: Map<String, Value>,
        #[serde(default)]
        strict: Option<bool>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        description: Option<String>,
    },
}

#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct ReasoningOptions {
    /// `none` and `minimal` ask the model not to reason, where its template can.
    pub effort: Option<String>,
    /// Read and ignored.
    pub summary: Option<String>,
    #[serde(flatten, skip_serializing)]
    #[schemars(skip)]
    pub others: Others,
}

#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct ResponseObject {
    pub id: String,
    pub object: &'static str,
    pub created_at: u64,
    /// `queued`, `in_progress`, `completed`, `incomplete`, `failed` or `cancelled`.
    pub status: &'static str,
    pub background: bool,
    pub error: Option<ResponseError>,
    pub incomplete_details: Option<IncompleteDetails>,
    pub instructions: Option<String>,
    pub max_output_tokens: Option<u32>,
    pub model: String,
    pub output: Vec<OutputItem>,
    pub parallel_tool_calls: bool,
    pub previous_response_id: Option<String>,
    pub reasoning: ReasoningOptions,
    pub store: bool,
    pub temperature: f32,
    pub text: TextOptions,
    pub tool_choice: Option<ResponseToolChoice>,
    pub tools: Vec<ResponseTool>,
    pub top_p: f32,
    pub truncation: &'static str,
    pub usage: Option<ResponseUsage>,
    pub user: Option<String>,
    pub metadata: Map<String, Value>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ResponseError {
    pub code: String,
    pub message: String,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct IncompleteDetails {
    pub reason: &'static str,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct ResponseUsage {
    pub input_tokens: usize,
    pub input_tokens_details: InputTokensDetails,
    pub output_tokens: usize,
    pub output_tokens_details: OutputTokensDetails,
    pub total_tokens: usize,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct InputTokensDetails {
    pub cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct OutputTokensDetails {
    pub reasoning_tokens: usize,
}

/// A part of an answer.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    Reasoning { id: String, summary: Vec<Value>, content: Vec<ContentPart>, status: &'static str },
    Message { id: String, role: &'static str, status: &'static str, content: Vec<ContentPart> },
    FunctionCall { id: String, call_id: String, name: String, arguments: String, status: &'static str },
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentPart {
    OutputText { text: String, annotations: Vec<Value>, logprobs: Vec<Value> },
    ReasoningText { text: String },
}

/// An event of a streamed response; which fields it has depends on its type.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct ResponseEvent<'a> {
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub sequence_number: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<&'a ResponseObject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub item_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub item: Option<OutputItem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<ContentPart>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<Value>>,
}

/// The input of a stored response, earlier turns included.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct InputItems {
    pub object: &'static str,
    pub data: Vec<Value>,
    pub first_id: Option<String>,
    pub last_id: Option<String>,
    pub has_more: bool,
}

/// What is left of a response that was forgotten.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DeletedResponse {
    pub id: String,
    pub object: &'static str,
    pub deleted: bool,
}
