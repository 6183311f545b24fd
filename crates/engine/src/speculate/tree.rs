//! Guesses beside a chain: where the draft found other tokens likely too, one step checks those as well, each in a branch of its own.
//!
//! Of the chain and what is beside it the likeliest guesses are kept, as many as a sequence may have. A guess is never likelier than
//! the one that it follows, so that those which are kept are a tree.

use baton_core::{SeqId, TokenId};

use super::config::{MAX_BRANCHES, Method};
use super::{Confidence, Speculation};

/// A guess in place of the one that the chain has there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Beside {
    /// How many guesses of the chain come before it.
    pub(crate) parent: usize,
    pub(crate) token_id: TokenId,
    /// How sure the draft was of it, and the chance that it and those before it are right.
    pub(crate) bucket: usize,
    chance: f64,
}

impl Speculation {
    /// How many tokens beside the one that it draws a draft is asked for.
    pub(crate) fn num_beside(&self) -> usize {
        match self.settings.method {
            Method::DraftModel { width } => width - 1,
            _ => 0,
        }
    }

    /// Branches of one sequence that a step checks at most.
    pub(crate) fn max_branches(&self) -> usize {
        if self.num_beside() == 0 { 0 } else { self.settings.num_tokens.min(MAX_BRANCHES) }
    }

    /// Guesses of one sequence that a step checks at most, whatever its request says.
    pub(crate) fn max_guesses(&self) -> usize {
        self.settings.num_tokens.max(baton_core::MAX_SPECULATIVE_TOKENS as usize)
    }

    /// No branches are guessed: the model could not tell them from what came before.
    pub(crate) fn forbid_branches(&mut self) {
        if let Method::DraftModel { width } = &mut self.settings.method {
            *width = 1;
        }
    }

    /// What may be guessed in place of the token that follows a chain of so many guesses, which are right with this chance.
    pub(crate) fn beside(
        &self,
        (parent, chance): (usize, f64),
        others: &[(TokenId, f32)],
        vocab_size: usize,
    ) -> Vec<Beside> {
        let known = others.iter().filter(|(token_id, _)| (*token_id as usize) < vocab_size);
        let beside = known.map(|&(token_id, probability)| {
            let bucket = Confidence::bucket_beside(probability);
            let chance = chance * self.confidence_beside.chance(bucket);
            Beside { parent, token_id, bucket, chance }
        });
        beside.filter(|beside| self.pays_to_check(beside.chance)).collect()
    }

    /// The likeliest of a chain and of what is beside it: how many of the chain, and which of the others, at most `max_branches`.
    pub(crate) fn choose_tree(
        &mut self,
        id: SeqId,
        chain: &[f64],
        beside: &[Beside],
        max_branches: usize,
    ) -> (usize, Vec<Beside>) {
        let Some(seq) = self.seqs.get_mut(&id) else { return (chain.len(), Vec::new()) };
        let mut others = beside.to_vec();
        others.sort_by(|a, b| b.chance.total_cmp(&a.chance));
        others.truncate(max_branches);
        let (mut count, mut chosen) = (0, Vec::new());
        while count + chosen.len() < seq.most {
            match (chain.get(count), others.get(chosen.len())) {
                (Some(next), Some(other)) if *next < other.chance => chosen.push(*other),
                (Some(_), _) => count += 1,
                (None, Some(other)) => chosen.push(*other),
                (None, None) => break,
            }
        }
        // What departs from a guess that is not checked cannot be either; equal chances may leave such.
        chosen.retain(|beside| beside.parent <= count);
        seq.beside.clone_from(&chosen);
        (count, chosen)
    }
}
