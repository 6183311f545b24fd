//! One tokenizer for every model: text to ids and back, whatever the vocabulary came from.
//!
//! `from_gguf` runs our own byte-level BPE or SentencePiece merger; `from_hf` hands a tokenizer.json to the
//! `tokenizers` crate. Special tokens, BOS and EOS are treated the same in both. A tokenizer never changes after it
//! is built and is shared between threads.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use baton_core::TokenId;

use crate::TextError;
use crate::bpe::{Bpe, BpeScratch, FirstSymbols};
use crate::encoder_vocab;
use crate::hf::{HfConfig, HfDecoding, HfTokenizer};
use crate::incremental::decode_bytes_lossy;
use crate::pretokenize::PreTokenizer;
use crate::special::{Fragment, SpecialMatcher};
use crate::spm::SentencePiece;
use crate::vocab::{GgufVocab, PieceStyle, Pieces, TokenKind};

/// How a text is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add BOS and EOS as the model's metadata says. A text that begins with BOS already gets no second one.
    pub add_special: bool,
    /// Take special tokens that are written out in the text (`<|im_end|>`) as those tokens. Off, they are plain text.
    pub parse_special: bool,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        Self { add_special: true, parse_special: true }
    }
}

#[derive(Debug)]
struct GgufTokenizer {
    model: GgufModel,
    ids: Arc<HashMap<Box<str>, TokenId>>,
    /// Control, unknown and user-defined tokens.
    special: SpecialMatcher,
    /// User-defined tokens only: they are tokens even where special ones are taken as text.
    user_defined: SpecialMatcher,
    /// Tokens after which white space is dropped.
    strips_after: HashSet<TokenId>,
    add_bos: bool,
    add_eos: bool,
}

#[derive(Debug)]
enum GgufModel {
    Bpe { bpe: Box<Bpe>, pre_tokenizer: PreTokenizer, escape_spaces: bool },
    SentencePiece { model: Box<SentencePiece>, add_space_prefix: bool },
}

#[derive(Debug)]
enum Model {
    Gguf(Box<GgufTokenizer>),
    Hf(Box<HfTokenizer>),
}

/// How ids become text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decoding {
    /// The bytes of the tokens one after the other; one leading space of the whole is cut off if the flag is set.
    Bytes { strip_leading_space: bool },
    /// By the `tokenizers` crate, a window at a time.
    Library,
}

/// A tokenizer. See the module's text.
#[derive(Debug)]
pub struct Tokenizer {
    model: Model,
    pieces: Pieces,
    texts: Vec<Box<str>>,
    decoding: Decoding,
    bos: Option<TokenId>,
    eos: Option<TokenId>,
    end_tokens: Vec<TokenId>,
    chat_template: Option<String>,
}

/// Tokens that end a turn in the models in use. GGUF files often name only one end token, or the wrong one of two.
const END_TOKEN_TEXTS: [&str; 12] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end_of_sentence|>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<EOT>",
];

