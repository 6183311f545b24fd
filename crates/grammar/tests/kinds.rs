//! Every kind of structured output, over byte-level BPE and SentencePiece vocabularies; limits and errors.

mod common;

use std::sync::Arc;

use baton_core::{Constraint, StructuredOutput, mask_allows};
use baton_grammar::GrammarError;
use common::Model;
use serde_json::json;

fn models() -> [Model; 2] {
    [Model::byte_level(), Model::sentence_piece()]
}

fn check(wish: &StructuredOutput, accepted: &[&str], refused: &[&str]) {
    for model in models() {
        let grammar = model.compile(wish).unwrap_or_else(|error| panic!("{wish:?}: {error}"));
        for text in accepted {
            assert!(model.accepts(&grammar, text), "{wish:?} must take {text:?}");
        }
        for text in refused {
            assert!(!model.accepts(&grammar, text), "{wish:?} must refuse {text:?}");
        }
    }
}

fn reason(wish: &StructuredOutput) -> String {
    Model::byte_level().compile(wish).expect_err("must be refused").to_string()
}

#[test]
fn regular_expressions_match_the_whole_output() {
    let date = || "[0-9]{4}-[0-9]{2}".to_owned();
    for expression in [date(), format!("^{}$", date())] {
        check(&StructuredOutput::Regex(expression), &["2024-05"], &["", "2024-5", "2024-055", "x2024-05"]);
    }
    let wish = StructuredOutput::Regex("(é|ß/|\\$)+ ?ok".to_owned());
    check(&wish, &["é ok", "ß/ß/ok", "$éok"], &["ok", "e ok", "é  ok"]);
}

#[test]
fn choices_are_taken_as_they_are() {
    let choices = ["yes", "yes!", "a.b", "tab\tline\n", "/x\\", "größe", "[(", "<|end|>", "{}"];
    let wish = StructuredOutput::Choice(choices.map(String::from).to_vec());
    check(&wish, &choices, &["", "y", "yes!!", "axb", "yesyes!", "[", "grosse"]);
}

#[test]
fn lark_grammars_nest() {
    let wish = StructuredOutput::Grammar("start: \"(\" start \")\" | NUMBER\nNUMBER: /[0-9]+/".to_owned());
    check(&wish, &["1", "(12)", "(((0)))"], &["", "(1", "1)", "()", "((1)"]);
}

