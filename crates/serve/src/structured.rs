//! Structured output, from the fields of a request to the compiled constraint that goes to the engine with it.
//!
//! Compiling happens on threads of its own, few and of low priority, so that a heavy schema delays neither prompts nor
//! streams; a schema that was compiled before needs none of them.
//! A request's shape is compiled when its fields are read, so that the error names the field that the client sent.

use std::sync::Arc;

use baton_core::{Constraint, SamplingParams, StructuredOutput, TokenFilter, TokenId};
use baton_grammar::{FilteredConstraint, close_objects, closed_schema};
use serde_json::Value;

use crate::error::ApiError;
use crate::scope;
use crate::state::App;
use crate::types::structured::{ResponseFormat, StructuredFields, StructuredOutputs};

/// A shape, and the field of the request that asks for it.
pub type StructuredRequest = (&'static str, StructuredOutput);

/// Puts a requested shape into the parameters and compiles it. What cannot be kept is an error that names its field.
pub async fn apply(
    app: &App,
    structured_request: Option<StructuredRequest>,
    params: &mut SamplingParams,
) -> Result<Option<Arc<dyn Constraint>>, ApiError> {
    let mut constraint = None;
    if let Some((field, shape)) = structured_request {
        params.structured_outputs = Some(shape.clone());
        params
            .validate(app.model.vocab_size as u32)
            .map_err(|error| ApiError::invalid_field(field, format!("{field}: {error}")))?;
        constraint = Some(compile(app, field, shape).await?);
    }
    if let Some(filter) = &params.token_filter {
        constraint = Some(filtered(app, filter.clone(), constraint, params.ignore_eos).await?);
    }
    Ok(constraint)
}

async fn filtered(
    app: &App,
    filter: TokenFilter,
    grammar: Option<Arc<dyn Constraint>>,
    ignore_eos: bool,
) -> Result<Arc<dyn Constraint>, ApiError> {
    let ends: Arc<[TokenId]> =
        if ignore_eos { Arc::from([]) } else { Arc::clone(&app.model.text.eos_token_ids) };
    match &app.model.grammars {
        Some(grammars) if !filter.bad_words.is_empty() => {
            let grammars = Arc::clone(grammars);
            let filter = move || grammars.filter(&filter, grammar, &ends);
            Ok(Arc::new(app.grammar_workers.run(scope::tenant(), filter).await??))
        }
        _ => Ok(Arc::new(FilteredConstraint::new(&filter, grammar, app.model.vocab_size, &ends))),
    }
}

async fn compile(app: &App, field: &str, shape: StructuredOutput) -> Result<Arc<dyn Constraint>, ApiError> {
    let Some(grammars) = &app.model.grammars else {
        let message = format!("{field}: this model has no tokenizer, so that its outputs have no shape");
        return Err(ApiError::invalid_field(field, message));
    };
    // Known shapes wait for nobody.
    if let Some(known) = grammars.find(&shape) {
        return Ok(known);
    }
    let grammars = Arc::clone(grammars);
    let compile = move || grammars.compile(&shape);
    let compiling = app.grammar_workers.run(scope::tenant(), compile);
    // One that is being compiled ends soon, so whoever waits longer waits for others.
    let compiled =
        tokio::time::timeout(app.config.compile_timeout, compiling).await.map_err(|_| ApiError::busy())??;
    match compiled {
        Ok(compiled) => Ok(compiled),
        Err(error) => Err(ApiError::invalid_field(field, format!("{field}: {error}"))),
    }
}

/// The one shape that the fields ask for, and the field that does.
pub fn requested(fields: StructuredFields) -> Result<Option<StructuredRequest>, ApiError> {
    let mut found: Option<StructuredRequest> = None;
    let asked = [
        ("response_format", fields.response_format.map_or(Ok(None), response_format)?),
        ("structured_outputs", fields.structured_outputs.map(structured_outputs).transpose()?),
        ("guided_json", given(fields.guided_json).map(json)),
        ("guided_regex", fields.guided_regex.map(StructuredOutput::Regex)),
        ("guided_choice", fields.guided_choice.map(StructuredOutput::Choice)),
        ("guided_grammar", fields.guided_grammar.map(StructuredOutput::Grammar)),
        ("grammar", text(fields.grammar).map(StructuredOutput::Grammar)),
        ("json_schema", given(fields.json_schema).filter(asks_for_shape).map(json)),
        ("regex", text(fields.regex).map(StructuredOutput::Regex)),
        ("ebnf", text(fields.ebnf).map(StructuredOutput::Grammar)),
    ];
    for (field, shape) in asked {
        let Some(shape) = shape else { continue };
        if let Some((other, _)) = &found {
            let message = format!("{field} and {other} both say what the output must be: give one of them");
            return Err(ApiError::invalid_field(field, message));
        }
        found = Some((field, shape));
    }
    Ok(found)
}

/// The shape that a dialect has a field of its own for, or the one that is asked for in another's words.
pub fn one_of(
    own: Option<StructuredRequest>,
    other: Option<StructuredRequest>,
) -> Result<Option<StructuredRequest>, ApiError> {
    match (own, other) {
        (Some((one, _)), Some((two, _))) => {
            let message = format!("{two} and {one} both say what the output must be: give one of them");
            Err(ApiError::invalid_field(two, message))
        }
        (own, other) => Ok(own.or(other)),
    }
}

fn response_format(format: ResponseFormat) -> Result<Option<StructuredOutput>, ApiError> {
    match format.kind.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(given(format.schema).map_or(StructuredOutput::JsonObject, json))),
        "json_schema" => {
            let schema = format.json_schema.and_then(|named| given(named.schema)).or(given(format.schema));
            let param = "response_format.json_schema.schema";
            let missing = || ApiError::invalid_field(param, format!("{param} is missing"));
            Ok(Some(json(schema.ok_or_else(missing)?)))
        }
        other => {
            let message = format!(
                "response_format.type must be \"text\", \"json_object\" or \"json_schema\", got {other:?}"
            );
            Err(ApiError::invalid_field("response_format.type", message))
        }
    }
}

