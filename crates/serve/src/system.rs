//! Pinned system prompts: instructions of the operator that stand before every chat which brings none of its own.
//!
//! A prompt is computed once before the server is ready, and its whole blocks stay in the prefix cache whatever else comes and
//! goes. Which tokens all chats begin with is not a matter of the text alone: the chat template puts BOS and marks before it
//! and a user's turn behind it. So chats are rendered with different questions, and what their tokens have in common is pinned.
//! It is no secret either: requests of all API keys share it.

use baton_core::TokenId;
use baton_engine::EngineError;
use baton_text::{ChatTemplate, RenderOptions, TemplateAbilities};
use serde_json::{Map, Value};
use thiserror::Error;

use crate::{ServedModel, turns};

/// Questions that have no first letter in common.
const PROBES: [&str; 3] = ["a", "Z", "1"];

const NO_CHATS: &str = "the model has no chat template or no tokenizer, so that it serves no chats: leave --system-prompt-file out";

/// A system prompt, as the operator writes it.
#[derive(Clone, Debug)]
pub struct SystemPrompt {
    /// For messages to the operator: the file it came from.
    pub file: String,
    /// The name of the model that it is for; every name without one of its own otherwise.
    pub model: Option<String>,
    pub text: String,
}

#[derive(Debug, Error)]
pub enum SystemPromptError {
    #[error("system prompt {file}: {cause}")]
    Text { file: String, cause: String },
    #[error("system prompt {file}: {cause}")]
    Pin { file: String, cause: EngineError },
    #[error("system prompt {file} is for {model:?}, but the model is served as {names}")]
    NoSuchModel { file: String, model: String, names: String },
}

/// The prompts of a server, ready to be put before chats.
#[derive(Debug, Default)]
pub struct SystemPrompts {
    prompts: Vec<SystemPrompt>,
    is_injected: bool,
}

impl SystemPrompts {
    /// Computes and pins every prompt. Gives their tokens as well, which are public.
    pub fn new(
        model: &ServedModel,
        prompts: &[SystemPrompt],
        is_injected: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<(Self, Vec<Vec<TokenId>>), SystemPromptError> {
        let mut all_tokens = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let SystemPrompt { file, model: name, text } = prompt;
            if let Some(name) = name.as_ref().filter(|name| !model.is_named(name)) {
                let (file, model, names) = (file.clone(), name.clone(), model.names.join(", "));
                return Err(SystemPromptError::NoSuchModel { file, model, names });
            }
            let failed = |cause| SystemPromptError::Text { file: file.clone(), cause };
            let token_ids = common_tokens(model, text, kwargs).map_err(failed)?;
            let pinned = model.engine.pin_prefix(token_ids.clone());
            let pinned = pinned.map_err(|cause| SystemPromptError::Pin { file: file.clone(), cause })?;
            tracing::info!(file, tokens = token_ids.len(), pinned, "system prompt");
            all_tokens.push(token_ids);
        }
        Ok((Self { prompts: prompts.to_vec(), is_injected }, all_tokens))
    }

    /// Puts the prompt of the model that was asked for before messages that bring no instructions.
    pub fn inject(
        &self,
        model: Option<&str>,
        messages: &mut Vec<Map<String, Value>>,
        abilities: TemplateAbilities,
    ) {
        let of = |name: Option<&str>| self.prompts.iter().find(|prompt| prompt.model.as_deref() == name);
        let prompt = model.and_then(|name| of(Some(name))).or_else(|| of(None));
        if let Some(prompt) = prompt.filter(|_| self.is_injected && !has_instructions(messages)) {
            put_before(&prompt.text, messages, abilities);
        }
    }
}

fn has_instructions(messages: &[Map<String, Value>]) -> bool {
    let role = |message: &Map<String, Value>| message.get("role").and_then(Value::as_str).map(str::to_owned);
    messages.iter().filter_map(role).any(|role| role == "system" || role == "developer")
}

