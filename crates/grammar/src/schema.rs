//! Prepares a client's JSON Schema for the grammar engine.
//!
//! The engine rejects keywords it cannot enforce, which is what we want. This module handles what it would get wrong or leave
//! open: `format` becomes an expression that every validator agrees with; numbers beyond its arithmetic are rejected or
//! rounded to the safe side, and so are constraints that duplicate keys could get around. White space is bounded, and each
//! character has one spelling, so that no key can pass for another.
//!
//! Nothing here decides whether an instance is valid; `$ref` and all other keywords are the engine's.

use llguidance::regex_to_lark;
use regex_syntax::hir::{Hir, HirKind};
use serde_json::{Map, Number, Value, json};

use crate::formats;

/// Between two parts of a JSON text: nothing, a space, or a line break with indentation.
const WHITE_SPACE: &str = r"\x20|\x0A\x20{0,16}";
/// No `\u`: `"\u0061"` would be a second way to write the key `"a"`.
const ESCAPES: &str = "nrbtf\"\\";
/// Keywords whose value maps names to schemas.
const MAPS: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Keywords whose value is data, whatever it looks like.
const NOTES: [&str; 3] = ["default", "examples", "example"];
/// Whole numbers up to here are exact in the engine's arithmetic.
const EXACT: f64 = 9_007_199_254_740_992.0; // 2^53
/// The largest double below 2^63, where the engine's integers end.
const LARGEST: f64 = 9_223_372_036_854_774_784.0;

/// Parses and rewrites a schema. The error says why it cannot be used.
pub(crate) fn prepare(text: &str) -> Result<Value, String> {
    let mut schema: Value = serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if schema == Value::Bool(false) {
        return Err("it is `false`, which no JSON is valid for".to_owned());
    }
    let Value::Object(root) = &mut schema else {
        return Err("it must be an object, for example {\"type\": \"object\"}".to_owned());
    };
    visit_schema(root)?;
    root.insert(
        "x-guidance".to_owned(),
        json!({
            "whitespace_flexible": true,
            "whitespace_pattern": WHITE_SPACE,
            "json_allowed_escapes": ESCAPES,
        }),
    );
    Ok(schema)
}

fn visit_schema(schema: &mut Map<String, Value>) -> Result<(), String> {
    for (keyword, value) in schema.iter_mut() {
        match value {
            Value::Object(map) if MAPS.contains(&keyword.as_str()) => {
                for inner in map.values_mut() {
                    visit_any(inner)?;
                }
            }
            _ if NOTES.contains(&keyword.as_str()) => {}
            _ if keyword == "const" || keyword == "enum" => check_constant(value)?,
            // Any other object may be a schema, or hold schemas that a `$ref` points to.
            _ => visit_any(value)?,
        }
    }
    let names = schema.get("patternProperties").and_then(Value::as_object).into_iter().flat_map(Map::keys);
    for pattern in schema.get("pattern").and_then(Value::as_str).into_iter().chain(names.map(String::as_str))
    {
        check_pattern(pattern)?;
    }
    rewrite_format(schema);
    check_min_properties(schema)?;
    limit_numbers(schema)
}

fn visit_any(value: &mut Value) -> Result<(), String> {
    match value {
        Value::Object(schema) => visit_schema(schema),
        Value::Array(values) => values.iter_mut().try_for_each(visit_any),
        _ => Ok(()),
    }
}

fn rewrite_format(schema: &mut Map<String, Value>) {
    let Some(Value::String(format)) = schema.get("format") else { return };
    let expression = formats::expression(format);
    // `shift_remove` keeps the order of the others, which is the order in which properties are written.
    schema.shift_remove("format");
    let Some(expression) = expression else { return };
    let pattern = Value::from(format!("^(?:{expression})$"));
    if !schema.contains_key("pattern") {
        schema.insert("pattern".to_owned(), pattern);
        return;
    }
    let all_of = schema.entry("allOf").or_insert_with(|| json!([]));
    if let Value::Array(all_of) = all_of {
        all_of.push(json!({ "pattern": pattern }));
    }
}

