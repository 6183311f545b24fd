//! Messages as clients write them, to messages as the model's template wants them.
//!
//! Contents become one text, arguments of earlier calls the form that the template shows. What a template cannot show is
//! said in words instead: functions in the system message, calls and results in the tags that Hermes introduced, so that
//! a model that has never heard of functions can at least be told of them.

use std::fmt::Write;

use baton_text::{ArgumentsForm, TemplateAbilities};
use serde_json::{Map, Value};

use crate::error::ApiError;

/// Identifiers of calls that the template's model was trained on.
const SHORT_ID_LENGTH: usize = 9;
/// Longer than any role that a model knows.
const MAX_ROLE_BYTES: usize = 64;

/// The messages for the template. `tools` are the functions that the template cannot show itself.
pub fn for_template(
    messages: Vec<Map<String, Value>>,
    tools: Option<&[Value]>,
    abilities: TemplateAbilities,
) -> Result<Vec<Value>, ApiError> {
    let mut turns: Vec<Map<String, Value>> = Vec::with_capacity(messages.len() + 1);
    for (index, message) in messages.into_iter().enumerate() {
        check_role(index, &message)?;
        let mut message = flatten(index, message)?;
        check_calls(index, &mut message)?;
        let shows_calls = abilities.tools && abilities.tool_calls.is_some();
        if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
            if shows_calls {
                prepare_calls(calls, abilities);
            } else {
                let text = describe_calls(calls);
                message.remove("tool_calls");
                append(&mut message, &text);
            }
        }
        let is_result = role(&message) == "tool";
        if is_result && !(abilities.tools && abilities.tool_results) {
            let text = format!("<tool_response>\n{}\n</tool_response>", content(&message));
            match turns
                .last_mut()
                .filter(|last| role(last) == "user" && content(last).ends_with("</tool_response>"))
            {
                Some(last) => append(last, &text),
                None => turns.push(turn("user", text)),
            }
            continue;
        }
        if is_result && abilities.short_call_ids {
            shorten(&mut message, "tool_call_id");
        }
        turns.push(message);
    }
    if let Some(tools) = tools {
        tell_of_tools(&mut turns, &instruction(tools), abilities);
    }
    Ok(turns.into_iter().map(Value::Object).collect())
}

/// Templates write any role that they are given into the prompt, and some models know others than OpenAI's (`ipython`,
/// `document`). So a role is any word, but nothing that could be read as marks of a template.
fn check_role(index: usize, message: &Map<String, Value>) -> Result<(), ApiError> {
    let role = message.get("role").and_then(Value::as_str);
    let is_word = |role: &str| {
        let is_within = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
        !role.is_empty() && role.len() <= MAX_ROLE_BYTES && role.chars().all(is_within)
    };
    if role.is_some_and(is_word) {
        return Ok(());
    }
    let param = format!("messages[{index}].role");
    let got = message.get("role").map_or_else(|| "nothing".to_owned(), Value::to_string);
    let message = format!(
        "{param} must be system, developer, user, assistant, tool or a word that the template knows, got {got}"
    );
    Err(ApiError::invalid_field(param, message))
}

pub(crate) fn turn(role: &str, content: String) -> Map<String, Value> {
    Map::from_iter([("role".to_owned(), role.into()), ("content".to_owned(), content.into())])
}

fn role(message: &Map<String, Value>) -> &str {
    message.get("role").and_then(Value::as_str).unwrap_or_default()
}

fn content(message: &Map<String, Value>) -> &str {
    message.get("content").and_then(Value::as_str).unwrap_or_default()
}

fn append(message: &mut Map<String, Value>, text: &str) {
    let before = content(message);
    let both = if before.is_empty() { text.to_owned() } else { format!("{before}\n{text}") };
    message.insert("content".to_owned(), both.into());
}

/// Puts the instruction where the model looks first.
fn tell_of_tools(turns: &mut Vec<Map<String, Value>>, instruction: &str, abilities: TemplateAbilities) {
    if let Some(first) = turns.first_mut().filter(|first| role(first) == "system") {
        let both = format!("{}\n\n{instruction}", content(first));
        first.insert("content".to_owned(), both.into());
    } else if abilities.system {
        turns.insert(0, turn("system", instruction.to_owned()));
    } else if let Some(first) = turns.iter_mut().find(|turn| role(turn) == "user") {
        let both = format!("{instruction}\n\n{}", content(first));
        first.insert("content".to_owned(), both.into());
    }
}

fn instruction(tools: &[Value]) -> String {
    let mut text = String::from(
        "You can call functions. Each is described by a JSON object with its name, its purpose and the JSON schema of \
         its arguments:\n",
    );
    for tool in tools {
        let _ = writeln!(text, "{}", tool.get("function").unwrap_or(tool));
    }
    text.push_str(
        "To call a function, answer with its name and arguments in this form and nothing else:\n<tool_call>\n\
         {\"name\": \"function name\", \"arguments\": {\"argument\": \"value\"}}\n</tool_call>\n\
         You will get its result between <tool_response> and </tool_response>. If no function helps, answer in words.",
    );
    text
}

