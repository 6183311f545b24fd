//! The only user of the `tokenizers` crate: everything that comes from a tokenizer.json.
//!
//! That crate is written for files of trusted origin: some malformed files make it panic while it reads them or
//! later, while it encodes. What can be checked is checked before; other panics are caught here and become
//! errors, so that a bad file or text never takes the server down.

use std::sync::OnceLock;

use baton_core::TokenId;
use serde_json::Value;

use crate::TextError;
use crate::bytes::{ByteAlphabet, byte_of_hex_token};
use crate::contain::contain;
use crate::vocab::{MAX_VOCAB_SIZE, PieceStyle, Pieces};

const FILE: &str = "tokenizer.json";
/// The deepest nesting of a tokenizer.json in use is about ten.
const MAX_JSON_DEPTH: usize = 64;

/// Runs a call into the `tokenizers` crate and turns a panic into an error.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match contain(call) {
        Some(result) => result.map_err(|error| error.to_string()),
        None => Err("its contents contradict each other (the tokenizer library gave up)".to_owned()),
    }
}

fn invalid(reason: impl Into<String>) -> TextError {
    TextError::InvalidFile { file: FILE, reason: reason.into() }
}

/// How ids become text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HfDecoding {
    /// Every token is a fixed string of bytes; the flag says that one leading space is cut off.
    Bytes { style: PieceStyle, strip_leading_space: bool },
    /// Only the library knows: WordPiece, CTC, Metaspace and unusual chains.
    Library,
}

#[derive(Debug)]
pub(crate) struct HfTokenizer {
    tokenizer: tokenizers::Tokenizer,
    /// The same tokenizer with special tokens in a text taken as plain text. Made when it is first asked for.
    plain: OnceLock<Box<tokenizers::Tokenizer>>,
}

/// What a tokenizer.json gives, besides the tokenizer itself.
#[derive(Debug)]
pub(crate) struct HfParts {
    pub(crate) tokenizer: HfTokenizer,
    pub(crate) decoding: HfDecoding,
    pub(crate) texts: Vec<Box<str>>,
    pub(crate) pieces: Pieces,
}

fn depth_is_bounded(value: &Value, left: usize) -> bool {
    let Some(left) = left.checked_sub(1) else { return false };
    match value {
        Value::Array(items) => items.iter().all(|item| depth_is_bounded(item, left)),
        Value::Object(items) => items.values().all(|item| depth_is_bounded(item, left)),
        _ => true,
    }
}

fn decoder_kinds(decoder: &Value) -> Option<Vec<&Value>> {
    match decoder.get("type")?.as_str()? {
        "Sequence" => Some(decoder.get("decoders")?.as_array()?.iter().collect()),
        _ => Some(vec![decoder]),
    }
}

/// Recognises the two chains that nearly all models use and that need no library to run.
fn decoding_of(decoder: &Value) -> HfDecoding {
    let Some(steps) = decoder_kinds(decoder) else { return HfDecoding::Library };
    let kinds: Vec<&str> = steps.iter().filter_map(|step| step.get("type")?.as_str()).collect();
    if kinds == ["ByteLevel"] {
        return HfDecoding::Bytes { style: PieceStyle::ByteLevel, strip_leading_space: false };
    }
    let replaces_spaces = |step: &Value| {
        step["pattern"]["String"].as_str() == Some("\u{2581}") && step["content"].as_str() == Some(" ")
    };
    let strips_one_space =
        |step: &Value| step["content"].as_str() == Some(" ") && step["start"] == 1 && step["stop"] == 0;
    match kinds.as_slice() {
        ["Replace", "ByteFallback", "Fuse"] if replaces_spaces(steps[0]) => {
            HfDecoding::Bytes { style: PieceStyle::SentencePiece, strip_leading_space: false }
        }
        ["Replace", "ByteFallback", "Fuse", "Strip"]
            if replaces_spaces(steps[0]) && strips_one_space(steps[3]) =>
        {
            HfDecoding::Bytes { style: PieceStyle::SentencePiece, strip_leading_space: true }
        }
        _ => HfDecoding::Library,
    }
}

/// Every id of the file, before the library sees it: it would reserve memory up to the highest.
fn check_ids(json: &Value) -> Result<(), TextError> {
    let vocab = &json["model"]["vocab"];
    let count = vocab.as_object().map_or(0, serde_json::Map::len) + vocab.as_array().map_or(0, Vec::len);
    let ids = vocab.as_object().into_iter().flat_map(serde_json::Map::values);
    let added = json["added_tokens"].as_array();
    let added_ids = added.into_iter().flatten().map(|token| &token["id"]);
    for id in ids.chain(added_ids) {
        let fits = id.as_u64().is_some_and(|id| id < MAX_VOCAB_SIZE as u64);
        if !fits {
            return Err(invalid(format!("token id {id} is not a number below {MAX_VOCAB_SIZE}")));
        }
    }
    if count > MAX_VOCAB_SIZE {
        return Err(invalid(format!("it has {count} tokens, at most {MAX_VOCAB_SIZE} are supported")));
    }
    Ok(())
}

