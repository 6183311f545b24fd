//! Sampling parameters with vLLM's names and defaults, and their validation.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{StructuredOutput, TokenFilter, TokenId};

/// The most sequences one request may own at a time (`n`, `best_of`, beam width).
pub const MAX_SEQUENCES_PER_REQUEST: u32 = 128;
/// The most alternatives a position may report (`logprobs`, `prompt_logprobs`).
pub const MAX_LOGPROBS: u32 = 128;

/// The most guesses of a sequence's next tokens that one step may check (`speculative_tokens`).
pub const MAX_SPECULATIVE_TOKENS: u32 = 64;

/// How to continue a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this fraction of the most likely one; 0 drops none.
    pub min_p: f32,
    /// Divides (positive) or multiplies (negative) the logits of tokens seen in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that occur in the output; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted once for each time a token occurs in the output; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens, in the order given.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The same seed gives the same tokens; without one the engine draws one.
    pub seed: Option<u64>,
    /// Texts that end the output when they appear. Found by the text layer, which aborts the request.
    pub stop: Vec<String>,
    /// Keep the stop text at the end of the output.
    pub include_stop_str_in_output: bool,
    /// Tokens that end the output, besides the model's own end tokens.
    pub stop_token_ids: Vec<TokenId>,
    /// Do not end the output before this many tokens.
    pub min_tokens: u32,
    /// End the output after this many tokens; without it, at the model's length limit.
    pub max_tokens: Option<u32>,
    /// Go on past the model's end tokens.
    pub ignore_eos: bool,
    /// Report the log-probability of each output token and of this many alternatives.
    pub logprobs: Option<u32>,
    /// The same for each prompt token but the first.
    pub prompt_logprobs: Option<u32>,
    /// How many continuations to return.
    pub n: u32,
    /// How many to sample; the `n` best by cumulative log-probability are returned at the end.
    pub best_of: Option<u32>,
    /// Beam search instead of sampling; its width is `n` unless `best_of` is larger.
    pub beam: Option<BeamParams>,
    /// The output must have this shape; tokens that would break it are never drawn.
    pub structured_outputs: Option<StructuredOutput>,
    /// Tokens that may or may not be drawn, whatever the shape.
    pub token_filter: Option<TokenFilter>,
    /// Also give the hidden state of the last prompt token, for embeddings.
    pub pooling: bool,
    /// The most guesses of the next tokens that a step checks; 0 is none, nothing is the engine's own number.
    pub speculative_tokens: Option<u32>,
}

/// Beam search, as transformers defines it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BeamParams {
    /// Score = cumulative log-probability / length ^ `length_penalty`.
    pub length_penalty: f32,
    /// Stop as soon as there are as many finished beams as the width.
    pub early_stopping: bool,
}

impl Default for BeamParams {
    fn default() -> Self {
        Self { length_penalty: 1.0, early_stopping: false }
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
            stop: Vec::new(),
            include_stop_str_in_output: false,
            stop_token_ids: Vec::new(),
            min_tokens: 0,
            max_tokens: Some(16),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            n: 1,
            best_of: None,
            beam: None,
            structured_outputs: None,
            token_filter: None,
            pooling: false,
            speculative_tokens: None,
        }
    }
}

/// A sampling parameter that cannot be used; the message says which and what is allowed.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{name} must be {allowed}, got {got}")]
pub struct ParamError {
    pub name: &'static str,
    pub allowed: String,
    pub got: String,
}

fn require(
    ok: bool,
    name: &'static str,
    allowed: &str,
    got: &dyn std::fmt::Display,
) -> Result<(), ParamError> {
    if ok { Ok(()) } else { Err(ParamError { name, allowed: allowed.to_owned(), got: got.to_string() }) }
}

impl SamplingParams {
    /// Greedy decoding of `max_tokens` tokens.
    pub fn greedy(max_tokens: u32) -> Self {
        Self { temperature: 0.0, max_tokens: Some(max_tokens), ..Self::default() }
    }

    /// How many sequences the request owns at its widest.
    pub fn num_sequences(&self) -> u32 {
        self.best_of.unwrap_or(self.n).max(self.n)
    }

    /// True where output is only known at the end, so that nothing can be streamed.
    pub fn selects_at_end(&self) -> bool {
        self.beam.is_some() || self.num_sequences() > self.n
    }

    /// True where any penalty looks at the tokens so far.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// True where a compiled constraint says which tokens may be drawn.
    pub fn is_masked(&self) -> bool {
        self.structured_outputs.is_some() || self.token_filter.is_some()
    }

