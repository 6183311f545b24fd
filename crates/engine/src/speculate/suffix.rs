//! Suffix decoding: the longest end of the text that stood before, in the request itself or in recent outputs of the same
//! owner, and what followed it there, by majority.
//!
//! The longer the span that is alike, the more tokens are guessed: where guesses were right, the span has grown by them,
//! so that a copied passage is soon guessed in long pieces. Outputs of other owners are never looked at.

use std::collections::HashMap;

use baton_core::{SeqId, TokenId};

use super::config::SuffixOptions;
use super::matches::{BORDER, MatchIndex, Matches};
use super::proposer::{DraftRequest, Guess, Owner, Proposer, class_of_match};

/// Tokens of outputs that are kept in all; about 40 bytes each.
const MAX_CACHED_TOKENS: usize = 1 << 20;
/// Of one owner: half of all that it may keep.
const MAX_GENERATION_TOKENS: usize = MAX_CACHED_TOKENS / 8;

#[derive(Debug)]
pub(crate) struct Suffix {
    options: SuffixOptions,
    /// Of each running sequence: the prediction, its prompt and its output.
    own: HashMap<SeqId, Own>,
    outputs: HashMap<Owner, Outputs>,
    num_ended: u64,
}

#[derive(Debug, Default)]
struct Own {
    index: MatchIndex,
    /// Tokens of the sequence that are in the index.
    num_tokens: usize,
}

/// Recent outputs of one owner, in two generations: the older one goes as a whole.
#[derive(Debug, Default)]
struct Outputs {
    young: MatchIndex,
    old: MatchIndex,
    num_young: usize,
    last_used: u64,
}

impl Outputs {
    fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    fn add(&mut self, output: &[TokenId], max_requests: usize) {
        if self.young.len() + output.len() > MAX_GENERATION_TOKENS
            || self.num_young >= max_requests.div_ceil(2)
        {
            self.old = std::mem::take(&mut self.young);
            self.num_young = 0;
        }
        let kept = &output[..output.len().min(MAX_GENERATION_TOKENS)];
        self.young.extend(kept.iter().copied().chain([BORDER]));
        self.num_young += 1;
    }
}

impl Suffix {
    pub(crate) fn new(options: SuffixOptions) -> Self {
        Self { options, own: HashMap::new(), outputs: HashMap::new(), num_ended: 0 }
    }

    fn forget_least_used(&mut self) {
        while self.outputs.len() > 1
            && self.outputs.values().map(Outputs::len).sum::<usize>() > MAX_CACHED_TOKENS
        {
            let oldest = self.outputs.iter().min_by_key(|(_, outputs)| outputs.last_used);
            let Some(owner) = oldest.map(|(owner, _)| owner.clone()) else { return };
            self.outputs.remove(&owner);
        }
    }
}

/// Follows the majority from where the spans end.
fn follow(
    options: &SuffixOptions,
    index: &MatchIndex,
    matches: &Matches,
    most: usize,
    is_own: bool,
) -> Guess {
    let class = class_of_match(matches.len) + if is_own { 0 } else { 8 };
    let mut guess = Guess { class, ..Guess::default() };
    let most = most.min((matches.len as f64 * options.max_factor) as usize).max(1);
    let mut places = matches.places.clone();
    let mut likelihood = 1.0;
    let mut votes: Vec<(TokenId, usize)> = Vec::new();
    while guess.token_ids.len() < most {
        votes.clear();
        for token in places.iter().filter_map(|&place| index.at(place)) {
            match votes.iter_mut().find(|(known, _)| *known == token) {
                Some((_, count)) => *count += 1,
                None => votes.push((token, 1)),
            }
        }
        // Of equal ones the latest, which is the first.
        let Some(&(token, count)) = votes.iter().rev().max_by_key(|(_, count)| *count) else { break };
        let share = count as f32 / places.len() as f32;
        likelihood *= f64::from(share);
        if likelihood < options.min_likelihood {
            break;
        }
        guess.push(token, share);
        places.retain(|&place| index.at(place) == Some(token));
        for place in &mut places {
            *place += 1;
        }
    }
    guess
}

/// Expected number of right guesses, by the proposer's own word.
fn expected(guess: &Guess, len: usize) -> f64 {
    let mut product = 1.0;
    // Longer spans are right more often: as a rule of thumb, half of the doubt goes with each token.
    let trust = 1.0 - 0.5_f64.powi(len.min(30) as i32 - 1);
    guess.likelihoods.iter().fold(0.0, |sum, likelihood| {
        product *= f64::from(*likelihood) * trust;
        sum + product
    })
}

