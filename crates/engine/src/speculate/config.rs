//! `--speculative-config`: vLLM's JSON, read as it is written, and what it means.

use baton_core::MAX_SPECULATIVE_TOKENS;
use serde::{Deserialize, Serialize};

use crate::EngineError;

const FLAG: &str = "--speculative-config";
const DEFAULT_LOOKUP_MIN: usize = 2;
const DEFAULT_LOOKUP_MAX: usize = 5;
const DEFAULT_TOKENS: u32 = 5;

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
    /// Of `synthetic`: the chance that a guess is right where those before it are.
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
    Ngram { min: usize, max: usize },
    Suffix(SuffixOptions),
    DraftModel,
    Synthetic { acceptance: f64, seed: u64 },
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
            (None, None) => Err(wrong("an object with a \"method\" (ngram, suffix, draft_model)", &"none")),
        }
    }

    /// The path or name of the model that drafts, where one does.
    pub fn draft_model(&self) -> Option<&str> {
        let drafts = self.method().is_ok_and(|method| method == SpeculativeMethod::DraftModel);
        self.model.as_deref().filter(|_| drafts)
    }

    /// The most guesses that a step checks of a sequence whose request says nothing.
    pub fn num_tokens(&self) -> Result<usize, EngineError> {
        let default = match self.method()? {
            SpeculativeMethod::Suffix => self.suffix().max_depth.min(MAX_SPECULATIVE_TOKENS as usize) as u32,
            SpeculativeMethod::Ngram | SpeculativeMethod::DraftModel | SpeculativeMethod::Synthetic => {
                DEFAULT_TOKENS
            }
        };
        let count = self.num_speculative_tokens.unwrap_or(default);
        if !(1..=MAX_SPECULATIVE_TOKENS).contains(&count) {
            return Err(wrong(format!("num_speculative_tokens in 1..={MAX_SPECULATIVE_TOKENS}"), &count));
        }
        Ok(count as usize)
    }

    fn suffix(&self) -> SuffixOptions {
        SuffixOptions {
            max_depth: self.suffix_decoding_max_tree_depth.unwrap_or(24),
            max_cached_requests: self.suffix_decoding_max_cached_requests.unwrap_or(10_000),
            max_factor: self.suffix_decoding_max_spec_factor.unwrap_or(1.0),
            min_likelihood: self.suffix_decoding_min_token_prob.unwrap_or(0.1),
        }
    }

    pub(crate) fn settings(&self) -> Result<Settings, EngineError> {
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
            SpeculativeMethod::DraftModel => {
                if self.model.as_deref().is_none_or(str::is_empty) {
                    return Err(wrong("a draft_model with a \"model\": its path or name", &"none"));
                }
                Ok(Method::DraftModel)
            }
            SpeculativeMethod::Synthetic => {
                let acceptance = self.acceptance.unwrap_or(0.8);
                if !(0.0..=1.0).contains(&acceptance) {
                    return Err(wrong("acceptance in [0, 1]", &acceptance));
                }
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
            assert_eq!((draft.method, draft.num_tokens), (Method::DraftModel, 3));
        }
        let longer = settings(r#"{"method": "ngram", "prompt_lookup_min": 8}"#).unwrap();
        assert_eq!(longer.method, Method::Ngram { min: 8, max: 8 });
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        for (json, expect) in [
            ("{}", "an object with a \"method\""),
            (r#"{"method": "medusa"}"#, "unknown variant `medusa`"),
            (r#"{"method": "draft_model"}"#, "a draft_model with a \"model\""),
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