fn describe_calls(calls: &[Value]) -> String {
    let describe = |call: &Value| {
        let function = &call["function"];
        let name = &function["name"];
        let arguments = match &function["arguments"] {
            Value::String(text) if !text.trim().is_empty() => text.clone(),
            Value::Null | Value::String(_) => "{}".to_owned(),
            other => other.to_string(),
        };
        format!("<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>")
    };
    calls.iter().map(describe).collect::<Vec<_>>().join("\n")
}

/// Gives calls the form that the template shows.
fn prepare_calls(calls: &mut [Value], abilities: TemplateAbilities) {
    for call in calls {
        if let Some(call) = call.as_object_mut().filter(|_| abilities.short_call_ids) {
            shorten(call, "id");
        }
        let arguments = &mut call["function"]["arguments"];
        let object = match &*arguments {
            Value::Object(_) => None,
            Value::String(text) if text.trim().is_empty() => Some(Map::new()),
            // What is no object was wrong in the first place; the model may see what it wrote.
            Value::String(text) => serde_json::from_str(text).ok(),
            _ => Some(Map::new()),
        };
        if let Some(object) = object {
            *arguments = Value::Object(object);
        }
        if abilities.tool_calls == Some(ArgumentsForm::Text) && !arguments.is_string() {
            *arguments = arguments.to_string().into();
        }
    }
}

/// The same identifier always becomes the same nine letters or digits.
fn shorten(message: &mut Map<String, Value>, key: &str) {
    let id = message.get(key).and_then(Value::as_str).unwrap_or_default();
    let letters: Vec<char> = id.chars().filter(char::is_ascii_alphanumeric).collect();
    let padding = SHORT_ID_LENGTH.saturating_sub(letters.len());
    let last = &letters[letters.len().saturating_sub(SHORT_ID_LENGTH)..];
    let short: String = std::iter::repeat_n('0', padding).chain(last.iter().copied()).collect();
    message.insert(key.to_owned(), short.into());
}

/// Templates ask whether there are calls, so an empty list must not be there.
fn check_calls(index: usize, message: &mut Map<String, Value>) -> Result<(), ApiError> {
    let path = format!("messages[{index}].tool_calls");
    match message.get("tool_calls") {
        None => return Ok(()),
        Some(Value::Array(calls)) if !calls.is_empty() => {
            for (number, call) in calls.iter().enumerate() {
                if call.pointer("/function/name").and_then(Value::as_str).is_none() {
                    let path = format!("{path}[{number}].function.name");
                    return Err(ApiError::invalid_field(&path, format!("{path} is missing")));
                }
            }
            return Ok(());
        }
        Some(Value::Null | Value::Array(_)) => {}
        Some(_) => return Err(ApiError::invalid_field(&path, format!("{path} must be a list of calls"))),
    }
    message.remove("tool_calls");
    Ok(())
}

/// Templates of text models want `content` to be one text: joins the parts, and refuses what is no text.
pub fn flatten(index: usize, mut message: Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    let role_path = format!("messages[{index}].role");
    let role = match message.get("role") {
        Some(Value::String(role)) if !role.is_empty() => role.as_str(),
        _ => {
            return Err(ApiError::invalid_field(
                &role_path,
                format!("{role_path} must be a text such as \"user\""),
            ));
        }
    };
    if role == "developer" {
        // OpenAI's newer name of the same thing; templates know the older one.
        message.insert("role".to_owned(), "system".into());
    }
    let content_path = format!("messages[{index}].content");
    let text = match message.get("content") {
        Some(Value::String(_)) => None,
        Some(Value::Array(parts)) => Some(join_parts(&content_path, parts)?),
        None | Some(Value::Null) => {
            let calls_tool = message.get("tool_calls").is_some_and(|calls| !calls.is_null());
            if !calls_tool {
                return Err(ApiError::invalid_field(&content_path, format!("{content_path} is missing")));
            }
            Some(String::new())
        }
        Some(_) => {
            let message = format!("{content_path} must be a text or a list of parts");
            return Err(ApiError::invalid_field(&content_path, message));
        }
    };
    if let Some(text) = text {
        message.insert("content".to_owned(), text.into());
    }
    // vLLM has two names for it; templates know this one.
    if let Some(reasoning) = message.remove("reasoning").filter(Value::is_string) {
        message.entry("reasoning_content").or_insert(reasoning);
    }
    if message.get("reasoning_content").is_some_and(Value::is_null) {
        message.remove("reasoning_content");
    }
    Ok(message)
}