impl Proposer for Suffix {
    fn propose(&mut self, request: &DraftRequest<'_>) -> Guess {
        let own = self.own.entry(request.seq_id).or_default();
        if own.num_tokens == 0 && !request.prediction.is_empty() {
            own.index.extend(request.prediction.iter().copied().chain([BORDER]));
        }
        own.index.extend(request.token_ids[own.num_tokens..].iter().copied());
        own.num_tokens = request.token_ids.len();
        if let Some(len) = request.num_predicted() {
            let mut guess = Guess { class: class_of_match(len + 4), ..Guess::default() };
            let most = request.most.min(((len + 4) as f64 * self.options.max_factor) as usize).max(1);
            request.prediction[len..].iter().take(most).for_each(|&token| guess.push(token, 1.0));
            return guess;
        }
        let own = &self.own[&request.seq_id].index;
        let outputs = self.outputs.get_mut(request.owner).map(|outputs| {
            outputs.last_used = self.num_ended;
            &*outputs
        });
        let (young, old) = match outputs {
            Some(outputs) => (Some(&outputs.young), Some(&outputs.old)),
            None => (None, None),
        };
        let mut best = (0.0, Guess::default());
        for (index, is_own) in [(Some(own), true), (young, false), (old, false)] {
            let Some(index) = index else { continue };
            let matches = index.longest(request.token_ids, self.options.max_depth);
            if matches.len < 2 {
                continue;
            }
            let guess = follow(&self.options, index, &matches, request.most, is_own);
            let score = expected(&guess, matches.len);
            if score > best.0 {
                best = (score, guess);
            }
        }
        best.1
    }

    fn ended(&mut self, seq_id: SeqId, output: &[TokenId], owner: &Owner) {
        self.own.remove(&seq_id);
        let max_requests = self.options.max_cached_requests;
        if max_requests == 0 || output.len() < 3 {
            return;
        }
        self.num_ended += 1;
        let outputs = self.outputs.entry(owner.clone()).or_default();
        outputs.last_used = self.num_ended;
        outputs.add(output, max_requests);
        self.forget_least_used();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: SuffixOptions =
        SuffixOptions { max_depth: 24, max_cached_requests: 100, max_factor: 1.0, min_likelihood: 0.1 };

    fn owner(tenant: u32, salt: Option<&str>) -> Owner {
        Owner { tenant, salt: salt.map(std::sync::Arc::from) }
    }

    fn propose(suffix: &mut Suffix, id: u64, tokens: &[TokenId], owner: &Owner) -> Vec<TokenId> {
        let request = DraftRequest {
            seq_id: SeqId(id),
            token_ids: tokens,
            num_prompt_tokens: tokens.len(),
            prediction: &[],
            owner,
            most: 16,
            hidden: &[],
        };
        suffix.propose(&request).token_ids
    }

    #[test]
    fn guesses_grow_with_what_was_right() {
        let mut suffix = Suffix::new(OPTIONS);
        let text: Vec<TokenId> = (100..140).collect();
        let owner = owner(0, None);
        for (copied, expect) in [(2, 2), (4, 4), (8, 8), (20, 16)] {
            let tokens = [&text[..], &[7], &text[..copied]].concat();
            let guess = propose(&mut suffix, copied as u64, &tokens, &owner);
            assert_eq!(guess, text[copied..copied + expect], "{copied} tokens copied");
        }
    }

    #[test]
    fn the_majority_is_followed_and_a_doubtful_guess_is_not_made() {
        let mut suffix = Suffix::new(SuffixOptions { max_factor: 4.0, ..OPTIONS });
        let tokens = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 5, 1, 2];
        assert_eq!(propose(&mut suffix, 0, &tokens, &owner(0, None))[..1], [4]);
        let mut picky = Suffix::new(SuffixOptions { min_likelihood: 0.7, ..OPTIONS });
        assert_eq!(propose(&mut picky, 0, &tokens, &owner(0, None)), [0; 0]);
    }

    #[test]
    fn outputs_are_shared_within_an_owner_only() {
        let mut suffix = Suffix::new(OPTIONS);
        let (mine, salted) = (owner(1, None), owner(1, Some("red")));
        propose(&mut suffix, 0, &[1, 2], &mine);
        suffix.ended(SeqId(0), &[10, 11, 12, 13, 14, 15], &mine);
        let ask = |suffix: &mut Suffix, id, owner: &Owner| propose(suffix, id, &[1, 11, 12], owner);
        assert_eq!(ask(&mut suffix, 1, &mine), [13, 14]);
        assert_eq!(ask(&mut suffix, 2, &owner(2, None)), [0; 0]);
        assert_eq!(ask(&mut suffix, 3, &salted), [0; 0]);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut suffix = Suffix::new(OPTIONS);
        for id in 0..300_u32 {
            let output: Vec<TokenId> = (0..20_000).map(|token| token * 7 + id).collect();
            suffix.ended(SeqId(u64::from(id)), &output, &owner(id % 20, None));
            let kept: usize = suffix.outputs.values().map(Outputs::len).sum();
            assert!(kept <= MAX_CACHED_TOKENS, "{kept} tokens after {id}");
        }
        assert!(suffix.own.is_empty() && suffix.outputs.len() < 20);
        let few = SuffixOptions { max_cached_requests: 4, ..OPTIONS };
        let mut suffix = Suffix::new(few);
        for id in 0..9_u32 {
            suffix.ended(SeqId(u64::from(id)), &[id, id + 50, id + 100], &owner(0, None));
        }
        assert_eq!(propose(&mut suffix, 99, &[8, 58], &owner(0, None)), [108]);
        assert_eq!(propose(&mut suffix, 98, &[1, 51], &owner(0, None)), [0; 0]);
    }
}
