//! `/v1/chat/completions`.

use baton_core::TokenId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::common::{PromptLogprobs, StopReason, Unsupported, Usage};
use super::tools::{ChatTool, ChatToolChoice, ToolCall, ToolCallDelta};

/// The fields of a chat besides [`super::common::SamplingFields`].
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["messages"]))]
pub struct ChatFields {
    /// Objects with `role` and `content` (a text, or a list of `{"type": "text", "text": …}`); those of the assistant may
    /// have `tool_calls`, those of the role `tool` have a `tool_call_id`.
    pub messages: Option<Vec<Map<String, Value>>>,
    pub max_completion_tokens: Option<u32>,
    pub logprobs: Option<bool>,
    #[schemars(range(min = 0))]
    pub top_logprobs: Option<u32>,
    pub best_of: Option<u32>,
    /// End the prompt with the beginning of an answer.
    pub add_generation_prompt: Option<bool>,
    /// The last message is the beginning of the answer.
    pub continue_final_message: Option<bool>,
    pub add_special_tokens: Option<bool>,
    pub documents: Option<Vec<Value>>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Prepend the last message, where it has the role of the answer.
    pub echo: Option<bool>,
    /// Functions that the model may call.
    pub tools: Option<Vec<ChatTool>>,
    pub tool_choice: Option<ChatToolChoice>,
    /// Allow more than one call in an answer.
    pub parallel_tool_calls: Option<bool>,
    pub chat_template: Unsupported,
    pub functions: Unsupported,
    pub function_call: Unsupported,
    pub audio: Unsupported,
    pub modalities: Option<Vec<String>>,
    pub web_search_options: Unsupported,
    pub mm_processor_kwargs: Unsupported,
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
    /// Always null: clients of vLLM look for it.
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
