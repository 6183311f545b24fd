//! What is asked of a continuation: the values that are given, over those that the model's makers recommend.

use baton_core::{SamplingParams, StructuredOutput};
use baton_grammar::closed_schema;

/// Tokens of an answer, unless said otherwise.
const DEFAULT_MAX_TOKENS: u32 = 512;

/// How to continue. What is not set is as the model's makers recommend.
///
/// ```
/// use baton::Params;
///
/// let params = Params::new().max_tokens(64).temperature(0.0).stop("\n\n");
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Params {
    max_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<u64>,
    n: Option<u32>,
    stop: Vec<String>,
    structured: Option<StructuredOutput>,
}

impl Params {
    /// The model's own.
    pub fn new() -> Self {
        Self::default()
    }

    /// End the output after this many tokens (default: 512).
    #[must_use]
    pub fn max_tokens(self, max_tokens: u32) -> Self {
        Self { max_tokens: Some(max_tokens), ..self }
    }

    /// 0 takes the most likely token, more draws more freely.
    #[must_use]
    pub fn temperature(self, temperature: f32) -> Self {
        Self { temperature: Some(temperature), ..self }
    }

    /// Keep the smallest set of tokens whose probabilities reach this sum.
    #[must_use]
    pub fn top_p(self, top_p: f32) -> Self {
        Self { top_p: Some(top_p), ..self }
    }

    /// Keep the k most likely tokens; 0 keeps all.
    #[must_use]
    pub fn top_k(self, top_k: u32) -> Self {
        Self { top_k: Some(top_k), ..self }
    }

    /// Drop tokens less likely than this fraction of the most likely one.
    #[must_use]
    pub fn min_p(self, min_p: f32) -> Self {
        Self { min_p: Some(min_p), ..self }
    }

    /// Divide the logits of tokens seen in prompt or output; 1 is off.
    #[must_use]
    pub fn repetition_penalty(self, penalty: f32) -> Self {
        Self { repetition_penalty: Some(penalty), ..self }
    }

    /// The same seed gives the same output; without one it is random.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// How many continuations of each prompt.
    #[must_use]
    pub fn n(self, n: u32) -> Self {
        Self { n: Some(n), ..self }
    }

    /// End the output where this text appears. May be called several times.
    #[must_use]
    pub fn stop(mut self, text: impl Into<String>) -> Self {
        self.stop.push(text.into());
        self
    }

    /// The output is JSON that is valid for this schema.
    #[must_use]
    pub fn json_schema(self, schema: &str) -> Self {
        self.structured(StructuredOutput::Json(closed_schema(schema)))
    }

    /// The whole output matches this regular expression.
    #[must_use]
    pub fn regex(self, regex: impl Into<String>) -> Self {
        self.structured(StructuredOutput::Regex(regex.into()))
    }

    /// The output is one of these texts.
    #[must_use]
    pub fn choice<T: Into<String>>(self, texts: impl IntoIterator<Item = T>) -> Self {
        self.structured(StructuredOutput::Choice(texts.into_iter().map(Into::into).collect()))
    }

    /// The output has this shape.
    #[must_use]
    pub fn structured(self, shape: StructuredOutput) -> Self {
        Self { structured: Some(shape), ..self }
    }

    pub(crate) fn resolve(&self, defaults: SamplingParams) -> SamplingParams {
        SamplingParams {
            max_tokens: Some(self.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)),
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            seed: self.seed,
            n: self.n.unwrap_or(1),
            stop: self.stop.clone(),
            structured_outputs: self.structured.clone(),
            ..defaults
        }
    }

    /// Whether an answer may end before its tokens are used up only because they are.
    pub(crate) fn asks_for_length(&self) -> bool {
        self.max_tokens.is_some()
    }
}