impl HfTokenizer {
    pub(crate) fn load(bytes: &[u8]) -> Result<HfParts, TextError> {
        let json: Value = serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))?;
        if !depth_is_bounded(&json, MAX_JSON_DEPTH) {
            return Err(invalid(format!("it is nested deeper than {MAX_JSON_DEPTH} levels")));
        }
        check_ids(&json)?;
        let decoding = decoding_of(&json["decoder"]);
        drop(json);
        let tokenizer = guarded(|| {
            let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes)?;
            // A server must neither cut a prompt silently nor fill it up.
            tokenizer.with_truncation(None)?;
            tokenizer.with_padding(None);
            Ok(tokenizer)
        })
        .map_err(invalid)?;
        let (texts, pieces) = Self::tables(&tokenizer, decoding)?;
        let tokenizer = Self { tokenizer, plain: OnceLock::new() };
        Ok(HfParts { tokenizer, decoding, texts, pieces })
    }

    fn tables(
        tokenizer: &tokenizers::Tokenizer,
        decoding: HfDecoding,
    ) -> Result<(Vec<Box<str>>, Pieces), TextError> {
        let vocab = guarded(|| Ok(tokenizer.get_vocab(true))).map_err(invalid)?;
        let size = vocab.values().max().map_or(0, |&id| id as usize + 1);
        if size == 0 || size > MAX_VOCAB_SIZE {
            return Err(invalid(format!("it has {size} tokens")));
        }
        let mut texts: Vec<Box<str>> = vec![Box::from(""); size];
        for (text, id) in vocab {
            texts[id as usize] = text.into();
        }
        let added = tokenizer.get_added_tokens_decoder();
        let alphabet = ByteAlphabet::new();
        let mut pieces = Pieces::with_capacity(size);
        for (id, text) in texts.iter().enumerate() {
            let special = added.get(&(id as TokenId)).is_some_and(|token| token.special);
            let style = match decoding {
                HfDecoding::Bytes { style, .. } => Some(style),
                HfDecoding::Library => None,
            };
            let bytes = match style {
                Some(PieceStyle::ByteLevel) => {
                    alphabet.decode_exact(text).unwrap_or_else(|| text.as_bytes().to_vec())
                }
                _ => match byte_of_hex_token(text) {
                    Some(byte) => vec![byte],
                    None => text.replace('\u{2581}', " ").into_bytes(),
                },
            };
            pieces.push(&bytes, special)?;
        }
        Ok((texts, pieces))
    }

    pub(crate) fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<TokenId>, TextError> {
        let tokenizer = if parse_special {
            &self.tokenizer
        } else {
            self.plain.get_or_init(|| {
                let mut plain = self.tokenizer.clone();
                plain.set_encode_special_tokens(true);
                Box::new(plain)
            })
        };
        let encoding = guarded(|| tokenizer.encode_fast(text, add_special)).map_err(TextError::Encode)?;
        Ok(encoding.get_ids().to_vec())
    }

    pub(crate) fn decode(&self, ids: &[TokenId], skip_special: bool) -> Result<String, TextError> {
        guarded(|| self.tokenizer.decode(ids, skip_special)).map_err(TextError::Decode)
    }

    pub(crate) fn token_to_id(&self, text: &str) -> Option<TokenId> {
        self.tokenizer.token_to_id(text)
    }
}

/// What tokenizer_config.json says. Absent keys stay `None`.
#[derive(Debug, Default)]
pub(crate) struct HfConfig {
    pub(crate) bos_token: Option<String>,
    pub(crate) eos_token: Option<String>,
    pub(crate) chat_template: Option<String>,
}

fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

/// `chat_template` is one template, or a list of named ones of which `default` is taken.
fn chat_template(value: &Value) -> Option<String> {
    if let Some(template) = value.as_str() {
        return Some(template.to_owned());
    }
    let named = value.as_array()?;
    let default = named.iter().find(|entry| entry["name"] == "default").or_else(|| named.first())?;
    default["template"].as_str().map(str::to_owned)
}

impl HfConfig {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, TextError> {
        let file = "tokenizer_config.json";
        let json: Value = serde_json::from_slice(bytes)
            .map_err(|error| TextError::InvalidFile { file, reason: error.to_string() })?;
        if !json.is_object() {
            return Err(TextError::InvalidFile { file, reason: "it is not a JSON object".to_owned() });
        }
        Ok(Self {
            bos_token: token_text(&json["bos_token"]),
            eos_token: token_text(&json["eos_token"]),
            chat_template: chat_template(&json["chat_template"]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn known_decoder_chains_need_no_library() {
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true});
        assert_eq!(
            decoding_of(&byte_level),
            HfDecoding::Bytes { style: PieceStyle::ByteLevel, strip_leading_space: false }
        );
        let llama = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        assert_eq!(
            decoding_of(&llama),
            HfDecoding::Bytes { style: PieceStyle::SentencePiece, strip_leading_space: true }
        );
        assert_eq!(decoding_of(&json!({"type": "WordPiece"})), HfDecoding::Library);
        assert_eq!(decoding_of(&Value::Null), HfDecoding::Library);
    }

    #[test]
    fn configuration_takes_both_spellings() {
        let config = HfConfig::parse(
            br#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>",
                 "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}"#,
        )
        .expect("valid");
        assert_eq!(config.bos_token.as_deref(), Some("<s>"));
        assert_eq!(config.eos_token.as_deref(), Some("</s>"));
        assert_eq!(config.chat_template.as_deref(), Some("D"));
        assert!(HfConfig::parse(b"[]").is_err());
    }
}
