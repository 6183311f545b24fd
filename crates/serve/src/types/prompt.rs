//! The `prompt` of a completion: a text, token ids, a list of texts or a list of lists of token ids.
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
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompts(pub Vec<Prompt>);

const EXPECTED: &str = "a string, a list of token ids, a list of strings or a list of lists of token ids";

/// An element of the outer list.
enum Element {
    Token(TokenId),
    Prompt(Prompt),
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
        Ok(Element::Prompt(Prompt::Text(text.to_owned())))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Element, E> {
        Ok(Element::Prompt(Prompt::Text(text)))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Element, A::Error> {
        text_of(map).map(|text| Element::Prompt(Prompt::Text(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
        let mut tokens = Vec::new();
        while let Some(token) = list.next_element()? {
            tokens.push(token);
        }
        Ok(Element::Prompt(Prompt::Tokens(tokens)))
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
        let (mut tokens, mut prompts) = (Vec::new(), Vec::new());
        while let Some(element) = list.next_element()? {
            match element {
                Element::Token(token) => tokens.push(token),
                Element::Prompt(prompt) => prompts.push(prompt),
            }
            if !tokens.is_empty() && !prompts.is_empty() {
                return Err(A::Error::custom(format!(
                    "token ids and prompts are mixed: expected {EXPECTED}"
                )));
            }
        }
        if !tokens.is_empty() {
            prompts.push(Prompt::Tokens(tokens));
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
    }

    #[test]
    fn wrong_shapes_are_refused() {
        assert!(read("[1, \"a\"]").unwrap_err().contains("mixed"));
        assert!(read("[-1]").unwrap_err().contains("-1 is no token id"));
        assert!(read("[4294967296]").unwrap_err().contains("no token id"));
        assert!(read("{}").unwrap_err().contains("a string, a list of token ids"));
        assert!(read("[[\"a\"]]").is_err());
        assert!(read("[1.5]").is_err());
        assert!(read(r#"{"content": [{"type": "image_url", "text": "x"}]}"#).is_err());
    }
}
