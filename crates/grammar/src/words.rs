//! Texts that an output must not hold (`bad_words`), however they are cut into tokens.
//!
//! A text is banned as a whole: from the beginning of a token to the end of one. A longer token that holds it is another word.

use baton_core::TokenId;
use baton_text::{TextError, Tokenizer};

/// All ways to write a text: at each position the tokens that go on with it, and where they lead. The last position is the
/// number of entries.
#[derive(Debug)]
pub(crate) struct BannedText {
    steps: Vec<Vec<(TokenId, usize)>>,
}

impl BannedText {
    /// Where a token leads to from a position, if it goes on with the text and does not end it.
    pub(crate) fn follow(&self, position: usize, token: TokenId) -> Option<usize> {
        let (_, next) = self.steps[position].iter().find(|(id, _)| *id == token)?;
        Some(*next).filter(|next| *next < self.steps.len())
    }

    /// The tokens that end the text.
    pub(crate) fn ends(&self, position: usize) -> impl Iterator<Item = TokenId> + '_ {
        let is_end = |(_, next): &&(TokenId, usize)| *next == self.steps.len();
        self.steps[position].iter().filter(is_end).map(|(token, _)| *token)
    }
}

/// A tokenizer's tokens in the order of their bytes.
#[derive(Debug)]
pub(crate) struct TokenOrder(Vec<TokenId>);

impl TokenOrder {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Self {
        let is_text = |id: &TokenId| !tokenizer.is_special(*id) && !tokenizer.token_bytes(*id).is_empty();
        let mut order: Vec<TokenId> = (0..tokenizer.vocab_size() as TokenId).filter(is_text).collect();
        order.sort_by(|&one, &other| tokenizer.token_bytes(one).cmp(&tokenizer.token_bytes(other)));
        Self(order)
    }

    /// The tokens that a text begins with, and how many bytes they are.
    fn beginnings(&self, tokenizer: &Tokenizer, text: &[u8]) -> Vec<(TokenId, usize)> {
        let mut found = Vec::new();
        let mut rest = &self.0[..];
        for len in 1..=text.len() {
            let begun = &text[..len];
            rest = &rest[rest.partition_point(|&id| *tokenizer.token_bytes(id) < *begun)..];
            rest = &rest[..rest.partition_point(|&id| tokenizer.token_bytes(id).starts_with(begun))];
            if rest.is_empty() {
                break;
            }
            let num_equal = rest.partition_point(|&id| tokenizer.token_bytes(id).len() == len);
            found.extend(rest[..num_equal].iter().map(|&id| (id, len)));
        }
        found
    }

    fn ban(&self, tokenizer: &Tokenizer, text: &str) -> Result<BannedText, TextError> {
        if !tokenizer.decodes_by_bytes() {
            // Only the way in which the tokenizer itself writes it.
            let tokens = tokenizer.encode(text, false)?;
            let steps = tokens.iter().enumerate().map(|(position, &token)| vec![(token, position + 1)]);
            return Ok(BannedText { steps: steps.collect() });
        }
        let bytes = text.as_bytes();
        let step = |position: usize| {
            let found = self.beginnings(tokenizer, &bytes[position..]);
            found.into_iter().map(|(token, len)| (token, position + len)).collect()
        };
        Ok(BannedText { steps: (0..bytes.len()).map(step).collect() })
    }

    /// Words are banned as they are given, at the beginning of a text and after a space.
    pub(crate) fn ban_words(
        &self,
        tokenizer: &Tokenizer,
        words: &[String],
    ) -> Result<Vec<BannedText>, TextError> {
        let forms = |word: &String| {
            let bare = word.trim_start();
            [word.clone(), bare.to_owned(), format!(" {bare}")]
        };
        let mut texts: Vec<String> = words.iter().flat_map(forms).collect();
        texts.sort();
        texts.dedup();
        let banned = texts.iter().map(|text| self.ban(tokenizer, text));
        let banned: Vec<BannedText> = banned.collect::<Result<_, _>>()?;
        Ok(banned.into_iter().filter(|text| !text.steps.is_empty()).collect())
    }
}
