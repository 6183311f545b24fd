//! Text from a stream of token ids, a piece at a time.
//!
//! The pieces put together are exactly the text of all ids together. A character is given out when its last byte has
//! come, never in halves; bytes that can no longer become a character are given out as U+FFFD at once. What is held
//! back is at most three bytes (or, for tokenizers that only a library can decode, a few tokens).

use std::sync::Arc;

use baton_core::TokenId;

use crate::TextError;
use crate::tokenizer::{Decoding, Tokenizer};

/// For library decoding: give text out anyway once this many tokens have come without a sound end.
const MAX_WINDOW: usize = 32;
/// For library decoding: how many tokens of the prompt are looked at for context.
const PROMPT_CONTEXT: usize = 6;

/// Bytes to text, with U+FFFD for what is not UTF-8.
pub(crate) fn decode_bytes_lossy(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// Moves everything that is certain from `pending` to `out`; keeps only the beginning of a character.
fn take_certain(pending: &mut Vec<u8>, out: &mut String) {
    let mut done = 0;
    loop {
        match std::str::from_utf8(&pending[done..]) {
            Ok(text) => {
                out.push_str(text);
                pending.clear();
                return;
            }
            Err(error) => {
                let valid = done + error.valid_up_to();
                out.push_str(
                    std::str::from_utf8(&pending[done..valid])
                        .expect("from_utf8 said that this part is valid"),
                );
                let Some(length) = error.error_len() else {
                    pending.drain(..valid);
                    return;
                };
                out.push(char::REPLACEMENT_CHARACTER);
                done = valid + length;
            }
        }
    }
}

#[derive(Debug)]
enum State {
    Bytes {
        pending: Vec<u8>,
        /// One leading space is still to be cut off.
        strip_leading_space: bool,
    },
    /// Text of `window[..read]` has been given out; it stays for context. Decoding the window with and without the
    /// new tokens and taking the difference is what keeps spaces and joins right for any decoder.
    Library { window: Vec<TokenId>, read: usize },
}

/// Turns the ids of one sequence into text as they come.
#[derive(Debug)]
pub struct IncrementalDecoder {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    state: State,
}

impl IncrementalDecoder {
    /// Decodes a sequence from its beginning: the pieces together are `tokenizer.decode(all ids)`.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        let state = match tokenizer.decoding() {
            Decoding::Bytes { strip_leading_space } => {
                State::Bytes { pending: Vec::new(), strip_leading_space }
            }
            Decoding::Library => State::Library { window: Vec::new(), read: 0 },
        };
        Self { tokenizer, skip_special, state }
    }

    /// Decodes the continuation of a prompt: a space at its beginning separates it from the prompt and is kept.
    pub fn after_prompt(tokenizer: Arc<Tokenizer>, skip_special: bool, prompt: &[TokenId]) -> Self {
        let mut decoder = Self::new(tokenizer, skip_special);
        if prompt.is_empty() {
            return decoder;
        }
        match &mut decoder.state {
            State::Bytes { strip_leading_space, .. } => *strip_leading_space = false,
            State::Library { window, read } => {
                let visible = |id: &&TokenId| has_text(&decoder.tokenizer, skip_special, **id);
                window.extend(prompt.iter().rev().filter(visible).take(PROMPT_CONTEXT));
                window.reverse();
                *read = window.len();
            }
        }
        decoder
    }

    /// Appends to `out` the text that has become certain with the new ids.
    pub fn push(&mut self, ids: &[TokenId], out: &mut String) -> Result<(), TextError> {
        match &mut self.state {
            State::Bytes { pending, strip_leading_space } => {
                for &id in ids {
                    if self.skip_special && self.tokenizer.is_special(id) {
                        continue;
                    }
                    let mut piece = self.tokenizer.piece(id);
                    if *strip_leading_space && !piece.is_empty() {
                        *strip_leading_space = false;
                        piece = piece.strip_prefix(b" ").unwrap_or(piece);
                    }
                    pending.extend_from_slice(piece);
                    take_certain(pending, out);
                }
                Ok(())
            }
            State::Library { window, read } => {
                for &id in ids {
                    // A token without text must not become the context of the next one.
                    if !has_text(&self.tokenizer, self.skip_special, id) {
                        continue;
                    }
                    window.push(id);
                    let full = self.tokenizer.decode(window, self.skip_special)?;
                    let unsure = full.ends_with(char::REPLACEMENT_CHARACTER) && window.len() < MAX_WINDOW;
                    if unsure {
                        continue;
                    }
                    let known = self.tokenizer.decode(&window[..*read], self.skip_special)?;
                    push_difference(&known, &full, out);
                    window.drain(..*read);
                    *read = window.len();
                }
                Ok(())
            }
        }
    }

    /// The sequence has ended: appends what was held back.
    pub fn finish(&mut self, out: &mut String) -> Result<(), TextError> {
        match &mut self.state {
            State::Bytes { pending, .. } => {
                if !pending.is_empty() {
                    // What is held is the beginning of one character.
                    out.push(char::REPLACEMENT_CHARACTER);
                    pending.clear();
                }
            }
            State::Library { window, read } => {
                if *read < window.len() {
                    let full = self.tokenizer.decode(window, self.skip_special)?;
                    let known = self.tokenizer.decode(&window[..*read], self.skip_special)?;
                    push_difference(&known, &full, out);
                }
                window.clear();
                *read = 0;
            }
        }
        Ok(())
    }
}

/// False for special tokens that are skipped and for ids that the vocabulary does not know.
fn has_text(tokenizer: &Tokenizer, skip_special: bool, id: TokenId) -> bool {
    let known = tokenizer.token_text(id).is_some_and(|text| !text.is_empty());
    known && !(skip_special && tokenizer.is_special(id))
}

/// Appends what `full` has beyond `known`. A decoder that rewrites text already given out is followed from the first
/// character of equal length on; nothing can be taken back from a stream.
fn push_difference(known: &str, full: &str, out: &mut String) {
    if let Some(new) = full.strip_prefix(known) {
        out.push_str(new);
    } else if full.is_char_boundary(known.len()) {
        out.push_str(full.get(known.len()..).unwrap_or(""));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(chunks: &[&[u8]], expect: &[&str]) {
        let mut pending = Vec::new();
        let mut found = Vec::new();
        for chunk in chunks {
            let mut text = String::new();
            pending.extend_from_slice(chunk);
            take_certain(&mut pending, &mut text);
            found.push(text);
        }
        assert_eq!(found, expect);
        assert!(pending.len() < 4);
    }

    #[test]
    fn characters_come_whole() {
        check(&[b"a\xC3", b"\xA9b"], &["a", "éb"]);
        check(&[b"\xF0", b"\x9F", b"\xA6", b"\x99"], &["", "", "", "🦙"]);
    }

    #[test]
    fn certain_errors_come_at_once() {
        check(&[b"\xFFa", b"\xC3", b"a"], &["\u{FFFD}a", "", "\u{FFFD}a"]);
        check(&[b"\xE2\x82", b"\xE2\x82\xAC"], &["", "\u{FFFD}€"]);
        check(&[b"\xF0\x9F", b"\xFF\xF0"], &["", "\u{FFFD}\u{FFFD}"]);
    }
}
