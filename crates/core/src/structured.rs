//! Structured outputs as data: the grammar crate compiles them, the sampler applies the masks.

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// What a structured output must match, with vLLM's names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StructuredOutput {
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid for this schema, given as JSON text.
    Json(String),
    /// Text that matches this regular expression as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text of this context-free grammar, in Lark syntax or in llama.cpp's GBNF.
    Grammar(String),
}

/// Which tokens may be drawn at all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenFilter {
    /// Only these, and the end tokens.
    pub allowed: Option<Vec<TokenId>>,
    /// Texts that are never completed.
    pub bad_words: Vec<String>,
}
