//! What a request's body says of where the request belongs. The body is read once, nothing of it is checked: what is wrong
//! with it is the worker's to say.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// More than any context has.
const MAX_TOKENS: usize = 4 << 20;

/// Which API a path belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Chat,
    Completion,
    /// Generates, and the router cannot or need not turn it into tokens.
    OtherGeneration,
    /// Anything else.
    Plain,
}

impl Kind {
    pub fn of(method: &str, path: &str) -> Self {
        if method != "POST" {
            return Self::Plain;
        }
        match path {
            "/v1/chat/completions" | "/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completion,
            "/v1/responses"
            | "/responses"
            | "/v1/messages"
            | "/api/chat"
            | "/api/generate"
            | "/completion"
            | "/completions"
            | "/infill"
            | "/v1/embeddings"
            | "/embeddings"
            | "/generate"
            | "/v1/rerank"
            | "/v1/score"
            | "/v1/chat/completions/batch" => Self::OtherGeneration,
            _ => Self::Plain,
        }
    }

    pub fn generates(self) -> bool {
        self != Self::Plain
    }
}

/// What was found in a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BodySummary {
    pub model: Option<String>,
    pub user: Option<String>,
    pub stream: bool,
    /// The response that this one goes on from.
    pub previous_response_id: Option<String>,
    /// The beginning of the prompt: what its texts begin with, one after the other.
    pub text: Vec<u8>,
    /// Bytes of all texts of the prompt.
    pub text_bytes: usize,
    /// The prompt where it came as token ids.
    pub token_ids: Vec<u32>,
}

impl BodySummary {
    /// Reads a body. `max_text` bytes of the prompt are kept. A body that is not JSON says nothing.
    pub fn read(body: &[u8], max_text: usize) -> Self {
        let Ok(fields) = serde_json::from_slice::<Fields>(body) else { return Self::default() };
        let mut body = Self {
            model: fields.model.0,
            user: fields.user.0.or(fields.prompt_cache_key.0),
            stream: fields.stream.0,
            previous_response_id: fields.previous_response_id.0,
            ..Self::default()
        };
        let parts = [fields.system, fields.instructions, fields.messages, fields.prompt, fields.input];
        for mut part in parts {
            body.text_bytes += part.num_bytes;
            let room = max_text.saturating_sub(body.text.len());
            part.text.truncate(room);
            body.text.append(&mut part.text);
            if body.token_ids.is_empty() {
                body.token_ids = part.token_ids;
            }
        }
        body
    }

    /// Roughly, where it is not known: four bytes per token.
    pub fn num_prompt_tokens(&self) -> usize {
        if self.token_ids.is_empty() { self.text_bytes / 4 } else { self.token_ids.len() }
    }
}

#[derive(Deserialize)]
struct Fields {
    #[serde(default)]
    model: Text,
    #[serde(default)]
    user: Text,
    #[serde(default)]
    prompt_cache_key: Text,
    #[serde(default)]
    previous_response_id: Text,
    #[serde(default)]
    stream: Flag,
    #[serde(default)]
    system: Part,
    #[serde(default)]
    instructions: Part,
    #[serde(default)]
    messages: Part,
    #[serde(default)]
    prompt: Part,
    #[serde(default)]
    input: Part,
}

/// A text, or nothing whatever else it is.
#[derive(Default)]
struct Text(Option<String>);

/// `true`, or nothing whatever else it is.
#[derive(Default)]
struct Flag(bool);

/// Part of a prompt: all texts in it, or the first list of token ids.
#[derive(Default)]
struct Part {
    text: Vec<u8>,
    num_bytes: usize,
    token_ids: Vec<u32>,
    /// A number that stands for itself: a token of the list that it is in. Lists of token ids are long, so no list is made of one.
    lone: Option<u32>,
}

/// What is kept of the texts of one part; `BodySummary::read` keeps less.
const MAX_PART_TEXT: usize = 64 << 10;

impl Part {
    fn push_text(&mut self, text: &str) {
        self.num_bytes += text.len();
        let room = MAX_PART_TEXT.saturating_sub(self.text.len());
        self.text.extend_from_slice(&text.as_bytes()[..text.len().min(room)]);
        if room > 0 {
            self.text.push(0);
        }
    }

