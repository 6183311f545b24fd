//! `POST /v1/embeddings`: the vector of each input. An encoder pools and normalises as its files say; of a decoder it is the hidden
//! state after the last token, through the last norm, as a unit vector.
//!
//! A decoder was trained to continue text, not to compare texts: its vectors tell topics apart, and a model that was trained for
//! embeddings does so better.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use baton_core::{SamplingParams, TokenId};

use crate::auth::Tenant;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::generation::{Generation, GenerationRequest};
use crate::ids;
use crate::params::{MAX_SALT_BYTES, truncate_prompt};
use crate::prepare;
use crate::state::App;
use crate::types::common::SamplingFields;
use crate::types::embeddings::{
    Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage, EmbeddingVector, EncodingFormat,
};

use super::{json, parsed};

pub async fn create(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let in_flight = app.admit()?;
    let body = JsonBody::read_for_engine(&app, request).await?;
    let asked: EmbeddingRequest = parsed(&app, body, JsonBody::parse).await?;
    let app = app.for_model(asked.model.as_deref()).await?;
    let limit = app.config.max_choices;
    let missing = || ApiError::invalid_field("input", "input is missing: give a text or token ids");
    let inputs = asked.input.ok_or_else(missing)?.0;
    if inputs.is_empty() || inputs.len() > limit {
        let message = format!("input must hold 1 to {limit} inputs, got {}", inputs.len());
        return Err(ApiError::invalid_field("input", message));
    }
    app.check_queue(inputs.len())?;
    let hidden_size = app.model.hidden_size;
    let dimensions = asked.dimensions.unwrap_or(hidden_size);
    if dimensions == 0 || dimensions > hidden_size {
        let message = format!("dimensions must be 1 to {hidden_size}, the model's hidden size");
        return Err(ApiError::invalid_field("dimensions", message));
    }
    if asked.cache_salt.as_ref().is_some_and(|salt| salt.is_empty() || salt.len() > MAX_SALT_BYTES) {
        let message = format!("cache_salt must be a text of 1 to {MAX_SALT_BYTES} bytes");
        return Err(ApiError::invalid_field("cache_salt", message));
    }
    let own_pooling = app.model.encoder.as_ref().map_or("last", |encoder| encoder.pooling.as_str());
    if let Some(pooling) =
        asked.pooling.as_deref().filter(|pooling| !pooling.eq_ignore_ascii_case(own_pooling))
    {
        let message = format!("pooling must be {own_pooling:?}, the model's own, got {pooling:?}");
        return Err(ApiError::invalid_field("pooling", message));
    }
    if app.model.encoder.as_ref().is_some_and(|encoder| encoder.scores_pairs) {
        let message = "this model scores pairs of texts and embeds none: use /v1/rerank or /score";
        return Err(ApiError::invalid(message));
    }
    let truncation =
        SamplingFields { truncate_prompt_tokens: asked.truncate_prompt_tokens, ..SamplingFields::default() };
    let add_special = asked.add_special_tokens.unwrap_or(true);
    let prompts = prepare::blocking(&app, move |app| {
        let tokens = |input| {
            let mut tokens = prepare::prompt_tokens(app, input, add_special, "input")?;
            truncate_prompt(app, &truncation, None, &mut tokens)?;
            Ok(tokens)
        };
        inputs.into_iter().map(tokens).collect()
    });
    let generation_request = pooling_request(prompts.await?, asked.cache_salt, asked.priority);
    let mut generation = Generation::start(&app, in_flight, &tenant, generation_request).await?;
    generation.collect().await?;
    let format = asked.encoding_format.unwrap_or_default();
    let own_normalize = app.model.encoder.as_ref().is_none_or(|encoder| encoder.normalize);
    let normalize = asked.normalize.unwrap_or(own_normalize);
    let data = (0..generation.num_choices()).map(|index| Embedding {
        object: "embedding",
        index,
        embedding: encode(&shortened(&generation.part_of(index).pooled, dimensions, normalize), format),
    });
    let prompt_tokens = generation.usage().prompt_tokens;
    Ok(json(&EmbeddingResponse {
        id: format!("embd-{}", ids::unique()),
        object: "list",
        created: ids::unix_seconds(),
        model: app.model.name().to_owned(),
        data: data.collect(),
        usage: EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens },
    }))
}

