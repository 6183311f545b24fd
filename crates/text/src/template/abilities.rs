//! What a template supports besides plain turns (tools, system messages, …), found by rendering: unique words are passed in and
//! either appear or do not. Templates do not declare this, and reading their source would be guessing.

use serde_json::{Value, json};

use super::{ChatTemplate, RenderOptions};

/// How a template wants the arguments of earlier calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentsForm {
    Object,
    /// JSON in a text.
    Text,
}

/// What a template shows of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateAbilities {
    /// Messages of the role `system`.
    pub system: bool,
    /// Descriptions of functions.
    pub tools: bool,
    /// Calls in messages of the assistant.
    pub tool_calls: Option<ArgumentsForm>,
    /// Messages of the role `tool`.
    pub tool_results: bool,
    /// Identifiers of calls must have nine letters or digits.
    pub short_call_ids: bool,
}

const WORD: &str = "zyxwprobe";
const SHORT_ID: &str = "abcdef123";
const LONG_ID: &str = "call_0123456789abcdef";

impl ChatTemplate {
    /// Asks the template. A few renderings: meant for start-up.
    pub fn abilities(&self) -> TemplateAbilities {
        let user = json!({"role": "user", "content": "Hi"});
        let system = json!({"role": "system", "content": WORD});
        let schema = json!({"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]});
        let tools = |name: &str| {
            json!([{
                "type": "function",
                "function": {"name": name, "description": "it", "parameters": schema},
            }])
        };
        let call = |id: &str, arguments: Value| {
            json!({"role": "assistant", "content": "", "tool_calls": [
                {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}},
            ]})
        };
        let result = |id: &str, content: &str| json!({"role": "tool", "content": content, "tool_call_id": id, "name": "f"});
        let shows_with = |messages: &[Value], tools: Option<Value>| {
            let options = RenderOptions { add_generation_prompt: true, tools, ..RenderOptions::default() };
            self.render(messages, &options).is_ok_and(|text| text.contains(WORD))
        };
        // Some templates show calls only where there are functions, or insist on functions.
        let shows = |messages: &[Value]| shows_with(messages, Some(tools("f"))) || shows_with(messages, None);
        let shows_call =
            |arguments: Value| shows(&[user.clone(), call(SHORT_ID, arguments), result(SHORT_ID, "ok")]);
        let tool_calls = if shows_call(json!({ "a": WORD })) {
            Some(ArgumentsForm::Object)
        } else if shows_call(json!({ "a": WORD }).to_string().into()) {
            Some(ArgumentsForm::Text)
        } else {
            None
        };
        let shows_result = |id: &str| {
            let arguments = match tool_calls {
                Some(ArgumentsForm::Text) => json!("{}"),
                _ => json!({}),
            };
            shows(&[user.clone(), call(id, arguments), result(id, WORD)])
        };
        let tool_results = shows_result(SHORT_ID);
        TemplateAbilities {
            system: shows(&[system, user.clone()]),
            tools: shows_with(std::slice::from_ref(&user), Some(tools(WORD))),
            tool_calls,
            tool_results,
            short_call_ids: tool_results && !shows_result(LONG_ID),
        }
    }
}