impl Tokenizer {
    /// Builds a tokenizer from a GGUF file's metadata.
    pub fn from_gguf(mut vocab: GgufVocab) -> Result<Self, TextError> {
        let kinds = vocab.validate()?;
        if encoder_vocab::is_encoder(&vocab.model) {
            return Self::from_encoder_vocab(vocab, &kinds);
        }
        let ids = Arc::new(vocab.ids_by_text());
        let (model, style, add_bos) = Self::gguf_model(&vocab, &kinds, &ids)?;
        let pieces = Pieces::from_gguf(&vocab, &kinds, style)?;
        let strip_leading_space = matches!(model, GgufModel::SentencePiece { add_space_prefix: true, .. });
        let of_kind = |wanted: &'static [TokenKind]| {
            let tokens = vocab.tokens.iter().zip(&kinds).enumerate();
            tokens
                .filter(move |(_, (_, kind))| wanted.contains(kind))
                .map(|(id, (text, _))| (text.as_str(), id as TokenId))
        };
        let special =
            SpecialMatcher::new(of_kind(&[TokenKind::Control, TokenKind::Unknown, TokenKind::UserDefined]));
        let user_defined = SpecialMatcher::new(of_kind(&[TokenKind::UserDefined]));
        let mut end_tokens: Vec<TokenId> =
            [vocab.eos_token_id, vocab.eot_token_id, vocab.eom_token_id].into_iter().flatten().collect();
        for text in END_TOKEN_TEXTS {
            end_tokens.extend(ids.get(text).filter(|&&id| kinds[id as usize] == TokenKind::Control));
        }
        let gguf = GgufTokenizer {
            model,
            special,
            user_defined,
            strips_after: strips_after(&vocab, &kinds),
            add_bos: vocab.add_bos.unwrap_or(add_bos),
            add_eos: vocab.add_eos.unwrap_or(false),
            ids,
        };
        Ok(Self {
            model: Model::Gguf(Box::new(gguf)),
            pieces,
            texts: std::mem::take(&mut vocab.tokens).into_iter().map(String::into_boxed_str).collect(),
            decoding: Decoding::Bytes { strip_leading_space },
            bos: vocab.bos_token_id,
            eos: vocab.eos_token_id,
            end_tokens: without_repeats(end_tokens),
            chat_template: vocab.chat_template,
        })
    }

    /// WordPiece and Unigram are the library's, whatever file they come in.
    fn from_encoder_vocab(vocab: GgufVocab, kinds: &[TokenKind]) -> Result<Self, TextError> {
        let json = encoder_vocab::tokenizer_json(&vocab, kinds);
        let mut tokenizer = Self::from_hf(json.to_string().as_bytes(), None)?;
        (tokenizer.bos, tokenizer.eos) = (vocab.bos_token_id, vocab.eos_token_id);
        tokenizer.end_tokens.extend(vocab.eos_token_id);
        tokenizer.end_tokens = without_repeats(tokenizer.end_tokens);
        tokenizer.chat_template = vocab.chat_template;
        Ok(tokenizer)
    }

    /// The model, how its tokens are written, and whether BOS is added where the file does not say.
    fn gguf_model(
        vocab: &GgufVocab,
        kinds: &[TokenKind],
        ids: &Arc<HashMap<Box<str>, TokenId>>,
    ) -> Result<(GgufModel, PieceStyle, bool), TextError> {
        match vocab.model.as_str() {
            // SentencePiece's pieces under the name of a byte-level model: spaces are written as `▁`.
            "gpt2"
                if matches!(
                    vocab.pre.as_deref(),
                    Some("gemma4" | "granite-embed-multi-311m" | "sarvam-moe")
                ) =>
            {
                let bpe = Bpe::new(vocab, kinds, ids, FirstSymbols::Characters, false)?;
                let pre_tokenizer = PreTokenizer::lines()?;
                let model = GgufModel::Bpe { bpe: Box::new(bpe), pre_tokenizer, escape_spaces: true };
                Ok((model, PieceStyle::SentencePiece, false))
            }
            // Words between white space, in characters.
            "gpt2" if vocab.pre.as_deref() == Some("whitespace") => {
                let bpe = Bpe::new(vocab, kinds, ids, FirstSymbols::Characters, false)?;
                let pre_tokenizer = PreTokenizer::words()?;
                let model = GgufModel::Bpe { bpe: Box::new(bpe), pre_tokenizer, escape_spaces: false };
                Ok((model, PieceStyle::SentencePiece, false))
            }
            "gpt2" => {
                let pre_tokenizer = PreTokenizer::from_name(vocab.pre.as_deref().unwrap_or("default"))?;
                let bpe = Bpe::new(vocab, kinds, ids, FirstSymbols::Bytes, pre_tokenizer.ignore_merges)?;
                let add_bos = pre_tokenizer.add_bos;
                let model = GgufModel::Bpe { bpe: Box::new(bpe), pre_tokenizer, escape_spaces: false };
                Ok((model, PieceStyle::ByteLevel, add_bos))
            }
            "gemma4" => {
                let bpe = Bpe::new(vocab, kinds, ids, FirstSymbols::Characters, false)?;
                let pre_tokenizer = PreTokenizer::lines()?;
                let model = GgufModel::Bpe { bpe: Box::new(bpe), pre_tokenizer, escape_spaces: true };
                Ok((model, PieceStyle::SentencePiece, true))
            }
            "llama" => {
                let model = Box::new(SentencePiece::new(vocab, kinds, Arc::clone(ids))?);
                let add_space_prefix = vocab.add_space_prefix.unwrap_or(true);
                let model = GgufModel::SentencePiece { model, add_space_prefix };
                Ok((model, PieceStyle::SentencePiece, true))
            }
            other => Err(TextError::UnsupportedModel(other.to_owned())),
        }
    }

    /// Builds a tokenizer from tokenizer.json and, where there is one, tokenizer_config.json.
    pub fn from_hf(tokenizer_json: &[u8], tokenizer_config_json: Option<&[u8]>) -> Result<Self, TextError> {
        let config = tokenizer_config_json.map(HfConfig::parse).transpose()?.unwrap_or_default();
        let parts = HfTokenizer::load(tokenizer_json)?;
        let id_of =
            |text: &Option<String>| text.as_deref().and_then(|text| parts.tokenizer.token_to_id(text));
        let (bos, eos) = (id_of(&config.bos_token), id_of(&config.eos_token));
        let known_ends = END_TOKEN_TEXTS.iter().filter_map(|text| parts.tokenizer.token_to_id(text));
        let end_tokens =
            eos.into_iter().chain(known_ends.filter(|&id| parts.pieces.is_special(id))).collect();
        let decoding = match parts.decoding {
            HfDecoding::Bytes { strip_leading_space, .. } => Decoding::Bytes { strip_leading_space },
            HfDecoding::Library => Decoding::Library,
        };
        Ok(Self {
            model: Model::Hf(Box::new(parts.tokenizer)),
            pieces: parts.pieces,
            texts: parts.texts,
            decoding,
            bos,
            eos,
            end_tokens: without_repeats(end_tokens),
            chat_template: config.chat_template,
        })
    }

    /// Encodes a prompt; special tokens written in it are recognised, as in vLLM's completions.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, TextError> {
        self.encode_with(text, EncodeOptions { add_special, parse_special: true })
    }

    /// Encodes what a chat template gave. BOS is added only where a GGUF file asks for it and the template did not
    /// write it; EOS never, since the conversation goes on.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<TokenId>, TextError> {
        let mut ids = self.encode(rendered, false)?;
        if let (Model::Gguf(tokenizer), Some(bos)) = (&self.model, self.bos)
            && tokenizer.add_bos
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Encodes a text as the options say.
    pub fn encode_with(&self, text: &str, options: EncodeOptions) -> Result<Vec<TokenId>, TextError> {
        match &self.model {
            Model::Hf(tokenizer) => {
                let mut ids = tokenizer.encode(text, options.add_special, options.parse_special)?;
                let doubled = self.bos.is_some_and(|bos| ids.starts_with(&[bos, bos]));
                if options.add_special && doubled {
                    ids.remove(0);
                }
                Ok(ids)
            }
            Model::Gguf(tokenizer) => {
                let mut ids = Vec::with_capacity(text.len() / 3 + 2);
                let bos = self.bos.filter(|_| options.add_special && tokenizer.add_bos);
                let eos = self.eos.filter(|_| options.add_special && tokenizer.add_eos);
                ids.extend(bos);
                tokenizer.encode_into(text, options.parse_special, &mut ids)?;
                if let Some(bos) = bos
                    && ids.get(1) == Some(&bos)
                {
                    ids.remove(0);
                }
                ids.extend(eos.filter(|eos| ids.last() != Some(eos)));
                Ok(ids)
            }
        }
    }

    /// The text of a whole sequence. Bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[TokenId], skip_special: bool) -> Result<String, TextError> {
        match (&self.decoding, &self.model) {
            (Decoding::Bytes { strip_leading_space }, _) => {
                let mut bytes = Vec::with_capacity(ids.len() * 4);
                for &id in ids {
                    if !(skip_special && self.is_special(id)) {
                        bytes.extend_from_slice(self.pieces.bytes(id));
                    }
                }
                let text = decode_bytes_lossy(bytes);
                Ok(match text.strip_prefix(' ') {
                    Some(stripped) if *strip_leading_space => stripped.to_owned(),
                    _ => text,
                })
            }
            (Decoding::Library, Model::Hf(tokenizer)) => tokenizer.decode(ids, skip_special),
            (Decoding::Library, Model::Gguf(_)) => unreachable!("GGUF tokenizers always decode by bytes"),
        }
    }

    pub(crate) fn decoding(&self) -> Decoding {
        self.decoding
    }

    pub(crate) fn piece(&self, id: TokenId) -> &[u8] {
        self.pieces.bytes(id)
    }

    /// The bytes that a token stands for, within a text. Empty for ids past the vocabulary.
    pub fn token_bytes(&self, id: TokenId) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.pieces.bytes(id))
    }

    /// True where a text is the bytes of its tokens one after the other, so that single tokens can be allowed or not by
    /// what they stand for.
    pub fn decodes_by_bytes(&self) -> bool {
        matches!(self.decoding, Decoding::Bytes { .. })
    }

    /// The token as the vocabulary writes it (`Ġhello`, `▁hello`), for showing to people.
    pub fn token_text(&self, id: TokenId) -> Option<&str> {
        self.texts.get(id as usize).map(AsRef::as_ref)
    }

    /// The id of a token as the vocabulary writes it.
    pub fn token_to_id(&self, text: &str) -> Option<TokenId> {
        match &self.model {
            Model::Gguf(tokenizer) => tokenizer.ids.get(text).copied(),
            Model::Hf(tokenizer) => tokenizer.token_to_id(text),
        }
    }

    /// One more than the highest token id. The model's output layer may be larger.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// True for control tokens, which `skip_special` leaves out of a text.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.pieces.is_special(id)
    }

    pub fn bos_id(&self) -> Option<TokenId> {
        self.bos
    }

    pub fn eos_id(&self) -> Option<TokenId> {
        self.eos
    }

    /// Every token that ends an answer: EOS, end of turn, end of message.
    pub fn end_token_ids(&self) -> &[TokenId] {
        &self.end_tokens
    }

    /// The model's own chat template.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }
}

