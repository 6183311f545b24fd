//! One event of a stream, read without a copy: only what the figures need, whatever else a server sends.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, de};

/// What a chunk of `/v1/completions` or `/v1/chat/completions` says.
#[derive(Debug, Default, Deserialize)]
pub struct Chunk<'a> {
    #[serde(borrow, default)]
    choices: FirstChoice<'a>,
    #[serde(default)]
    pub usage: Option<Usage>,
    #[serde(default)]
    pub error: Option<ErrorField>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct Usage {
    #[serde(default)]
    pub prompt_tokens: usize,
    #[serde(default)]
    pub completion_tokens: usize,
}

/// `{"error": {"message": …}}`, or a text.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum ErrorField {
    Object { message: String },
    Text(String),
    Other(IgnoredAny),
}

impl ErrorField {
    pub fn message(&self) -> &str {
        match self {
            Self::Object { message } | Self::Text(message) => message,
            Self::Other(_) => "an error without a message",
        }
    }
}

/// A text that borrows from the event where it has no escapes; null is empty.
#[derive(Debug, Default)]
struct Text<'a>(Cow<'a, str>);

#[derive(Debug, Default)]
struct FirstChoice<'a>(Option<Choice<'a>>);

#[derive(Debug, Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    /// Sent by servers that support `return_token_ids`.
    #[serde(default)]
    token_ids: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    finish_reason: Option<IgnoredAny>,
}

#[derive(Debug, Default, Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Text<'a>,
    #[serde(borrow, default, alias = "reasoning")]
    reasoning_content: Text<'a>,
    #[serde(default)]
    tool_calls: Option<IgnoredAny>,
}

impl<'a> Chunk<'a> {
    pub fn parse(event: &'a [u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(event)
    }

    /// The new text, if the chunk stands for at least one token. A chat's opening chunk has none, nor has a chunk that
    /// only says why the answer ended; a token that is not yet a whole character has an empty one. Token ids are tokens, whatever
    /// the text is: a server without a tokenizer has none.
    pub fn new_text(&self) -> Option<&str> {
        let choice = self.choices.0.as_ref()?;
        let has_ids = choice.token_ids.as_ref().is_some_and(|ids| !ids.is_empty());
        Self::shown_text(choice).or(has_ids.then_some(""))
    }

    fn shown_text<'b>(choice: &'b Choice<'a>) -> Option<&'b str> {
        if let Some(delta) = &choice.delta {
            let text = if delta.content.0.is_empty() { &delta.reasoning_content.0 } else { &delta.content.0 };
            return (!text.is_empty() || delta.tool_calls.is_some()).then_some(text);
        }
        let text = choice.text.as_ref().map_or("", |text| &text.0);
        (!text.is_empty() || choice.finish_reason.is_none()).then_some(text)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for FirstChoice<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for List<'a> {
            type Value = FirstChoice<'a>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of choices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let first = list.next_element()?;
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(FirstChoice(first))
            }

            fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
                Ok(FirstChoice(None))
            }
        }
        deserializer.deserialize_any(List(PhantomData))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for Any<'a> {
            type Value = Text<'a>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a text or null")
            }

            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }

            fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
                Ok(Text::default())
            }
        }
        deserializer.deserialize_any(Any(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(event: &str, expect: Option<&str>) {
        let chunk = Chunk::parse(event.as_bytes()).unwrap_or_else(|error| panic!("{event}: {error}"));
        assert_eq!(chunk.new_text(), expect, "{event}");
    }

    #[test]
    fn tokens_are_told_from_the_rest() {
        check(r#"{"id":"x","choices":[{"index":0,"text":" a","finish_reason":null}]}"#, Some(" a"));
        check(r#"{"choices":[{"text":"a\n","finish_reason":"length"}],"usage":null}"#, Some("a\n"));
        check(r#"{"choices":[{"text":"","finish_reason":null}]}"#, Some(""));
        check(r#"{"choices":[{"text":"","finish_reason":"stop"}]}"#, None);
        check(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#, None);
        check(r#"{"choices":[{"delta":{"content":"b"}}]}"#, Some("b"));
        check(r#"{"choices":[{"delta":{"content":null,"reasoning_content":"hm"}}]}"#, Some("hm"));
        check(r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#, Some(""));
        check(r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#, None);
        check(r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}"#, None);
        check(r#"{"choices":null}"#, None);
        check(r#"{"choices":[{"text":"","token_ids":[7],"finish_reason":"length"}]}"#, Some(""));
        check(r#"{"choices":[{"delta":{"content":""},"token_ids":[7,9]}]}"#, Some(""));
        check(r#"{"choices":[{"delta":{"content":""},"token_ids":[],"finish_reason":"stop"}]}"#, None);
    }

    #[test]
    fn usage_and_errors_are_found() {
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}}"#;
        let usage = Chunk::parse(usage.as_bytes()).unwrap().usage;
        assert_eq!(usage, Some(Usage { prompt_tokens: 3, completion_tokens: 5 }));
        for (event, expect) in [
            (r#"{"error":{"message":"too long","code":400}}"#, "too long"),
            (r#"{"error":"no"}"#, "no"),
            (r#"{"error":7}"#, "an error without a message"),
        ] {
            let chunk = Chunk::parse(event.as_bytes()).unwrap();
            assert_eq!(chunk.error.expect("an error").message(), expect);
        }
        assert!(Chunk::parse(b"{").is_err());
    }

    #[test]
    fn plain_text_is_not_copied() {
        let event = r#"{"choices":[{"text":"plain"}]}"#;
        let chunk = Chunk::parse(event.as_bytes()).unwrap();
        let text = &chunk.choices.0.as_ref().unwrap().text.as_ref().unwrap().0;
        assert!(matches!(text, Cow::Borrowed("plain")));
    }
}