/// The texts of a content that is a list of parts.
pub fn join_parts(path: &str, parts: &[Value]) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
        let text = part.as_str().or_else(|| part.get("text").and_then(Value::as_str));
        let (true, Some(text)) = (["text", "input_text", "output_text"].contains(&kind), text) else {
            let param = format!("{path}[{index}]");
            let message = format!("{param} is not a text; this model takes texts only");
            return Err(ApiError::invalid_field(param, message));
        };
        texts.push(text);
    }
    Ok(texts.join("\n"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ALL: TemplateAbilities = TemplateAbilities {
        system: true,
        tools: true,
        tool_calls: Some(ArgumentsForm::Object),
        tool_results: true,
        short_call_ids: false,
    };
    const NONE: TemplateAbilities =
        TemplateAbilities { tools: false, tool_calls: None, tool_results: false, ..ALL };

    fn check(message: Value) -> Result<Value, String> {
        let Value::Object(message) = message else { panic!("an object") };
        flatten(3, message).map(Value::Object).map_err(|error| error.body().error.message)
    }

    fn turns(messages: Value, tools: Option<&[Value]>, abilities: TemplateAbilities) -> Value {
        let messages: Vec<Map<String, Value>> = serde_json::from_value(messages).expect("messages");
        for_template(messages, tools, abilities).expect("sound").into()
    }

    fn conversation(arguments: &Value) -> Value {
        json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "call_abcdefghijkl", "type": "function", "function": {"name": "f", "arguments": arguments}},
            ]},
            {"role": "tool", "tool_call_id": "call_abcdefghijkl", "content": "one"},
            {"role": "tool", "tool_call_id": "x", "content": "two"},
        ])
    }

    #[test]
    fn parts_become_one_text() {
        let message = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        assert_eq!(check(message).unwrap()["content"], "a\nb");
        let message = json!({"role": "developer", "content": "x", "name": "kept"});
        assert_eq!(check(message).unwrap(), json!({"role": "system", "content": "x", "name": "kept"}));
    }

    #[test]
    fn the_wrong_part_is_named() {
        assert_eq!(
            check(json!({"content": "x"})).unwrap_err(),
            "messages[3].role must be a text such as \"user\""
        );
        assert_eq!(check(json!({"role": "user"})).unwrap_err(), "messages[3].content is missing");
        let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]});
        assert!(check(image).unwrap_err().starts_with("messages[3].content[0] is not a text"));
        assert!(check(json!({"role": "assistant", "content": null, "tool_calls": [1]})).is_ok());
        let call = json!([{"role": "assistant", "content": "x", "tool_calls": [{"function": {}}]}]);
        let messages = serde_json::from_value(call).unwrap();
        let error = for_template(messages, None, ALL).unwrap_err();
        assert_eq!(error.body().error.param.as_deref(), Some("messages[0].tool_calls[0].function.name"));
    }

    #[test]
    fn calls_get_the_form_of_the_template() {
        let shown = turns(conversation(&json!("{\"a\": 1}")), None, ALL);
        assert_eq!(shown[1]["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
        assert_eq!(shown[1]["content"], "");
        let text = TemplateAbilities { tool_calls: Some(ArgumentsForm::Text), ..ALL };
        let shown = turns(conversation(&json!({"a": 1})), None, text);
        assert_eq!(shown[1]["tool_calls"][0]["function"]["arguments"], "{\"a\":1}");
        let shown = turns(conversation(&json!("oops")), None, ALL);
        assert_eq!(shown[1]["tool_calls"][0]["function"]["arguments"], "oops");
        let short = TemplateAbilities { short_call_ids: true, ..ALL };
        let shown = turns(conversation(&json!({})), None, short);
        assert_eq!(shown[1]["tool_calls"][0]["id"], "defghijkl");
        assert_eq!(shown[2]["tool_call_id"], "defghijkl");
        assert_eq!(shown[3]["tool_call_id"], "00000000x");
        let empty = turns(json!([{"role": "assistant", "content": "x", "tool_calls": []}]), None, ALL);
        assert_eq!(empty, json!([{"role": "assistant", "content": "x"}]));
    }

    #[test]
    fn what_a_template_cannot_show_is_said_in_words() {
        let tools = [json!({"type": "function", "function": {"name": "f"}})];
        let shown = turns(conversation(&json!("{\"a\": 1}")), Some(&tools), NONE);
        let roles: Vec<&str> =
            shown.as_array().unwrap().iter().map(|turn| turn["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert!(shown[0]["content"].as_str().unwrap().contains("{\"name\":\"f\"}"));
        assert_eq!(
            shown[2]["content"],
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>"
        );
        let results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>";
        assert_eq!(shown[3]["content"], results);
        let system = json!([{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]);
        let shown = turns(system, Some(&tools), NONE);
        assert!(shown[0]["content"].as_str().unwrap().starts_with("S\n\nYou can call"));
        let no_system = TemplateAbilities { system: false, ..NONE };
        let shown = turns(json!([{"role": "user", "content": "Hi"}]), Some(&tools), no_system);
        assert_eq!(shown.as_array().unwrap().len(), 1);
        assert!(shown[0]["content"].as_str().unwrap().ends_with("Hi"));
    }
}
