//! What makes guesses: one trait, whatever is behind it. Who embeds the engine may bring another one
//! ([`Engine::set_proposer`](crate::Engine::set_proposer)).

use std::sync::Arc;

use baton_core::{SeqId, TokenId};

/// Whose outputs may be looked at: those of the same tenant under the same salt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    pub tenant: u32,
    pub salt: Option<Arc<str>>,
}

/// A sequence that may have guesses.
#[derive(Clone, Copy, Debug)]
pub struct DraftRequest<'a> {
    pub seq_id: SeqId,
    /// Prompt and output as far as known.
    pub token_ids: &'a [TokenId],
    pub num_prompt_tokens: usize,
    /// What the client expects the output to be.
    pub prediction: &'a [TokenId],
    pub owner: &'a Owner,
    /// No more guesses than this.
    pub most: usize,
    /// `[rows, hidden]`, for a proposer that wants it: what the model made of the tokens of its last step that were right, after the
    /// last norm. The last row is the one that the newest token was drawn from, which has none itself yet.
    pub hidden: &'a [f32],
}

impl DraftRequest<'_> {
    /// Tokens of the prediction that the whole output is alike so far, where it is and more follow.
    pub(crate) fn num_predicted(&self) -> Option<usize> {
        let output = &self.token_ids[self.num_prompt_tokens..];
        let is_alike = output.len() < self.prediction.len() && self.prediction.starts_with(output);
        is_alike.then_some(output.len())
    }
}

/// Guesses of what a sequence draws next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Guess {
    pub token_ids: Vec<TokenId>,
    /// How likely each is to be right where those before it are, as far as the proposer can tell.
    pub likelihoods: Vec<f32>,
    /// Guesses of one class are right about equally often: below [`NUM_CLASSES`].
    pub class: usize,
}

/// Classes that acceptance is counted by.
pub const NUM_CLASSES: usize = 16;

impl Guess {
    pub fn push(&mut self, token_id: TokenId, likelihood: f32) {
        self.token_ids.push(token_id);
        self.likelihoods.push(likelihood);
    }

    pub fn truncate(&mut self, len: usize) {
        self.token_ids.truncate(len);
        self.likelihoods.truncate(len);
    }
}

/// Makes guesses. It is asked after every token that a sequence draws, whether or not its guesses are then checked.
pub trait Proposer: std::fmt::Debug + Send {
    fn propose(&mut self, request: &DraftRequest<'_>) -> Guess;

    /// Whether it is to be told the hidden states of the rows behind the newest tokens ([`DraftRequest::hidden`]), as heads need that go on from
    /// what the model itself has made of the text. Devices bring them to the host after each step.
    fn wants_hidden(&self) -> bool {
        false
    }

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
