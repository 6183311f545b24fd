//! Compiled structured outputs: which tokens may come next. There are two traits; the grammar crate implements them, the
//! engine calls them, and neither depends on the other.
//!
//! A mask has one bit per token of the model's vocabulary, 32 to a word, the lowest bit first. A set bit allows the token.

use crate::TokenId;

/// What the outputs of one request must be like. Shared by all its sequences.
pub trait Constraint: std::fmt::Debug + Send + Sync {
    /// Which tokens may come first.
    fn first_mask(&self) -> &[u32]; // [vocab_size / 32, rounded up]

    /// Follows one sequence from its first output token on. May take a while: not for the engine's thread.
    fn start(&self) -> Box<dyn ConstraintMatcher>;
}

/// Follows the output of one sequence.
pub trait ConstraintMatcher: Send {
    /// Takes the next token of the output, which the last mask allowed, and overwrites `mask` with what may follow it.
    /// The error says why nothing can. May take a while: not for the engine's thread.
    fn advance(&mut self, token_id: TokenId, mask: &mut Vec<u32>) -> Result<(), String>;

    /// A copy that follows guesses of what comes, which may be wrong, while this one stays where it is.
    fn fork(&self) -> Box<dyn ConstraintMatcher>;
}

/// How many words the mask of a vocabulary has.
pub const fn mask_words(vocab_size: usize) -> usize {
    vocab_size.div_ceil(32)
}

/// Whether a mask allows a token. One that is past the end of the mask is not allowed.
pub fn mask_allows(mask: &[u32], token_id: TokenId) -> bool {
    mask.get(token_id as usize / 32).is_some_and(|word| word >> (token_id % 32) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_counted_from_the_lowest() {
        assert_eq!((mask_words(0), mask_words(1), mask_words(32), mask_words(33)), (0, 1, 1, 2));
        let mask = [1 << 31 | 1, 0b100];
        let allowed: Vec<TokenId> = (0..200).filter(|&token| mask_allows(&mask, token)).collect();
        assert_eq!(allowed, [0, 31, 34]);
    }
}