    /// Checks every field against its range and the model's vocabulary.
    pub fn validate(&self, vocab_size: u32) -> Result<(), ParamError> {
        let in_vocab = |token: TokenId| token < vocab_size;
        let below_vocab = format!("token ids below the vocabulary size {vocab_size}");
        require(
            self.temperature.is_finite() && self.temperature >= 0.0,
            "temperature",
            "a number >= 0",
            &self.temperature,
        )?;
        require(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", "in (0, 1]", &self.top_p)?;
        require((0.0..=1.0).contains(&self.min_p), "min_p", "in [0, 1]", &self.min_p)?;
        require(
            self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0,
            "repetition_penalty",
            "a number > 0",
            &self.repetition_penalty,
        )?;
        let penalty = -2.0..=2.0;
        require(
            penalty.contains(&self.presence_penalty),
            "presence_penalty",
            "in [-2, 2]",
            &self.presence_penalty,
        )?;
        require(
            penalty.contains(&self.frequency_penalty),
            "frequency_penalty",
            "in [-2, 2]",
            &self.frequency_penalty,
        )?;
        for &(token, bias) in &self.logit_bias {
            require(in_vocab(token), "logit_bias", &below_vocab, &token)?;
            require((-100.0..=100.0).contains(&bias), "logit_bias", "values in [-100, 100]", &bias)?;
        }
        for &token in &self.stop_token_ids {
            require(in_vocab(token), "stop_token_ids", &below_vocab, &token)?;
        }
        if let Some(filter) = &self.token_filter {
            let allowed = filter.allowed.as_deref().unwrap_or_default();
            require(
                filter.allowed.is_none() || !allowed.is_empty(),
                "allowed_token_ids",
                "a list of tokens",
                &"[]",
            )?;
            for &token in allowed {
                require(in_vocab(token), "allowed_token_ids", &below_vocab, &token)?;
            }
        }
        require(!self.stop.iter().any(String::is_empty), "stop", "non-empty strings", &"\"\"")?;
        if let Some(max_tokens) = self.max_tokens {
            require(max_tokens >= 1, "max_tokens", ">= 1", &max_tokens)?;
            require(
                self.min_tokens <= max_tokens,
                "min_tokens",
                &format!("<= max_tokens ({max_tokens})"),
                &self.min_tokens,
            )?;
        }
        for (name, value) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            let value = value.unwrap_or(0);
            require(value <= MAX_LOGPROBS, name, &format!("<= {MAX_LOGPROBS}"), &value)?;
        }
        let guesses = self.speculative_tokens.unwrap_or(0);
        let most = MAX_SPECULATIVE_TOKENS;
        require(guesses <= most, "speculative_tokens", &format!("in 0..={most}"), &guesses)?;
        let widest = format!("in 1..={MAX_SEQUENCES_PER_REQUEST}");
        require((1..=MAX_SEQUENCES_PER_REQUEST).contains(&self.n), "n", &widest, &self.n)?;
        if let Some(best_of) = self.best_of {
            require(
                (self.n..=MAX_SEQUENCES_PER_REQUEST).contains(&best_of),
                "best_of",
                &format!("in n..={MAX_SEQUENCES_PER_REQUEST} (n is {})", self.n),
                &best_of,
            )?;
        }
        if let Some(beam) = &self.beam {
            require(
                beam.length_penalty.is_finite(),
                "length_penalty",
                "a finite number",
                &beam.length_penalty,
            )?;
            // The beams are ranked by what the device says is most likely, before any mask.
            require(
                self.structured_outputs.is_none(),
                "structured_outputs",
                "left out with beam search",
                &"both",
            )?;
            require(self.token_filter.is_none(), "bad_words", "left out with beam search", &"both")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl FnOnce(&mut SamplingParams), expect: &str) {
        let mut params = SamplingParams::default();
        change(&mut params);
        assert_eq!(params.validate(100).expect_err("must be refused").to_string(), expect);
    }

    #[test]
    fn defaults_are_valid() {
        SamplingParams::default().validate(1).expect("defaults");
        SamplingParams::greedy(5).validate(1).expect("greedy");
    }

    #[test]
    fn every_wrong_value_is_named() {
        check(|p| p.temperature = -1.0, "temperature must be a number >= 0, got -1");
        check(|p| p.temperature = f32::NAN, "temperature must be a number >= 0, got NaN");
        check(|p| p.top_p = 0.0, "top_p must be in (0, 1], got 0");
        check(|p| p.min_p = 1.5, "min_p must be in [0, 1], got 1.5");
        check(|p| p.repetition_penalty = 0.0, "repetition_penalty must be a number > 0, got 0");
        check(|p| p.presence_penalty = 3.0, "presence_penalty must be in [-2, 2], got 3");
        check(|p| p.frequency_penalty = f32::NAN, "frequency_penalty must be in [-2, 2], got NaN");
        check(
            |p| p.logit_bias = vec![(100, 1.0)],
            "logit_bias must be token ids below the vocabulary size 100, got 100",
        );
        check(
            |p| p.stop_token_ids = vec![7, 100],
            "stop_token_ids must be token ids below the vocabulary size 100, got 100",
        );
        check(|p| p.stop = vec![String::new()], "stop must be non-empty strings, got \"\"");
        check(|p| p.max_tokens = Some(0), "max_tokens must be >= 1, got 0");
        check(|p| p.min_tokens = 17, "min_tokens must be <= max_tokens (16), got 17");
        check(|p| p.logprobs = Some(129), "logprobs must be <= 128, got 129");
        check(|p| p.speculative_tokens = Some(65), "speculative_tokens must be in 0..=64, got 65");
        check(|p| p.n = 0, "n must be in 1..=128, got 0");
        check(
            |p| {
                p.n = 3;
                p.best_of = Some(2);
            },
            "best_of must be in n..=128 (n is 3), got 2",
        );
        check(
            |p| {
                p.beam = Some(BeamParams::default());
                p.structured_outputs = Some(StructuredOutput::JsonObject);
            },
            "structured_outputs must be left out with beam search, got both",
        );
    }
}
