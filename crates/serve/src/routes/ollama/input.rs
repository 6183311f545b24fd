//! From Ollama's words to ours.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::state::App;
use crate::structured::{self, StructuredRequest};
use crate::types::ollama::OllamaGenerate;

/// The model that is meant, and the name that it was called by. `:latest` is what Ollama's clients add to a name without a tag.
pub async fn model(app: &Arc<App>, asked: Option<&str>) -> Result<(Arc<App>, String), ApiError> {
    let asked = asked.filter(|name| !name.is_empty());
    let asked = asked.ok_or_else(|| ApiError::invalid_field("model", "model is required"))?;
    let plain = asked.strip_suffix(":latest").unwrap_or(asked);
    let is_known = app.model.is_named(asked) || app.model.is_named(plain);
    let found = if is_known { Arc::clone(app) } else { app.for_model(Some(plain)).await? };
    Ok((found, asked.to_owned()))
}

pub fn refuse(asked: &OllamaGenerate) -> Result<(), ApiError> {
    if asked.images.as_ref().is_some_and(|images| !images.is_empty()) {
        return Err(ApiError::unsupported("images"));
    }
    if asked.template.as_ref().is_some_and(|template| !template.is_empty()) {
        return Err(ApiError::unsupported("template"));
    }
    if asked.context.as_ref().is_some_and(|context| !context.is_empty()) {
        return Err(ApiError::unsupported("context"));
    }
    Ok(())
}

/// `json`, or a schema; an empty text asks for nothing.
pub fn format(format: Option<Value>) -> Result<Option<StructuredRequest>, ApiError> {
    match format {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) if text == "json" => {
            Ok(Some(("format", baton_core::StructuredOutput::JsonObject)))
        }
        Some(schema @ Value::Object(_)) => Ok(Some(("format", structured::json(schema)))),
        Some(_) => Err(ApiError::invalid_field("format", "format must be \"json\" or a JSON schema")),
    }
}

/// Calls get the ids that the rest of the server goes by: Ollama has none, and answers them in their order.
pub fn messages(mut messages: Vec<Map<String, Value>>) -> Result<Vec<Map<String, Value>>, ApiError> {
    let (mut num_calls, mut num_answers) = (0, 0);
    for message in &mut messages {
        let images = message.remove("images");
        if images.is_some_and(|images| images.as_array().is_some_and(|images| !images.is_empty())) {
            return Err(ApiError::unsupported("images"));
        }
        message.remove("thinking");
        message.remove("tool_name");
        if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
            for call in calls {
                let name = call["function"]["name"].clone();
                let arguments = match &call["function"]["arguments"] {
                    Value::String(text) => text.clone(),
                    other => other.to_string(),
                };
                let id = format!("call_{num_calls}");
                *call =
                    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
                num_calls += 1;
            }
        }
        if message.get("role").is_some_and(|role| role == "tool") && !message.contains_key("tool_call_id") {
            message.insert("tool_call_id".to_owned(), format!("call_{num_answers}").into());
            num_answers += 1;
        }
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_their_answers_find_each_other() {
        let said = json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g", "arguments": "{}"}}]},
            {"role": "tool", "content": "one", "tool_name": "f"},
            {"role": "tool", "content": "two"},
        ]);
        let said: Vec<Map<String, Value>> = serde_json::from_value(said).unwrap();
        let told = messages(said).unwrap();
        assert_eq!(told[1]["tool_calls"][0]["function"]["arguments"], "{\"a\":1}");
        assert_eq!(told[1]["tool_calls"][1]["id"], told[3]["tool_call_id"]);
        assert!(!told[2].contains_key("tool_name"));
        let image = Map::from_iter([("images".to_owned(), json!(["x"]))]);
        assert!(messages(vec![image]).is_err());
    }

    #[test]
    fn formats_are_read() {
        assert!(format(Some(json!("json"))).unwrap().is_some());
        assert!(format(Some(json!({"type": "object"}))).unwrap().is_some());
        assert!(format(Some(json!(""))).unwrap().is_none() && format(None).unwrap().is_none());
        assert!(format(Some(json!("xml"))).is_err() && format(Some(json!(1))).is_err());
    }
}
