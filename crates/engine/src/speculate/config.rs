//! `--speculative-config`: vLLM's JSON, read as it is written, and what it means.

use baton_core::MAX_SPECULATIVE_TOKENS;
use serde::{Deserialize, Serialize};

use crate::EngineError;

const FLAG: &str = "--speculative-config";
/// Branches of one tree that a step checks at most: each takes a block.
pub(crate) const MAX_BRANCHES: usize = 8;
const DEFAULT_LOOKUP_MIN: usize = 2;
const DEFAULT_LOOKUP_MAX: usize = 5;
const DEFAULT_TOKENS: u32 = 5;
const DEFAULT_TREE_TOKENS: u32 = 8;
const DEFAULT_TREE_WIDTH: usize = 3;
const MAX_TREE_WIDTH: usize = 8;

/// Who makes the guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpeculativeMethod {
    /// What followed the last few tokens where they stood before, in the request itself.
    #[serde(alias = "[ngram]", alias = "prompt_lookup")]
    Ngram,
    /// The same for the longest span that is known, in the request and in recent outputs of the same tenant.
    #[serde(alias = "suffix_decoding")]
    Suffix,
    /// A smaller model with the same vocabulary.
    DraftModel,
    /// The same with the likeliest tokens of each position: a tree that one step checks.
    Tree,
    /// Guesses of a given acceptance, for measurements: `baton bench` only.
    Synthetic,
}

/// vLLM's fields, under its names. What is not said gets the method's own default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpeculativeConfig {
    pub method: Option<SpeculativeMethod>,
    /// The path or name of a model that drafts, or `ngram`.
    pub model: Option<String>,
    /// Of the draft model: branch, tag or commit on the hub.
    pub revision: Option<String>,
    /// Sequences longer than this are not drafted for; without it, what the draft model was made for.
    pub max_model_len: Option<usize>,
    /// The most guesses that a step checks of one sequence.
    pub num_speculative_tokens: Option<u32>,
    /// Of `tree`: how many tokens are guessed after one.
    pub tree_width: Option<usize>,
    pub prompt_lookup_min: Option<usize>,
    pub prompt_lookup_max: Option<usize>,
    /// Of `suffix`: the longest span that is compared, and the most guesses.
    pub suffix_decoding_max_tree_depth: Option<usize>,
    /// Outputs of earlier requests that are kept; 0 keeps none.
    pub suffix_decoding_max_cached_requests: Option<usize>,
    /// Guesses per token that was found to be alike.
    pub suffix_decoding_max_spec_factor: Option<f64>,
    /// Guesses less likely than this are not made.
    pub suffix_decoding_min_token_prob: Option<f64>,
    /// Only 1.
    pub draft_tensor_parallel_size: Option<usize>,
    /// No guesses in steps of this many sequences or more.
    pub disable_by_batch_size: Option<usize>,
    /// Whether the number of guesses follows from what they cost and bring. Not vLLM's; true unless said otherwise.
    pub adaptive: Option<bool>,
    /// Of `synthetic`, and of a `draft_model` whose own guesses are of no interest: the chance that a guess is right where those
    /// before it are. For measurements: `baton bench` only.
    pub acceptance: Option<f64>,
    pub seed: Option<u64>,
}

