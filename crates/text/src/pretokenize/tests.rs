//! The splitting rules beside others' and against their own look-ahead.

use proptest::string::string_regex;
use proptest::test_runner::{Config, TestRunner};

use super::*;

const NAMES: [&str; 34] = [
    "spark2_5",
    "jais-2",
    "exaone-moe",
    "chameleon",
    "tiny_aya",
    "cohere2moe",
    "superbpe",
    "kimi-k2",
    "afmoe",
    "default",
    "gpt-2",
    "starcoder",
    "falcon",
    "llama-bpe",
    "dbrx",
    "glm4",
    "minicpm5",
    "qwen2",
    "qwen35",
    "laguna",
    "seed-coder",
    "bailingmoe",
    "ufakzeka",
    "gpt-4o",
    "granite-embed-multi-97m",
    "tekken",
    "youtu",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "bloom",
    "viking",
    "smollm",
    "command-r",
];

fn check(name: &str, text: &str, expect: &[&str]) {
    let mut pieces = Vec::new();
    PreTokenizer::from_name(name).expect("known").split(text, |piece| pieces.push(piece)).expect("splits");
    assert_eq!(pieces, expect, "{name}");
}

#[test]
fn families_split_as_their_models_do() {
    check("gpt-2", "I'm 1234  years\told", &["I", "'m", " 1234", " ", " years", "\t", "old"]);
    check("smollm", "in 2024!", &["in", " ", "2", "0", "2", "4", "!"]);
    check("llama-bpe", "I'M 12345\n\n x", &["I", "'M", " ", "123", "45", "\n\n", " x"]);
    check("qwen2", "a12 (b)\r\n", &["a", "1", "2", " (", "b", ")\r\n"]);
    check("gpt-4o", "camelCase HTTPServer's", &["camel", "Case", " HTTPServer's"]);
    check("tekken", "camelCase 12", &["camel", "Case", " ", "1", "2"]);
    check("falcon", "a1234?!", &["a", "123", "4", "?!"]);
    check("kimi-k2", "日本語abc DEFghi12345's", &["日本語", "abc", " DEFghi", "123", "45", "'s"]);
    check("superbpe", "a 1234567b 12", &["a ", "1", "234", "567", "b ", "12"]);
    check("afmoe", "x1234 12", &["x", "1", "234", " ", "12"]);
    check("tiny_aya", "1234 1234x", &["1", "234", " ", "123", "4", "x"]);
    check("exaone-moe", "a b  c1", &["a b", " ", " c", "1"]);
    check("jais-2", "a      b", &["a", "    ", " ", " b"]);
    check("spark2_5", "a.b 1234\n\nx", &["a", ".b", " ", "1", "2", "3", "4", "\n", "\n", "x"]);
    check("chameleon", "a12  b!", &["a", "1", "2", "  ", "b", "!"]);
    check("deepseek-v3", "日本a 1234", &["日本", "a", " ", "123", "4"]);
}

/// The pieces come from llama.cpp's expressions and another engine: see `tests/data/make_pretokenize.py`.
#[test]
fn rules_split_as_those_of_llama_cpp() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../../tests/data/pretokenize.json")).expect("a golden file");
    let rules = golden["pieces"].as_object().expect("rules");
    assert!(rules.len() >= 28);
    for (name, expected) in rules {
        let rule = PreTokenizer::from_name(name).expect("known");
        for (text, expected) in
            golden["texts"].as_array().expect("texts").iter().zip(expected.as_array().expect("pieces"))
        {
            let mut pieces = Vec::new();
            rule.split(text.as_str().expect("a text"), |piece| pieces.push(piece)).expect("splits");
            assert_eq!(&serde_json::json!(pieces), expected, "{name}: {text}");
        }
    }
}

#[test]
fn every_rule_compiles_and_keeps_the_text() {
    let text = "Hello, wörld!\t 12345 日本語 🦙\u{301}\r\n\n   don't  CamelCase    ";
    for name in NAMES {
        let mut joined = String::new();
        PreTokenizer::from_name(name)
            .unwrap_or_else(|error| panic!("{name}: {error}"))
            .split(text, |piece| {
                assert!(!piece.is_empty());
                joined.push_str(piece);
            })
            .expect("splits");
        assert_eq!(joined, text, "{name}");
    }
}

#[test]
fn an_unknown_rule_is_named() {
    let error = PreTokenizer::from_name("klingon").expect_err("unknown");
    assert!(error.to_string().contains("'klingon'"), "{error}");
}

/// The same rule with the models' own look-ahead, one match after the other.
fn split_with_look_ahead(regex: &Regex, text: &str) -> Vec<String> {
    let mut pieces = Vec::new();
    let mut done = 0;
    for found in regex.find_iter(text) {
        let found = found.expect("matches");
        if found.start() > done {
            pieces.push(text[done..found.start()].to_owned());
        }
        pieces.push(found.as_str().to_owned());
        done = found.end();
    }
    if done < text.len() {
        pieces.push(text[done..].to_owned());
    }
    pieces
}

/// Every pattern that gives back a space, as we and as the models write it.
fn both_ways() -> Vec<(PreTokenizer, Regex)> {
    [GPT2, LLAMA3, QWEN2, QWEN35, MINICPM5, SEED_CODER, BAILING, UFAKZEKA, GPT4O, TEKKEN, DEEPSEEK3]
        .iter()
        .map(|pattern| {
            let ours = PreTokenizer::compile(&[pattern], false, false).expect("compiles");
            let before = pattern.strip_suffix(r"|\s+").expect("ends in white space");
            (ours, Regex::new(&format!(r"{before}|\s+(?!\S)|\s+")).expect("compiles"))
        })
        .collect()
}

#[test]
fn giving_back_space_equals_looking_ahead() {
    let word = "[a-zA-Z\u{E9}\u{65E5}\u{301}]{1,3}|[0-9]{1,4}|'s|'LL|[!.,/_-]{1,2}";
    let text = format!("([ \\t\\r\\n\u{A0}\u{3000}]{{0,4}}({word})?){{0,8}}");
    let patterns = both_ways();
    let mut runner = TestRunner::new(Config::with_cases(1000));
    runner
        .run(&string_regex(&text).expect("a regex"), |text| {
            for (ours, theirs) in &patterns {
                let mut pieces = Vec::new();
                ours.split(&text, |piece| pieces.push(piece.to_owned())).expect("splits");
                proptest::prop_assert_eq!(
                    pieces,
                    split_with_look_ahead(theirs, &text),
                    "{}",
                    theirs.as_str()
                );
            }
            Ok(())
        })
        .expect("both ways agree");
}
