//! From prompts and messages to token ids. This is the server's only heavy work besides the engine's, so it runs on
//! threads of its own, as many at a time as there are cores, and refuses what cannot fit before tokenising it.

use std::sync::Arc;

use baton_core::TokenId;
use baton_text::{RenderOptions, TextError, Tokenizer};
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::state::App;
use crate::types::prompt::Prompt;

/// Runs `work` off the async threads.
pub async fn blocking<T: Send + 'static>(
    app: &Arc<App>,
    work: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let permit =
        Arc::clone(&app.text_workers).acquire_owned().await.map_err(|closed| ApiError::internal(&closed))?;
    let app = Arc::clone(app);
    let task = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work(&app)
    });
    task.await.map_err(|error| ApiError::internal(&error))?
}

pub fn tokenizer(app: &App) -> Result<&Arc<Tokenizer>, ApiError> {
    let missing = || ApiError::invalid("this model has no tokenizer: give prompts as token ids");
    app.model.text.tokenizer.as_ref().ok_or_else(missing)
}

fn check_length(app: &App, text: &str, param: &str) -> Result<(), ApiError> {
    let most = app.model.max_prompt_bytes();
    if text.len() <= most {
        return Ok(());
    }
    let (length, limit) = (text.len(), app.model.max_model_len);
    let message =
        format!("the prompt has {length} bytes, more than {limit} tokens (the model's limit) can stand for");
    Err(ApiError::too_long(param, message))
}

/// The token ids of a completion's prompt.
pub fn prompt_tokens(app: &App, prompt: Prompt, add_special: bool) -> Result<Vec<TokenId>, ApiError> {
    let token_ids = match prompt {
        Prompt::Tokens(token_ids) => token_ids,
        Prompt::Text(text) => {
            check_length(app, &text, "prompt")?;
            tokenizer(app)?.encode(&text, add_special)?
        }
    };
    if token_ids.is_empty() {
        return Err(ApiError::invalid_field(
            "prompt",
            "the prompt is empty: it must have at least one token",
        ));
    }
    let vocab_size = app.model.vocab_size;
    if let Some(token) = token_ids.iter().find(|&&token| token as usize >= vocab_size) {
        let message = format!("prompt token {token} is outside the model's vocabulary of {vocab_size}");
        return Err(ApiError::invalid_field("prompt", message));
    }
    Ok(token_ids)
}

/// How a conversation becomes a prompt.
#[derive(Clone, Debug, Default)]
pub struct ChatOptions {
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,
    pub add_special_tokens: Option<bool>,
    pub documents: Option<Vec<Value>>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

/// The token ids of a conversation.
pub fn chat_tokens(
    app: &App,
    messages: Vec<Map<String, Value>>,
    options: ChatOptions,
) -> Result<Vec<TokenId>, ApiError> {
    let tokenizer = tokenizer(app)?;
    let template = app.model.text.chat_template.as_ref().ok_or(TextError::NoChatTemplate)?;
    let continue_final_message = options.continue_final_message.unwrap_or(false);
    let add_generation_prompt = options.add_generation_prompt.unwrap_or(!continue_final_message);
    if continue_final_message && add_generation_prompt {
        let message = "continue_final_message goes on with the last message, add_generation_prompt begins a new one: \
                       set one of them";
        return Err(ApiError::invalid_field("continue_final_message", message));
    }
    if messages.is_empty() {
        return Err(ApiError::invalid_field("messages", "messages must hold at least one message"));
    }
    let messages = messages.into_iter().enumerate().map(|(index, message)| flatten(index, message));
    let messages = messages.collect::<Result<Vec<Value>, _>>()?;
    let rendered = template.render(
        &messages,
        &RenderOptions {
            add_generation_prompt,
            continue_final_message,
            documents: options.documents.map(Value::from),
            chat_template_kwargs: options.chat_template_kwargs.unwrap_or_default(),
            ..RenderOptions::default()
        },
    )?;
    check_length(app, &rendered, "messages")?;
    let token_ids = match options.add_special_tokens {
        Some(true) => tokenizer.encode(&rendered, true)?,
        _ => tokenizer.encode_chat(&rendered)?,
    };
    if token_ids.is_empty() {
        return Err(ApiError::invalid_field("messages", "the messages give an empty prompt"));
    }
    Ok(token_ids)
}

/// Templates of text models want `content` to be one text: joins the parts, and refuses what is no text.
pub fn flatten(index: usize, mut message: Map<String, Value>) -> Result<Value, ApiError> {
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
    Ok(Value::Object(message))
}

fn join_parts(path: &str, parts: &[Value]) -> Result<String, ApiError> {
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

    fn check(message: Value) -> Result<Value, String> {
        let Value::Object(message) = message else { panic!("an object") };
        flatten(3, message).map_err(|error| error.body().error.message)
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
    }
}