/// A configuration whose every field has a value that can be used.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) method: Method,
    pub(crate) num_tokens: usize,
    pub(crate) adaptive: bool,
    pub(crate) max_batch: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Method {
    Ngram {
        min: usize,
        max: usize,
    },
    Suffix(SuffixOptions),
    DraftModel {
        /// Tokens that are guessed after one: 1 makes a chain.
        width: usize,
    },
    Synthetic {
        acceptance: f64,
        seed: u64,
    },
    /// What [`Engine::set_proposer`](crate::Engine::set_proposer) was given.
    Given,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SuffixOptions {
    pub(crate) max_depth: usize,
    pub(crate) max_cached_requests: usize,
    pub(crate) max_factor: f64,
    pub(crate) min_likelihood: f64,
}

fn wrong(allowed: impl Into<String>, got: &dyn std::fmt::Display) -> EngineError {
    EngineError::Flag { flag: FLAG, allowed: allowed.into(), got: got.to_string() }
}

impl SpeculativeConfig {
    pub fn method(&self) -> Result<SpeculativeMethod, EngineError> {
        match (self.method, self.model.as_deref()) {
            (Some(method), _) => Ok(method),
            (None, Some("ngram" | "[ngram]")) => Ok(SpeculativeMethod::Ngram),
            (None, Some(_)) => Ok(SpeculativeMethod::DraftModel),
            (None, None) => {
                Err(wrong("an object with a \"method\" (ngram, suffix, draft_model, tree)", &"none"))
            }
        }
    }

    /// The path or name of the model that drafts, where one does.
    pub fn draft_model(&self) -> Option<&str> {
        let is_model = |method| matches!(method, SpeculativeMethod::DraftModel | SpeculativeMethod::Tree);
        let drafts = self.method().is_ok_and(is_model);
        self.model.as_deref().filter(|_| drafts)
    }

    /// The most guesses that a step checks of a sequence whose request says nothing.
    pub fn num_tokens(&self) -> Result<usize, EngineError> {
        let default = match self.method()? {
            SpeculativeMethod::Suffix => self.suffix().max_depth.min(MAX_SPECULATIVE_TOKENS as usize) as u32,
            SpeculativeMethod::Ngram | SpeculativeMethod::DraftModel | SpeculativeMethod::Synthetic => {
                DEFAULT_TOKENS
            }
            SpeculativeMethod::Tree => DEFAULT_TREE_TOKENS,
        };
        let count = self.num_speculative_tokens.unwrap_or(default);
        if !(1..=MAX_SPECULATIVE_TOKENS).contains(&count) {
            return Err(wrong(format!("num_speculative_tokens in 1..={MAX_SPECULATIVE_TOKENS}"), &count));
        }
        Ok(count as usize)
    }

    /// The most rows that a step has for a sequence whose request says nothing: places for guesses that a model is going to make are
    /// kept before it is known which of them are a chain.
    pub(crate) fn max_rows(&self) -> Result<usize, EngineError> {
        let num_tokens = self.num_tokens()?;
        let is_tree = self.method()? == SpeculativeMethod::Tree;
        Ok(1 + num_tokens + if is_tree { num_tokens.min(MAX_BRANCHES) } else { 0 })
    }

    fn suffix(&self) -> SuffixOptions {
        SuffixOptions {
            max_depth: self.suffix_decoding_max_tree_depth.unwrap_or(24),
            max_cached_requests: self.suffix_decoding_max_cached_requests.unwrap_or(10_000),
            max_factor: self.suffix_decoding_max_spec_factor.unwrap_or(1.0),
            min_likelihood: self.suffix_decoding_min_token_prob.unwrap_or(0.1),
        }
    }

    /// Guesses are right by chance, so that outputs mean nothing.
    pub fn is_forced(&self) -> bool {
        self.acceptance.is_some() || self.method == Some(SpeculativeMethod::Synthetic)
    }

    pub(crate) fn settings(&self) -> Result<Settings, EngineError> {
        let acceptance = self.acceptance.unwrap_or(0.8);
        if !(0.0..=1.0).contains(&acceptance) {
            return Err(wrong("acceptance in [0, 1]", &acceptance));
        }
        if let Some(size) = self.draft_tensor_parallel_size.filter(|&size| size != 1) {
            return Err(wrong("draft_tensor_parallel_size 1: one device drafts", &size));
        }
        Ok(Settings {
            method: self.checked_method()?,
            num_tokens: self.num_tokens()?,
            adaptive: self.adaptive.unwrap_or(true),
            max_batch: self.disable_by_batch_size.unwrap_or(usize::MAX),
        })
    }

    fn checked_method(&self) -> Result<Method, EngineError> {
        match self.method()? {
            SpeculativeMethod::Ngram => {
                // One of the two given stands for both where the other's default contradicts it, as in vLLM.
                let max = self
                    .prompt_lookup_max
                    .unwrap_or_else(|| self.prompt_lookup_min.unwrap_or(0).max(DEFAULT_LOOKUP_MAX));
                let min = self.prompt_lookup_min.unwrap_or(DEFAULT_LOOKUP_MIN.min(max));
                if min == 0 || min > max || max > 1024 {
                    let allowed = "prompt_lookup_min >= 1 and prompt_lookup_max from it to 1024";
                    return Err(wrong(allowed, &format!("{min} and {max}")));
                }
                Ok(Method::Ngram { min, max })
            }
            SpeculativeMethod::Suffix => {
                let options = self.suffix();
                if !(2..=1024).contains(&options.max_depth) {
                    return Err(wrong("suffix_decoding_max_tree_depth in 2..=1024", &options.max_depth));
                }
                if !(options.max_factor > 0.0 && options.max_factor <= 64.0) {
                    return Err(wrong("suffix_decoding_max_spec_factor in (0, 64]", &options.max_factor));
                }
                if !(0.0..=1.0).contains(&options.min_likelihood) {
                    return Err(wrong("suffix_decoding_min_token_prob in [0, 1]", &options.min_likelihood));
                }
                Ok(Method::Suffix(options))
            }
            method @ (SpeculativeMethod::DraftModel | SpeculativeMethod::Tree) => {
                let is_tree = method == SpeculativeMethod::Tree;
                if self.model.as_deref().is_none_or(str::is_empty) {
                    let name = if is_tree { "tree" } else { "draft_model" };
                    return Err(wrong(format!("a {name} with a \"model\": its path or name"), &"none"));
                }
                let width = if is_tree { self.tree_width.unwrap_or(DEFAULT_TREE_WIDTH) } else { 1 };
                if is_tree && !(2..=MAX_TREE_WIDTH).contains(&width) {
                    return Err(wrong(format!("tree_width in 2..={MAX_TREE_WIDTH}"), &width));
                }
                Ok(Method::DraftModel { width })
            }
            SpeculativeMethod::Synthetic => {
                let acceptance = self.acceptance.unwrap_or(0.8);
                Ok(Method::Synthetic { acceptance, seed: self.seed.unwrap_or(0) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(json: &str) -> Result<Settings, String> {
        let config: SpeculativeConfig = serde_json::from_str(json).map_err(|error| error.to_string())?;
        config.settings().map_err(|error| error.to_string())
    }

    #[test]
    fn vllms_own_examples_are_read() {
        let lookup =
            settings(r#"{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}"#).unwrap();
        assert_eq!((lookup.method, lookup.num_tokens), (Method::Ngram { min: 2, max: 4 }, 5));
        let suffix = settings(r#"{"method": "suffix", "suffix_decoding_max_tree_depth": 32}"#).unwrap();
        assert_eq!(suffix.num_tokens, 32);
        let old =
            settings(r#"{"model": "[ngram]", "prompt_lookup_min": 1, "prompt_lookup_max": 1}"#).unwrap();
        assert_eq!(old.method, Method::Ngram { min: 1, max: 1 });
        for json in [
            r#"{"model": "tiny", "num_speculative_tokens": 3}"#,
            r#"{"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}"#,
        ] {
            let draft = settings(json).unwrap();
            assert_eq!((draft.method, draft.num_tokens), (Method::DraftModel { width: 1 }, 3));
        }
        let tree = settings(r#"{"method": "tree", "model": "tiny", "tree_width": 4}"#).unwrap();
        assert_eq!((tree.method, tree.num_tokens), (Method::DraftModel { width: 4 }, 8));
        let longer = settings(r#"{"method": "ngram", "prompt_lookup_min": 8}"#).unwrap();
        assert_eq!(longer.method, Method::Ngram { min: 8, max: 8 });
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        for (json, expect) in [
            ("{}", "an object with a \"method\""),
            (r#"{"method": "medusa"}"#, "unknown variant `medusa`"),
            (r#"{"method": "draft_model"}"#, "a draft_model with a \"model\""),
            (r#"{"method": "tree"}"#, "a tree with a \"model\""),
            (r#"{"method": "tree", "model": "tiny", "tree_width": 1}"#, "tree_width in 2..=8"),
            (r#"{"method": "ngram", "k": 3}"#, "unknown field `k`"),
            (r#"{"method": "ngram", "num_speculative_tokens": 0}"#, "num_speculative_tokens in 1..=64"),
            (r#"{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}"#, "prompt_lookup_max"),
            (r#"{"method": "suffix", "suffix_decoding_max_tree_depth": 1}"#, "max_tree_depth in 2..=1024"),
            (r#"{"method": "suffix", "suffix_decoding_min_token_prob": 2}"#, "min_token_prob in [0, 1]"),
            (r#"{"method": "ngram", "draft_tensor_parallel_size": 2}"#, "draft_tensor_parallel_size 1"),
        ] {
            let error = settings(json).expect_err(json);
            assert!(error.contains(expect), "{json}: {error}");
        }
    }
}
