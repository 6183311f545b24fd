//! `/v1/chat/completions`.

use baton_core::TokenId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::common::{PromptLogprobs, StopReason, Unsupported, Usage};
use super::tools::{ChatTool, ChatToolChoice, ToolCall, ToolCallDelta};

/// A conversation.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct Messages(pub Vec<Map<String, Value>>);

/// Many of them.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct Conversations(pub Vec<Messages>);

/// The fields of `/v1/chat/completions` besides [`super::common::SamplingFields`].
pub type ChatFields = ChatFieldsOf<Messages>;

/// Those of `/v1/chat/completions/batch`: each list of messages is a conversation of its own.
pub type BatchChatFields = ChatFieldsOf<Conversations>;

/// The fields of a chat over one conversation or over many.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["messages"]), rename = "ChatFieldsOf{M}")]
pub struct ChatFieldsOf<M: Default> {
    /// Objects with `role` and `content` (a text, or a list of `{"type": "text", "text": …}`); those of the assistant may
    /// have `tool_calls`, those of the role `tool` have a `tool_call_id`. A batch has a list of such lists.
    pub messages: Option<M>,
    /// The most tokens of the answer; without it, what is left of the context.
    pub max_completion_tokens: Option<u32>,
    /// Report the log-probability of each token.
    pub logprobs: Option<bool>,
    /// How many alternatives each token reports.
    #[schemars(range(min = 0))]
    pub top_logprobs: Option<u32>,
    /// How many to sample; the best `n` are returned.
    pub best_of: Option<u32>,
    /// End the prompt with the beginning of an answer.
    pub add_generation_prompt: Option<bool>,
    /// The last message is the beginning of the answer.
    pub continue_final_message: Option<bool>,
    /// Add what the model wants at the beginning of a prompt.
    pub add_special_tokens: Option<bool>,
    /// For templates that know documents.
    pub documents: Option<Vec<Value>>,
    /// Variables for the chat template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// How hard to think before answering (`none`, `minimal`, `low`, `medium`, `high`), for templates that know how to say it.
    pub reasoning_effort: Option<String>,
    /// Prepend the last message, where it has the role of the answer.
    pub echo: Option<bool>,
    /// Functions that the model may call.
    pub tools: Option<Vec<ChatTool>>,
    /// Whether the model may, must or must not call a function, or which one it must.
    pub tool_choice: Option<ChatToolChoice>,
    /// Allow more than one call in an answer.
    pub parallel_tool_calls: Option<bool>,
    /// What the answer is expected to be like (`{"type": "content", "content": …}`). Where the server speculates, parts of it that
    /// are right come faster; it never changes the answer.
    pub prediction: Option<Prediction>,
    /// Not built: refused where it asks for something.
    pub chat_template: Unsupported,
    /// Not built: refused where it asks for something.
    pub functions: Unsupported,
    /// Not built: refused where it asks for something.
    pub function_call: Unsupported,
    /// Not built: refused where it asks for something.
    pub audio: Unsupported,
    /// Only `text`.
    pub modalities: Option<Vec<String>>,
    /// Not built: refused where it asks for something.
    pub web_search_options: Unsupported,
    /// Not built: refused where it asks for something.
    pub mm_processor_kwargs: Unsupported,
}

/// OpenAI's predicted output.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct Prediction {
    #[serde(rename = "type")]
    pub kind: PredictionKind,
    /// The text, whole or in parts.
    pub content: PredictedContent,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PredictionKind {
    Content,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "content must be a text or a list of {\"type\": \"text\", \"text\": …}")]
pub enum PredictedContent {
    Text(String),
    Parts(Vec<PredictedPart>),
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct PredictedPart {
    /// Only text can be predicted.
    #[serde(rename = "type")]
    pub kind: PredictedPartKind,
    /// What the answer is expected to say here.
    pub text: String,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PredictedPartKind {
    Text,
}

impl Prediction {
    pub fn into_text(self) -> String {
        match self.content {
            PredictedContent::Text(text) => text,
            PredictedContent::Parts(parts) => parts.into_iter().map(|part| part.text).collect(),
        }
    }
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatResponse {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChoice>,
    pub usage: Usage,
    pub system_fingerprint: &'static str,
    pub prompt_logprobs: Option<PromptLogprobs>,
    pub prompt_token_ids: Option<Vec<TokenId>>,
    /// Where a decode worker finds the KV, if one goes on with the answer; else null.
    pub kv_transfer_params: Option<Value>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatChoice {
    pub index: usize,
    pub message: AnswerMessage,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<StopReason>,
    pub token_ids: Option<Vec<TokenId>>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct AnswerMessage {
    pub role: String,
    /// Absent where there are only calls.
    pub content: Option<String>,
    pub refusal: Option<String>,
    /// What the model wrote to itself, under vLLM's newer and older name.
    pub reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct ChatLogprobs {
    pub content: Vec<ChatTokenLogprob>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatTokenLogprob {
    #[serde(flatten)]
    pub chosen: ChatAlternative,
    pub top_logprobs: Vec<ChatAlternative>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatAlternative {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
}

/// A piece of a streamed answer.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatChunk<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: Vec<ChatChunkChoice<'a>>,
    /// Absent unless usage was asked for; `null` in all but the last chunk then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    pub system_fingerprint: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [TokenId]>,
}

#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct ChatChunkChoice<'a> {
    pub index: usize,
    pub delta: ChatDelta<'a>,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCallDelta>>,
}
