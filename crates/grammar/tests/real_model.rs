//! The default model with schemas of our own: at temperature 1 it writes only what is valid, or runs out of tokens.
//!
//! `cargo xtask test` fetches the model and names it in `BATON_TEST_MODEL`.

#[path = "common/real.rs"]
mod real;

use std::path::{Path, PathBuf};

use baton_core::{FinishReason, SamplingParams, StructuredOutput};
use real::RealModel;
use serde_json::{Value, json};

fn schemas() -> Vec<Value> {
    let string = || json!({"type": "string", "maxLength": 12});
    let object = |properties: Value| {
        let required: Vec<String> = properties.as_object().expect("an object").keys().cloned().collect();
        json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
    };
    vec![
        object(json!({"name": string(), "age": {"type": "integer", "minimum": 0, "maximum": 120}})),
        object(json!({"city": string(), "temperature": {"type": "number"}, "unit": {"enum": ["C", "F"]}})),
        object(json!({"tags": {"type": "array", "items": string(), "minItems": 1, "maxItems": 3}})),
        object(
            json!({"when": {"type": "string", "format": "date-time"}, "mail": {"type": "string", "format": "email"}}),
        ),
        object(
            json!({"id": {"type": "string", "format": "uuid"}, "ip": {"type": "string", "format": "ipv4"}}),
        ),
        object(
            json!({"plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "ok": {"type": "boolean"}}),
        ),
        object(
            json!({"point": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}], "items": false,
            "minItems": 2}}),
        ),
        json!({"anyOf": [object(json!({"error": string()})), object(json!({"result": {"type": "integer"}}))]}),
        json!({"oneOf": [object(json!({"kind": {"const": "a"}, "x": {"type": "integer"}})),
            object(json!({"kind": {"const": "b"}, "y": string()}))]}),
        json!({"$defs": {"tree": object(json!({"leaf": {"type": "boolean"}, "below": {"type": "array", "maxItems": 2,
            "items": {"$ref": "#/$defs/tree"}}}))}, "$ref": "#/$defs/tree"}),
        json!({"type": "object", "patternProperties": {"^key_[0-9]$": {"type": "null"}}, "additionalProperties": false,
            "maxProperties": 3}),
        json!({"enum": [{"a": 1, "b": [true, null]}, "plain", 3.5]}),
    ]
}

/// The default model: where `BATON_TEST_MODEL` says, or where `cargo xtask setup` puts it. Without it the test is skipped.
fn model_path() -> Option<PathBuf> {
    const FETCHED: &str = "../../.cache/home/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = std::env::var_os("BATON_TEST_MODEL")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(FETCHED), PathBuf::from);
    if !path.is_file() {
        println!("skipped: {} is not here; `cargo xtask setup` fetches it", path.display());
    }
    path.is_file().then_some(path)
}

#[test]
fn what_it_writes_is_valid() {
    let Some(path) = model_path() else { return };
    let model = RealModel::open(&path, 32);
    let params =
        |seed| SamplingParams { max_tokens: Some(96), seed: Some(seed), n: 2, ..SamplingParams::default() };
    let schemas = schemas();
    let pending: Vec<_> = (0..)
        .zip(&schemas)
        .map(|(seed, schema)| {
            let wish = StructuredOutput::Json(schema.to_string());
            let prompt = "Here is a short JSON document:\n";
            model.submit(prompt, wish, params(seed)).unwrap_or_else(|error| panic!("{schema}: {error}"))
        })
        .collect();
    let choice = StructuredOutput::Choice(vec!["yes".to_owned(), "no".to_owned()]);
    let choice = model.submit("Is water wet? Answer:", choice, params(1)).expect("compiles");
    let regex = StructuredOutput::Regex("[A-Z][a-z]+, [0-9]{4}".to_owned());
    let regex = model.submit("Place and year:", regex, params(1)).expect("compiles");
    let mut num_finished = 0;
    for (schema, pending) in schemas.iter().zip(pending) {
        let validator = jsonschema::options().should_validate_formats(true).build(schema).expect("a schema");
        for (text, reason) in pending.finish(&model.tokenizer, 2) {
            if reason == FinishReason::Length {
                continue;
            }
            assert_eq!(reason, FinishReason::Stop, "{schema}: {text}");
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{schema}: {error}: {text}"));
            assert!(validator.is_valid(&value), "{schema}: {text}");
            num_finished += 1;
        }
    }
    println!("{num_finished} of {} documents finished within 96 tokens", 2 * schemas.len());
    assert!(num_finished >= schemas.len(), "only {num_finished} finished");
    for (text, reason) in choice.finish(&model.tokenizer, 2) {
        assert!(reason == FinishReason::Stop && (text == "yes" || text == "no"), "{text}");
    }
    for (text, reason) in regex.finish(&model.tokenizer, 2) {
        let year = text.rsplit(", ").next().expect("a part");
        assert!(reason == FinishReason::Length || year.len() == 4, "{text}");
    }
}
