//! Public prefixes: beginnings of prompts that are no secret, such as a system prompt that every client sends.
//!
//! Each API key has its own part of the prefix cache, so that nobody can find out by timing what others have asked. A
//! beginning that the operator has declared public is the exception: its blocks are computed once for all keys. The
//! declaration is a text or messages; here it becomes tokens, and a prompt is public as far as it has the same ones.

use baton_core::TokenId;
use baton_text::RenderOptions;
use serde_json::{Map, Value};
use thiserror::Error;

use crate::{ServedModel, turns};

/// A beginning of prompts, as the operator writes it.
#[derive(Clone, Debug)]
pub struct PublicPrefix {
    /// For messages to the operator: the file it came from.
    pub name: String,
    pub content: PublicContent,
}

#[derive(Clone, Debug)]
pub enum PublicContent {
    /// The beginning of a completion's prompt.
    Text(String),
    /// The first messages of a conversation.
    Messages(Vec<Value>),
}

#[derive(Debug, Error)]
#[error("public prefix {name}: {cause}")]
pub struct PublicPrefixError {
    name: String,
    cause: String,
}

/// The token ids of all public prefixes.
#[derive(Debug, Default)]
pub struct PublicPrefixes(Vec<Vec<TokenId>>);

impl PublicPrefixes {
    pub fn new(
        model: &ServedModel,
        prefixes: &[PublicPrefix],
        kwargs: &Map<String, Value>,
    ) -> Result<Self, PublicPrefixError> {
        let tokens = |prefix: &PublicPrefix| {
            let failed = |cause: String| PublicPrefixError { name: prefix.name.clone(), cause };
            let token_ids = tokenise(model, &prefix.content, kwargs).map_err(failed)?;
            tracing::info!(name = prefix.name, tokens = token_ids.len(), "public prefix");
            Ok(token_ids)
        };
        prefixes.iter().map(tokens).collect::<Result<_, _>>().map(Self)
    }

    /// Tokens that are public as well.
    pub fn extend(&mut self, prefixes: Vec<Vec<TokenId>>) {
        self.0.extend(prefixes);
    }

    /// How many of a prompt's first tokens are public. The last tokens of a declared text may merge with what follows
    /// it, so the prompt need not hold all of it: any beginning of what is public is public.
    pub fn count(&self, prompt: &[TokenId]) -> u32 {
        let common =
            |prefix: &Vec<TokenId>| prefix.iter().zip(prompt).take_while(|(one, other)| one == other).count();
        self.0.iter().map(common).max().unwrap_or(0) as u32
    }
}

fn tokenise(
    model: &ServedModel,
    content: &PublicContent,
    kwargs: &Map<String, Value>,
) -> Result<Vec<TokenId>, String> {
    let tokenizer = model.text.tokenizer.as_ref().ok_or("the model has no tokenizer")?;
    let token_ids = match content {
        PublicContent::Text(text) => tokenizer.encode(text, true),
        PublicContent::Messages(messages) => {
            let template = model.text.chat_template.as_ref().ok_or("the model has no chat template")?;
            let messages = messages.iter().enumerate().map(|(index, message)| flatten(index, message));
            let messages = messages.collect::<Result<Vec<Value>, _>>()?;
            let options = RenderOptions {
                add_generation_prompt: false,
                chat_template_kwargs: kwargs.clone(),
                ..RenderOptions::default()
            };
            template.render(&messages, &options).and_then(|rendered| tokenizer.encode_chat(&rendered))
        }
    };
    let token_ids = token_ids.map_err(|error| error.to_string())?;
    match token_ids.len() {
        0 => Err("it has no tokens".to_owned()),
        length if length >= model.max_model_len => {
            Err(format!("it has {length} tokens, the model's limit is {}", model.max_model_len))
        }
        _ => Ok(token_ids),
    }
}

/// A message as the chat routes would give it to the template.
fn flatten(index: usize, message: &Value) -> Result<Value, String> {
    let object = message.as_object().ok_or_else(|| format!("messages[{index}] is not an object"))?;
    turns::flatten(index, object.clone()).map(Value::Object).map_err(|error| error.body().error.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_common_beginning_counts() {
        let prefixes = PublicPrefixes(vec![vec![1, 2, 3, 4], vec![1, 9]]);
        let check = |prompt: &[TokenId], expected| assert_eq!(prefixes.count(prompt), expected, "{prompt:?}");
        check(&[1, 2, 3, 4, 5], 4);
        check(&[1, 2, 3, 7], 3);
        check(&[1, 9, 3], 2);
        check(&[2, 1], 0);
        check(&[1], 1);
        assert_eq!(PublicPrefixes::default().count(&[1]), 0);
    }
}
