//! Outputs drawn at random from the masks, checked by an independent validator: whatever the mask allows is valid.

mod common;

use baton_core::{Constraint, StructuredOutput, TokenId, mask_allows};
use baton_grammar::CompiledGrammar;
use common::Model;
use proptest::prelude::*;
use serde_json::{Value, json};

struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// An output of at most `max_tokens` tokens, or `None` where it did not come to an end. The further it gets, the more it
/// prefers to close what is open.
fn walk(model: &Model, grammar: &CompiledGrammar, dice: &mut Dice, max_tokens: usize) -> Option<String> {
    let mut mask = grammar.first_mask().to_vec();
    let mut matcher = grammar.start();
    let mut bytes = Vec::new();
    let closing = |id: TokenId| {
        let bytes = model.tokenizer.token_bytes(id);
        id == model.end || matches!(&*bytes, b"\"" | b"}" | b"]" | b"}}" | b"\"}")
    };
    for position in 0..max_tokens {
        let allowed: Vec<TokenId> =
            (0..model.vocab_size as TokenId).filter(|&id| mask_allows(&mask, id)).collect();
        let closers: Vec<TokenId> = allowed.iter().copied().filter(|&id| closing(id)).collect();
        let choices = if !closers.is_empty() && dice.below(60) < position { &closers } else { &allowed };
        let token = choices[dice.below(choices.len())];
        if token == model.end {
            return Some(String::from_utf8(bytes).expect("masks allow whole characters only"));
        }
        bytes.extend_from_slice(&model.tokenizer.token_bytes(token));
        matcher.advance(token, &mut mask).expect("an allowed token can be taken");
    }
    None
}

fn check(model: &Model, schema: &Value, dice: &mut Dice, walks: usize) -> usize {
    let wish = StructuredOutput::Json(schema.to_string());
    let Ok(grammar) = model.compile(&wish) else { return 0 };
    let validator = jsonschema::options().should_validate_formats(true).build(schema).expect("a schema");
    let mut finished = 0;
    for _ in 0..walks {
        let Some(text) = walk(model, &grammar, dice, 200) else { continue };
        let value: Value =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{schema}: {error}: {text}"));
        assert!(validator.is_valid(&value), "{schema} allows {text}");
        finished += 1;
    }
    finished
}

#[test]
fn formats_satisfy_a_strict_checker() {
    let model = Model::byte_level();
    let mut dice = Dice(7);
    for format in [
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "iri",
        "uri-reference",
        "iri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    ] {
        let schema = json!({"type": "string", "format": format});
        let finished = check(&model, &schema, &mut dice, 60);
        assert!(finished >= 10, "{format}: only {finished} walks ended");
    }
}

#[test]
fn real_life_schemas() {
    let model = Model::sentence_piece();
    let mut dice = Dice(3);
    for schema in [
        json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer",
            "minimum": 0, "maximum": 130}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
            "required": ["name", "age"], "additionalProperties": false}),
        json!({"$defs": {"node": {"type": "object", "properties": {"value": {"type": "number", "exclusiveMinimum": -1.5,
            "maximum": 2}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["value", "next"],
            "additionalProperties": false}}, "$ref": "#/$defs/node"}),
        json!({"type": "object", "patternProperties": {"^x-": {"type": "boolean"}}, "additionalProperties": {"type": "null"}}),
        json!({"oneOf": [{"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required":
            ["kind", "x"]}, {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]}]}),
        json!({"type": "integer", "multipleOf": 7, "minimum": -100, "exclusiveMaximum": 1000}),
        json!({"type": "number", "multipleOf": 0.25}),
        json!({"type": "string", "pattern": "^[a-c]+\\d{2}$", "minLength": 4, "maxLength": 6}),
        json!({"type": ["string", "null", "array"], "items": {"type": "boolean"}, "minItems": 1, "maxLength": 3}),
    ] {
        let finished = check(&model, &schema, &mut dice, 60);
        assert!(finished >= 10, "{schema}: only {finished} walks ended");
    }
}

/// A bound, often a nasty one.
fn bound() -> impl Strategy<Value = Value> {
    prop_oneof![
        (-30_i64..30).prop_map(Value::from),
        (-3000_i64..3000).prop_map(|n| Value::from(n as f64 / 100.0)),
        any::<i64>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    #[test]
    fn numbers_stay_in_their_bounds(
        integer: bool,
        bounds in prop::collection::btree_map(
            prop::sample::select(vec!["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), bound(), 1..3),
        step in prop::option::weighted(0.3, prop::sample::select(vec![json!(3), json!(0.5), json!(10), json!(0.01)])),
        seed: u64,
    ) {
        let mut schema = json!({"type": if integer { "integer" } else { "number" }});
        for (keyword, value) in bounds {
            schema[keyword] = value;
        }
        // A validator's remainder of doubles is not exact; ours is, on the digits.
        if let Some(step) = step.filter(|step| integer || step.is_i64()) {
            schema["multipleOf"] = step;
        }
        check(&Model::byte_level(), &schema, &mut Dice(seed), 6);
    }
}
