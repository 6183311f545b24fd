//! The vocabulary as plain data: what a GGUF file says about it, and the piece table that decoding reads.
//!
//! Nothing here merges or splits text. `GgufVocab` is filled by the reader of the file; `Pieces` is built once from
//! it and holds the exact bytes of every token in one block of memory.

use std::collections::HashMap;

use baton_core::TokenId;

use crate::TextError;
use crate::bytes::{ByteAlphabet, byte_of_hex_token};

/// The largest vocabulary that is accepted. The largest in use has about 262 thousand tokens.
pub(crate) const MAX_VOCAB_SIZE: usize = 4 << 20;

/// What `tokenizer.*` metadata of a GGUF file says. Absent keys stay `None` or empty.
#[derive(Clone, Debug, Default)]
pub struct GgufVocab {
    /// `general.name`: Phi-3's tokenizer differs from others of its kind, and only the name says that it is one.
    pub name: Option<String>,
    /// `tokenizer.ggml.model`: `gpt2`, `llama` or `gemma4`.
    pub model: String,
    /// `tokenizer.ggml.pre`: the splitting rules of byte-level BPE.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`; the index is the token id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`; empty when the file has none, then all tokens are normal.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.scores`; needed by SentencePiece only.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.merges`, two tokens separated by a space; needed by BPE only.
    pub merges: Vec<String>,
    pub bos_token_id: Option<TokenId>,
    pub eos_token_id: Option<TokenId>,
    /// `tokenizer.ggml.eot_token_id`: ends a turn.
    pub eot_token_id: Option<TokenId>,
    /// `tokenizer.ggml.eom_token_id`: ends a message that waits for a tool.
    pub eom_token_id: Option<TokenId>,
    pub unknown_token_id: Option<TokenId>,
    pub padding_token_id: Option<TokenId>,
    /// `tokenizer.ggml.precompiled_charsmap`: how Unigram vocabularies normalise a text.
    pub precompiled_charsmap: Vec<u8>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
}

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    Normal,
    Unknown,
    /// Has a meaning for the model, none as text: begin, end, turn markers.
    Control,
    /// Plain text that is always one token, wherever it occurs.
    UserDefined,
    Unused,
    /// One byte of SentencePiece's byte fallback.
    Byte,
}

impl TokenKind {
    fn from_gguf(value: i32) -> Result<Self, TextError> {
        Ok(match value {
            // Converters write 0 ("undefined") for tokens they could not classify.
            0 | 1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            other => return Err(TextError::InvalidVocab(format!("token type {other} is not one of 0 to 6"))),
        })
    }

    /// True for tokens that `skip_special` leaves out of the text.
    pub fn is_special(self) -> bool {
        matches!(self, Self::Control | Self::Unknown)
    }
}

impl GgufVocab {
    /// Checks lengths and ids against each other and gives the kind of every token.
    pub(crate) fn validate(&self) -> Result<Vec<TokenKind>, TextError> {
        let size = self.tokens.len();
        let invalid = |reason: String| Err(TextError::InvalidVocab(reason));
        if size == 0 {
            return invalid("it has no tokens".to_owned());
        }
        if size > MAX_VOCAB_SIZE {
            return invalid(format!("it has {size} tokens, at most {MAX_VOCAB_SIZE} are supported"));
        }
        if !self.token_types.is_empty() && self.token_types.len() != size {
            return invalid(format!("{size} tokens but {} token types", self.token_types.len()));
        }
        if !self.scores.is_empty() && self.scores.len() != size {
            return invalid(format!("{size} tokens but {} scores", self.scores.len()));
        }
        for (name, id) in [
            ("bos_token_id", self.bos_token_id),
            ("eos_token_id", self.eos_token_id),
            ("eot_token_id", self.eot_token_id),
            ("eom_token_id", self.eom_token_id),
            ("unknown_token_id", self.unknown_token_id),
            ("padding_token_id", self.padding_token_id),
        ] {
            if let Some(id) = id
                && id as usize >= size
            {
                return invalid(format!("{name} is {id}, but there are only {size} tokens"));
            }
        }
        if self.token_types.is_empty() {
            return Ok(vec![TokenKind::Normal; size]);
        }
        self.token_types.iter().map(|&value| TokenKind::from_gguf(value)).collect()
    }

    /// Token text to id. Where two tokens have the same text the first one wins.
    pub(crate) fn ids_by_text(&self) -> HashMap<Box<str>, TokenId> {
        let mut ids = HashMap::with_capacity(self.tokens.len());
        for (id, text) in self.tokens.iter().enumerate() {
            ids.entry(text.as_str().into()).or_insert(id as TokenId);
        }
        ids
    }
}

