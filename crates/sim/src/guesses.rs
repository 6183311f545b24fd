//! Guesses of what a sequence of the fake model draws next: often right, a chain with branches that depart from it and from each
//! other.

use baton_core::TokenId;
use baton_sched::{DraftBranch, Drafts, PlannedSeq};

use crate::{FakeModel, PrefixHash, Rng};

/// The most guesses of a chain, and of a branch where a block holds so many.
const MAX_CHAIN: usize = 6;
const MAX_BRANCH: usize = 4;

/// Where guesses begin, and how the sequence draws.
pub(crate) struct Guesses<'a> {
    pub(crate) prefix: PrefixHash,
    pub(crate) model: &'a FakeModel,
    pub(crate) seed: u64,
    pub(crate) index: u32,
    pub(crate) block_size: usize,
}

impl Guesses<'_> {
    /// A chain, and every second time some branches.
    pub(crate) fn make(&self, rng: &mut Rng) -> Drafts {
        let (token_ids, ends) = self.follow(self.prefix, rng.between(1, MAX_CHAIN), 800, rng);
        let mut prefixes = vec![self.prefix];
        prefixes.extend(ends);
        let mut branches = Vec::new();
        let num_branches = if rng.per_mille(500) { rng.between(1, 4) } else { 0 };
        for _ in 0..num_branches {
            let parent = rng.between(0, prefixes.len() - 1);
            let most = rng.between(1, MAX_BRANCH.min(self.block_size));
            // A branch is of use where the chain is wrong.
            let (token_ids, ends) = self.follow(prefixes[parent], most, 700, rng);
            prefixes.extend(ends);
            branches.push(DraftBranch { parent, token_ids });
        }
        Drafts { token_ids, branches, ..Drafts::default() }
    }

    /// Tokens that follow a prefix, each right by so many chances in a thousand, and the prefixes after them.
    fn follow(
        &self,
        mut prefix: PrefixHash,
        count: usize,
        per_mille: u64,
        rng: &mut Rng,
    ) -> (Vec<TokenId>, Vec<PrefixHash>) {
        let next = |_| {
            let right = self.model.sample(prefix, self.seed, self.index, |_| false);
            let token_id = if rng.per_mille(per_mille) { right } else { (right + 1) % 40 };
            prefix = prefix.child(token_id);
            (token_id, prefix)
        };
        (0..count).map(next).unzip()
    }
}

/// Some of the branches of a run that departs from the first `count` of its chain, each as far as chance has it.
pub(crate) fn some_branches(planned: &PlannedSeq, count: usize, rng: &mut Rng) -> Vec<DraftBranch> {
    let mut kept = Vec::new();
    for (first, branch) in planned.numbered_branches() {
        if branch.parent as usize <= count && rng.per_mille(700) {
            let token_ids =
                planned.drafts()[first - 1..][..rng.between(1, branch.num_tokens as usize)].to_vec();
            kept.push(DraftBranch { parent: branch.parent as usize, token_ids });
        }
    }
    kept
}
