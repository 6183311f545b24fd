//! From prompts and messages to token ids. This is the server's only heavy work besides the engine's, so it runs on
//! threads of its own, at most one per core, and refuses what cannot fit before tokenising it.

use std::sync::Arc;

use baton_core::TokenId;
use baton_text::{RenderOptions, TextError, Tokenizer};
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::scope;
use crate::state::App;
use crate::tools::ToolUse;
use crate::turns;
use crate::types::prompt::{Piece, Prompt};

/// Runs `work` off the async threads, when it is the turn of the request's key.
pub async fn blocking<T: Send + 'static>(
    app: &Arc<App>,
    work: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (own, charge) = (Arc::clone(app), scope::charge());
    let work = move || {
        // What the work holds is there until it has ended, even if its client has gone.
        let _charge = charge;
        work(&own)
    };
    app.text_workers.run(scope::tenant(), work).await?
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

/// The token ids of a prompt, which the request calls `param`.
pub fn prompt_tokens(
    app: &App,
    prompt: Prompt,
    add_special: bool,
    param: &str,
) -> Result<Vec<TokenId>, ApiError> {
    let token_ids = match prompt {
        Prompt::Tokens(token_ids) => token_ids,
        Prompt::Text(text) => {
            check_length(app, &text, param)?;
            tokenizer(app)?.encode(&text, add_special)?
        }
        Prompt::Mixed(pieces) => mixed_tokens(app, pieces, add_special, param)?,
    };
    if token_ids.is_empty() {
        return Err(ApiError::invalid_field(param, "the prompt is empty: it must have at least one token"));
    }
    let vocab_size = app.model.vocab_size;
    if let Some(token) = token_ids.iter().find(|&&token| token as usize >= vocab_size) {
        let message = format!("{param} token {token} is outside the model's vocabulary of {vocab_size}");
        return Err(ApiError::invalid_field(param, message));
    }
    Ok(token_ids)
}

/// Texts and token ids one after the other. What the model wants at the beginning is added to a text that begins.
fn mixed_tokens(
    app: &App,
    pieces: Vec<Piece>,
    add_special: bool,
    param: &str,
) -> Result<Vec<TokenId>, ApiError> {
    let tokenizer = tokenizer(app)?;
    let mut token_ids = Vec::new();
    for (index, piece) in pieces.into_iter().enumerate() {
        match piece {
            Piece::Tokens(tokens) => token_ids.extend(tokens),
            Piece::Text(text) => {
                check_length(app, &text, param)?;
                token_ids.extend(tokenizer.encode(&text, add_special && index == 0)?);
            }
        }
    }
    Ok(token_ids)
}

/// A conversation, in the words of `/v1/chat/completions`, and how it becomes a prompt.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// The name that the model was asked for by.
    pub model: Option<String>,
    pub messages: Vec<Map<String, Value>>,
    pub tools: ToolUse,
    pub options: ChatOptions,
}

#[derive(Clone, Debug, Default)]
pub struct ChatOptions {
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,
    pub add_special_tokens: Option<bool>,
    pub documents: Option<Vec<Value>>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// The answer must have a shape from its first letter on: there is no place for reasoning.
    pub skips_reasoning: bool,
}

/// Variables for a template, with how hard to think in the words of those that know how to say it.
pub fn with_effort(kwargs: Option<Map<String, Value>>, effort: Option<String>) -> Option<Map<String, Value>> {
    let Some(effort) = effort else { return kwargs };
    let mut kwargs = kwargs.unwrap_or_default();
    let thinks = !["none", "minimal"].contains(&&*effort);
    kwargs.entry("enable_thinking").or_insert(Value::Bool(thinks));
    kwargs.entry("reasoning_effort").or_insert(Value::String(effort));
    Some(kwargs)
}

/// A conversation as a prompt.
#[derive(Debug)]
pub struct ChatPrompt {
    pub token_ids: Vec<TokenId>,
    /// The end of its text.
    pub end: String,
}

/// How much of a prompt's end is kept: more than any mark that it may end with.
const END_CHARACTERS: usize = 64;

pub fn chat_prompt(app: &App, conversation: Conversation) -> Result<ChatPrompt, ApiError> {
    let tokenizer = tokenizer(app)?;
    let Conversation { model, mut messages, tools, options } = conversation;
    // Here, once for all dialects; what is empty is refused as it is.
    if !messages.is_empty() {
        app.system_prompts.inject(model.as_deref(), &mut messages, app.chat_format.abilities);
    }
    let mut rendered = render(app, messages, &tools, &options)?;
    let skipped = app.chat_format.reasoning.filter(|_| options.skips_reasoning);
    if let Some(closing) = skipped.and_then(|reasoning| reasoning.skipped_after(&rendered)) {
        rendered.push_str(&closing);
    }
    check_length(app, &rendered, "messages")?;
    let token_ids = match options.add_special_tokens {
        Some(true) => tokenizer.encode(&rendered, true)?,
        _ => tokenizer.encode_chat(&rendered)?,
    };
    if token_ids.is_empty() {
        return Err(ApiError::invalid_field("messages", "the messages give an empty prompt"));
    }
    let start = rendered.char_indices().rev().nth(END_CHARACTERS).map_or(0, |(start, _)| start);
    Ok(ChatPrompt { token_ids, end: rendered.split_off(start) })
}

fn render(
    app: &App,
    messages: Vec<Map<String, Value>>,
    tools: &ToolUse,
    options: &ChatOptions,
) -> Result<String, ApiError> {
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
    let abilities = app.chat_format.abilities;
    let shown = tools.shown();
    let told = shown.as_deref().filter(|_| !abilities.tools);
    let messages = turns::for_template(messages, told, abilities)?;
    let mut kwargs = options.chat_template_kwargs.clone().unwrap_or_default();
    if options.skips_reasoning {
        kwargs.entry("enable_thinking").or_insert(Value::Bool(false));
    }
    for (name, value) in &app.config.chat_template_kwargs {
        kwargs.entry(name).or_insert_with(|| value.clone());
    }
    let rendered = template.render(
        &messages,
        &RenderOptions {
            add_generation_prompt,
            continue_final_message,
            tools: shown.filter(|_| abilities.tools).map(Value::from),
            documents: options.documents.clone().map(Value::from),
            chat_template_kwargs: kwargs,
            ..RenderOptions::default()
        },
    )?;
    Ok(rendered)
}