fn structured_outputs(asked: StructuredOutputs) -> Result<StructuredOutput, ApiError> {
    let asks = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
    // It only asks for a refusal where another implementation would guess; there is none here.
    let unknown = asked.others.iter().find(|(name, value)| asks(value) && *name != "disable_fallback");
    if let Some((name, _)) = unknown {
        return Err(ApiError::unsupported(&format!("structured_outputs.{name}")));
    }
    let shapes = [
        given(asked.json).map(json),
        asked.regex.map(StructuredOutput::Regex),
        asked.choice.map(StructuredOutput::Choice),
        asked.grammar.map(StructuredOutput::Grammar),
        asked.json_object.filter(|&wanted| wanted).map(|_| StructuredOutput::JsonObject),
    ];
    let mut shapes = shapes.into_iter().flatten();
    if let (Some(shape), None) = (shapes.next(), shapes.next()) {
        return Ok(shape);
    }
    let message = "structured_outputs must hold exactly one of json, regex, choice, grammar and json_object";
    Err(ApiError::invalid_field("structured_outputs", message))
}

fn given(value: Option<Value>) -> Option<Value> {
    value.filter(|value| !value.is_null())
}

/// Clients of other servers send empty texts and empty schemas for nothing.
fn text(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.trim().is_empty())
}

fn asks_for_shape(schema: &Value) -> bool {
    schema.as_object().is_none_or(|schema| !schema.is_empty())
}

/// A schema may come as an object or as its text. Its objects have the keys that it lists and no others.
pub fn json(schema: Value) -> StructuredOutput {
    StructuredOutput::Json(match schema {
        Value::String(text) => closed_schema(&text),
        other => close_objects(other).to_string(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn wished(fields: Value) -> Result<Option<(&'static str, StructuredOutput)>, String> {
        let fields = serde_json::from_value(fields).expect("fields");
        requested(fields).map_err(|error| {
            let detail = error.body().error;
            format!("{}: {}", detail.param.unwrap_or_default(), detail.message)
        })
    }

    #[test]
    fn every_way_of_asking_is_understood() {
        use StructuredOutput::{Choice, Grammar, Json, JsonObject, Regex};
        let schema = json!({"type": "array"});
        let text = || schema.to_string();
        let named = json!({"name": "a", "schema": schema, "strict": true});
        for (fields, expected) in [
            (json!({"response_format": {"type": "json_object"}}), JsonObject),
            (json!({"response_format": {"type": "json_schema", "json_schema": named}}), Json(text())),
            (json!({"structured_outputs": {"json": schema}}), Json(text())),
            (json!({"structured_outputs": {"json": text(), "regex": null}}), Json(text())),
            (json!({"structured_outputs": {"regex": "a+", "disable_fallback": true}}), Regex("a+".into())),
            (json!({"structured_outputs": {"choice": ["a"]}}), Choice(vec!["a".into()])),
            (json!({"structured_outputs": {"grammar": "start: \"a\""}}), Grammar("start: \"a\"".into())),
            (json!({"structured_outputs": {"json_object": true}}), JsonObject),
            (json!({"guided_json": schema}), Json(text())),
            (json!({"guided_regex": "a", "response_format": {"type": "text"}}), Regex("a".into())),
            (json!({"guided_choice": ["a", "b"]}), Choice(vec!["a".into(), "b".into()])),
            (json!({"guided_grammar": "g"}), Grammar("g".into())),
            (json!({"grammar": "root ::= \"a\"", "json_schema": {}}), Grammar("root ::= \"a\"".into())),
            (json!({"json_schema": schema, "grammar": ""}), Json(text())),
            (json!({"regex": "a"}), Regex("a".into())),
            (json!({"ebnf": "root ::= x"}), Grammar("root ::= x".into())),
            (json!({"response_format": {"type": "json_object", "schema": schema}}), Json(text())),
            (
                json!({"guided_json": {"properties": {"a": {}}}}),
                Json(r#"{"properties":{"a":{}},"additionalProperties":false}"#.into()),
            ),
        ] {
            assert_eq!(wished(fields.clone()).expect("understood").expect("asked").1, expected, "{fields}");
        }
        assert_eq!(wished(json!({"response_format": {"type": "text"}})), Ok(None));
        assert_eq!(wished(json!({"guided_json": null})), Ok(None));
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (fields, expected) in [
            (json!({"response_format": {"type": "xml"}}), "response_format.type: "),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema: "),
            (json!({"structured_outputs": {}}), "structured_outputs: "),
            (json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "structured_outputs: "),
            (json!({"structured_outputs": {"structural_tag": {}}}), "structured_outputs.structural_tag: "),
            (
                json!({"guided_regex": "a", "guided_json": {}}),
                "guided_regex: guided_regex and guided_json both",
            ),
            (json!({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}), "guided_choice: "),
        ] {
            let refused = wished(fields.clone()).expect_err("must be refused");
            assert!(refused.starts_with(expected), "{fields}: {refused}");
        }
    }
}
