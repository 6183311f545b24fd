//! The `prompt` of a completion: a text, token ids, texts between token ids, or a list of prompts.
//!
//! Read without an intermediate tree: a list of a million ids must not cost more than its ids.

use std::borrow::Cow;
use std::fmt;

use baton_core::TokenId;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// One prompt as the client wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<TokenId>),
    /// Texts between token ids, as llama.cpp has it.
    Mixed(Vec<Piece>),
}

/// A part of a mixed prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    Text(String),
    Tokens(Vec<TokenId>),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompts(pub Vec<Prompt>);

const EXPECTED: &str = "a string, a list of token ids, a list of strings or a list of lists of token ids";

/// An element of the outer list.
enum Element {
    Token(TokenId),
    Text(String),
    Prompt(Prompt),
}

/// A list of token ids and texts, while it is read.
#[derive(Default)]
struct Pieces {
    list: Vec<Piece>,
    has_tokens: bool,
    has_texts: bool,
}

impl Pieces {
    fn push_token(&mut self, token: TokenId) {
        self.has_tokens = true;
        match self.list.last_mut() {
            Some(Piece::Tokens(tokens)) => tokens.push(token),
            _ => self.list.push(Piece::Tokens(vec![token])),
        }
    }

    fn push_text(&mut self, text: String) {
        self.has_texts = true;
        self.list.push(Piece::Text(text));
    }

    /// The texts so far, each a prompt; none where there are token ids.
    fn take_texts(&mut self) -> Vec<Prompt> {
        if self.has_tokens {
            return Vec::new();
        }
        let text = |piece| match piece {
            Piece::Text(text) => Prompt::Text(text),
            Piece::Tokens(tokens) => Prompt::Tokens(tokens),
        };
        self.list.drain(..).map(text).collect()
    }

    /// All of them as one prompt.
    fn into_prompt(mut self) -> Prompt {
        match self.list.pop() {
            None => Prompt::Tokens(Vec::new()),
            Some(Piece::Tokens(tokens)) if self.list.is_empty() => Prompt::Tokens(tokens),
            Some(Piece::Text(text)) if self.list.is_empty() => Prompt::Text(text),
            Some(last) => {
                self.list.push(last);
                Prompt::Mixed(self.list)
            }
        }
    }
}

/// A part of a prompt as chats have it.
#[derive(Deserialize)]
struct TextPart {
    #[serde(rename = "type")]
    _kind: TextKind,
    text: String,
}

#[derive(Deserialize)]
enum TextKind {
    #[serde(rename = "text")]
    Text,
}

/// llama.cpp's prompt with pictures, where there are none.
fn text_of<'de, A: MapAccess<'de>>(mut map: A) -> Result<String, A::Error> {
    let mut text = None;
    while let Some(key) = map.next_key::<String>()? {
        match key.as_str() {
            "prompt_string" => text = Some(map.next_value()?),
            "content" => {
                text = Some(map.next_value::<Vec<TextPart>>()?.into_iter().map(|part| part.text).collect());
            }
            "multimodal_data" => return Err(A::Error::custom("multimodal_data: models take text only")),
            other => {
                return Err(A::Error::custom(format!(
                    "{other:?} is no field of a prompt: expected {EXPECTED}"
                )));
            }
        }
    }
    text.ok_or_else(|| A::Error::custom(format!("prompt_string is missing: expected {EXPECTED}")))
}

struct ElementVisitor;

