//! `POST /tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use baton_core::TokenId;

use crate::body::JsonBody;
use crate::error::ApiError;
use crate::prepare::{self, ChatOptions, Conversation};
use crate::state::App;
use crate::tools::ToolUse;
use crate::types::prompt::Prompt;
use crate::types::text::{
    DetokenizeRequest, DetokenizeResponse, TokenPiece, TokenizeRequest, TokenizeResponse, TokenizerInfo,
    Tokens,
};

use super::{json, parsed};

pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let body = JsonBody::read(&app, request).await?;
    let mut asked: TokenizeRequest = parsed(&app, body, JsonBody::parse).await?;
    if let (Some(content), None) = (asked.content.take(), &asked.prompt) {
        asked.prompt = Some(content);
        asked.add_special_tokens = asked.add_special_tokens.or(asked.add_special).or(Some(false));
    }
    let pieces = asked.with_pieces.unwrap_or(false);
    let app = app.for_model(asked.model.as_deref()).await?;
    let names = asked.return_token_strs.unwrap_or(false);
    let tokens = prepare::blocking(&app, move |app| match (asked.prompt, asked.messages) {
        (Some(prompt), None) => {
            prepare::tokenizer(app)?;
            if prompt.is_empty() {
                return Ok(Vec::new());
            }
            prepare::prompt_tokens(
                app,
                Prompt::Text(prompt),
                asked.add_special_tokens.unwrap_or(true),
                "prompt",
            )
        }
        (None, Some(messages)) => {
            let options = ChatOptions {
                add_generation_prompt: asked.add_generation_prompt,
                continue_final_message: asked.continue_final_message,
                add_special_tokens: asked.add_special_tokens,
                documents: None,
                chat_template_kwargs: asked.chat_template_kwargs,
                skips_reasoning: false,
            };
            let tools = ToolUse::of_chat(asked.tools, None, None)?;
            let conversation = Conversation { model: asked.model, messages, tools, options };
            prepare::chat_prompt(app, conversation).map(|prompt| prompt.token_ids)
        }
        _ => Err(ApiError::invalid_field("prompt", "give either prompt or messages")),
    })
    .await?;
    let token_strs = prepare::tokenizer(&app).ok().filter(|_| names).map(|tokenizer| {
        tokens.iter().map(|&token| tokenizer.token_text(token).unwrap_or_default().to_owned()).collect()
    });
    Ok(json(&TokenizeResponse {
        count: tokens.len(),
        max_model_len: app.model.max_model_len,
        tokens: if pieces { with_pieces(&app, tokens) } else { Tokens::Ids(tokens) },
        token_strs,
    }))
}

fn with_pieces(app: &App, tokens: Vec<TokenId>) -> Tokens {
    Tokens::Pieces(tokens.into_iter().map(|id| TokenPiece { id, piece: app.model.token_text(id) }).collect())
}

pub async fn tokenizer_info(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let tokenizer = prepare::tokenizer(&app)?;
    let text =
        |id: Option<baton_core::TokenId>| id.and_then(|id| tokenizer.token_text(id)).map(str::to_owned);
    Ok(json(&TokenizerInfo {
        tokenizer_class: "PreTrainedTokenizerFast",
        vocab_size: tokenizer.vocab_size(),
        model_max_length: app.model.max_model_len,
        bos_token: text(tokenizer.bos_id()),
        eos_token: text(tokenizer.eos_id()),
        chat_template: tokenizer.chat_template().map(str::to_owned),
    }))
}

pub async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let body = JsonBody::read(&app, request).await?;
    let asked: DetokenizeRequest = parsed(&app, body, JsonBody::parse).await?;
    let app = app.for_model(asked.model.as_deref()).await?;
    let missing = || ApiError::invalid_field("tokens", "tokens is missing: give a list of token ids");
    let tokens = asked.tokens.ok_or_else(missing)?;
    let prompt = prepare::blocking(&app, move |app| {
        let tokenizer = prepare::tokenizer(app)?;
        let vocab_size = app.model.vocab_size;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab_size) {
            let message = format!("token {token} is outside the model's vocabulary of {vocab_size}");
            return Err(ApiError::invalid_field("tokens", message));
        }
        Ok(tokenizer.decode(&tokens, false)?)
    })
    .await?;
    Ok(json(&DetokenizeResponse { content: prompt.clone(), prompt }))
}
