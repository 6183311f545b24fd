//! `generation_config.json`: how the makers of a model want it sampled, used where a request does not say.

use baton_core::TokenId;
use serde::Deserialize;

use super::limits::config_error;
use super::raw::OneOrMany;
use crate::ModelError;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Ends of sequence beside those of the model's configuration.
    pub eos_token_ids: Vec<TokenId>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawGeneration {
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
    eos_token_id: Option<OneOrMany>,
}

impl GenerationDefaults {
    pub fn from_json(bytes: &[u8]) -> Result<Self, ModelError> {
        let raw: RawGeneration = serde_json::from_slice(bytes)
            .map_err(|cause| config_error(format!("generation_config.json is not usable: {cause}")))?;
        let bounded = |name: &str, value: Option<f64>, least: f64, most: f64| match value {
            Some(value) if !(least..=most).contains(&value) => Err(config_error(format!(
                "generation_config.json has the {name} {value}; it must be {least} to {most}"
            ))),
            other => Ok(other.map(|value| value as f32)),
        };
        Ok(Self {
            temperature: bounded("temperature", raw.temperature, 0.0, 100.0)?,
            top_p: bounded("top_p", raw.top_p, 0.0, 1.0)?,
            // Zero and negative numbers switch it off.
            top_k: raw.top_k.and_then(|top_k| u32::try_from(top_k).ok()).filter(|&top_k| top_k > 0),
            min_p: bounded("min_p", raw.min_p, 0.0, 1.0)?,
            repetition_penalty: bounded("repetition_penalty", raw.repetition_penalty, 1e-3, 1e3)?,
            eos_token_ids: raw
                .eos_token_id
                .iter()
                .flat_map(OneOrMany::as_slice)
                .filter_map(|&id| TokenId::try_from(id).ok())
                .collect(),
        })
    }
}