/// llama.cpp's grammars: no lexemes, so that a rule may end in the middle of what another could go on with.
#[test]
fn gbnf_grammars_are_taken() {
    let gbnf = |text: &str| StructuredOutput::Grammar(text.to_owned());
    check(&gbnf("root ::= [a-z]+ \"foo\""), &["afoo", "foofoo"], &["foo", "afo", "Afoo"]);
    check(
        &gbnf("# list\nroot ::= item (\",\" ws item){1,2}\nitem ::= [^,\\n ]+ | \"\\\"\"\nws ::= \" \"?"),
        &["a,b", "a, b,c", "é,\""],
        &["a", "a,b,c,d", "a,", "a,  b"],
    );
    let json = concat!(
        "root ::= object\n",
        "value ::= object | array | string | number | (\"true\" | \"false\" | \"null\") ws\n",
        "object ::=\n  \"{\" ws (\n    string \":\" ws value\n    (\",\" ws string \":\" ws value)*\n  )? \"}\" ws\n",
        "array ::= \"[\" ws ( value (\",\" ws value)* )? \"]\" ws\n",
        "string ::= \"\\\"\" ( [^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" ([\"\\\\bfnrt] | \"u\" [0-9a-fA-F]{4}) )* \"\\\"\" ws\n",
        "number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ws\n",
        "ws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n",
    );
    check(
        &gbnf(json),
        &["{}", "{\"a\": [1, -2.5, {\"b\":null}], \"c\":\"x\\n\"}", "{ \"a\":true}"],
        &["[]", "{\"a\"}", "{\"a\":01}", "{\"a\":1,}"],
    );
}

#[test]
fn any_object_is_json() {
    check(
        &StructuredOutput::JsonObject,
        &["{}", r#"{"a": [1, -2.5e3, "x\n\"", null, true], "b": {}}"#, "{\n  \"a\": 1\n}", r#"{"ä": "€𝄞"}"#],
        &[
            "[]",
            "1",
            "{",
            r#"{"a" 1}"#,
            r#"{"a": 01}"#,
            r#"{"a": .5}"#,
            "{,}",
            r"{'a': 1}",
            "{\"a\": \"\n\"}",
            "{} x",
        ],
    );
}

#[test]
fn white_space_and_numbers_are_bounded() {
    let model = Model::byte_level();
    let grammar = model.json(&json!({"type": "array", "items": {"type": "number"}}));
    assert!(model.accepts(&grammar, "[1, 2,3 ,\n  4 ]"));
    assert!(!model.accepts(&grammar, "[1,  2]") && !model.accepts(&grammar, "[1,\n\n2]"));
    assert!(!model.accepts(&grammar, &format!("[1,\n{}2]", " ".repeat(17))));
    assert!(!model.accepts(&grammar, "[1,\t2]") && !model.accepts(&grammar, "[1,\r\n2]"));
    let digits = |count: usize| "7".repeat(count);
    assert!(model.accepts(&grammar, &format!("[{},0.{}]", digits(32), digits(32))));
    assert!(!model.accepts(&grammar, &format!("[{}]", digits(33))));
    assert!(!model.accepts(&grammar, &format!("[0.{}]", digits(33))));
    assert!(model.accepts(&grammar, "[1e99]") && !model.accepts(&grammar, "[1e100]"));
    let grammar = model.json(&json!({"type": "number", "minimum": 0.5, "maximum": 0.5}));
    assert!(model.accepts(&grammar, "0.5") && !model.accepts(&grammar, "0.51"));
}

#[test]
fn special_tokens_are_never_text() {
    let model = Model::byte_level();
    let grammar = model.compile(&StructuredOutput::Regex("<\\|start\\|>".to_owned())).expect("compiles");
    let start = 1;
    assert_eq!(&*model.tokenizer.token_bytes(start), b"<|start|>");
    assert!(!mask_allows(grammar.first_mask(), start), "the special token stands for no text");
    assert!(model.accepts(&grammar, "<|start|>"), "its letters do");
    let grammar = model.compile(&StructuredOutput::Regex("(?s:.*)".to_owned())).expect("compiles");
    let allowed: Vec<u32> =
        (0..model.vocab_size as u32 + 40).filter(|&id| mask_allows(grammar.first_mask(), id)).collect();
    assert!(allowed.contains(&model.end) && !allowed.contains(&start));
    let padding = model.tokenizer.vocab_size() as u32..;
    assert!(allowed.iter().all(|id| !padding.contains(id)), "ids past the tokenizer's stand for nothing");
}

#[test]
fn escapes_cannot_rename_a_key() {
    let model = Model::byte_level();
    let grammar = model.json(&json!({"properties": {"a": {"type": "null"}}, "type": "object"}));
    assert!(model.accepts(&grammar, r#"{"a":null,"b":1}"#));
    for text in [r#"{"a":1}"#, r#"{"\u0061":1}"#, r#"{"b":1,"a":1}"#, r#"{"a":null,"a":1}"#] {
        assert!(!model.accepts(&grammar, text), "{text}");
    }
}

#[test]
fn what_cannot_be_compiled_says_why() {
    let json = |schema: serde_json::Value| StructuredOutput::Json(schema.to_string());
    for (wish, expected) in [
        (json(json!({"type": "nothing"})), "nothing"),
        (json(json!({"if": {}, "not": {}})), "these keywords are not supported: if, not"),
        (json(json!({"uniqueItems": true})), "uniqueItems"),
        (json(json!({"oneOf": [{"minimum": 1}, {"maximum": 2}]})), "use anyOf"),
        (json(json!({"$ref": "#/$defs/missing"})), "missing"),
        (json(json!({"$ref": "https://example.com/schema.json"})), "example.com"),
        (json(json!({"type": "string", "pattern": "(?=a)b"})), "look-around"),
        (json(json!({"enum": []})), "nsatisfiable"),
        (StructuredOutput::Json("[]".into()), "must be an object"),
        (StructuredOutput::Regex("a(".into()), "the regular expression cannot be used"),
        (StructuredOutput::Regex("(?!a)b".into()), "the regular expression cannot be used"),
        (StructuredOutput::Grammar("start: missing_rule".into()), "missing_rule"),
        (StructuredOutput::Grammar("root ::= nothing".into()), "`nothing`, which is not defined"),
        (StructuredOutput::Grammar("rule ::= \"a\"".into()), "no rule `root`"),
        (StructuredOutput::Grammar("root ::= (\"a\"".into()), "`)` is missing"),
        (StructuredOutput::Choice(Vec::new()), "1 to 4096"),
    ] {
        let reason = reason(&wish);
        assert!(reason.contains(expected), "{wish:?}: {reason}");
        assert!(!reason.contains('\n') && reason.len() < 1000, "{reason}");
    }
}

#[test]
fn broken_schemas_are_errors() {
    let model = Model::byte_level();
    let text =
        json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}, "c": {"enum": [1, "x", null]}},
        "$defs": {"b": {"type": "string", "pattern": "^a[0-9]+$", "maxLength": 9}}, "required": ["a"]})
        .to_string();
    let mut state = 9_u64;
    let mut num_compiled = 0;
    for _ in 0..300 {
        let mut bytes = text.clone().into_bytes();
        for _ in 0..3 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let position = (state >> 33) as usize % bytes.len();
            bytes[position] = b"\"{}[]:,0a$-#\\^"[(state >> 20) as usize % 14];
        }
        let Ok(broken) = String::from_utf8(bytes) else { continue };
        match model.compile(&StructuredOutput::Json(broken)) {
            Ok(_) => num_compiled += 1,
            Err(error) => assert!(matches!(error, GrammarError::Invalid { .. }), "{error}"),
        }
    }
    assert!(num_compiled > 0, "some changes hurt nothing");
}

