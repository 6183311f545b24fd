//! The keys of a family's `config.json`, with llama's names beside its own.

use serde_json::{Map, Value};

use super::Family;
use crate::config::config_error;
use crate::{ModelConfig, ModelError};

/// What many families call llama's keys.
const COMMON: &[(&str, &str)] = &[
    ("n_embd", "hidden_size"),
    ("n_embed", "hidden_size"),
    ("d_model", "hidden_size"),
    ("n_inner", "intermediate_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_layers", "num_hidden_layers"),
    ("num_layers", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_heads", "num_attention_heads"),
    ("layer_norm_eps", "rms_norm_eps"),
    ("layer_norm_epsilon", "rms_norm_eps"),
    ("norm_epsilon", "rms_norm_eps"),
    ("norm_eps", "rms_norm_eps"),
    ("hidden_activation", "hidden_act"),
    ("activation_function", "hidden_act"),
    ("rotary_pct", "partial_rotary_factor"),
    ("rope_pct", "partial_rotary_factor"),
    ("rotary_emb_base", "rope_theta"),
];

#[derive(Debug)]
pub(crate) struct Keys {
    values: Map<String, Value>,
}

impl Keys {
    pub(crate) fn parse(config: &[u8], family: &Family) -> Result<Self, ModelError> {
        let values: Value = serde_json::from_slice(config)
            .map_err(|cause| config_error(format!("config.json is not usable: {cause}")))?;
        let Value::Object(mut values) = values else {
            return Err(config_error("config.json is no object"));
        };
        for (own, llamas) in family.aliases.iter().chain(COMMON) {
            if let Some(value) = values.get(*own).filter(|value| !value.is_null()).cloned() {
                values.entry((*llamas).to_owned()).or_insert(value);
            }
        }
        Ok(Self { values })
    }

    pub(crate) fn to_value(&self) -> Value {
        Value::Object(self.values.clone())
    }

    /// Absent and null are the same.
    fn get(&self, name: &str) -> Option<&Value> {
        self.values.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn class(&self) -> &str {
        let class = self.get("architectures").and_then(|classes| classes.get(0));
        class.or_else(|| self.get("model_type")).and_then(Value::as_str).unwrap_or_default()
    }

    /// The keys of an object within.
    pub(crate) fn object(&self, name: &str) -> Self {
        Self { values: self.get(name).and_then(Value::as_object).cloned().unwrap_or_default() }
    }

    pub(crate) fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// There, but null: for keys where that differs from an absent one.
    pub(crate) fn is_null(&self, name: &str) -> bool {
        self.values.get(name).is_some_and(Value::is_null)
    }

    pub(crate) fn bool(&self, name: &str, default: bool) -> Result<bool, ModelError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| config_error(format!("{name} is {value}; it must be true or false")))
    }

    pub(crate) fn number(&self, name: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_f64().filter(|number| number.is_finite());
        number.map(Some).ok_or_else(|| config_error(format!("{name} is {value}; it must be a number")))
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(Value::as_str)
    }

    /// Of a head for classes: two where nothing is said.
    pub(crate) fn num_labels(&self) -> Result<usize, ModelError> {
        let named = self.get("id2label").and_then(Value::as_object).map(Map::len);
        let labels = self.size("num_labels")?.or(named).unwrap_or(2);
        if labels == 0 || labels > 1 << 16 {
            return Err(config_error(format!("the model has {labels} labels; it must be 1 to 65536")));
        }
        Ok(labels)
    }

    /// A cross-encoder says that its scores are used as they are.
    pub(crate) fn has_identity_activation(&self) -> bool {
        let own = self.text("sbert_ce_default_activation_function").map(str::to_owned);
        let named =
            own.or_else(|| self.object("sentence_transformers").text("activation_fn").map(str::to_owned));
        named.is_some_and(|name| name.ends_with("Identity"))
    }

    pub(crate) fn size(&self, name: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let size = value.as_u64().filter(|&size| size <= 1 << 40);
        let wrong =
            || config_error(format!("{name} is {value}; it must be a whole number that is not too large"));
        size.map(|size| Some(size as usize)).ok_or_else(wrong)
    }

    /// What no program is written for is refused: left out, it would give wrong answers that look right.
    pub(crate) fn refuse_unless(&self, name: &str, usual: bool) -> Result<(), ModelError> {
        if self.bool(name, usual)? == usual {
            return Ok(());
        }
        Err(config_error(format!("{name} is {}, which is not supported", !usual)))
    }

    /// Gives a window to the layers that slide: by `layer_types` where the file has them, else as the family does.
    pub(crate) fn set_windows(
        &self,
        config: &mut ModelConfig,
        default_window: Option<u32>,
        slides: impl Fn(usize) -> bool,
    ) -> Result<Vec<bool>, ModelError> {
        let slides = self.sliding_layers(config.layers.len(), slides)?;
        // Null switches the window off, as an absent key does not.
        let window = match self.values.get("sliding_window") {
            None => default_window,
            Some(Value::Null) => None,
            Some(_) => Some(
                self.size("sliding_window")?
                    .and_then(|window| u32::try_from(window).ok())
                    .ok_or_else(|| config_error("sliding_window does not fit 32 bits"))?,
            ),
        };
        for (layer, slides) in config.layers.iter_mut().zip(&slides) {
            layer.window = window.filter(|_| *slides);
        }
        Ok(slides)
    }

    fn sliding_layers(
        &self,
        num_layers: usize,
        slides: impl Fn(usize) -> bool,
    ) -> Result<Vec<bool>, ModelError> {
        let Some(types) = self.get("layer_types") else { return Ok((0..num_layers).map(slides).collect()) };
        let types = types.as_array().filter(|types| types.len() == num_layers);
        let types =
            types.ok_or_else(|| config_error(format!("layer_types must have {num_layers} entries")))?;
        let slides = |kind: &Value| match kind.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            _ => Err(config_error(format!("layer_types has {kind}, which is not supported"))),
        };
        types.iter().map(slides).collect()
    }

    /// A list with a number for each layer.
    pub(crate) fn flags(&self, name: &str, num_layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let wrong = || config_error(format!("{name} must have 0 or 1 for each of {num_layers} layers"));
        let list = value.as_array().filter(|list| list.len() == num_layers).ok_or_else(wrong)?;
        let flag = |value: &Value| value.as_u64().filter(|&flag| flag <= 1).map(|flag| flag == 1);
        list.iter().map(|value| flag(value).ok_or_else(wrong)).collect::<Result<_, _>>().map(Some)
    }
}
