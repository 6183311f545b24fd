//! Tokens that may or may not be drawn, whatever else is asked: `allowed_token_ids` and `bad_words`.
//!
//! A filter is a constraint like a grammar's, and goes before one where both are asked for: only what both allow may
//! follow. Where that is nothing, the bans give way, because an output must go on.

use std::sync::Arc;

use baton_core::{Constraint, ConstraintMatcher, TokenFilter, TokenId, mask_words};

/// The filter of a request, over its grammar if it has one.
#[derive(Debug)]
pub struct FilteredConstraint {
    filter: Arc<TokenFilter>,
    inner: Option<Arc<dyn Constraint>>,
    /// What the filter allows anywhere.
    always: Arc<[u32]>,
    first_mask: Vec<u32>,
}

impl FilteredConstraint {
    /// The end tokens are always allowed, except where a grammar says otherwise: an output must be able to end.
    pub fn new(
        filter: TokenFilter,
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
        for banned in &filter.banned {
            if let [token] = banned[..] {
                clear(&mut always, token);
            }
        }
        let mut first_mask =
            inner.as_ref().map_or_else(|| always.clone(), |inner| inner.first_mask().to_vec());
        let always: Arc<[u32]> = always.into();
        intersect(&mut first_mask, &always);
        Self { filter: Arc::new(filter), inner, always, first_mask }
    }
}

impl Constraint for FilteredConstraint {
    fn first_mask(&self) -> &[u32] {
        &self.first_mask
    }

    fn start(&self) -> Box<dyn ConstraintMatcher> {
        Box::new(FilteredMatcher {
            filter: Arc::clone(&self.filter),
            always: Arc::clone(&self.always),
            inner: self.inner.as_ref().map(|inner| inner.start()),
            recent: Vec::new(),
        })
    }
}

struct FilteredMatcher {
    filter: Arc<TokenFilter>,
    always: Arc<[u32]>,
    inner: Option<Box<dyn ConstraintMatcher>>,
    /// As many of the last tokens as the longest ban needs.
    recent: Vec<TokenId>,
}

impl ConstraintMatcher for FilteredMatcher {
    fn advance(&mut self, token_id: TokenId, mask: &mut Vec<u32>) -> Result<(), String> {
        if let Some(inner) = &mut self.inner {
            inner.advance(token_id, mask)?;
        } else {
            mask.clear();
            mask.extend_from_slice(&self.always);
        }
        self.recent.push(token_id);
        let longest = self.filter.banned.iter().map(Vec::len).max().unwrap_or(0);
        let surplus = self.recent.len().saturating_sub(longest);
        self.recent.drain(..surplus);
        let mut filtered = mask.clone();
        filtered.iter_mut().zip(self.always.iter()).for_each(|(word, allowed)| *word &= allowed);
        for banned in &self.filter.banned {
            if let Some((&last, before)) = banned.split_last()
                && !before.is_empty()
                && self.recent.ends_with(before)
            {
                clear(&mut filtered, last);
            }
        }
        intersect(mask, &filtered);
        Ok(())
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

    use super::*;

    fn allowed(mask: &[u32]) -> Vec<TokenId> {
        (0..64).filter(|&token| mask_allows(mask, token)).collect()
    }

    #[test]
    fn only_allowed_tokens_and_the_end_are_drawn() {
        let filter = TokenFilter { allowed: Some(vec![3, 40, 99]), banned: vec![vec![40]] };
        let constraint = FilteredConstraint::new(filter, None, 50, &[2]);
        assert_eq!(allowed(constraint.first_mask()), [2, 3]);
        let mut mask = Vec::new();
        constraint.start().advance(3, &mut mask).expect("goes on");
        assert_eq!(allowed(&mask), [2, 3]);
    }

    #[test]
    fn a_banned_word_is_not_completed() {
        let filter = TokenFilter { allowed: None, banned: vec![vec![5, 6, 7], vec![6, 9]] };
        let constraint = FilteredConstraint::new(filter, None, 10, &[0]);
        assert_eq!(allowed(constraint.first_mask()).len(), 10);
        let mut matcher = constraint.start();
        let mut mask = Vec::new();
        for (token, missing) in
            [(5, vec![]), (6, vec![7, 9]), (5, vec![]), (5, vec![]), (6, vec![7, 9]), (1, vec![])]
        {
            matcher.advance(token, &mut mask).expect("goes on");
            let refused: Vec<TokenId> = (0..10).filter(|&token| !mask_allows(&mask, token)).collect();
            assert_eq!(refused, missing, "after {token}");
        }
    }
}
