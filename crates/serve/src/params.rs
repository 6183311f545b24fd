//! From the fields of a request to [`SamplingParams`]: the request's own, else the model's, else the API's default.

use std::collections::BTreeMap;

use baton_core::{BeamParams, SamplingParams, TokenFilter, TokenId};

use crate::error::ApiError;
use crate::prepare;
use crate::state::App;
use crate::types::common::{BiasedToken, LogitBias, SamplingFields};
use crate::types::prompt::Prompt;

/// Texts that may end an answer; OpenAI allows 4, vLLM any number.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;
const MAX_BIASES: usize = 1024;
const MAX_BIAS_BYTES: usize = 64;
/// Every sampled token is compared with all of them, on the engine's thread.
const MAX_STOP_TOKENS: usize = 1024;
/// Every one is compared with the last tokens at each step.
const MAX_BAD_WORDS: usize = 256;
const MAX_BAD_WORD_BYTES: usize = 256;
pub const MAX_SALT_BYTES: usize = 1024;

/// What the APIs name differently.
#[derive(Clone, Copy, Debug, Default)]
pub struct ApiFields {
    pub max_tokens: Option<u32>,
    pub logprobs: Option<u32>,
    pub best_of: Option<u32>,
    /// A map of biases may name texts, as with llama.cpp; elsewhere it has token ids.
    pub biases_texts: bool,
}

/// How the answer is to be shown, besides how it is made.
#[derive(Clone, Copy, Debug)]
pub struct Show {
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub token_ids: bool,
    pub tokens_as_ids: bool,
    pub skip_special_tokens: bool,
}

impl Show {
    pub fn new(app: &App, fields: &SamplingFields) -> Result<Self, ApiError> {
        let stream = fields.stream.unwrap_or(false);
        if !stream && fields.stream_options.is_some() {
            let message = "stream_options is only for streams: set stream to true or leave it out";
            return Err(ApiError::invalid_field("stream_options", message));
        }
        let options = fields.stream_options.unwrap_or_default();
        let include_usage = options.include_usage.unwrap_or(false) || app.config.force_include_usage;
        Ok(Self {
            stream,
            include_usage,
            continuous_usage: include_usage && options.continuous_usage_stats.unwrap_or(false),
            token_ids: fields.return_token_ids.unwrap_or(false),
            tokens_as_ids: fields.return_tokens_as_token_ids.unwrap_or(app.config.tokens_as_ids),
            skip_special_tokens: fields.skip_special_tokens.unwrap_or(true),
        })
    }
}