impl<'de> Visitor<'de> for ElementVisitor {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Element, E> {
        let token = TokenId::try_from(value).map_err(|_| E::custom(format!("{value} is no token id")))?;
        Ok(Element::Token(token))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Element, E> {
        let token = TokenId::try_from(value).map_err(|_| E::custom(format!("{value} is no token id")))?;
        Ok(Element::Token(token))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Element, E> {
        Ok(Element::Text(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Element, E> {
        Ok(Element::Text(text))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Element, A::Error> {
        text_of(map).map(|text| Element::Prompt(Prompt::Text(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
        let mut pieces = Pieces::default();
        while let Some(element) = list.next_element()? {
            match element {
                Element::Token(token) => pieces.push_token(token),
                Element::Text(text) => pieces.push_text(text),
                Element::Prompt(_) => {
                    return Err(A::Error::custom(format!(
                        "a prompt within a list of prompts is a text or token ids: expected {EXPECTED}"
                    )));
                }
            }
        }
        if pieces.has_texts && !pieces.has_tokens {
            return Err(A::Error::custom(format!("a list of texts within a list: expected {EXPECTED}")));
        }
        Ok(Element::Prompt(pieces.into_prompt()))
    }
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ElementVisitor)
    }
}

struct PromptsVisitor;

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts(vec![Prompt::Text(text.to_owned())]))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Prompts, E> {
        Ok(Prompts(vec![Prompt::Text(text)]))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Prompts, A::Error> {
        text_of(map).map(|text| Prompts(vec![Prompt::Text(text)]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
        // Texts alone are prompts; among token ids they are parts of one.
        let (mut pieces, mut prompts) = (Pieces::default(), Vec::new());
        while let Some(element) = list.next_element()? {
            match element {
                Element::Token(token) => pieces.push_token(token),
                Element::Text(text) if !pieces.has_tokens && !prompts.is_empty() => {
                    prompts.push(Prompt::Text(text));
                }
                Element::Text(text) => pieces.push_text(text),
                Element::Prompt(prompt) => {
                    prompts.extend(pieces.take_texts());
                    prompts.push(prompt);
                }
            }
            if pieces.has_tokens && !prompts.is_empty() {
                return Err(A::Error::custom(format!(
                    "token ids and prompts are mixed: expected {EXPECTED}"
                )));
            }
        }
        if pieces.has_tokens {
            prompts.push(pieces.into_prompt());
        } else {
            prompts.extend(pieces.take_texts());
        }
        Ok(Prompts(prompts))
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

impl JsonSchema for Prompts {
    fn schema_name() -> Cow<'static, str> {
        "Prompts".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let token = || serde_json::json!({"type": "integer", "minimum": 0});
        json_schema!({
            "description": EXPECTED,
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {"type": "array", "minItems": 1, "items": token()},
                {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": token()}},
            ],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Vec<Prompt>, String> {
        serde_json::from_str::<Prompts>(json).map(|prompts| prompts.0).map_err(|error| error.to_string())
    }

    #[test]
    fn every_shape_is_read() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(read("\"hi\""), Ok(vec![text("hi")]));
        assert_eq!(read("[\"a\", \"b\"]"), Ok(vec![text("a"), text("b")]));
        assert_eq!(read("[1, 2]"), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        assert_eq!(read("[[1], [2, 3]]"), Ok(vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]));
        assert_eq!(read("[]"), Ok(vec![]));
        assert_eq!(read(r#"{"prompt_string": "hi"}"#), Ok(vec![text("hi")]));
        let parts = r#"["a", {"content": [{"type": "text", "text": "b "}, {"type": "text", "text": "c"}]}]"#;
        assert_eq!(read(parts), Ok(vec![text("a"), text("b c")]));
        assert_eq!(read(r#"["a", [1], "b"]"#), Ok(vec![text("a"), Prompt::Tokens(vec![1]), text("b")]));
    }

    #[test]
    fn texts_between_token_ids_are_one_prompt() {
        let mixed = |pieces: &[Piece]| Prompt::Mixed(pieces.to_vec());
        let (ids, text) =
            (|ids: &[u32]| Piece::Tokens(ids.to_vec()), |text: &str| Piece::Text(text.to_owned()));
        assert_eq!(read(r#"[1, 2, "a", 3]"#), Ok(vec![mixed(&[ids(&[1, 2]), text("a"), ids(&[3])])]));
        assert_eq!(read(r#"["a", "b", 1]"#), Ok(vec![mixed(&[text("a"), text("b"), ids(&[1])])]));
        let inner = mixed(&[text("a"), ids(&[2])]);
        assert_eq!(read(r#"[[1], ["a", 2]]"#), Ok(vec![Prompt::Tokens(vec![1]), inner]));
    }

    #[test]
    fn wrong_shapes_are_refused() {
        assert!(read("[1, [2]]").unwrap_err().contains("mixed"));
        assert!(read("[\"a\", 1, [2]]").unwrap_err().contains("mixed"));
        assert!(read("[\"a\", [2], 1]").unwrap_err().contains("mixed"));
        assert!(read("[-1]").unwrap_err().contains("-1 is no token id"));
        assert!(read("[4294967296]").unwrap_err().contains("no token id"));
        assert!(read("{}").unwrap_err().contains("a string, a list of token ids"));
        assert!(read("[[\"a\"]]").is_err());
        assert!(read("[1.5]").is_err());
        assert!(read(r#"{"content": [{"type": "image_url", "text": "x"}]}"#).is_err());
    }
}