/// Phi-3 drops white space after its special tokens, but for those that its tokenizer had before it was made one for
/// chats. GGUF files do not carry that property of a token: llama.cpp goes by the model's name, and so must we.
fn strips_after(vocab: &GgufVocab, kinds: &[TokenKind]) -> HashSet<TokenId> {
    let name = vocab.name.as_deref().unwrap_or_default().to_ascii_lowercase();
    if !name.contains("phi-3") && !name.contains("phi3") {
        return HashSet::new();
    }
    let is_marker = |id: usize| {
        matches!(kinds[id], TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined)
            && !["<unk>", "<s>", "<|endoftext|>"].contains(&vocab.tokens[id].as_str())
    };
    (0..vocab.tokens.len()).filter(|&id| is_marker(id)).map(|id| id as TokenId).collect()
}

fn without_repeats(ids: Vec<TokenId>) -> Vec<TokenId> {
    let mut unique = Vec::with_capacity(ids.len());
    for id in ids {
        if !unique.contains(&id) {
            unique.push(id);
        }
    }
    unique
}

impl GgufTokenizer {
    fn encode_into(&self, text: &str, parse_special: bool, out: &mut Vec<TokenId>) -> Result<(), TextError> {
        let matcher = if parse_special { &self.special } else { &self.user_defined };
        let mut scratch = BpeScratch::default();
        let mut after_special = true;
        let mut strips = false;
        matcher.split(text, |fragment| {
            let fragment = match fragment {
                Fragment::Token(id) => {
                    out.push(id);
                    after_special = true;
                    strips = self.strips_after.contains(&id);
                    return Ok(());
                }
                Fragment::Text(fragment) if std::mem::replace(&mut strips, false) => {
                    fragment.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c', '\r'])
                }
                Fragment::Text(fragment) => fragment,
            };
            if fragment.is_empty() {
                return Ok(());
            }
            let begins_text = std::mem::replace(&mut after_special, false);
            match &self.model {
                GgufModel::SentencePiece { model, add_space_prefix } => {
                    let mut escaped = String::with_capacity(fragment.len() + fragment.len() / 2 + 3);
                    if *add_space_prefix && begins_text {
                        escaped.push('\u{2581}');
                    }
                    push_escaped(fragment, &mut escaped);
                    model.encode(&escaped, out)
                }
                GgufModel::Bpe { bpe, pre_tokenizer, escape_spaces } => {
                    let mut escaped = String::new();
                    let fragment = if *escape_spaces {
                        push_escaped(fragment, &mut escaped);
                        escaped.as_str()
                    } else {
                        fragment
                    };
                    pre_tokenizer.split(fragment, |piece| bpe.encode_piece(piece, &mut scratch, out))
                }
            }
        })
    }
}

