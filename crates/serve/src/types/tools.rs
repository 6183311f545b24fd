//! Functions that a model may call, in the words of each API.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::common::Others;

/// A function of `/v1/chat/completions`.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct ChatTool {
    /// `function` is the only type.
    #[serde(rename = "type")]
    pub kind: String,
    /// What is called.
    pub function: Function,
    #[serde(flatten, skip_serializing)]
    #[schemars(skip)]
    pub others: Others,
}

#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// What it is for, for the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// A JSON schema of an object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Map<String, Value>>,
    /// Noted; arguments always follow the schema where a call is required.
    #[serde(default, skip_serializing)]
    pub strict: Option<bool>,
    #[serde(flatten, skip_serializing)]
    #[schemars(skip)]
    pub others: Others,
}

/// `none`, `auto`, `required`, or the one function to call.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "tool_choice must be \"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}"
)]
pub enum ChatToolChoice {
    Mode(String),
    Named {
        #[serde(rename = "type")]
        kind: Option<String>,
        function: FunctionName,
    },
    /// `allowed_tools`: only these, in the mode `auto` or `required`.
    Allowed {
        #[serde(rename = "type")]
        kind: Option<String>,
        allowed_tools: AllowedTools,
    },
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct AllowedTools {
    /// `auto` or `required`.
    pub mode: String,
    /// Functions that the model may call.
    pub tools: Vec<Map<String, Value>>,
    #[serde(flatten)]
    #[schemars(skip)]
    pub others: Others,
}

#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct FunctionName {
    /// Its name.
    pub name: String,
    #[serde(flatten, skip_serializing)]
    #[schemars(skip)]
    pub others: Others,
}

/// A call, in a whole answer.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ToolCall {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub function: CalledFunction,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CalledFunction {
    pub name: String,
    /// JSON, unless the model got it wrong.
    pub arguments: String,
}

/// A piece of a call, in a stream.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ToolCallDelta {
    pub index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    pub function: FunctionDelta,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub arguments: String,
}