    fn append(&mut self, other: Self) {
        self.num_bytes += other.num_bytes;
        let room = MAX_PART_TEXT.saturating_sub(self.text.len());
        self.text.extend_from_slice(&other.text[..other.text.len().min(room)]);
        // Of several prompts the first one decides.
        if self.token_ids.is_empty() {
            self.token_ids = other.token_ids;
        }
    }
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Part;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("anything")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Part, E> {
                let mut part = Part::default();
                part.push_text(text);
                Ok(part)
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Part, E> {
                Ok(Part { lone: u32::try_from(number).ok(), ..Part::default() })
            }

            fn visit_i64<E: de::Error>(self, _: i64) -> Result<Part, E> {
                Ok(Part::default())
            }

            fn visit_f64<E: de::Error>(self, _: f64) -> Result<Part, E> {
                Ok(Part::default())
            }

            fn visit_bool<E: de::Error>(self, _: bool) -> Result<Part, E> {
                Ok(Part::default())
            }

            fn visit_unit<E: de::Error>(self) -> Result<Part, E> {
                Ok(Part::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Part, A::Error> {
                let mut part = Part::default();
                while let Some(item) = items.next_element::<Part>()? {
                    match item.lone {
                        Some(token) if part.token_ids.len() < MAX_TOKENS => part.token_ids.push(token),
                        Some(_) => {}
                        None => part.append(item),
                    }
                }
                Ok(part)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Part, A::Error> {
                let mut part = Part::default();
                while entries.next_key::<IgnoredAny>()?.is_some() {
                    let other: Part = entries.next_value()?;
                    // Numbers within messages are no tokens.
                    part.append(Part { token_ids: Vec::new(), ..other });
                }
                Ok(part)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

macro_rules! lenient {
    ($name:ident, $method:ident, $kind:ty, $make:expr) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Any;

                impl<'de> Visitor<'de> for Any {
                    type Value = $name;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str("anything")
                    }

                    fn $method<E: de::Error>(self, value: $kind) -> Result<$name, E> {
                        Ok($make(value))
                    }

                    fn visit_unit<E: de::Error>(self) -> Result<$name, E> {
                        Ok($name::default())
                    }

                    fn visit_u64<E: de::Error>(self, _: u64) -> Result<$name, E> {
                        Ok($name::default())
                    }

                    fn visit_i64<E: de::Error>(self, _: i64) -> Result<$name, E> {
                        Ok($name::default())
                    }

                    fn visit_f64<E: de::Error>(self, _: f64) -> Result<$name, E> {
                        Ok($name::default())
                    }

                    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<$name, A::Error> {
                        while items.next_element::<IgnoredAny>()?.is_some() {}
                        Ok($name::default())
                    }

                    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<$name, A::Error> {
                        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                        Ok($name::default())
                    }
                }
                deserializer.deserialize_any(Any)
            }
        }
    };
}

lenient!(Text, visit_str, &str, |text: &str| Text(Some(text.to_owned())));
lenient!(Flag, visit_bool, bool, Flag);

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> BodySummary {
        BodySummary::read(body.as_bytes(), 1 << 10)
    }

    #[test]
    fn chats_are_the_texts_of_their_messages() {
        let body = read(
            r#"{"model":"m","stream":true,"user":"u","temperature":0.5,"messages":[
                {"role":"system","content":"Be kind."},
                {"role":"user","content":[{"type":"text","text":"Hi"}]}]}"#,
        );
        assert_eq!((body.model.as_deref(), body.user.as_deref(), body.stream), (Some("m"), Some("u"), true));
        assert_eq!(body.text, b"system\0Be kind.\0user\0text\0Hi\0");
        assert_eq!((body.text_bytes, body.token_ids.len()), (24, 0));
    }

    #[test]
    fn prompts_have_four_forms() {
        assert_eq!(read(r#"{"prompt":"abc"}"#).text, b"abc\0");
        assert_eq!(read(r#"{"prompt":["abc","d"]}"#).text, b"abc\0d\0");
        assert_eq!(read(r#"{"prompt":[5,6,7]}"#).token_ids, [5, 6, 7]);
        assert_eq!(read(r#"{"prompt":[[5,6],[7,8]]}"#).token_ids, [5, 6]);
        assert_eq!(read(r#"{"prompt":[[5]]}"#).token_ids, [5]);
        assert_eq!(read(r#"{"prompt":[5,6,7]}"#).num_prompt_tokens(), 3);
    }

    #[test]
    fn whatever_else_it_is_it_says_nothing() {
        for body in ["", "{", "[]", "null", "{\"prompt\":", "\"x\""] {
            assert_eq!(read(body), BodySummary::default(), "{body}");
        }
        let odd = read(r#"{"model":[1],"user":{"a":1},"stream":"yes","prompt":{"a":[1.5,-2,true,null]}}"#);
        assert_eq!(odd, BodySummary::default());
        let deep = format!("{{\"prompt\":{}{}}}", "[".repeat(500), "]".repeat(500));
        assert_eq!(read(&deep), BodySummary::default());
    }

    #[test]
    fn long_texts_are_cut() {
        let body = read(&format!("{{\"prompt\":\"{}\"}}", "x".repeat(5000)));
        assert_eq!((body.text.len(), body.text_bytes), (1 << 10, 5000));
    }

    #[test]
    fn paths_are_told_apart() {
        assert_eq!(Kind::of("POST", "/v1/chat/completions"), Kind::Chat);
        assert_eq!(Kind::of("GET", "/v1/chat/completions"), Kind::Plain);
        assert!(Kind::of("POST", "/v1/messages").generates());
        assert!(!Kind::of("POST", "/tokenize").generates());
    }
}