/// As a system message, or before the first question where the template knows no such message.
fn put_before(text: &str, messages: &mut Vec<Map<String, Value>>, abilities: TemplateAbilities) {
    if abilities.system {
        messages.insert(0, turns::turn("system", text.to_owned()));
        return;
    }
    let is_question =
        |message: &&mut Map<String, Value>| message.get("role").is_some_and(|role| role == "user");
    let Some(question) = messages.iter_mut().find(is_question) else { return };
    let content = match question.remove("content") {
        Some(Value::String(content)) => Value::String(format!("{text}\n\n{content}")),
        Some(Value::Array(mut parts)) => {
            parts.insert(0, serde_json::json!({"type": "text", "text": format!("{text}\n")}));
            Value::Array(parts)
        }
        // What is no content is refused later, by name.
        other => other.unwrap_or(Value::Null),
    };
    question.insert("content".to_owned(), content);
}

/// The tokens that every chat with this prompt begins with.
fn common_tokens(
    model: &ServedModel,
    text: &str,
    kwargs: &Map<String, Value>,
) -> Result<Vec<TokenId>, String> {
    let template = model.text.chat_template.as_ref().ok_or(NO_CHATS)?;
    let tokenizer = model.text.tokenizer.as_ref().ok_or(NO_CHATS)?;
    if text.len() > model.max_prompt_bytes() {
        let (length, limit) = (text.len(), model.max_model_len);
        return Err(format!("{length} bytes cannot fit into --max-model-len {limit}: shorten the text"));
    }
    let mut common: Option<Vec<TokenId>> = None;
    for probe in PROBES {
        let rendered = render(template, text, probe, kwargs)?;
        let token_ids = tokenizer.encode_chat(&rendered).map_err(|error| error.to_string())?;
        common = Some(match common {
            None => token_ids,
            Some(mut common) => {
                let same = common.iter().zip(&token_ids).take_while(|(one, other)| one == other).count();
                common.truncate(same);
                common
            }
        });
    }
    let common = common.unwrap_or_default();
    if common.is_empty() {
        return Err("the chat template puts nothing of it before the first question".to_owned());
    }
    Ok(common)
}

/// A chat of one question, as the chat routes render it.
fn render(
    template: &ChatTemplate,
    text: &str,
    probe: &str,
    kwargs: &Map<String, Value>,
) -> Result<String, String> {
    let abilities = template.abilities();
    let mut messages = vec![turns::turn("user", probe.to_owned())];
    put_before(text, &mut messages, abilities);
    let messages =
        turns::for_template(messages, None, abilities).map_err(|error| error.body().error.message)?;
    let options = RenderOptions {
        add_generation_prompt: true,
        chat_template_kwargs: kwargs.clone(),
        ..RenderOptions::default()
    };
    template.render(&messages, &options).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn inject(model: Option<&str>, messages: Value, system: bool) -> Value {
        let prompt = |model: Option<&str>, text: &str| SystemPrompt {
            file: "file".to_owned(),
            model: model.map(str::to_owned),
            text: text.to_owned(),
        };
        let prompts =
            SystemPrompts { prompts: vec![prompt(None, "S"), prompt(Some("b"), "B")], is_injected: true };
        let abilities = TemplateAbilities {
            system,
            tools: false,
            tool_calls: None,
            tool_results: false,
            short_call_ids: false,
        };
        let mut messages: Vec<Map<String, Value>> = serde_json::from_value(messages).expect("messages");
        prompts.inject(model, &mut messages, abilities);
        json!(messages)
    }

    #[test]
    fn chats_without_instructions_get_those_of_their_model() {
        let chat = json!([{"role": "user", "content": "Hi"}]);
        assert_eq!(inject(None, chat.clone(), true)[0], json!({"role": "system", "content": "S"}));
        assert_eq!(inject(Some("a"), chat.clone(), true)[0]["content"], "S");
        assert_eq!(inject(Some("b"), chat.clone(), true)[0]["content"], "B");
        assert_eq!(inject(Some("b"), chat, true)[1]["content"], "Hi");
        for role in ["system", "developer"] {
            let own = json!([{"role": "user", "content": "Hi"}, {"role": role, "content": ""}]);
            assert_eq!(inject(None, own.clone(), true), own);
        }
    }

    #[test]
    fn a_template_without_system_messages_has_them_in_the_first_question() {
        let chat = json!([{"role": "user", "content": "Hi"}, {"role": "user", "content": "Yo"}]);
        let shown = inject(None, chat, false);
        assert_eq!((&shown[0]["content"], &shown[1]["content"]), (&json!("S\n\nHi"), &json!("Yo")));
        let parts = json!([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]);
        assert_eq!(inject(None, parts, false)[0]["content"][0]["text"], "S\n");
    }
}
