//! A model without weights: the logits after a prefix are a function of a hash over that prefix.

use baton_core::random::mix;
use baton_core::{PositionLogprobs, Request, TokenId, TokenLogprob};

/// Names a prefix: all tokens up to a position, and the salt of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefixHash(pub u64);

impl PrefixHash {
    /// The empty prefix. Different salts give different ones, so that a block shared across salts is seen.
    pub fn root(salt: Option<&str>) -> Self {
        let start = mix(u64::from(salt.is_some()) + 1);
        Self(salt.unwrap_or_default().bytes().fold(start, |hash, byte| mix(hash ^ u64::from(byte))))
    }

    /// The prefix with one more token.
    #[must_use]
    pub fn child(self, token_id: TokenId) -> Self {
        Self(mix(self.0 ^ (u64::from(token_id) << 20)))
    }

    /// The prefix with many more tokens.
    #[must_use]
    pub fn extend(self, token_ids: &[TokenId]) -> Self {
        token_ids.iter().fold(self, |hash, &token_id| hash.child(token_id))
    }
}

/// How the prefixes of a request are named: without its salt within its public blocks, with it after them.
#[derive(Clone, Copy, Debug)]
pub struct Naming {
    pub root: PrefixHash,
    /// The first position that belongs to the salt, and the salt's own root.
    salted_from: Option<(usize, PrefixHash)>,
}

impl Naming {
    pub fn of(request: &Request, block_size: usize) -> Self {
        let own = PrefixHash::root(request.cache_salt.as_deref());
        match request.num_public_tokens as usize / block_size {
            0 => Self { root: own, salted_from: None },
            num_blocks => Self {
                root: PrefixHash::root(None),
                salted_from: request.cache_salt.is_some().then_some((num_blocks * block_size, own)),
            },
        }
    }

    /// The prefix with the token of `position`.
    pub fn child(&self, prefix: PrefixHash, position: usize, token_id: TokenId) -> PrefixHash {
        let start = match self.salted_from {
            Some((first, own)) if first == position => PrefixHash(mix(prefix.0 ^ own.0)),
            _ => prefix,
        };
        start.child(token_id)
    }

    /// All these tokens from the first position on.
    pub fn whole(&self, token_ids: &[TokenId]) -> PrefixHash {
        let tokens = token_ids.iter().enumerate();
        tokens.fold(self.root, |prefix, (position, &token_id)| self.child(prefix, position, token_id))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FakeModel {
    pub vocab_size: u32,
}

impl Default for FakeModel {
    fn default() -> Self {
        Self { vocab_size: 40 }
    }
}

impl FakeModel {
    /// The token that continuation `index` of a request with this seed draws after `prefix`.
    /// `is_banned` names tokens that may not be drawn; it must leave one.
    pub fn sample(
        &self,
        prefix: PrefixHash,
        seed: u64,
        index: u32,
        is_banned: impl Fn(TokenId) -> bool,
    ) -> TokenId {
        let draw = mix(prefix.0 ^ mix(seed ^ (u64::from(index) << 32)));
        let first = (draw % u64::from(self.vocab_size)) as TokenId;
        let tokens = (first..self.vocab_size).chain(0..first);
        tokens.into_iter().find(|&token_id| !is_banned(token_id)).expect("a token is left")
    }

    /// The log-probability of a token after `prefix` (not normalised: nobody adds them up).
    pub fn logprob(&self, prefix: PrefixHash, token_id: TokenId) -> f32 {
        let draw = mix(prefix.0 ^ mix(u64::from(token_id) + 0x5eed));
        -((draw % 8192) as f32) / 1024.0
    }

    pub fn position_logprobs(&self, prefix: PrefixHash, token_id: TokenId) -> PositionLogprobs {
        let chosen = TokenLogprob { token_id, logprob: self.logprob(prefix, token_id), rank: 1 };
        PositionLogprobs { chosen, top: Vec::new() }
    }

    /// The `count` most likely tokens after `prefix`, best first.
    pub fn candidates(
        &self,
        prefix: PrefixHash,
        count: usize,
        is_banned: impl Fn(TokenId) -> bool,
    ) -> Vec<TokenLogprob> {
        let mut tokens: Vec<TokenLogprob> = (0..self.vocab_size)
            .filter(|&token_id| !is_banned(token_id))
            .map(|token_id| TokenLogprob { token_id, logprob: self.logprob(prefix, token_id), rank: 0 })
            .collect();
        tokens.sort_by(|one, other| other.logprob.total_cmp(&one.logprob));
        tokens.truncate(count);
        for (rank, token) in tokens.iter_mut().enumerate() {
            token.rank = rank as u32 + 1;
        }
        tokens
    }
}
