//! Anthropic's messages to the turns of a conversation, in the words of `/v1/chat/completions`.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::tools::{Described, ToolChoice, ToolUse};
use crate::types::common::Others;
use crate::types::messages::{MessageContent, MessageFields, MessageParam, MessageTool, MessageToolChoice};
use crate::types::tools::Function;

type Turn = Map<String, Value>;

/// All turns of a request, the system's first.
pub fn turns(asked: &mut MessageFields) -> Result<Vec<Turn>, ApiError> {
    let mut turns = Vec::new();
    if let Some(system) = asked.system.take() {
        let text = match system {
            MessageContent::Text(text) => text,
            MessageContent::Blocks(blocks) => texts("system", &blocks)?,
        };
        if !text.is_empty() {
            turns.push(turn("system", text));
        }
    }
    let missing = || ApiError::invalid_field("messages", "messages: at least one message is required");
    let messages = asked.messages.take().filter(|messages| !messages.is_empty()).ok_or_else(missing)?;
    for (index, message) in messages.into_iter().enumerate() {
        extend(&mut turns, &format!("messages[{index}]"), message)?;
    }
    Ok(turns)
}

fn turn(role: &str, content: String) -> Turn {
    Map::from_iter([("role".to_owned(), role.into()), ("content".to_owned(), content.into())])
}

fn extend(turns: &mut Vec<Turn>, path: &str, message: MessageParam) -> Result<(), ApiError> {
    let role = message.role.as_str();
    if !["user", "assistant", "system"].contains(&role) {
        let param = format!("{path}.role");
        return Err(ApiError::invalid_field(
            &param,
            format!("{param} must be user or assistant, got {role:?}"),
        ));
    }
    let blocks = match message.content {
        MessageContent::Text(text) => {
            turns.push(turn(role, text));
            return Ok(());
        }
        MessageContent::Blocks(blocks) => blocks,
    };
    let (mut text, mut reasoning, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (index, block) in blocks.iter().enumerate() {
        let path = format!("{path}.content[{index}]");
        match (block.get("type").and_then(Value::as_str), role) {
            (Some("text"), _) => text.push(string(&path, block, "text")?),
            (Some("thinking"), "assistant") => reasoning.push(string(&path, block, "thinking")?),
            (Some("redacted_thinking"), "assistant") => {}
            (Some("tool_use"), "assistant") => {
                let (id, name) = (string(&path, block, "id")?, string(&path, block, "name")?);
                let input = block.get("input").cloned().unwrap_or_else(|| json!({}));
                calls.push(
                    json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}}),
                );
            }
            (Some("tool_result"), "user") => {
                let mut result = turn("tool", result_text(&path, block)?);
                result.insert("tool_call_id".to_owned(), string(&path, block, "tool_use_id")?.into());
                turns.push(result);
            }
            (kind, _) => {
                let kind = kind.unwrap_or_default();
                let message = format!(
                    "{path}.type: {kind:?} is not taken in a message of the {role}; this model takes texts only"
                );
                return Err(ApiError::invalid_field(format!("{path}.type"), message));
            }
        }
    }
    // A message that only brings results is no turn of its own.
    if text.is_empty() && reasoning.is_empty() && calls.is_empty() {
        return Ok(());
    }
    let mut turn = turn(role, text.join("\n"));
    if !reasoning.is_empty() {
        turn.insert("reasoning_content".to_owned(), reasoning.join("\n").into());
    }
    if !calls.is_empty() {
        turn.insert("tool_calls".to_owned(), calls.into());
    }
    turns.push(turn);
    Ok(())
}

fn string<'a>(path: &str, block: &'a Turn, key: &str) -> Result<&'a str, ApiError> {
    let param = format!("{path}.{key}");
    let missing = || ApiError::invalid_field(&param, format!("{param} must be a text"));
    block.get(key).and_then(Value::as_str).ok_or_else(missing)
}