/// A request for the vectors of prompts.
pub(super) fn pooling_request(
    prompts: Vec<Vec<TokenId>>,
    cache_salt: Option<String>,
    priority: Option<i32>,
) -> GenerationRequest {
    GenerationRequest {
        prompts,
        // One token is drawn and thrown away: a request without any would need a way of its own through the engine.
        params: SamplingParams { ignore_eos: true, pooling: true, ..SamplingParams::greedy(1) },
        constraint: None,
        skip_special_tokens: true,
        cache_salt,
        kv_transfer: None,
        priority: priority.unwrap_or(0),
        answer_formats: Vec::new(),
        clamps_length: false,
        prediction: Arc::from([]),
    }
}

/// The first numbers of a vector, made as long as 1 unless they are wanted as they are.
fn shortened(vector: &[f32], dimensions: usize, normalize: bool) -> Vec<f32> {
    let kept = &vector[..dimensions.min(vector.len())];
    if !normalize {
        return kept.to_vec();
    }
    let length = kept.iter().map(|x| x * x).sum::<f32>().sqrt();
    let scale = if length > 0.0 && length.is_finite() { length.recip() } else { 0.0 };
    kept.iter().map(|x| x * scale).collect()
}

pub(super) fn encode(vector: &[f32], format: EncodingFormat) -> EmbeddingVector {
    match format {
        EncodingFormat::Float => EmbeddingVector::Float(vector.to_vec()),
        EncodingFormat::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            EmbeddingVector::Base64(base64(&bytes))
        }
    }
}

pub(super) fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let three = [group[0], group.get(1).copied().unwrap_or(0), group.get(2).copied().unwrap_or(0)];
        let bits = u32::from_be_bytes([0, three[0], three[1], three[2]]);
        for letter in 0..4 {
            let shown = letter <= group.len();
            let index = (bits >> (18 - 6 * letter)) & 63;
            text.push(if shown { LETTERS[index as usize] as char } else { '=' });
        }
    }
    text
}

/// The bytes of a field in base64, with or without padding.
pub(super) fn from_base64(param: &str, text: &str) -> Result<Vec<u8>, ApiError> {
    let digits = text.trim_end_matches('=').as_bytes();
    let wrong = |what: String| ApiError::invalid_field(param, format!("{param} is not base64: {what}"));
    if digits.len() % 4 == 1 || text.len() - digits.len() > 2 {
        return Err(wrong(format!("{} letters cannot be", text.len())));
    }
    let mut bytes = Vec::with_capacity(digits.len() / 4 * 3 + 2);
    for (group, letters) in digits.chunks(4).enumerate() {
        let mut bits = 0u32;
        for (place, &letter) in letters.iter().enumerate() {
            let value = match letter {
                b'A'..=b'Z' => letter - b'A',
                b'a'..=b'z' => letter - b'a' + 26,
                b'0'..=b'9' => letter - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return Err(wrong(format!("byte {} is none of its letters", 4 * group + place))),
            };
            bits |= u32::from(value) << (18 - 6 * place);
        }
        bytes.extend_from_slice(&bits.to_be_bytes()[1..letters.len()]);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read_as_it_is_written() {
        for len in 0..20u8 {
            let bytes: Vec<u8> = (0..len).map(|i| i.wrapping_mul(37).wrapping_add(200)).collect();
            let text = base64(&bytes);
            assert_eq!(from_base64("x", &text).unwrap(), bytes);
            assert_eq!(from_base64("x", text.trim_end_matches('=')).unwrap(), bytes);
        }
        for wrong in ["A", "AAAAA", "AA-A", "AA A", "A===", "===="] {
            assert!(from_base64("x", wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[255, 239]), "/+8=");
    }

    #[test]
    fn vectors_have_the_length_1() {
        assert_eq!(shortened(&[3.0, 4.0, 12.0], 2, true), [0.6, 0.8]);
        assert_eq!(shortened(&[3.0, 4.0, 12.0], 2, false), [3.0, 4.0]);
        assert_eq!(shortened(&[0.0, 0.0], 2, true), [0.0, 0.0]);
    }
}
