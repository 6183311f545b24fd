//! `generation_config.json` and GGUF's `general.sampling.*`: the sampling parameters that the authors of a model recommend,
//! used where a request has none.

use baton_core::TokenId;
use serde::Deserialize;

use super::limits::config_error;
use super::raw::OneOrMany;
use crate::ModelError;
use crate::gguf::{GgufMetadata, GgufValue};

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
    /// `general.sampling.*`, which newer GGUF files carry.
    pub fn from_gguf(metadata: &GgufMetadata) -> Result<Self, ModelError> {
        let number = |key: &str, least: f32, most: f32| -> Result<Option<f32>, ModelError> {
            let value = metadata.get_f32(key).map_err(config_error)?;
            match value {
                Some(value) if !(least..=most).contains(&value) => {
                    Err(config_error(format!("{key} is {value}; it must be {least} to {most}")))
                }
                other => Ok(other),
            }
        };
        let top_k = metadata.get("general.sampling.top_k").and_then(GgufValue::as_u64);
        Ok(Self {
            temperature: number("general.sampling.temp", 0.0, 100.0)?,
            top_p: number("general.sampling.top_p", 0.0, 1.0)?.filter(|&top_p| top_p > 0.0),
            top_k: top_k.and_then(|top_k| u32::try_from(top_k).ok()).filter(|&top_k| top_k > 0),
            min_p: number("general.sampling.min_p", 0.0, 1.0)?,
            repetition_penalty: number("general.sampling.penalty_repeat", 1e-3, 1e3)?,
            eos_token_ids: Vec::new(),
        })
    }

    /// True where anything is said of sampling.
    pub fn samples(&self) -> bool {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, eos_token_ids: _ } = self;
        temperature.or(*top_p).or(*min_p).or(*repetition_penalty).is_some() || top_k.is_some()
    }

    /// These values, and those of another where these say nothing.
    #[must_use]
    pub fn or(self, other: &Self) -> Self {
        Self {
            temperature: self.temperature.or(other.temperature),
            top_p: self.top_p.or(other.top_p),
            top_k: self.top_k.or(other.top_k),
            min_p: self.min_p.or(other.min_p),
            repetition_penalty: self.repetition_penalty.or(other.repetition_penalty),
            eos_token_ids: if self.eos_token_ids.is_empty() {
                other.eos_token_ids.clone()
            } else {
                self.eos_token_ids
            },
        }
    }

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