fn texts(path: &str, blocks: &[Turn]) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(blocks.len());
    for (index, block) in blocks.iter().enumerate() {
        let path = format!("{path}[{index}]");
        if block.get("type").is_some_and(|kind| kind != "text") {
            let message = format!("{path}.type must be \"text\"; this model takes texts only");
            return Err(ApiError::invalid_field(format!("{path}.type"), message));
        }
        texts.push(string(&path, block, "text")?);
    }
    Ok(texts.join("\n"))
}

fn result_text(path: &str, block: &Turn) -> Result<String, ApiError> {
    let path = format!("{path}.content");
    match block.get("content") {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(blocks)) => {
            let blocks: Vec<Turn> = blocks.iter().filter_map(|block| block.as_object().cloned()).collect();
            texts(&path, &blocks)
        }
        Some(_) => Err(ApiError::invalid_field(&path, format!("{path} must be a text or a list of blocks"))),
    }
}

/// The functions of a request.
pub fn tools(
    tools: Option<Vec<MessageTool>>,
    choice: Option<MessageToolChoice>,
) -> Result<ToolUse, ApiError> {
    let describe = |(index, tool): (usize, MessageTool)| {
        let path = format!("tools[{index}]");
        if let Some(kind) = tool.kind.filter(|kind| kind != "custom") {
            let message =
                format!("{path}.type: {kind:?} is not supported; this server runs no tools of its own");
            return Err(ApiError::invalid_field(format!("{path}.type"), message));
        }
        let function = Function {
            name: tool.name,
            description: tool.description,
            parameters: tool.input_schema,
            strict: None,
            others: Others,
        };
        Ok(Described { path, function })
    };
    let described = tools.unwrap_or_default().into_iter().enumerate().map(describe);
    let described = described.collect::<Result<Vec<_>, _>>()?;
    let Some(choice) = choice else { return ToolUse::new(described, ToolChoice::Auto, None) };
    let parallel = choice.disable_parallel_tool_use.map(|disabled| !disabled);
    let choice = match (choice.kind.as_str(), choice.name) {
        ("auto", _) => ToolChoice::Auto,
        ("any", _) => ToolChoice::Required,
        ("none", _) => ToolChoice::None,
        ("tool", Some(name)) => ToolChoice::Named(name),
        ("tool", None) => {
            return Err(ApiError::invalid_field("tool_choice.name", "tool_choice.name is missing"));
        }
        (kind, _) => {
            let message = format!("tool_choice.type must be auto, any, tool or none, got {kind:?}");
            return Err(ApiError::invalid_field("tool_choice.type", message));
        }
    };
    ToolUse::new(described, choice, parallel)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Result<Value, String> {
        let mut asked: MessageFields = serde_json::from_value(body).expect("the fields");
        turns(&mut asked).map(Value::from_iter).map_err(|error| error.body().error.param.unwrap_or_default())
    }

    #[test]
    fn blocks_become_turns() {
        let body = json!({"system": [{"type": "text", "text": "S"}], "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "ok"}]},
                {"type": "text", "text": "And?"},
            ]},
        ]});
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
        let expect = json!([
            {"role": "system", "content": "S"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "ok", "tool_call_id": "1"},
            {"role": "user", "content": "And?"},
        ]);
        assert_eq!(read(body).unwrap(), expect);
    }

    #[test]
    fn the_wrong_block_is_named() {
        let message = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
        assert_eq!(read(message(json!([{"type": "image"}]))).unwrap_err(), "messages[0].content[0].type");
        assert_eq!(read(message(json!([{"type": "text"}]))).unwrap_err(), "messages[0].content[0].text");
        let result = json!([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]);
        assert_eq!(read(message(result)).unwrap_err(), "messages[0].content[0].content[0].type");
        assert_eq!(read(json!({"messages": []})).unwrap_err(), "messages");
        assert_eq!(
            read(json!({"messages": [{"role": "tool", "content": "x"}]})).unwrap_err(),
            "messages[0].role"
        );
    }
}
