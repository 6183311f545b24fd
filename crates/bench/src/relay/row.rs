//! A row of `baton bench relay --parts rows`, as written on the command line: how many requests share how many tokens.

use std::fmt;
use std::str::FromStr;

use baton_core::TokenId;

use super::run::Prompt;
use crate::dataset::{MAX_LEN, TokenRange, synthetic_tokens};
use crate::random::Random;

/// The most requests of a row.
const MAX_REQUESTS: usize = 65_536;

/// One level of the tree of prefixes: how many nodes under each node of the level above, and how many tokens each has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLevel {
    pub count: usize,
    pub tokens: usize,
}

/// Requests whose prompts form a tree. The last level is what each request has alone.
///
/// `64x2048+64/128` is 64 requests that share 2,048 tokens, have 64 of their own and get 128 more.
/// `tree:8x1024,4x2048,8x64/128` is 8 system prompts, 4 documents under each, 8 questions about each document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayRow {
    pub levels: Vec<RowLevel>,
    pub output_len: usize,
}

impl RelayRow {
    /// Requests that share one prefix.
    pub fn flat(num_requests: usize, shared: usize, own: usize, output_len: usize) -> Self {
        let levels =
            vec![RowLevel { count: 1, tokens: shared }, RowLevel { count: num_requests, tokens: own }];
        Self { levels, output_len }
    }

    pub fn num_requests(&self) -> usize {
        self.levels.iter().map(|level| level.count).product()
    }

    /// Tokens of each prompt that other requests may have too.
    pub fn num_shared(&self) -> usize {
        self.levels[..self.levels.len() - 1].iter().map(|level| level.tokens).sum()
    }

    /// Tokens of each request with its answer.
    pub fn total_len(&self) -> usize {
        self.levels.iter().map(|level| level.tokens).sum::<usize>() + self.output_len
    }

    /// The prompts in an order that knows nothing of the tree. Prefixes depend on `seed`, what is a request's own on
    /// `own_seed` as well.
    pub(super) fn prompts(&self, seed: u64, own_seed: u64, range: TokenRange) -> Vec<Prompt> {
        let mut prefixes: Vec<(Vec<TokenId>, u64)> = vec![(Vec::new(), seed)];
        let (own, shared) = self.levels.split_last().expect("a row has levels");
        for level in shared {
            prefixes = prefixes.iter().flat_map(|node| children(node, level, range)).collect();
        }
        let mut prompts = Vec::with_capacity(self.num_requests());
        for (prefix, seed) in prefixes {
            for (token_ids, _) in children(&(prefix.clone(), seed ^ own_seed), own, range) {
                prompts.push(Prompt {
                    token_ids,
                    num_shared: prefix.len(),
                    output_len: self.output_len,
                    at_s: 0.0,
                });
            }
        }
        Random::new(seed).shuffle(&mut prompts);
        prompts
    }
}

/// The nodes of a level under one node, each with the tokens from the root on and a seed for its own children.
fn children(
    (prefix, seed): &(Vec<TokenId>, u64),
    level: &RowLevel,
    range: TokenRange,
) -> Vec<(Vec<TokenId>, u64)> {
    let mut random = Random::new(*seed);
    let child = |_| {
        let seed = random.next_u64();
        ([prefix.as_slice(), &synthetic_tokens(seed, level.tokens, range)].concat(), seed)
    };
    (0..level.count).map(child).collect()
}

