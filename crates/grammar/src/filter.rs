//! Token filters: `allowed_token_ids` and `bad_words`.
//!
//! A filter is a constraint like a grammar. If a request has both, only tokens that both allow may follow. If there are none,
//! the filter yields, because an output must go on.

use std::sync::Arc;

use baton_core::{Constraint, ConstraintMatcher, TokenFilter, TokenId, mask_words};

use crate::words::BannedText;

/// The filter of a request, over its grammar if it has one.
#[derive(Debug)]
pub struct FilteredConstraint {
    banned: Arc<[BannedText]>,
    inner: Option<Arc<dyn Constraint>>,
    /// What the filter allows anywhere.
    always: Arc<[u32]>,
    first_mask: Vec<u32>,
}

impl FilteredConstraint {
    /// Only of `allowed_token_ids`: words are banned by [`crate::GrammarCompiler::filter`]. The end tokens are always allowed,
    /// except where a grammar says otherwise: an output must be able to end.
    pub fn new(
        filter: &TokenFilter,
        inner: Option<Arc<dyn Constraint>>,
        vocab_size: usize,
        eos_token_ids: &[TokenId],
    ) -> Self {
        Self::with_banned(filter, Vec::new(), inner, vocab_size, eos_token_ids)
    }

    pub(crate) fn with_banned(
        filter: &TokenFilter,
        banned: Vec<BannedText>,
        inner: Option<Arc<dyn Constraint>>,
        vocab_size: usize,
        eos_token_ids: &[TokenId],
    ) -> Self {
        let mut always = vec![0; mask_words(vocab_size)];
        let mut set = |token: TokenId| {
            if (token as usize) < vocab_size {
                always[token as usize / 32] |= 1 << (token % 32);
            }
        };
        match &filter.allowed {
            Some(allowed) => allowed.iter().chain(eos_token_ids).for_each(|&token| set(token)),
            None => (0..vocab_size as TokenId).for_each(set),
        }
        banned.iter().flat_map(|text| text.ends(0)).for_each(|token| clear(&mut always, token));
        let mut first_mask =
            inner.as_ref().map_or_else(|| always.clone(), |inner| inner.first_mask().to_vec());
        let always: Arc<[u32]> = always.into();
        intersect(&mut first_mask, &always);
        Self { banned: banned.into(), inner, always, first_mask }
    }
}

impl Constraint for FilteredConstraint {
    fn first_mask(&self) -> &[u32] {
        &self.first_mask
    }

    fn start(&self) -> Box<dyn ConstraintMatcher> {
        Box::new(FilteredMatcher {
            banned: Arc::clone(&self.banned),
            always: Arc::clone(&self.always),
            inner: self.inner.as_ref().map(|inner| inner.start()),
            begun: Vec::new(),
        })
    }
}

struct FilteredMatcher {
    banned: Arc<[BannedText]>,
    always: Arc<[u32]>,
    inner: Option<Box<dyn ConstraintMatcher>>,
    /// Banned texts that the output may be in, and how far.
    begun: Vec<(usize, usize)>,
}

impl ConstraintMatcher for FilteredMatcher {
    fn advance(&mut self, token_id: TokenId, mask: &mut Vec<u32>) -> Result<(), String> {
        if let Some(inner) = &mut self.inner {
            inner.advance(token_id, mask)?;
        } else {
            mask.clear();
            mask.extend_from_slice(&self.always);
        }
        let starts = (0..self.banned.len()).map(|number| (number, 0));
        let go_on = |(number, position): (usize, usize)| {
            self.banned[number].follow(position, token_id).map(|next| (number, next))
        };
        self.begun = self.begun.drain(..).chain(starts).filter_map(go_on).collect();
        let mut filtered = mask.clone();
        filtered.iter_mut().zip(self.always.iter()).for_each(|(word, allowed)| *word &= allowed);
        for &(number, position) in &self.begun {
            self.banned[number].ends(position).for_each(|token| clear(&mut filtered, token));
        }
        intersect(mask, &filtered);
        Ok(())
    }

    fn fork(&self) -> Box<dyn ConstraintMatcher> {
        Box::new(Self {
            banned: Arc::clone(&self.banned),
            always: Arc::clone(&self.always),
            inner: self.inner.as_ref().map(|inner| inner.fork()),
            begun: self.begun.clone(),
        })
    }
}

fn clear(mask: &mut [u32], token: TokenId) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        *word &= !(1 << (token % 32));
    }
}

/// What both allow, unless that is nothing.
fn intersect(mask: &mut [u32], other: &[u32]) {
    if mask.iter().zip(other).any(|(word, other)| word & other != 0) {
        mask.iter_mut().zip(other).for_each(|(word, other)| *word &= other);
    }
}

#[cfg(test)]
mod tests {
    use baton_core::mask_allows;
    use baton_text::{GgufVocab, Tokenizer};

    use super::*;
    use crate::GrammarCompiler;

    fn allowed(mask: &[u32]) -> Vec<TokenId> {
        (0..64).filter(|&token| mask_allows(mask, token)).collect()
    }

    /// The letters a to d, and pairs of them.
    fn letters() -> GrammarCompiler {
        let texts = ["</s>", "a", "b", "c", "d", "ab", "bc", "abc", "e"];
        let vocab = GgufVocab {
            model: "gpt2".to_owned(),
            pre: Some("gpt-2".to_owned()),
            tokens: texts.map(str::to_owned).into(),
            token_types: texts.map(|text| if text == "</s>" { 3 } else { 1 }).into(),
            eos_token_id: Some(0),
            ..GgufVocab::default()
        };
        let tokenizer = Tokenizer::from_gguf(vocab).expect("a vocabulary");
        GrammarCompiler::new(Arc::new(tokenizer), texts.len(), Arc::from([0]))
    }

    #[test]
    fn only_allowed_tokens_and_the_end_are_drawn() {
        let filter = TokenFilter { allowed: Some(vec![3, 4, 99]), bad_words: vec!["d".to_owned()] };
        let constraint = letters().filter(&filter, None, &[0]).expect("a filter");
        assert_eq!(allowed(constraint.first_mask()), [0, 3]);
        let mut mask = Vec::new();
        constraint.start().advance(3, &mut mask).expect("goes on");
        assert_eq!(allowed(&mask), [0, 3]);
    }

    #[test]
    fn a_banned_word_is_not_completed_in_any_tokens() {
        let filter = TokenFilter { allowed: None, bad_words: vec!["abcd".to_owned(), "bb".to_owned()] };
        let constraint = letters().filter(&filter, None, &[0]).expect("a filter");
        assert_eq!(allowed(constraint.first_mask()).len(), 9);
        let (a, b, c, d, ab, bc, abc) = (1, 2, 3, 4, 5, 6, 7);
        let mut matcher = constraint.start();
        let mut mask = Vec::new();
        for (token, missing) in [
            (a, vec![]),
            (b, vec![b]),
            (c, vec![d]),
            (ab, vec![]),
            (c, vec![d]),
            (a, vec![]),
            (bc, vec![d]),
            (abc, vec![d]),
            (b, vec![b]),
            (d, vec![]),
        ] {
            matcher.advance(token, &mut mask).expect("goes on");
            let refused: Vec<TokenId> = (0..9).filter(|&token| !mask_allows(&mask, token)).collect();
            assert_eq!(refused, missing, "after {token}");
        }
    }
}
