//! SentencePiece BPE: repeatedly joins the neighbours whose joined text is the token with the best score.
//!
//! There are no words here: spaces are `▁`, a character like any other, and the whole fragment is merged at once.
//! A text of n characters costs O(n log n); texts longer than the longest token are never looked up.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

use baton_core::TokenId;

use crate::vocab::{GgufVocab, TokenKind};
use crate::{TextError, bytes};

const NONE: u32 = u32::MAX;

/// A span of the text, in a doubly linked list by index; length 0 once it was joined to its left neighbour.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: u32,
    length: u32,
    previous: u32,
    next: u32,
}

/// A pair that may be joined: best score first, then leftmost.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    score: f32,
    left: u32,
    right: u32,
    length: u32,
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Candidate {}
impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

/// A SentencePiece model.
#[derive(Debug)]
pub(crate) struct SentencePiece {
    ids: Arc<HashMap<Box<str>, TokenId>>,
    /// NaN for control tokens: plain text never becomes one.
    scores: Vec<f32>,
    longest_token: usize,
    byte_tokens: [Option<TokenId>; 256],
    unknown: Option<TokenId>,
}

impl SentencePiece {
    pub(crate) fn new(
        vocab: &GgufVocab,
        kinds: &[TokenKind],
        ids: Arc<HashMap<Box<str>, TokenId>>,
    ) -> Result<Self, TextError> {
        if vocab.scores.is_empty() {
            return Err(TextError::InvalidVocab("a SentencePiece vocabulary needs scores".to_owned()));
        }
        let mut byte_tokens = [None; 256];
        for (id, (text, &kind)) in vocab.tokens.iter().zip(kinds).enumerate() {
            if kind == TokenKind::Byte
                && let Some(byte) = bytes::byte_of_hex_token(text)
            {
                byte_tokens[byte as usize] = Some(id as TokenId);
            }
        }
        for (byte, token) in byte_tokens.iter_mut().enumerate().filter(|(byte, _)| *byte < 128) {
            let text = char::from(byte as u8).to_string();
            *token = token.or_else(|| ids.get(text.as_str()).copied());
        }
        // Adding 0 turns -0 into 0: scores are compared bit by bit in the queue.
        let score =
            |(score, kind): (&f32, &TokenKind)| if kind.is_special() { f32::NAN } else { score + 0.0 };
        let scores = vocab.scores.iter().zip(kinds).map(score).collect();
        let longest_token = vocab.tokens.iter().map(String::len).max().unwrap_or(0);
        Ok(Self { ids, scores, longest_token, byte_tokens, unknown: vocab.unknown_token_id })
    }

    fn candidate(&self, text: &str, symbols: &[Symbol], left: u32, right: u32) -> Option<Candidate> {
        if left == NONE || right == NONE {
            return None;
        }
        let (first, second) = (symbols[left as usize], symbols[right as usize]);
        let length = first.length + second.length;
        if length as usize > self.longest_token {
            return None;
        }
        let joined = &text[first.start as usize..(first.start + length) as usize];
        let score = self.scores[self.plain_id(joined)? as usize];
        Some(Candidate { score, left, right, length })
    }

    fn plain_id(&self, text: &str) -> Option<TokenId> {
        self.ids.get(text).copied().filter(|&id| !self.scores[id as usize].is_nan())
    }

    /// Appends the tokens of a text in which spaces are already `▁`.
    pub(crate) fn encode(&self, text: &str, out: &mut Vec<TokenId>) -> Result<(), TextError> {
        if u32::try_from(text.len()).is_err() {
            return Err(TextError::Encode("it is longer than 4 GiB".to_owned()));
        }
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(index, (start, character))| Symbol {
                start: start as u32,
                length: character.len_utf8() as u32,
                previous: (index as u32).wrapping_sub(1),
                next: index as u32 + 1,
            })
            .collect();
        let Some(last) = symbols.last_mut() else { return Ok(()) };
        last.next = NONE;
        self.merge(text, &mut symbols);
        let mut index = 0;
        while index != NONE {
            let symbol = symbols[index as usize];
            self.emit(&text[symbol.start as usize..(symbol.start + symbol.length) as usize], out);
            index = symbol.next;
        }
        Ok(())
    }

    fn merge(&self, text: &str, symbols: &mut [Symbol]) {
        let mut queue: BinaryHeap<Candidate> = (1..symbols.len() as u32)
            .filter_map(|right| self.candidate(text, symbols, right - 1, right))
            .collect();
        while let Some(best) = queue.pop() {
            let (left, right) = (symbols[best.left as usize], symbols[best.right as usize]);
            // Stale when either side was joined to something else since: lengths only grow, or drop to 0.
            if left.length == 0 || right.length == 0 || left.length + right.length != best.length {
                continue;
            }
            symbols[best.left as usize].length = best.length;
            symbols[best.left as usize].next = right.next;
            symbols[best.right as usize].length = 0;
            if right.next != NONE {
                symbols[right.next as usize].previous = best.left;
            }
            queue.extend(self.candidate(text, symbols, left.previous, best.left));
            queue.extend(self.candidate(text, symbols, best.left, right.next));
        }
    }

    /// A character that is not a token falls back to byte tokens, those to the unknown token.
    fn emit(&self, text: &str, out: &mut Vec<TokenId>) {
        if let Some(id) = self.plain_id(text) {
            out.push(id);
            return;
        }
        for byte in text.bytes() {
            match self.byte_tokens[byte as usize] {
                Some(id) => out.push(id),
                // One unknown token for the character, as SentencePiece gives without byte fallback.
                None => return out.extend(self.unknown),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(tokens: &[(&str, f32)]) -> (SentencePiece, Vec<String>) {
        let vocab = GgufVocab {
            tokens: tokens.iter().map(|(t, _)| (*t).to_owned()).collect(),
            scores: tokens.iter().map(|(_, s)| *s).collect(),
            unknown_token_id: Some(0),
            ..GgufVocab::default()
        };
        let kinds: Vec<_> = vocab
            .tokens
            .iter()
            .map(|t| if bytes::byte_of_hex_token(t).is_some() { TokenKind::Byte } else { TokenKind::Normal })
            .collect();
        let ids = Arc::new(vocab.ids_by_text());
        (SentencePiece::new(&vocab, &kinds, ids).expect("model"), vocab.tokens)
    }

    fn check(model: &(SentencePiece, Vec<String>), text: &str, expect: &[&str]) {
        let mut ids = Vec::new();
        model.0.encode(text, &mut ids).expect("encodes");
        let texts: Vec<&str> = ids.iter().map(|&id| model.1[id as usize].as_str()).collect();
        assert_eq!(texts, expect);
    }

    #[test]
    fn the_best_score_is_joined_first() {
        let tokens =
            model(&[("<unk>", 0.0), ("a", -9.0), ("b", -9.0), ("c", -9.0), ("ab", -2.0), ("bc", -1.0)]);
        check(&tokens, "abc", &["a", "bc"]);
        check(&tokens, "abab", &["ab", "ab"]);
        check(&tokens, "", &[]);
    }

    #[test]
    fn unknown_characters_become_bytes_or_the_unknown_token() {
        let tokens = model(&[("<unk>", 0.0), ("<0xC3>", 0.0), ("<0xA9>", 0.0)]);
        check(&tokens, "é", &["<0xC3>", "<0xA9>"]);
        check(&tokens, "日", &["<unk>"]);
    }
}
