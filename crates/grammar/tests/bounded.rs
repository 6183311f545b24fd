//! Hostile schemas, expressions and grammars: compiling ends by itself, soon, and in little memory.
//!
//! A test binary of its own, because memory is measured for the whole process.

mod common;

use std::time::{Duration, Instant};

use baton_core::{Constraint, StructuredOutput, mask_allows};
use common::Model;
use serde_json::{Value, json};

/// Many times what each takes; without bounds they take minutes to years.
const PATIENCE: Duration = Duration::from_secs(20);
/// What the whole process may take at its peak: without bounds one compilation took 50 MiB per second.
const MAX_PEAK_MIB: u64 = 768;

fn hostile() -> Vec<StructuredOutput> {
    let nested = |opening: &str, depth: usize| {
        StructuredOutput::Json(format!("{}{{}}{}", opening.repeat(depth), "}".repeat(depth)))
    };
    let schema = |schema: Value| StructuredOutput::Json(schema.to_string());
    let constants: Vec<Value> =
        (0..3000).map(|i| json!({"const": format!("{i}{}", "x".repeat(40))})).collect();
    let multiple = |step: u64| json!({"type": "integer", "multipleOf": step});
    let properties = |count: usize| {
        let names = (0..count).map(|i| (format!("p{i}"), multiple(99_999_989)));
        json!({"type": "object", "properties": names.collect::<serde_json::Map<_, _>>()})
    };
    // Each pair of alternatives doubles the ways to satisfy all.
    let pair =
        |i: usize| json!({"anyOf": [{"required": [format!("a{i}")]}, {"required": [format!("b{i}")]}]});
    let pairs: Vec<Value> = (0..24).map(pair).collect();
    let strings: Vec<Value> = (0..12).map(|i| json!({"pattern": format!("a.{{{i},40}}b.*c{i}")})).collect();
    let doubling: serde_json::Map<_, _> = (0..30)
        .map(|i| {
            let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
            (format!("d{i}"), json!({"type": "object", "properties": {"l": next, "r": next}}))
        })
        .chain([("d30".to_owned(), json!({"type": "null"}))])
        .collect();
    vec![
        nested("{\"items\":", 120),
        schema(json!({"anyOf": constants})),
        schema(multiple(2_147_483_648)),
        schema(multiple(99_999_989)),
        schema(multiple(4_294_967_291)),
        schema(json!({"type": "number", "multipleOf": 0.000_099_991})),
        schema(json!({"allOf": [multiple(9973), multiple(9967)]})),
        schema(json!({"anyOf": [multiple(99_999_989), multiple(99_999_971)]})),
        schema(properties(100)),
        schema(json!({"type": "array", "items": multiple(99_999_989), "minItems": 1000})),
        schema(json!({"type": "string", "minLength": 1_000_000})),
        schema(json!({"type": "string", "minLength": 1_000_000, "pattern": "^(a|b)*c.{1000}$"})),
        schema(json!({"type": "string", "allOf": strings})),
        schema(json!({"type": "array", "minItems": 10_000_000})),
        schema(json!({"allOf": pairs, "type": "object"})),
        schema(json!({"$ref": "#/$defs/d0", "$defs": doubling})),
        schema(json!({"$ref": "#"})),
        schema(json!({"allOf": [{"$ref": "#"}]})),
        StructuredOutput::Regex("(a{1000}){1000}".into()),
        StructuredOutput::Regex("((((a*)*)*)*)*b".into()),
        StructuredOutput::Regex("(.*a.{300}b)|(.*b.{300}a)|(.*c.{200}d)".into()),
        StructuredOutput::Regex("[ab]*a[ab]{2000}".into()),
        StructuredOutput::Regex("(((a?){100}){100}){100}b".into()),
        StructuredOutput::Grammar("start: start start | \"a\"".into()),
        StructuredOutput::Grammar("start: A\nA: /(.*x){40}/ & ~/.*(yz){30}.*/ & /[^q]*r.{200}/".into()),
        StructuredOutput::Grammar(format!("start: {}\na: \"\" | \"a\"", "a ".repeat(500))),
    ]
}

#[test]
fn hostile_wishes_end_soon_and_in_little_memory() {
    let model = Model::byte_level();
    for wish in hostile() {
        let started = Instant::now();
        let result = model.compile(&wish);
        let name: String = format!("{wish:?}").chars().take(100).collect();
        println!("{:.2} s, {} MiB, {name}", started.elapsed().as_secs_f64(), peak_mib().unwrap_or(0));
        assert!(started.elapsed() < PATIENCE, "{name} took {:?}", started.elapsed());
        // What compiles must also be bounded when it is used.
        if let Ok(grammar) = result {
            let mut matcher = grammar.start();
            let mut mask = grammar.first_mask().to_vec();
            for _ in 0..50 {
                let Some(token) = (0..model.vocab_size as u32).rev().find(|&id| mask_allows(&mask, id))
                else {
                    break;
                };
                if token == model.end || matcher.advance(token, &mut mask).is_err() {
                    break;
                }
            }
            assert!(started.elapsed() < 2 * PATIENCE, "{name} took {:?}", started.elapsed());
        }
    }
    if let Some(peak) = peak_mib() {
        assert!(peak < MAX_PEAK_MIB, "{peak} MiB at the peak");
    }
}

/// The most memory this process ever held, where the system tells (Linux).
fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024)
}