pub fn sampling_params(
    app: &App,
    fields: &SamplingFields,
    api: ApiFields,
) -> Result<SamplingParams, ApiError> {
    let defaults = app.model.text.default_sampling.clone();
    let top_k = match fields.top_k {
        None => defaults.top_k,
        Some(0 | -1) => 0,
        Some(top_k) => u32::try_from(top_k)
            .map_err(|_| ApiError::invalid_field("top_k", "top_k must be -1, 0 or a positive number"))?,
    };
    let stop = fields.stop.clone().map_or_else(Vec::new, crate::types::common::Stop::into_list);
    if stop.len() > MAX_STOPS || stop.iter().any(|text| text.len() > MAX_STOP_BYTES) {
        let message = format!("stop may hold {MAX_STOPS} texts of {MAX_STOP_BYTES} bytes each");
        return Err(ApiError::invalid_field("stop", message));
    }
    for (name, value) in [("logprobs", api.logprobs), ("prompt_logprobs", fields.prompt_logprobs)] {
        let limit = app.config.max_logprobs;
        if value.is_some_and(|value| value > limit) {
            return Err(ApiError::invalid_field(
                name,
                format!("{name} must be at most {limit} (--max-logprobs)"),
            ));
        }
    }
    if fields.stop_token_ids.as_ref().is_some_and(|tokens| tokens.len() > MAX_STOP_TOKENS) {
        let message = format!("stop_token_ids may hold {MAX_STOP_TOKENS} tokens");
        return Err(ApiError::invalid_field("stop_token_ids", message));
    }
    if fields.cache_salt.as_ref().is_some_and(|salt| salt.is_empty() || salt.len() > MAX_SALT_BYTES) {
        let message = format!("cache_salt must be a text of 1 to {MAX_SALT_BYTES} bytes");
        return Err(ApiError::invalid_field("cache_salt", message));
    }
    let beam = fields.use_beam_search.unwrap_or(false).then(|| BeamParams {
        length_penalty: fields.length_penalty.unwrap_or(BeamParams::default().length_penalty),
        early_stopping: fields.early_stopping.unwrap_or(false),
    });
    let params = SamplingParams {
        temperature: fields.temperature.unwrap_or(defaults.temperature),
        top_k,
        top_p: fields.top_p.unwrap_or(defaults.top_p),
        min_p: fields.min_p.unwrap_or(defaults.min_p),
        repetition_penalty: repetition_penalty(fields)?.unwrap_or(defaults.repetition_penalty),
        presence_penalty: fields.presence_penalty.unwrap_or(defaults.presence_penalty),
        frequency_penalty: fields.frequency_penalty.unwrap_or(defaults.frequency_penalty),
        logit_bias: logit_bias(app, fields, api.biases_texts)?,
        // Any 64 bits are a seed, whatever their sign.
        seed: fields.seed.map(|seed| seed as u64),
        stop,
        include_stop_str_in_output: fields.include_stop_str_in_output.unwrap_or(false),
        stop_token_ids: fields.stop_token_ids.clone().unwrap_or_default(),
        min_tokens: fields.min_tokens.unwrap_or(0),
        max_tokens: api.max_tokens,
        ignore_eos: fields.ignore_eos.unwrap_or(false),
        logprobs: api.logprobs,
        prompt_logprobs: fields.prompt_logprobs,
        n: fields.n.unwrap_or(1),
        best_of: api.best_of,
        beam,
        // Read and compiled apart, by `structured`.
        structured_outputs: None,
        token_filter: token_filter(app, fields)?,
        pooling: false,
        speculative_tokens: fields.speculative_tokens,
    };
    params.validate(app.model.vocab_size as u32)?;
    if !params.stop.is_empty() && app.model.text.tokenizer.is_none() {
        return Err(ApiError::invalid_field("stop", "this model has no tokenizer: use stop_token_ids"));
    }
    let streams = fields.stream.unwrap_or(false);
    if streams && params.selects_at_end() {
        let param = if params.beam.is_some() { "use_beam_search" } else { "best_of" };
        let message = format!("{param} chooses at the end, so it cannot be streamed: set stream to false");
        return Err(ApiError::invalid_field(param, message));
    }
    Ok(params)
}

/// Under its two names.
fn repetition_penalty(fields: &SamplingFields) -> Result<Option<f32>, ApiError> {
    if let (Some(one), Some(other)) = (fields.repetition_penalty, fields.repeat_penalty)
        && one != other
    {
        let message = "repeat_penalty and repetition_penalty are the same: give one of them";
        return Err(ApiError::invalid_field("repeat_penalty", message));
    }
    let penalty = fields.repetition_penalty.or(fields.repeat_penalty);
    let penalises = penalty.is_some_and(|penalty| penalty != 1.0);
    if penalises && fields.repeat_last_n.is_some_and(|last| last != -1) {
        let message = "repeat_last_n: the penalty looks at all tokens: set it to -1 or leave it out";
        return Err(ApiError::invalid_field("repeat_last_n", message));
    }
    Ok(penalty)
}

/// `allowed_token_ids` and `bad_words`.
fn token_filter(app: &App, fields: &SamplingFields) -> Result<Option<TokenFilter>, ApiError> {
    let words = fields.bad_words.as_deref().unwrap_or_default();
    if words.is_empty() && fields.allowed_token_ids.is_none() {
        return Ok(None);
    }
    if words.len() > MAX_BAD_WORDS
        || words.iter().any(|word| word.trim().is_empty() || word.len() > MAX_BAD_WORD_BYTES)
    {
        let message = format!("bad_words may hold {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_BYTES} bytes");
        return Err(ApiError::invalid_field("bad_words", message));
    }
    if !words.is_empty() && app.model.text.tokenizer.is_none() {
        return Err(ApiError::invalid_field("bad_words", "bad_words: this model has no tokenizer"));
    }
    Ok(Some(TokenFilter { allowed: fields.allowed_token_ids.clone(), bad_words: words.to_vec() }))
}

