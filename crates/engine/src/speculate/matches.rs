//! Where a pair of tokens stood before: the index behind `suffix`.
//!
//! Tokens are stored once, in order; every place is linked to the place before it that ends with the same two tokens. So all
//! earlier spans that end like the text are found by walking one chain, the latest first, and how far each is alike is
//! counted backwards. That is a suffix tree's answer for the price of two numbers a token.

use std::collections::HashMap;

use baton_core::TokenId;

/// Stands between texts: it is alike nothing.
pub(crate) const BORDER: TokenId = TokenId::MAX;
/// The end of a chain.
const NONE: u32 = u32::MAX;
/// Places that are looked at, the latest ones.
const MAX_CHAIN: usize = 128;

#[derive(Debug, Default)]
pub(crate) struct MatchIndex {
    tokens: Vec<TokenId>,
    /// For each place the one before it that ends with the same two tokens.
    previous: Vec<u32>,
    /// The latest place of each pair.
    latest: HashMap<(TokenId, TokenId), u32>,
}

/// Stretches that end like a text, all for the same number of tokens.
#[derive(Debug, Default)]
pub(crate) struct Matches {
    /// How far they are alike.
    pub(crate) len: usize,
    /// What follows each of them begins here, the latest first.
    pub(crate) places: Vec<usize>,
}

impl MatchIndex {
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn extend(&mut self, tokens: impl IntoIterator<Item = TokenId>) {
        for token in tokens {
            let place = self.tokens.len() as u32;
            let before = self.tokens.last().copied();
            self.tokens.push(token);
            let pair = before.filter(|&before| before != BORDER && token != BORDER);
            let previous = pair.and_then(|before| self.latest.insert((before, token), place));
            self.previous.push(previous.unwrap_or(NONE));
        }
    }

    /// The spans that are alike the end of `context` the longest, up to `max_len` tokens.
    pub(crate) fn longest(&self, context: &[TokenId], max_len: usize) -> Matches {
        let mut best = Matches::default();
        let [.., before, last] = *context else { return best };
        let mut place = self.latest.get(&(before, last)).copied().unwrap_or(NONE);
        for _ in 0..MAX_CHAIN {
            if place == NONE {
                break;
            }
            let end = place as usize + 1;
            place = self.previous[place as usize];
            if self.at(end).is_none() {
                continue;
            }
            let alike = self.tokens[..end].iter().rev().zip(context.iter().rev());
            let len = alike.take(max_len).take_while(|(one, other)| one == other).count();
            if len > best.len {
                best.len = len;
                best.places.clear();
            }
            if len == best.len {
                best.places.push(end);
            }
        }
        best
    }

    /// The token at a place, where a text goes on there.
    pub(crate) fn at(&self, place: usize) -> Option<TokenId> {
        self.tokens.get(place).copied().filter(|&token| token != BORDER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_spans_are_found_whoever_wrote_them() {
        let mut index = MatchIndex::default();
        index.extend([5, 1, 2, 3, 7, BORDER, 1, 2, 4, 6, 1, 2, 3, 8]);
        let found = index.longest(&[9, 1, 2], 8);
        assert_eq!((found.len, found.places.as_slice()), (2, &[12, 8, 3][..]));
        let found = index.longest(&[6, 1, 2, 3], 8);
        assert_eq!((found.len, found.places.as_slice()), (4, &[13][..]));
        // Cut at two, both count.
        assert_eq!(index.longest(&[6, 1, 2, 3], 3).places, [13, 4]);
        assert_eq!(index.longest(&[2], 8).len, 0);
        // A span at the end of a text, or over its border, says nothing.
        assert_eq!(index.longest(&[3, 7], 8).len, 0);
        assert_eq!(index.longest(&[3, 8], 8).len, 0);
    }

    /// Against the definition, over random texts.
    #[test]
    fn it_finds_what_looking_everywhere_finds() {
        let mut random = baton_core::random::Random::new(3);
        for _ in 0..200 {
            let len = random.between(2, 60);
            let tokens: Vec<TokenId> = (0..len).map(|_| random.between(0, 3) as TokenId).collect();
            let mut index = MatchIndex::default();
            index.extend(tokens.iter().copied());
            let max = random.between(2, 6);
            let alike = |end: usize| {
                let pairs = tokens[..end].iter().rev().zip(tokens.iter().rev());
                pairs.take(max).take_while(|(one, other)| one == other).count()
            };
            let best = (1..len).map(alike).max().unwrap_or(0);
            let found = index.longest(&tokens, max);
            if best < 2 {
                assert_eq!(found.len, 0);
                continue;
            }
            assert_eq!(found.len, best, "{tokens:?}");
            let places: Vec<usize> = (1..len).rev().filter(|&end| alike(end) == best).collect();
            assert_eq!(found.places, places, "{tokens:?}");
        }
    }
}
