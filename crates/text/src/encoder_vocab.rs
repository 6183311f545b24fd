//! WordPiece (BERT) and Unigram (T5, XLM-R) vocabularies of GGUF files, written as the tokenizer.json that they came
//! from, for the library that knows these two.
//!
//! A GGUF file marks the beginning of a word (`▁word`) where WordPiece marks the rest of one (`##word`); everything else
//! is the same data in another place.

use serde_json::{Map, Value, json};

use crate::vocab::{GgufVocab, TokenKind};

/// True for the kinds of vocabulary that this module writes.
pub(crate) fn is_encoder(model: &str) -> bool {
    matches!(model, "bert" | "t5")
}

/// The vocabulary as a tokenizer.json.
pub(crate) fn tokenizer_json(vocab: &GgufVocab, kinds: &[TokenKind]) -> Value {
    let mut json = if vocab.model == "bert" { word_piece(vocab, kinds) } else { unigram(vocab) };
    let is_added = |kind: TokenKind| matches!(kind, TokenKind::Control | TokenKind::Unknown);
    let added = vocab.tokens.iter().zip(kinds).enumerate().filter(|(_, (_, kind))| is_added(**kind));
    let added = added.map(|(id, (text, _))| {
        json!({"id": id, "content": text, "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false})
    });
    json["added_tokens"] = added.collect();
    json["post_processor"] = post_processor(vocab);
    json["version"] = "1.0".into();
    json
}

fn word_piece(vocab: &GgufVocab, kinds: &[TokenKind]) -> Value {
    let mut words = Map::new();
    for (id, (text, kind)) in vocab.tokens.iter().zip(kinds).enumerate() {
        let word = match text.strip_prefix('\u{2581}') {
            _ if matches!(kind, TokenKind::Control | TokenKind::Unknown | TokenKind::Unused) => text.clone(),
            Some(word) => word.to_owned(),
            None => format!("##{text}"),
        };
        words.entry(word).or_insert_with(|| id.into());
    }
    let unknown = vocab.unknown_token_id.map_or("[UNK]", |id| &vocab.tokens[id as usize]);
    json!({
        "model": {"type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": words},
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
    })
}

fn unigram(vocab: &GgufVocab) -> Value {
    let score = |id: usize| f64::from(vocab.scores.get(id).copied().unwrap_or(0.0));
    let pieces: Vec<Value> =
        vocab.tokens.iter().enumerate().map(|(id, text)| json!([text, score(id)])).collect();
    let spaces =
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    let normalizer = if vocab.precompiled_charsmap.is_empty() {
        Value::Null
    } else {
        json!({"type": "Precompiled", "precompiled_charsmap": base64(&vocab.precompiled_charsmap)})
    };
    json!({
        "model": {"type": "Unigram", "unk_id": vocab.unknown_token_id.unwrap_or(0), "vocab": pieces,
            "byte_fallback": false},
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]},
        "decoder": spaces,
    })
}

/// Where the begin and end of a text go: both for BERT, as the file says for the others.
fn post_processor(vocab: &GgufVocab) -> Value {
    let default = vocab.model == "bert";
    let token = |id: Option<u32>, wanted: Option<bool>| {
        let id = id.filter(|_| wanted.unwrap_or(default))?;
        Some((id, vocab.tokens[id as usize].clone()))
    };
    // BERT's files do not always name the two, but everybody calls them the same.
    let named = |text: &str| {
        let position = vocab.tokens.iter().position(|token| token == text).filter(|_| default);
        position.map(|id| id as u32)
    };
    let begin = token(named("[CLS]").or(vocab.bos_token_id), vocab.add_bos);
    let end = token(named("[SEP]").or(vocab.eos_token_id), vocab.add_eos);
    let special = |token: &Option<(u32, String)>| {
        token.as_ref().map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": 0}}))
    };
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let single: Vec<Value> = [special(&begin), Some(text), special(&end)].into_iter().flatten().collect();
    let tokens: Map<String, Value> = [&begin, &end]
        .into_iter()
        .flatten()
        .map(|(id, text)| (text.clone(), json!({"id": text, "ids": [id], "tokens": [text]})))
        .collect();
    json!({"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens})
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0_u32, |bits, at| bits << 8 | u32::from(group.get(at).copied().unwrap_or(0)));
        for letter in 0..4 {
            let index = (bits >> (18 - 6 * letter)) & 63;
            text.push(if letter <= group.len() { LETTERS[index as usize] as char } else { '=' });
        }
    }
    text
}
