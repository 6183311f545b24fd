//! The state of one sequence in a grammar, and the rule that JSON numbers end.
//!
//! A schema's `integer` is any number of digits, and a model that is stuck in a loop writes them until it runs out of tokens. So after [`MAX_DIGITS`] digits in a row (of an exponent [`MAX_EXPONENT_DIGITS`]) outside a string no
//! further digit is allowed, unless only digits are: a constant with more of them is written to its end.

use std::sync::Arc;

use baton_core::{ConstraintMatcher, TokenId};
use llguidance::Matcher;

use crate::vocabulary::{Vocabulary, first_line};

/// Digits in a row of the whole or the fractional part. 64-bit numbers have at most 20.
const MAX_DIGITS: usize = 32;
/// 10⁹⁹ is still a number to every reader; 10⁹⁹⁹ is not.
const MAX_EXPONENT_DIGITS: usize = 2;

pub(crate) struct TokenMatcher {
    vocabulary: Arc<Vocabulary>,
    matcher: Matcher,
    /// Only for JSON.
    numbers: Option<NumberGuard>,
}

impl TokenMatcher {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, matcher: Matcher, is_json: bool) -> Self {
        Self { vocabulary, matcher, numbers: is_json.then(NumberGuard::default) }
    }

    /// What may come next.
    pub(crate) fn mask(&mut self, mask: &mut Vec<u32>) -> Result<(), String> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(|error| first_line(&error.to_string()))?;
        self.vocabulary.copy_mask(&allowed, mask);
        let digits_left = self.numbers.map(NumberGuard::digits_left);
        if let Some(digits) = digits_left.and_then(|left| self.vocabulary.digit_runs.get(left))
            && mask.iter().zip(digits).any(|(word, digits)| word & !digits != 0)
        {
            mask.iter_mut().zip(digits).for_each(|(word, digits)| *word &= !digits);
        }
        if mask.iter().all(|&word| word == 0) {
            return Err("no token of the vocabulary can continue the output".to_owned());
        }
        Ok(())
    }
}

impl ConstraintMatcher for TokenMatcher {
    fn advance(&mut self, token_id: TokenId, mask: &mut Vec<u32>) -> Result<(), String> {
        self.matcher.consume_token(token_id).map_err(|error| first_line(&error.to_string()))?;
        if let Some(numbers) = &mut self.numbers {
            for &byte in self.vocabulary.token_bytes(token_id) {
                numbers.push(byte);
            }
        }
        self.mask(mask)
    }

    fn fork(&self) -> Box<dyn ConstraintMatcher> {
        Box::new(Self {
            vocabulary: Arc::clone(&self.vocabulary),
            matcher: self.matcher.deep_clone(),
            numbers: self.numbers,
        })
    }
}

/// Where in a JSON text we are, as far as numbers care.
#[derive(Clone, Copy, Debug, Default)]
struct NumberGuard {
    in_string: bool,
    is_escaped: bool,
    in_exponent: bool,
    /// Digits since the last byte that is none.
    num_digits: usize,
}

impl NumberGuard {
    fn push(&mut self, byte: u8) {
        if self.in_string {
            self.in_string = self.is_escaped || byte != b'"';
            self.is_escaped = !self.is_escaped && byte == b'\\';
            return;
        }
        match byte {
            b'0'..=b'9' => {
                self.num_digits += 1;
                return;
            }
            // Only in a number does one of these follow a digit; `true` and `false` have no digits before their `e`.
            b'e' | b'E' if self.num_digits > 0 => self.in_exponent = true,
            b'+' | b'-' => {}
            _ => self.in_exponent = false,
        }
        self.in_string = byte == b'"';
        self.num_digits = 0;
    }

    fn digits_left(self) -> usize {
        let limit = if self.in_exponent { MAX_EXPONENT_DIGITS } else { MAX_DIGITS };
        limit.saturating_sub(self.num_digits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_long_after(text: &str) -> bool {
        let mut guard = NumberGuard::default();
        text.bytes().for_each(|byte| guard.push(byte));
        guard.digits_left() == 0
    }

    #[test]
    fn only_digits_of_numbers_are_counted() {
        let digits = "7".repeat(MAX_DIGITS);
        assert!(is_long_after(&digits));
        assert!(is_long_after(&format!("{{\"a\": -0.{digits}")));
        assert!(!is_long_after(&digits[1..]));
        assert!(!is_long_after(&format!("\"{digits}")));
        assert!(!is_long_after(&format!("\"\\\"{digits}")));
        assert!(is_long_after(&format!("[\"\\\\\",{digits}")));
        assert!(!is_long_after(&format!("{digits},")));
        assert!(is_long_after("1e12") && is_long_after("[1.5E-12") && !is_long_after("1e1"));
        assert!(!is_long_after("[1e12,12") && !is_long_after("[true,12") && !is_long_after("[false,12"));
    }
}