impl FromStr for RelayRow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not a row: write REQUESTSxSHARED+OWN/OUTPUT or tree:COUNTxTOKENS,…,COUNTxTOKENS/OUTPUT"
            )
        };
        let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
        let (levels, output) = text.rsplit_once('/').ok_or_else(wrong)?;
        let pair = |text: &str| -> Result<RowLevel, String> {
            let (count, tokens) = text.split_once('x').ok_or_else(wrong)?;
            Ok(RowLevel { count: number(count)?, tokens: number(tokens)? })
        };
        let row = if let Some(levels) = levels.strip_prefix("tree:") {
            let levels = levels.split(',').map(pair).collect::<Result<Vec<_>, _>>()?;
            Self { levels, output_len: number(output)? }
        } else {
            let (shared, own) = levels.split_once('+').ok_or_else(wrong)?;
            let RowLevel { count, tokens } = pair(shared)?;
            Self::flat(count, tokens, number(own)?, number(output)?)
        };
        row.check().map_err(|cause| format!("{text:?}: {cause}"))?;
        Ok(row)
    }
}

impl RelayRow {
    fn check(&self) -> Result<(), String> {
        let requests = self.levels.iter().try_fold(1_usize, |all, level| all.checked_mul(level.count));
        if !requests.is_some_and(|requests| (1..=MAX_REQUESTS).contains(&requests)) {
            return Err(format!("there must be 1 to {MAX_REQUESTS} requests"));
        }
        if self.levels.iter().any(|level| level.tokens > MAX_LEN) || self.output_len > MAX_LEN {
            return Err(format!("lengths must be at most {MAX_LEN}"));
        }
        if self.levels.last().is_none_or(|own| own.tokens == 0) || self.output_len == 0 {
            return Err("each request has at least one token of its own and one of output".to_owned());
        }
        Ok(())
    }
}

impl fmt::Display for RelayRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [RowLevel { count: 1, tokens: shared }, RowLevel { count, tokens: own }] = self.levels[..] {
            return write!(f, "{count}x{shared}+{own}/{}", self.output_len);
        }
        let levels: Vec<String> =
            self.levels.iter().map(|level| format!("{}x{}", level.count, level.tokens)).collect();
        write!(f, "tree:{}/{}", levels.join(","), self.output_len)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const RANGE: TokenRange = TokenRange { first: 300, end: 10_000 };

    #[test]
    fn rows_are_read_and_written() {
        for text in ["64x2048+64/128", "tree:8x1024,4x2048,8x64/128", "1x0+512/256"] {
            assert_eq!(text.parse::<RelayRow>().unwrap().to_string(), text);
        }
        let tree: RelayRow = "tree:8x1024,4x2048,8x64/128".parse().unwrap();
        assert_eq!((tree.num_requests(), tree.num_shared(), tree.total_len()), (256, 3072, 3264));
        for text in [
            "",
            "64",
            "64x2048/128",
            "64x2048+64",
            "x+/",
            "0x1+1/1",
            "4x8+0/1",
            "4x8+1/0",
            "tree:/3",
            "99999999999x1+1/1",
        ] {
            assert!(text.parse::<RelayRow>().unwrap_err().contains(&format!("{text:?}")), "{text}");
        }
    }

    #[test]
    fn prompts_form_the_tree() {
        let row: RelayRow = "tree:2x5,3x7,4x2/9".parse().unwrap();
        let prompts = row.prompts(1, 2, RANGE);
        let distinct = |len: usize| -> usize {
            prompts.iter().map(|prompt| &prompt.token_ids[..len]).collect::<HashSet<_>>().len()
        };
        assert_eq!((prompts.len(), distinct(5), distinct(12), distinct(14)), (24, 2, 6, 24));
        assert!(prompts.iter().all(|prompt| (prompt.num_shared, prompt.output_len) == (12, 9)));
        // Another run has the same prefixes and other questions.
        let later: HashSet<Vec<TokenId>> =
            row.prompts(1, 3, RANGE).into_iter().map(|prompt| prompt.token_ids).collect();
        assert!(prompts.iter().all(|prompt| !later.contains(&prompt.token_ids)));
        let prefixes: HashSet<&[TokenId]> = later.iter().map(|tokens| &tokens[..12]).collect();
        assert!(prompts.iter().all(|prompt| prefixes.contains(&prompt.token_ids[..12])));
    }
}