/// How the text of a token maps to bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PieceStyle {
    /// GPT-2's byte alphabet.
    ByteLevel,
    /// `▁` is a space, `<0x0A>` a byte.
    SentencePiece,
}

/// The bytes of every token, one after the other in one allocation.
#[derive(Debug)]
pub(crate) struct Pieces {
    blob: Vec<u8>,
    /// One more entry than there are tokens.
    offsets: Vec<u32>,
    special: Vec<bool>,
}

impl Pieces {
    /// An empty table; ids are pushed in order.
    pub(crate) fn with_capacity(tokens: usize) -> Self {
        let mut offsets = Vec::with_capacity(tokens + 1);
        offsets.push(0);
        Self { blob: Vec::with_capacity(tokens * 8), offsets, special: Vec::with_capacity(tokens) }
    }

    pub(crate) fn push(&mut self, bytes: &[u8], special: bool) -> Result<(), TextError> {
        self.blob.extend_from_slice(bytes);
        let end = u32::try_from(self.blob.len())
            .map_err(|_| TextError::InvalidVocab("its tokens are longer than 4 GiB together".to_owned()))?;
        self.offsets.push(end);
        self.special.push(special);
        Ok(())
    }

    pub(crate) fn from_gguf(
        vocab: &GgufVocab,
        kinds: &[TokenKind],
        style: PieceStyle,
    ) -> Result<Self, TextError> {
        let alphabet = ByteAlphabet::new();
        let mut pieces = Self::with_capacity(vocab.tokens.len());
        let mut scratch = Vec::new();
        for (text, &kind) in vocab.tokens.iter().zip(kinds) {
            scratch.clear();
            match kind {
                TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined => {
                    scratch.extend_from_slice(text.as_bytes());
                }
                TokenKind::Byte => match byte_of_hex_token(text) {
                    Some(byte) => scratch.push(byte),
                    None => scratch.extend_from_slice(text.as_bytes()),
                },
                TokenKind::Normal | TokenKind::Unused => match style {
                    PieceStyle::ByteLevel => alphabet.decode_into(text, &mut scratch),
                    PieceStyle::SentencePiece => {
                        scratch.extend_from_slice(text.replace('\u{2581}', " ").as_bytes());
                    }
                },
            }
            pieces.push(&scratch, kind.is_special())?;
        }
        Ok(pieces)
    }

    pub(crate) fn len(&self) -> usize {
        self.special.len()
    }

    /// The bytes of a token; empty for an id outside the vocabulary (models pad their output layer).
    pub(crate) fn bytes(&self, id: TokenId) -> &[u8] {
        let id = id as usize;
        if id >= self.len() {
            return &[];
        }
        &self.blob[self.offsets[id] as usize..self.offsets[id + 1] as usize]
    }

    pub(crate) fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocab() -> GgufVocab {
        GgufVocab { tokens: vec!["a".into(), "b".into()], ..GgufVocab::default() }
    }

    fn refused(change: impl FnOnce(&mut GgufVocab), expect: &str) {
        let mut vocab = vocab();
        change(&mut vocab);
        assert_eq!(vocab.validate().expect_err("must be refused").to_string(), expect);
    }

    #[test]
    fn contradictions_are_named() {
        assert_eq!(vocab().validate().expect("valid").len(), 2);
        refused(|v| v.tokens.clear(), "the vocabulary is not usable: it has no tokens");
        refused(|v| v.token_types = vec![1], "the vocabulary is not usable: 2 tokens but 1 token types");
        refused(|v| v.scores = vec![0.0; 3], "the vocabulary is not usable: 2 tokens but 3 scores");
        refused(
            |v| v.eos_token_id = Some(2),
            "the vocabulary is not usable: eos_token_id is 2, but there are only 2 tokens",
        );
        refused(
            |v| v.token_types = vec![1, 9],
            "the vocabulary is not usable: token type 9 is not one of 0 to 6",
        );
    }

    #[test]
    fn pieces_hold_exact_bytes() {
        let vocab = GgufVocab {
            tokens: vec!["Ġhi".into(), "<s>".into(), "Ã".into(), "<0x0A>".into()],
            ..GgufVocab::default()
        };
        let kinds = [TokenKind::Normal, TokenKind::Control, TokenKind::Normal, TokenKind::Byte];
        let pieces = Pieces::from_gguf(&vocab, &kinds, PieceStyle::ByteLevel).expect("pieces");
        assert_eq!(pieces.bytes(0), b" hi");
        assert_eq!(pieces.bytes(1), b"<s>");
        assert_eq!(pieces.bytes(2), [0xC3]);
        assert_eq!(pieces.bytes(3), b"\n");
        assert_eq!(pieces.bytes(99), b"");
        assert!(pieces.is_special(1) && !pieces.is_special(0) && !pieces.is_special(99));
    }
}
