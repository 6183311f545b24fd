//! What makes guesses: one trait, whatever is behind it.

use std::sync::Arc;

use baton_core::{SeqId, TokenId};

/// Whose outputs may be looked at: those of the same tenant under the same salt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Owner {
    pub(crate) tenant: u32,
    pub(crate) salt: Option<Arc<str>>,
}

/// A sequence that may have guesses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask<'a> {
    pub(crate) seq_id: SeqId,
    /// Prompt and output as far as known.
    pub(crate) token_ids: &'a [TokenId],
    pub(crate) num_prompt_tokens: usize,
    /// What the client expects the output to be.
    pub(crate) prediction: &'a [TokenId],
    pub(crate) owner: &'a Owner,
    /// No more guesses than this.
    pub(crate) most: usize,
}

impl Ask<'_> {
    /// Tokens of the prediction that the whole output is alike so far, where it is and more follow.
    pub(crate) fn num_predicted(&self) -> Option<usize> {
        let output = &self.token_ids[self.num_prompt_tokens..];
        let is_alike = output.len() < self.prediction.len() && self.prediction.starts_with(output);
        is_alike.then_some(output.len())
    }
}

/// Guesses of what a sequence draws next.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Guess {
    pub(crate) token_ids: Vec<TokenId>,
    /// How likely each is to be right where those before it are, as far as the proposer can tell.
    pub(crate) likelihoods: Vec<f32>,
    /// Guesses of one class are right about equally often: below [`NUM_CLASSES`].
    pub(crate) class: usize,
}

/// Classes that acceptance is counted by.
pub(crate) const NUM_CLASSES: usize = 16;

impl Guess {
    pub(crate) fn push(&mut self, token_id: TokenId, likelihood: f32) {
        self.token_ids.push(token_id);
        self.likelihoods.push(likelihood);
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        self.token_ids.truncate(len);
        self.likelihoods.truncate(len);
    }
}

/// Makes guesses. It is asked after every token that a sequence draws, whether or not its guesses are then checked.
pub(crate) trait Proposer: std::fmt::Debug + Send {
    fn propose(&mut self, ask: &Ask<'_>) -> Guess;

    /// A sequence has ended; its whole output is known.
    fn ended(&mut self, seq_id: SeqId, output: &[TokenId], owner: &Owner);
}

/// The class of guesses that follow so many tokens that were alike.
pub(crate) fn class_of_match(len: usize) -> usize {
    match len {
        0..=1 => 0,
        2 => 1,
        3 => 2,
        4 => 3,
        5..=6 => 4,
        7..=10 => 5,
        11..=18 => 6,
        _ => 7,
    }
}
