//! The official test suite of JSON Schema (draft 2020-12), token by token.
//!
//! A schema either compiles, and then exactly its valid instances can be written, or it is refused, and then it stands
//! in `refused.txt` with the reason. Three differences are deliberate and part of the API, and taken into account here:
//! the properties of an object come in the order of the schema, so an instance counts as accepted if some order of its
//! keys is; a whole number is written without a fraction; `format` is kept, not just noted.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use baton_core::StructuredOutput;
use baton_grammar::CompiledGrammar;
use common::Model;
use serde_json::{Map, Value};

/// Instances that are valid and cannot be written, by group and test, with the reason.
const NOT_WRITTEN: [(&str, &str, &str); 0] = [];

/// More orders of keys than any instance of the suite has.
const MAX_ORDERS: usize = 800;

fn data() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

/// A number as the grammars write it.
fn canonical(value: &Value) -> Value {
    match value {
        Value::Number(number) => match number.as_f64() {
            Some(double) if number.is_f64() && double.fract() == 0.0 && double.abs() < 1e18 => {
                Value::from(double as i64)
            }
            _ => value.clone(),
        },
        Value::Array(values) => values.iter().map(canonical).collect(),
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), canonical(value))).collect(),
        other => other.clone(),
    }
}

/// The value with the keys of its objects in every order.
fn orders(value: &Value) -> Vec<Value> {
    let found = match value {
        Value::Array(values) => values
            .iter()
            .fold(vec![Vec::new()], |lists: Vec<Vec<Value>>, item| {
                product(&lists, &orders(item), |list, item| {
                    [list.as_slice(), std::slice::from_ref(item)].concat()
                })
            })
            .into_iter()
            .map(Value::from)
            .collect(),
        Value::Object(map) => {
            let mut found = Vec::new();
            permute(&mut map.iter().collect::<Vec<_>>(), 0, &mut |entries| {
                let objects = entries.iter().fold(vec![Map::new()], |objects, (key, value)| {
                    product(&objects, &orders(value), |object, value| {
                        let mut object = object.clone();
                        object.insert((*key).clone(), value.clone());
                        object
                    })
                });
                found.extend(objects.into_iter().map(Value::Object));
            });
            found
        }
        other => vec![other.clone()],
    };
    assert!(found.len() <= MAX_ORDERS, "too many orders of {value}");
    found
}

fn product<A, B, C>(left: &[A], right: &[B], join: impl Fn(&A, &B) -> C) -> Vec<C> {
    left.iter().flat_map(|one| right.iter().map(|other| join(one, other)).collect::<Vec<_>>()).collect()
}

fn permute<T: Copy>(items: &mut Vec<T>, from: usize, visit: &mut impl FnMut(&[T])) {
    if from >= items.len() {
        visit(items);
        return;
    }
    for other in from..items.len() {
        items.swap(from, other);
        permute(items, from + 1, visit);
        items.swap(from, other);
    }
}

/// Compact, with spaces, and over several lines.
fn styles(value: &Value) -> [String; 3] {
    let spaced = serde_json::to_string_pretty(value).expect("JSON");
    let pretty = spaced.clone();
    let lines: Vec<&str> = spaced.lines().map(str::trim).collect();
    let joined = lines.iter().fold(String::new(), |mut text, line| {
        if text.ends_with(',') {
            text.push(' ');
        }
        text.push_str(line);
        text
    });
    [value.to_string(), joined, pretty]
}

fn accepts(model: &Model, grammar: &CompiledGrammar, instance: &Value) -> bool {
    let mut results = Vec::new();
    for value in orders(&canonical(instance)) {
        let styles = styles(&value);
        let accepted = styles.each_ref().map(|text| model.accepts(grammar, text));
        assert!(
            accepted.iter().all(|&one| one == accepted[0]),
            "white space matters: {styles:?} {accepted:?}"
        );
        results.push(accepted[0]);
    }
    results.contains(&true)
}

#[test]
fn what_compiles_is_kept_to_the_letter() {
    let model = Model::byte_level();
    let mut refused = BTreeMap::new();
    let (mut num_groups, mut num_instances) = (0, 0);
    let mut wrong = Vec::new();
    let mut files: Vec<_> = std::fs::read_dir(data().join("suite"))
        .expect("the suite")
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    for path in files.iter().filter(|path| path.extension().is_some_and(|end| end == "json")) {
        let file = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let groups: Vec<Value> = serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON");
        for group in &groups {
            let name = format!("{file}: {}", group["description"].as_str().expect("a description"));
            let grammar = match model.compile(&StructuredOutput::Json(group["schema"].to_string())) {
                Ok(grammar) => grammar,
                Err(error) => {
                    refused.insert(name, error.to_string());
                    continue;
                }
            };
            num_groups += 1;
            for test in group["tests"].as_array().expect("tests") {
                // Formats are kept here, which the specification leaves open.
                if file == "format"
                    && test["description"].as_str().is_some_and(|text| text.contains("annotation"))
                {
                    continue;
                }
                num_instances += 1;
                let valid = test["valid"].as_bool().expect("a verdict");
                let accepted = accepts(&model, &grammar, &test["data"]);
                let test_name = test["description"].as_str().expect("a description");
                let excused = NOT_WRITTEN.iter().any(|(group, test, _)| *group == name && *test == test_name);
                if accepted != valid && !(excused && valid) {
                    wrong.push(format!(
                        "{name}: {test_name}: {} is {}",
                        test["data"],
                        if valid { "refused" } else { "accepted" }
                    ));
                }
            }
        }
    }
    println!(
        "{num_groups} groups with {num_instances} instances compile, {} groups are refused",
        refused.len()
    );
    assert!(wrong.is_empty(), "{} wrong verdicts:\n{}", wrong.len(), wrong.join("\n"));
    check_refused(&refused);
}

/// The list of what is refused is part of the API: it may only get shorter, and not by accident.
fn check_refused(refused: &BTreeMap<String, String>) {
    let path = data().join("refused.txt");
    let listed = std::fs::read_to_string(&path).unwrap_or_default();
    let got = refused.iter().fold(String::new(), |got, (name, reason)| got + name + "\n    " + reason + "\n");
    if std::env::var_os("BATON_UPDATE").is_some() {
        std::fs::write(&path, &got).expect("refused.txt can be written");
        return;
    }
    assert_eq!(got, listed, "run with BATON_UPDATE=1 to write refused.txt, and look at the difference");
}
