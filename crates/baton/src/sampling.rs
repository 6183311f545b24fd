//! How a model is sampled when nobody says: as its makers recommend.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use baton_core::SamplingParams;
use baton_hub::{Origin, catalogue};
use baton_model::{GenerationDefaults, ModelFiles};

use crate::Error;

/// Where sampling defaults come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GenerationConfig {
    /// The model's `generation_config.json` or GGUF metadata, else the catalogue.
    #[default]
    Auto,
    /// Neutral ones: temperature 1, nothing cut off.
    Neutral,
    /// This `generation_config.json`, or that of this directory.
    Path(PathBuf),
}

impl FromStr for GenerationConfig {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => Self::Auto,
            "vllm" | "neutral" => Self::Neutral,
            path => Self::Path(path.into()),
        })
    }
}

/// What a request that says nothing gets. `None` leaves a value as the API defines it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// The values themselves.
    pub values: GenerationDefaults,
    /// Where they come from, for people; empty where there are none.
    pub source: String,
}

impl SamplingDefaults {
    /// Those of a model that was opened.
    pub fn of(
        wanted: &GenerationConfig,
        files: &ModelFiles,
        name: &str,
        origin: &Origin,
    ) -> Result<Self, Error> {
        let own = files.generation_defaults();
        match wanted {
            GenerationConfig::Neutral => Ok(Self::default()),
            GenerationConfig::Path(path) => {
                let path = if path.is_dir() { path.join("generation_config.json") } else { path.clone() };
                let bytes = std::fs::read(&path).map_err(|cause| {
                    Error::usage(
                        format!("--generation-config: cannot read {}: {cause}", path.display()),
                        "give auto, vllm, or the path of a generation_config.json",
                    )
                })?;
                Ok(Self {
                    values: GenerationDefaults::from_json(&bytes)?,
                    source: path.display().to_string(),
                })
            }
            GenerationConfig::Auto if own.samples() => {
                let source = if files.gguf().is_some() { "the GGUF file" } else { "generation_config.json" };
                Ok(Self { values: own.clone(), source: source.to_owned() })
            }
            GenerationConfig::Auto => {
                let known = match origin {
                    Origin::Catalogue(entry) => Some(entry.sampling),
                    Origin::Path | Origin::Hub(_) => catalogue::sampling_for(name),
                };
                Ok(known.map_or_else(Self::default, |known| Self {
                    values: GenerationDefaults {
                        temperature: known.temperature,
                        top_p: known.top_p,
                        top_k: known.top_k,
                        min_p: known.min_p,
                        repetition_penalty: known.repetition_penalty,
                        eos_token_ids: Vec::new(),
                    },
                    source: "the catalogue".to_owned(),
                }))
            }
        }
    }

    /// The same with some values given by hand, as JSON with the names of `generation_config.json`.
    pub fn overridden(self, json: &str) -> Result<Self, Error> {
        let new = GenerationDefaults::from_json(json.as_bytes())?;
        let source = match self.source.as_str() {
            "" => "--override-generation-config".to_owned(),
            source => format!("{source} and --override-generation-config"),
        };
        Ok(Self { values: new.or(&self.values), source })
    }

    /// These values over others.
    pub fn over(&self, params: SamplingParams) -> SamplingParams {
        let values = &self.values;
        SamplingParams {
            temperature: values.temperature.unwrap_or(params.temperature),
            top_p: values.top_p.unwrap_or(params.top_p),
            top_k: values.top_k.unwrap_or(params.top_k),
            min_p: values.min_p.unwrap_or(params.min_p),
            repetition_penalty: values.repetition_penalty.unwrap_or(params.repetition_penalty),
            ..params
        }
    }
}

impl fmt::Display for SamplingDefaults {
    /// `temperature 0.2, top_p 0.9 (from the catalogue)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = &self.values;
        let shown: Vec<String> = [
            values.temperature.map(|value| format!("temperature {value}")),
            values.top_p.map(|value| format!("top_p {value}")),
            values.top_k.map(|value| format!("top_k {value}")),
            values.min_p.map(|value| format!("min_p {value}")),
            values.repetition_penalty.map(|value| format!("repetition_penalty {value}")),
        ]
        .into_iter()
        .flatten()
        .collect();
        if shown.is_empty() {
            return f.write_str("neutral");
        }
        write!(f, "{} (from {})", shown.join(", "), self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_given_by_hand_win() {
        let values =
            GenerationDefaults { temperature: Some(0.2), top_p: Some(0.9), ..GenerationDefaults::default() };
        let defaults = SamplingDefaults { values, source: "the catalogue".to_owned() };
        assert_eq!(defaults.to_string(), "temperature 0.2, top_p 0.9 (from the catalogue)");
        let defaults = defaults.overridden("{\"temperature\": 0.5}").unwrap();
        let params = defaults.over(SamplingParams::default());
        assert_eq!((params.temperature, params.top_p, params.top_k), (0.5, 0.9, 0));
        assert!(defaults.overridden("{\"temperature\": -1}").is_err());
        assert_eq!(SamplingDefaults::default().to_string(), "neutral");
        assert_eq!("vllm".parse(), Ok(GenerationConfig::Neutral));
    }
}