fn push_escaped(text: &str, out: &mut String) {
    out.extend(text.chars().map(|character| if character == ' ' { '\u{2581}' } else { character }));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocab(tokens: &[(&str, i32)]) -> GgufVocab {
        GgufVocab {
            model: "gpt2".to_owned(),
            pre: Some("gpt-2".to_owned()),
            tokens: tokens.iter().map(|(text, _)| (*text).to_owned()).collect(),
            token_types: tokens.iter().map(|&(_, kind)| kind).collect(),
            ..GgufVocab::default()
        }
    }

    /// SmolLM2's file names `<|endoftext|>` as the unknown token and has no token for some control characters.
    #[test]
    fn a_byte_without_a_token_is_left_out() {
        let mut vocab = vocab(&[("<|endoftext|>", 3), ("a", 1), ("b", 1)]);
        vocab.unknown_token_id = Some(0);
        let tokenizer = Tokenizer::from_gguf(vocab).expect("a vocabulary");
        assert_eq!(tokenizer.encode("a\u{6}b", false).expect("encodes"), [1, 2]);
        assert!(tokenizer.encode("é", false).expect("encodes").is_empty());
    }

    #[test]
    fn phi_3_drops_white_space_after_its_marks() {
        let tokens = [("<s>", 3), ("<|user|>", 3), ("a", 1), ("\u{120}", 1), ("\u{10A}", 1), ("<|end|>", 3)];
        let encode = |name: &str, text: &str| {
            let vocab = GgufVocab { name: Some(name.to_owned()), ..vocab(&tokens) };
            Tokenizer::from_gguf(vocab).expect("a vocabulary").encode(text, false).expect("encodes")
        };
        let text = "<s> a<|user|>\n a<|end|>\n<|end|> ";
        assert_eq!(encode("Phi-3 mini", text), [0, 3, 2, 1, 2, 5, 5]);
        assert_eq!(encode("Other", text), [0, 3, 2, 1, 4, 3, 2, 5, 4, 5, 3]);
    }
}
