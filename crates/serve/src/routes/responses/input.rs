//! Input items to the turns of a conversation, in the words of `/v1/chat/completions`.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::store::Turns;
use crate::turns::join_parts;
use crate::types::responses::ResponseInput;

/// Appends the input to a conversation.
pub fn extend(turns: &mut Turns, input: ResponseInput) -> Result<(), ApiError> {
    match input {
        ResponseInput::Text(text) => turns.push(turn("user", text)),
        ResponseInput::Items(items) => {
            for (index, item) in items.into_iter().enumerate() {
                extend_by_item(turns, &format!("input[{index}]"), &item)?;
            }
        }
    }
    Ok(())
}

pub fn turn(role: &str, content: String) -> Map<String, Value> {
    Map::from_iter([("role".to_owned(), role.into()), ("content".to_owned(), content.into())])
}

fn extend_by_item(turns: &mut Turns, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
    match item.get("type").and_then(Value::as_str).unwrap_or("message") {
        "message" => {
            let role = text(path, item, "role")?;
            let content = content(path, item, "content")?;
            turns.push(turn(role, content));
        }
        "function_call" => {
            let (id, name) = (text(path, item, "call_id")?, text(path, item, "name")?);
            add_call(turns, id, name, text(path, item, "arguments")?);
        }
        "function_call_output" => {
            let mut result = turn("tool", content(path, item, "output")?);
            result.insert("tool_call_id".to_owned(), text(path, item, "call_id")?.into());
            turns.push(result);
        }
        "reasoning" => {
            let parts = item.get("content").and_then(Value::as_array);
            let texts = parts.into_iter().flatten().filter_map(|part| part.get("text")?.as_str());
            add_reasoning(turns, &texts.collect::<Vec<_>>().join("\n"));
        }
        kind => {
            let param = format!("{path}.type");
            let message = format!(
                "{param}: {kind:?} is not supported; message, function_call, function_call_output and reasoning are"
            );
            return Err(ApiError::invalid_field(param, message));
        }
    }
    Ok(())
}

/// A conversation as items again, without the answer at its end.
pub fn items(turns: &Turns) -> Vec<Value> {
    let is_answer = |turn: &&Map<String, Value>| turn.get("role").is_some_and(|role| role == "assistant");
    let num_input = turns.len() - turns.iter().rev().take_while(is_answer).count();
    let mut items = Vec::new();
    for turn in &turns[..num_input] {
        let role = turn.get("role").and_then(Value::as_str).unwrap_or("user");
        let text = turn.get("content").and_then(Value::as_str).unwrap_or_default();
        if role == "tool" {
            let call_id = turn.get("tool_call_id").cloned().unwrap_or_default();
            items.push(json!({"type": "function_call_output", "call_id": call_id, "output": text}));
            continue;
        }
        if !text.is_empty() {
            let kind = if role == "assistant" { "output_text" } else { "input_text" };
            let content = json!([{"type": kind, "text": text}]);
            items.push(json!({"type": "message", "role": role, "status": "completed", "content": content}));
        }
        for call in turn.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            let function = &call["function"];
            items.push(json!({"type": "function_call", "call_id": call["id"], "name": function["name"],
                "arguments": function["arguments"], "status": "completed"}));
        }
    }
    for (index, item) in items.iter_mut().enumerate() {
        item["id"] = format!("item_{index}").into();
    }
    items
}

/// Calls belong to the assistant's turn before them.
pub fn add_call(turns: &mut Turns, id: &str, name: &str, arguments: &str) {
    let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let turn = assistant(turns);
    match turn.get_mut("tool_calls").and_then(Value::as_array_mut) {
        Some(calls) => calls.push(call),
        None => {
            turn.insert("tool_calls".to_owned(), json!([call]));
        }
    }
}

/// Reasoning belongs to the turn that follows it.
pub fn add_reasoning(turns: &mut Turns, text: &str) {
    if !text.is_empty() {
        let mut turn = turn("assistant", String::new());
        turn.insert("reasoning_content".to_owned(), text.into());
        turns.push(turn);
    }
}

/// Text of the assistant.
pub fn add_text(turns: &mut Turns, text: &str) {
    let turn = assistant(turns);
    let before = turn.get("content").and_then(Value::as_str).unwrap_or_default();
    let both = format!("{before}{text}");
    turn.insert("content".to_owned(), both.into());
}

/// The assistant's turn at the end.
fn assistant(turns: &mut Turns) -> &mut Map<String, Value> {
    let is_last = turns.last().is_some_and(|last| last.get("role").is_some_and(|role| role == "assistant"));
    if !is_last {
        turns.push(turn("assistant", String::new()));
    }
    turns.last_mut().expect("one was there or was pushed")
}

fn text<'a>(path: &str, item: &'a Map<String, Value>, key: &str) -> Result<&'a str, ApiError> {
    let param = format!("{path}.{key}");
    let missing = || ApiError::invalid_field(&param, format!("{param} must be a text"));
    item.get(key).and_then(Value::as_str).ok_or_else(missing)
}

fn content(path: &str, item: &Map<String, Value>, key: &str) -> Result<String, ApiError> {
    let param = format!("{path}.{key}");
    match item.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => join_parts(&param, parts),
        _ => Err(ApiError::invalid_field(&param, format!("{param} must be a text or a list of texts"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(items: Value) -> Result<Value, String> {
        let mut turns = Turns::new();
        let items = serde_json::from_value(items).expect("objects");
        let param = |error: ApiError| error.body().error.param.unwrap_or_default();
        extend(&mut turns, ResponseInput::Items(items)).map_err(param)?;
        Ok(json!(turns))
    }

    #[test]
    fn items_become_turns() {
        let items = json!([
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "ok"},
        ]);
        let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
        let expect = json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call("1", "f"), call("2", "g")]},
            {"role": "tool", "content": "ok", "tool_call_id": "1"},
        ]);
        assert_eq!(turns(items).unwrap(), expect);
    }

    #[test]
    fn the_wrong_item_is_named() {
        assert_eq!(turns(json!([{"role": "user", "content": 1}])).unwrap_err(), "input[0].content");
        let image = json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]);
        assert_eq!(turns(image).unwrap_err(), "input[0].content[0]");
        assert_eq!(turns(json!([{"type": "item_reference", "id": "x"}])).unwrap_err(), "input[0].type");
        assert_eq!(turns(json!([{"type": "function_call", "name": "f"}])).unwrap_err(), "input[0].call_id");
    }
}
