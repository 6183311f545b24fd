//! Prompt lookup: where the last few tokens stood before, what followed them then is guessed to follow now.
//!
//! The longest span of `min..=max` tokens counts, and of equal ones the earliest, as in vLLM.

use baton_core::{SeqId, TokenId};

use super::proposer::{DraftRequest, Guess, Owner, Proposer, class_of_match};

#[derive(Debug)]
pub(crate) struct Ngram {
    min: usize,
    max: usize,
}

impl Ngram {
    pub(crate) fn new(min: usize, max: usize) -> Self {
        Self { min, max }
    }
}

/// Where in `text` the longest end of `context` of at most `max` tokens stands, and what follows it begins: its length and that
/// place. Of equal lengths the earliest.
fn longest_match(text: &[TokenId], context: &[TokenId], max: usize) -> (usize, usize) {
    let last = context[context.len() - 1];
    let mut best = (0, 0);
    for (place, _) in text.iter().enumerate().filter(|(_, token)| **token == last) {
        let before = text[..=place].iter().rev().zip(context.iter().rev());
        let len = before.take(max).take_while(|(one, other)| one == other).count();
        if len > best.0 {
            best = (len, place + 1);
            if len == max {
                break;
            }
        }
    }
    best
}

impl Proposer for Ngram {
    fn propose(&mut self, request: &DraftRequest<'_>) -> Guess {
        let context = request.token_ids;
        let mut found: (usize, &[TokenId]) = match request.num_predicted() {
            Some(len) => (len.max(self.min), &request.prediction[len..]),
            None => (0, &[]),
        };
        // What is last in the text has nothing after it.
        let texts = [
            &request.prediction[..request.prediction.len().saturating_sub(1)],
            &context[..context.len() - 1],
        ];
        for (text, whole) in texts.into_iter().zip([request.prediction, context]) {
            let (len, place) = longest_match(text, context, self.max);
            if len >= self.min && len > found.0 {
                found = (len, &whole[place..]);
            }
        }
        let mut guess = Guess { class: class_of_match(found.0), ..Guess::default() };
        found.1.iter().take(request.most).for_each(|&token_id| guess.push(token_id, 1.0));
        guess
    }

    fn ended(&mut self, _: SeqId, _: &[TokenId], _: &Owner) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn propose(min: usize, max: usize, tokens: &[TokenId], prediction: &[TokenId]) -> Vec<TokenId> {
        let owner = Owner { tenant: 0, salt: None };
        let num_prompt_tokens = tokens.len();
        let request = DraftRequest {
            seq_id: SeqId(0),
            token_ids: tokens,
            num_prompt_tokens,
            prediction,
            owner: &owner,
            most: 3,
            hidden: &[],
        };
        Ngram::new(min, max).propose(&request).token_ids
    }

    #[test]
    fn the_longest_match_counts_and_of_equal_ones_the_earliest() {
        assert_eq!(propose(2, 3, &[1, 2, 3, 4, 9, 1, 2, 5, 7, 1, 2], &[]), [3, 4, 9]);
        assert_eq!(propose(2, 3, &[1, 2, 3, 4, 9, 1, 2, 5, 7, 9, 1, 2], &[]), [5, 7, 9]);
        assert_eq!(propose(3, 3, &[1, 2, 3, 4, 1, 2], &[]), [0; 0]);
        assert_eq!(propose(1, 3, &[6, 6], &[]), [6]);
        assert_eq!(propose(1, 3, &[6], &[]), [0; 0]);
    }

    #[test]
    fn a_prediction_is_looked_through_and_begun_with() {
        // Nothing is written yet: it begins as the prediction does.
        assert_eq!(propose(2, 3, &[1, 2], &[7, 8, 9, 10]), [7, 8, 9]);
        let owner = Owner { tenant: 0, salt: None };
        let prediction = &[7, 8, 9, 10];
        let request = DraftRequest {
            seq_id: SeqId(0),
            token_ids: &[1, 8, 9],
            num_prompt_tokens: 1,
            prediction,
            owner: &owner,
            most: 3,
            hidden: &[],
        };
        assert_eq!(Ngram::new(2, 3).propose(&request).token_ids, [10]);
    }
}
