//! Guesses that are right as often as one likes, whatever the model: for measurements of the steps that check them.
//!
//! The proposer guesses anything, and what the device drew is then replaced, by chance: by the guess where it is to be right, by
//! another token where not. Outputs mean nothing.

use baton_backend::StepOutput;
use baton_core::random::Random;
use baton_core::{SeqId, TokenId};
use baton_sched::Plan;

use super::proposer::{DraftRequest, Guess, Owner, Proposer};

#[derive(Debug)]
pub(crate) struct Anything(pub(crate) f64);

impl Proposer for Anything {
    fn propose(&mut self, request: &DraftRequest<'_>) -> Guess {
        let mut guess = Guess::default();
        let first = request.token_ids.len();
        // Some tokens of the text again: they are in every vocabulary.
        (0..request.most)
            .for_each(|place| guess.push(request.token_ids[(first + place) * 7 % first], self.0 as f32));
        guess
    }

    fn ended(&mut self, _: SeqId, _: &[TokenId], _: &Owner) {}
}

#[derive(Debug)]
pub(crate) struct Synthetic {
    acceptance: f64,
    random: Random,
}

impl Synthetic {
    pub(crate) fn new(acceptance: f64, seed: u64) -> Self {
        Self { acceptance, random: Random::new(seed) }
    }

    pub(crate) fn force(&mut self, plan: &Plan, output: &mut StepOutput) {
        let mut first = 0;
        for seq in &plan.seqs {
            first += seq.scored.len() + seq.num_redrawn as usize;
            let drafts = &seq.token_ids[seq.token_ids.len() - seq.num_drafts as usize..];
            for (place, &draft) in drafts.iter().enumerate() {
                let drawn = &mut output.samples[first + place].chosen.token_id;
                let is_right = self.random.uniform() < self.acceptance;
                *drawn = match (is_right, draft) {
                    (true, _) => draft,
                    (false, 0) => 1,
                    (false, _) => draft - 1,
                };
            }
            first += seq.samples.len() + drafts.len();
        }
    }
}