/// Keys that the schema does not name could be written twice, and be counted twice, where a reader sees one.
fn check_min_properties(schema: &Map<String, Value>) -> Result<(), String> {
    let min = schema.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let required = schema.get("required").and_then(Value::as_array).map_or(0, Vec::len);
    if min > required as u64 + 1 {
        return Err(format!(
            "minProperties of {min} is supported only with at least {} keys in `required`",
            min - 1
        ));
    }
    Ok(())
}

fn limit_numbers(schema: &mut Map<String, Value>) -> Result<(), String> {
    for keyword in ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"] {
        let Some(Value::Number(number)) = schema.get(keyword) else { continue };
        let is_lower = keyword.ends_with("inimum");
        let bound = safe_bound(number, is_lower);
        // What must lie beyond the engine's integers cannot be written.
        if (is_lower && bound > EXACT) || (!is_lower && bound < -EXACT) {
            return Err(format!("{keyword} of {number} is too far from 0"));
        }
        if bound.abs() > EXACT {
            schema.insert(keyword.to_owned(), bound.clamp(-LARGEST, LARGEST).into());
        }
    }
    if let Some(Value::Number(step)) = schema.get("multipleOf")
        && !step.as_f64().is_some_and(is_countable)
    {
        return Err(format!(
            "multipleOf of {step} is not supported: it must be above 0, with at most 8 decimals and below \
             400,000,000 without its point"
        ));
    }
    if schema.contains_key("multipleOf") {
        // Readers compute with doubles: of a larger number they would not see that it is a multiple.
        for (keyword, limit) in [("minimum", -EXACT), ("maximum", EXACT)] {
            let bound = schema.get(keyword).and_then(Value::as_f64).unwrap_or(limit);
            let bound = bound.clamp(-EXACT, EXACT);
            if bound.abs() == EXACT {
                schema.insert(keyword.to_owned(), bound.into());
            }
        }
    }
    Ok(())
}

/// Whether the engine's 32-bit remainders can count the multiples of this step: it computes `10 × remainder + 9 × 10^decimals`,
/// and what does not fit wraps around without a word.
fn is_countable(step: f64) -> bool {
    const MAX_STEP: f64 = 4e8;
    let is_whole = |scaled: &f64| (scaled - scaled.round()).abs() <= scaled * 1e-12;
    let whole = (0..=8).map(|decimals| step * 10f64.powi(decimals)).find(is_whole);
    step > 0.0 && whole.is_some_and(|whole| whole <= MAX_STEP)
}

/// The bound as a double, moved inwards where it is not one.
fn safe_bound(number: &Number, is_lower: bool) -> f64 {
    let bound = number.as_f64().unwrap_or(0.0);
    let Some(exact) = number.as_i128() else { return bound };
    match (bound as i128).cmp(&exact) {
        std::cmp::Ordering::Greater if !is_lower => bound.next_down(),
        std::cmp::Ordering::Less if is_lower => bound.next_up(),
        _ => bound,
    }
}

/// Without `\u` some control characters cannot be written, and the engine would leave them out of a fixed text.
fn check_pattern(pattern: &str) -> Result<(), String> {
    // An expression that does not parse is the engine's to complain about.
    let Ok(expression) = regex_syntax::parse(&regex_to_lark(pattern, "dw")) else { return Ok(()) };
    if has_unwritable_literal(&expression) {
        return Err(format!("the pattern {pattern:?} asks for control characters, which are never written"));
    }
    Ok(())
}

