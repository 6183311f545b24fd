//! `/v1/messages`, the dialect of Anthropic's API.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::common::Others;

/// A request, and that of `/v1/messages/count_tokens`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["messages", "max_tokens"]))]
pub struct MessageFields {
    /// The name of the model, as `/v1/models` lists it.
    pub model: Option<String>,
    /// What was said so far.
    pub messages: Option<Vec<MessageParam>>,
    /// Not needed to count tokens.
    pub max_tokens: Option<u32>,
    /// The system prompt.
    pub system: Option<MessageContent>,
    /// Texts that end the answer.
    pub stop_sequences: Option<Vec<String>>,
    /// 0 takes the most likely token.
    pub temperature: Option<f32>,
    /// Keep the smallest set of tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: Option<f32>,
    /// Keep the k most likely tokens; 0 or -1 keeps all.
    pub top_k: Option<i64>,
    /// Send the answer as server-sent events while it is made.
    pub stream: Option<bool>,
    /// Functions that the model may call.
    pub tools: Option<Vec<MessageTool>>,
    /// Whether the model may, must or must not call a function, or which one it must.
    pub tool_choice: Option<MessageToolChoice>,
    /// Whether the model may reason, where its template can tell it.
    pub thinking: Option<Thinking>,
    /// The shape of the answer.
    pub output_config: Option<OutputConfig>,
    /// The older name of `output_config.format`.
    pub output_format: Option<OutputFormat>,
    /// Noted nowhere.
    pub metadata: Option<Map<String, Value>>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OutputConfig {
    /// What the answer must be like.
    pub format: Option<OutputFormat>,
    #[serde(flatten)]
    #[schemars(skip)]
    pub others: Others,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct OutputFormat {
    /// `json_schema`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The JSON schema.
    pub schema: Option<Value>,
    #[serde(flatten)]
    #[schemars(skip)]
    pub others: Others,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct MessageParam {
    /// `user` or `assistant`.
    pub role: String,
    /// A text, or a list of blocks.
    pub content: MessageContent,
    #[serde(flatten)]
    #[schemars(skip)]
    pub others: Others,
}

/// A text, or blocks of the types `text`, `tool_use`, `tool_result`, `thinking` and `redacted_thinking`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a text or a list of blocks")]
pub enum MessageContent {
    Text(String),
    Blocks(Vec<Map<String, Value>>),
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct MessageTool {
    /// `custom` is the only type.
    #[serde(rename = "type", default)]
    pub kind: Option<String>,
    /// Its name.
    pub name: String,
    /// What it is for, for the model.
    #[serde(default)]
    pub description: Option<String>,
    /// The JSON schema of its arguments.
    #[serde(default)]
    pub input_schema: Option<Map<String, Value>>,
    #[serde(flatten)]
    #[schemars(skip)]
    pub others: Others,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct MessageToolChoice {
    /// `auto`, `any`, `tool` or `none`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The function, for `tool`.
    #[serde(default)]
    pub name: Option<String>,
    /// Allow one call only.
    #[serde(default)]
    pub disable_parallel_tool_use: Option<bool>,
    #[serde(flatten)]
    #[schemars(skip)]
    pub others: Others,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct Thinking {
    /// `enabled`, `adaptive` or `disabled`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Read and ignored: there is no such limit.
    #[serde(default)]
    pub budget_tokens: Option<u32>,
    #[serde(flatten)]
    #[schemars(skip)]
    pub others: Others,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MessageResponse {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub role: &'static str,
    pub model: String,
    pub content: Vec<ContentBlock>,
    /// `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`.
    pub stop_reason: Option<&'static str>,
    pub stop_sequence: Option<String>,
    pub usage: MessageUsage,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentBlock {
    Text { text: String },
    Thinking { thinking: String, signature: String },
    ToolUse { id: String, name: String, input: Map<String, Value> },
}

#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub struct MessageUsage {
    /// Tokens of the prompt that were not in the prefix cache.
    pub input_tokens: usize,
    pub cache_creation_input_tokens: usize,
    pub cache_read_input_tokens: usize,
    pub output_tokens: usize,
}

/// An event of a streamed message.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessageEvent {
    MessageStart { message: MessageResponse },
    Ping,
    ContentBlockStart { index: usize, content_block: ContentBlock },
    ContentBlockDelta { index: usize, delta: ContentDelta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: MessageDelta, usage: MessageUsage },
    MessageStop,
    Error { error: MessageErrorDetail },
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentDelta {
    TextDelta { text: String },
    ThinkingDelta { thinking: String },
    InputJsonDelta { partial_json: String },
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MessageDelta {
    pub stop_reason: Option<&'static str>,
    pub stop_sequence: Option<String>,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct TokenCount {
    pub input_tokens: usize,
}

/// The body of every answer of these routes that is not a success.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MessageError {
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub error: MessageErrorDetail,
    pub request_id: Option<String>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MessageErrorDetail {
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub message: String,
}
