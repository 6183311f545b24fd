//! Fields of other servers that would change the answer and are not built here. Each is refused by its name, unless its
//! value asks for nothing: clients send their defaults along.

use serde::Deserialize;
use serde_json::Value;

use crate::error::ApiError;

macro_rules! refused {
    ($($name:ident $neutral:expr;)*) => {
        /// Read of every request that generates.
        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(default)]
        pub struct RefusedFields {
            $(pub $name: Option<Value>,)*
        }

        impl RefusedFields {
            /// Refuses the first field that asks for something.
            pub fn check(&self) -> Result<(), ApiError> {
                $(check(stringify!($name), self.$name.as_ref(), &$neutral)?;)*
                Ok(())
            }
        }
    };
}

// A name, and the numbers with which it does nothing.
refused! {
    logits_processors [];
    logprob_token_ids [];
    custom_logit_processor [];
    structural_tag [];
    guided_whitespace_pattern [];
    lora_path [];
    typical_p [1.0, 0.0];
    typical [1.0, 0.0];
    tfs_z [1.0];
    mirostat [0.0];
    mirostat_mode [0.0];
    dry_multiplier [0.0];
    xtc_probability [0.0];
    min_keep [0.0, 1.0];
    top_a [0.0];
    top_n_sigma [0.0, -1.0];
    dynatemp_range [0.0];
    smoothing_factor [0.0];
    epsilon_cutoff [0.0];
    eta_cutoff [0.0];
    no_repeat_ngram_size [0.0];
    encoder_repetition_penalty [1.0];
    penalty_alpha [0.0];
    samplers [];
}

fn check(name: &str, value: Option<&Value>, neutral: &[f64]) -> Result<(), ApiError> {
    let asks = match value {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Number(number)) => number.as_f64().is_none_or(|number| !neutral.contains(&number)),
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(map)) => !map.is_empty(),
        Some(Value::Bool(true)) => true,
    };
    if asks { Err(ApiError::unsupported(name)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_would_change_the_answer_is_refused_by_name() {
        let param = |fields: Value| {
            let fields: RefusedFields = serde_json::from_value(fields).expect("any value is read");
            fields.check().err().and_then(|error| error.body().error.param)
        };
        for name in ["logits_processors", "logprob_token_ids", "samplers", "structural_tag"] {
            assert_eq!(param(json!({ name: ["x"] })).as_deref(), Some(name));
            assert_eq!(param(json!({ name: [] })), None);
        }
        for (name, value, neutral) in [
            ("typical_p", 0.5, 1.0),
            ("mirostat", 2.0, 0.0),
            ("dry_multiplier", 0.8, 0.0),
            ("xtc_probability", 0.5, 0.0),
            ("min_keep", 3.0, 0.0),
        ] {
            assert_eq!(param(json!({ name: value })).as_deref(), Some(name));
            assert_eq!(param(json!({ name: neutral })), None);
        }
        assert_eq!(param(json!({"unheard_of": true, "mirostat": null})), None);
    }
}