/// Keeps the end of a prompt, as `truncate_prompt_tokens` asks.
pub fn truncate_prompt(
    app: &App,
    fields: &SamplingFields,
    max_tokens: Option<u32>,
    tokens: &mut Vec<TokenId>,
) -> Result<(), ApiError> {
    let limit = app.model.max_model_len;
    let most = match fields.truncate_prompt_tokens {
        None => return Ok(()),
        Some(-1) => limit.saturating_sub(max_tokens.unwrap_or(1) as usize).max(1),
        Some(most) => {
            usize::try_from(most).ok().filter(|most| (1..=limit).contains(most)).ok_or_else(|| {
                let message = format!("truncate_prompt_tokens must be -1 or in 1 to {limit}, got {most}");
                ApiError::invalid_field("truncate_prompt_tokens", message)
            })?
        }
    };
    tokens.drain(..tokens.len().saturating_sub(most));
    Ok(())
}

fn logit_bias(
    app: &App,
    fields: &SamplingFields,
    biases_texts: bool,
) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let wrong = |message: String| ApiError::invalid_field("logit_bias", message);
    let too_many = || wrong(format!("logit_bias may hold {MAX_BIASES} tokens"));
    let token_of = |key: &String| match key.trim().parse() {
        Ok(id) => Ok(BiasedToken::Id(id)),
        Err(_) if biases_texts => Ok(BiasedToken::Text(key.clone())),
        Err(_) => Err(wrong(format!("logit_bias: {key:?} is not a token id"))),
    };
    let pairs: Vec<(BiasedToken, f32)> = match &fields.logit_bias {
        None => return Ok(Vec::new()),
        Some(LogitBias::Map(map)) if map.len() > MAX_BIASES => return Err(too_many()),
        Some(LogitBias::Map(map)) => {
            map.iter().map(|(key, &bias)| Ok((token_of(key)?, bias))).collect::<Result<_, ApiError>>()?
        }
        Some(LogitBias::Pairs(pairs)) if pairs.len() > MAX_BIASES => return Err(too_many()),
        Some(LogitBias::Pairs(pairs)) => pairs.clone(),
    };
    let mut by_token = BTreeMap::new();
    for (token, bias) in pairs {
        match token {
            BiasedToken::Id(id) => {
                by_token.insert(id, bias);
            }
            BiasedToken::Text(text) if text.len() > MAX_BIAS_BYTES => {
                return Err(wrong(format!("logit_bias may hold texts of {MAX_BIAS_BYTES} bytes")));
            }
            // Every token of the text.
            BiasedToken::Text(text) => {
                let ids = prepare::prompt_tokens(app, Prompt::Text(text), false, "logit_bias")?;
                by_token.extend(ids.into_iter().map(|id| (id, bias)));
            }
        }
        if by_token.len() > MAX_BIASES {
            return Err(too_many());
        }
    }
    Ok(by_token.into_iter().collect())
}

/// How many tokens may follow the prompt: as asked, and never past the model's limit. With `clamps`, asking for more than
/// there is room for asks for all of it.
pub fn limit_tokens(
    app: &App,
    params: &mut SamplingParams,
    num_prompt_tokens: usize,
    clamps: bool,
) -> Result<(), ApiError> {
    let limit = app.model.max_model_len;
    if num_prompt_tokens >= limit {
        let (tokens, limit) = (grouped(num_prompt_tokens), grouped(limit));
        if params.pooling {
            let message =
                format!("the {tokens}-token input is too large: an input has fewer than {limit} tokens");
            return Err(ApiError::too_long("input", message));
        }
        let message = format!("the {tokens}-token prompt leaves no room for a reply (limit {limit})");
        return Err(ApiError::too_long("prompt", message));
    }
    let room = limit - num_prompt_tokens;
    match params.max_tokens {
        None => params.max_tokens = Some(room as u32),
        Some(max_tokens) if clamps => params.max_tokens = Some(max_tokens.min(room as u32)),
        Some(max_tokens) if max_tokens as usize > room => {
            let message = format!(
                "the {}-token prompt and max_tokens {} are together more than the limit of {} tokens: lower max_tokens \
                 to {room} or shorten the prompt",
                grouped(num_prompt_tokens),
                grouped(max_tokens as usize),
                grouped(limit)
            );
            return Err(ApiError::too_long("max_tokens", message));
        }
        Some(_) => {}
    }
    Ok(())
}

/// Digits in groups of three: `8,192`.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