#[test]
fn models_without_an_end_or_bytes_are_refused() {
    let model = Model::byte_level();
    let compiler = baton_grammar::GrammarCompiler::new(Arc::clone(&model.tokenizer), 300, Arc::from([]));
    let error = compiler.compile(&StructuredOutput::JsonObject).expect_err("no end token");
    assert!(matches!(&error, GrammarError::Model { reason } if reason.contains("end token")), "{error}");
}

#[test]
fn threads_share_a_compiler_and_its_cache() {
    let model = Arc::new(Model::byte_level());
    let threads: Vec<_> = (0..8)
        .map(|thread| {
            let model = Arc::clone(&model);
            std::thread::spawn(move || {
                for round in 0..12 {
                    let value = (thread + round) % 5;
                    let grammar = model.json(&json!({"const": value}));
                    assert!(model.accepts(&grammar, &value.to_string()));
                    assert!(!model.accepts(&grammar, &(value + 1).to_string()));
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no thread fails");
    }
    let again = model.json(&json!({"const": 1}));
    assert!(Arc::ptr_eq(&again, &model.json(&json!({"const": 1}))), "the second time it is found");
}

#[test]
fn multiples_are_those_of_arithmetic() {
    let model = Model::byte_level();
    for (step, good, bad) in [
        (json!(3), vec!["-6", "0", "27"], vec!["1", "-5"]),
        (json!(1000), vec!["1000", "250000"], vec!["100", "1500"]),
        (json!(0.01), vec!["0.25", "3.1"], vec!["0.255"]),
    ] {
        let grammar = model.json(&json!({"type": "number", "multipleOf": step}));
        for text in good {
            assert!(model.accepts(&grammar, text), "{text} is a multiple of {step}");
        }
        for text in bad {
            assert!(!model.accepts(&grammar, text), "{text} is no multiple of {step}");
        }
    }
    for step in
        [json!(2_147_483_648_u64), json!(4_294_967_291_u64), json!(0.123_456_789_1), json!(-1), json!(0)]
    {
        let wish = StructuredOutput::Json(json!({"type": "number", "multipleOf": step}).to_string());
        assert!(model.compile(&wish).is_err(), "{step}");
    }
}