fn has_unwritable_literal(expression: &Hir) -> bool {
    match expression.kind() {
        HirKind::Literal(literal) => literal.0.iter().any(|&byte| is_unwritable(char::from(byte))),
        HirKind::Repetition(repetition) => has_unwritable_literal(&repetition.sub),
        HirKind::Capture(capture) => has_unwritable_literal(&capture.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => parts.iter().any(has_unwritable_literal),
        HirKind::Empty | HirKind::Class(_) | HirKind::Look(_) => false,
    }
}

/// Control characters that JSON writes as `\u` only.
fn is_unwritable(character: char) -> bool {
    character.is_ascii_control() && !['\n', '\r', '\t', '\u{8}', '\u{c}'].contains(&character)
}

/// Constants are compared as doubles.
fn check_constant(value: &Value) -> Result<(), String> {
    match value {
        Value::Number(number) => {
            let double = number.as_f64().unwrap_or(f64::NAN);
            let is_exact = number.as_i128().is_none_or(|exact| double as i128 == exact);
            if is_exact && double.abs() <= LARGEST {
                return Ok(());
            }
            Err(format!("the constant {number} has more digits than can be compared exactly"))
        }
        Value::String(text) if text.contains(is_unwritable) => {
            Err(format!("the constant {text:?} has control characters, which are never written"))
        }
        Value::Array(values) => values.iter().try_for_each(check_constant),
        Value::Object(map) => map.values().try_for_each(check_constant),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(schema: &Value) -> Value {
        let mut prepared = prepare(&schema.to_string()).expect("a usable schema");
        prepared.as_object_mut().expect("an object").remove("x-guidance");
        prepared
    }

    fn refused(schema: &Value) -> String {
        prepare(&schema.to_string()).expect_err("must be refused")
    }

    #[test]
    fn formats_become_expressions_and_unknown_ones_are_notes() {
        let schema = prepared(&json!({"properties": {
            "format": {"type": "string", "format": "uuid"},
            "plain": {"type": "integer", "format": "int32"},
            "both": {"pattern": "a", "format": "date"},
        }}));
        let properties = &schema["properties"];
        assert!(
            properties["format"]["pattern"]
                .as_str()
                .is_some_and(|pattern| pattern.starts_with("^(?:[0-9a-fA-F]"))
        );
        assert_eq!(properties["plain"], json!({"type": "integer"}));
        assert_eq!(properties["both"]["pattern"], "a");
        assert!(properties["both"]["allOf"][0]["pattern"].is_string());
    }

    #[test]
    fn data_is_not_taken_for_a_schema() {
        let schema = json!({"const": {"format": "date"}, "default": {"format": "date"}, "properties": {
            "enum": {"format": "int32"},
        }});
        let got = prepared(&schema);
        assert_eq!((&got["const"], &got["default"]), (&schema["const"], &schema["default"]));
        assert_eq!(got["properties"]["enum"], json!({}));
    }

    #[test]
    fn options_of_the_engine_are_ours_alone() {
        let text = r#"{"x-guidance": {"lenient": true}, "type": "string"}"#;
        let prepared = prepare(text).expect("usable");
        assert!(prepared["x-guidance"].get("lenient").is_none());
        assert_eq!(prepared["x-guidance"]["whitespace_pattern"], WHITE_SPACE);
    }

    #[test]
    fn what_cannot_be_kept_is_named() {
        assert!(refused(&json!(false)).contains("false"));
        assert!(refused(&json!([1])).contains("must be an object"));
        assert!(prepare("{").expect_err("no JSON").starts_with("it is not JSON"));
        assert!(refused(&json!({"minProperties": 2})).contains("minProperties of 2"));
        assert!(refused(&json!({"items": {"minimum": 1e17}})).contains("minimum of 1e+17"));
        assert!(refused(&json!({"multipleOf": 0})).contains("multipleOf"));
        assert!(refused(&json!({"const": "a\u{0}b"})).contains("control characters"));
        assert!(
            refused(&json!({"properties": {"a": {"pattern": "x\\x00y"}}})).contains("control characters")
        );
        assert!(refused(&json!({"patternProperties": {"(a\u{1})+": {}}})).contains("control characters"));
        assert!(prepare(&json!({"pattern": "^[^\\x00-\\x1f]+\\n$"}).to_string()).is_ok());
        assert!(refused(&json!({"enum": [1, [9_007_199_254_740_993_u64]]})).contains("9007199254740993"));
    }

    #[test]
    fn bounds_move_inwards() {
        let bound = 9_007_199_254_740_995_i64;
        let schema = prepared(&json!({"maximum": bound, "minimum": -bound}));
        let (max, min) = (schema["maximum"].as_f64().unwrap(), schema["minimum"].as_f64().unwrap());
        assert!(max as i64 <= bound && max as i64 > bound - 3);
        assert!(min as i64 >= -bound && (min as i64) < -bound + 3);
        assert_eq!(prepared(&json!({"maximum": u64::MAX}))["maximum"], LARGEST);
        assert_eq!(prepared(&json!({"maximum": 7})), json!({"maximum": 7}));
    }
}
