//! `/v1/messages`, the dialect of Anthropic's API.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A request, and that of `/v1/messages/count_tokens`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["messages", "max_tokens"]))]
pub struct MessageFields {
    pub model: Option<String>,
    pub messages: Option<Vec<MessageParam>>,
    /// Not needed to count tokens.
    pub max_tokens: Option<u32>,
    pub system: Option<MessageContent>,
    pub stop_sequences: Option<Vec<String>>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub stream: Option<bool>,
    pub tools: Option<Vec<MessageTool>>,
    pub tool_choice: Option<MessageToolChoice>,
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
    pub format: Option<OutputFormat>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct OutputFormat {
    /// `json_schema`.
    #[serde(rename = "type")]
    pub kind: String,
    pub schema: Option<Value>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct MessageParam {
    /// `user` or `assistant`.
    pub role: String,
    pub content: MessageContent,
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
    pub name: String,
    #[serde(default)]
    pub description: Option<String>,
    #[serde(default)]
    pub input_schema: Option<Map<String, Value>>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct MessageToolChoice {
    /// `auto`, `any`, `tool` or `none`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The function, for `tool`.
    #[serde(default)]
    pub name: Option<String>,
    #[serde(default)]
    pub disable_parallel_tool_use: Option<bool>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct Thinking {
    /// `enabled`, `adaptive` or `disabled`.
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default)]
    pub budget_tokens: Option<u32>,
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
