//! Log-probabilities in the shapes of the APIs.

use std::collections::BTreeMap;

use baton_core::{FinishReason, PositionLogprobs, TokenId, TokenLogprob};

use crate::ServedModel;
use crate::types::chat::{ChatAlternative, ChatLogprobs, ChatTokenLogprob};
use crate::types::common::{PromptLogprob, PromptLogprobs};
use crate::types::completions::CompletionLogprobs;

/// JSON has no infinity; vLLM writes this instead.
const LEAST: f32 = -9999.0;

/// How tokens are written.
#[derive(Clone, Copy, Debug)]
pub struct TokenNames<'a> {
    pub model: &'a ServedModel,
    /// As `token_id:ID` instead of their text.
    pub as_ids: bool,
}

impl TokenNames<'_> {
    fn name(self, token: TokenId) -> String {
        if self.as_ids { format!("token_id:{token}") } else { self.model.token_text(token) }
    }

    fn alternative(self, token: &TokenLogprob) -> ChatAlternative {
        let tokenizer = self.model.text.tokenizer.as_ref();
        ChatAlternative {
            token: self.name(token.token_id),
            logprob: token.logprob.max(LEAST),
            bytes: tokenizer
                .map_or_else(Vec::new, |tokenizer| tokenizer.token_bytes(token.token_id).into_owned()),
        }
    }
}

pub fn chat(positions: &[PositionLogprobs], top: usize, names: TokenNames<'_>) -> ChatLogprobs {
    let entry = |position: &PositionLogprobs| ChatTokenLogprob {
        chosen: names.alternative(&position.chosen),
        top_logprobs: position.top.iter().take(top).map(|token| names.alternative(token)).collect(),
    };
    ChatLogprobs { content: positions.iter().map(entry).collect() }
}

/// Where the next token begins: characters of the text so far, and the text from there on.
#[derive(Debug)]
pub struct Place<'a> {
    pub offset: &'a mut usize,
    pub rest: &'a str,
}

/// Appends tokens to the parallel lists.
pub fn extend_completion(
    lists: &mut CompletionLogprobs,
    positions: &[PositionLogprobs],
    top: usize,
    place: &mut Place<'_>,
    names: TokenNames<'_>,
) {
    for position in positions {
        push_token(lists, position.chosen.token_id, place, names);
        lists.token_logprobs.push(Some(position.chosen.logprob.max(LEAST)));
        let alternatives = std::iter::once(&position.chosen).chain(position.top.iter().take(top));
        let alternatives = alternatives.map(|token| (names.name(token.token_id), token.logprob.max(LEAST)));
        lists.top_logprobs.push(Some(alternatives.collect()));
    }
}

/// The tokens of an echoed prompt; the first one has no probability, because nothing comes before it.
pub fn extend_echo(
    lists: &mut CompletionLogprobs,
    prompt: &[TokenId],
    positions: &[PositionLogprobs],
    top: usize,
    place: &mut Place<'_>,
    names: TokenNames<'_>,
) {
    if let Some(&first) = prompt.first() {
        push_token(lists, first, place, names);
        lists.token_logprobs.push(None);
        lists.top_logprobs.push(None);
    }
    extend_completion(lists, positions, top, place, names);
}

fn push_token(lists: &mut CompletionLogprobs, token: TokenId, place: &mut Place<'_>, names: TokenNames<'_>) {
    lists.tokens.push(names.name(token));
    lists.text_offset.push(*place.offset);
    let text = names.model.token_text(token);
    let after = place.rest.strip_prefix(&*text);
    // Special tokens are in the text only where somebody wrote them there.
    let tokenizer = names.model.text.tokenizer.as_ref();
    if after.is_none() && tokenizer.is_some_and(|tokenizer| tokenizer.is_special(token)) {
        return;
    }
    place.rest = after.unwrap_or(place.rest);
    *place.offset += text.chars().count();
}

/// vLLM's `prompt_logprobs`.
pub fn prompt(positions: &[PositionLogprobs], names: TokenNames<'_>) -> PromptLogprobs {
    let entry = |token: &TokenLogprob| {
        let logprob = PromptLogprob {
            logprob: token.logprob.max(LEAST),
            rank: token.rank,
            decoded_token: names.model.token_text(token.token_id),
        };
        (token.token_id.to_string(), logprob)
    };
    let map = |position: &PositionLogprobs| -> BTreeMap<String, PromptLogprob> {
        position.top.iter().chain(std::iter::once(&position.chosen)).map(entry).collect()
    };
    std::iter::once(None).chain(positions.iter().map(|position| Some(map(position)))).collect()
}

/// A finish reason in OpenAI's words.
pub fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Abort => "abort",
        FinishReason::Error => "error",
    }
}
