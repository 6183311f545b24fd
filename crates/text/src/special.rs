//! Finding tokens that are written out in a text: control tokens (`<|im_end|>`) and user-defined ones.
//!
//! This runs before any splitting or merging: what it finds is one token, what lies between goes to the BPE or
//! SentencePiece merger. The leftmost match wins; of several at one place, the longest.

use std::collections::HashMap;

use baton_core::TokenId;

/// A span of a text after the tokens written in it are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fragment<'a> {
    Text(&'a str),
    Token(TokenId),
}

/// All tokens of one kind that can be written out.
#[derive(Debug, Default)]
pub(crate) struct SpecialMatcher {
    ids: HashMap<Box<[u8]>, TokenId>,
    /// For each first byte the lengths of the tokens that begin with it, longest first. A text full of `<` then
    /// costs one look-up for each different length, however many tokens there are.
    lengths: Vec<Vec<usize>>,
}

impl SpecialMatcher {
    pub(crate) fn new<'a>(tokens: impl Iterator<Item = (&'a str, TokenId)>) -> Self {
        let mut matcher = Self { ids: HashMap::new(), lengths: vec![Vec::new(); 256] };
        for (text, id) in tokens.filter(|(text, _)| !text.is_empty()) {
            let bytes = text.as_bytes();
            let lengths = &mut matcher.lengths[bytes[0] as usize];
            if !lengths.contains(&bytes.len()) {
                lengths.push(bytes.len());
            }
            matcher.ids.entry(bytes.into()).or_insert(id);
        }
        for lengths in &mut matcher.lengths {
            lengths.sort_unstable_by(|a, b| b.cmp(a));
        }
        matcher
    }

    fn match_at(&self, text: &[u8], start: usize) -> Option<(usize, TokenId)> {
        self.lengths[text[start] as usize].iter().find_map(|&length| {
            let end = start.checked_add(length)?;
            self.ids.get(text.get(start..end)?).map(|&id| (end, id))
        })
    }

    /// Calls `visit` with every fragment of `text`, in order; text fragments are never empty.
    pub(crate) fn split<'a, E>(
        &self,
        text: &'a str,
        mut visit: impl FnMut(Fragment<'a>) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.ids.is_empty() {
            return if text.is_empty() { Ok(()) } else { visit(Fragment::Text(text)) };
        }
        let bytes = text.as_bytes();
        let (mut text_start, mut position) = (0, 0);
        while position < bytes.len() {
            let Some((end, id)) = self.match_at(bytes, position) else {
                position += 1;
                continue;
            };
            // Tokens are valid UTF-8, so a match begins and ends between characters.
            if text_start < position {
                visit(Fragment::Text(&text[text_start..position]))?;
            }
            visit(Fragment::Token(id))?;
            text_start = end;
            position = end;
        }
        if text_start < bytes.len() {
            visit(Fragment::Text(&text[text_start..]))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tokens: &[&str], text: &str, expect: &[Fragment<'_>]) {
        let matcher = SpecialMatcher::new(tokens.iter().copied().zip(0..));
        let mut found = Vec::new();
        matcher
            .split::<()>(text, |fragment| {
                found.push(fragment);
                Ok(())
            })
            .expect("visit never fails");
        assert_eq!(found, expect);
    }

    #[test]
    fn leftmost_longest() {
        use Fragment::{Text, Token};
        check(&[], "abc", &[Text("abc")]);
        check(&[], "", &[]);
        check(
            &["<s>", "<s><s>", "é"],
            "a<s><s><s>é<s",
            &[Text("a"), Token(1), Token(0), Token(2), Text("<s")],
        );
        check(&["ab", "bc"], "abc", &[Token(0), Text("c")]);
        check(&["", "x"], "yx", &[Text("y"), Token(1)]);
    }
}
