//! Runs a folder of JSON Schemas through a real model and checks every document that it finishes.
//!
//! ```text
//! cargo run -p baton-grammar --example schemas -- MODEL FOLDER [MAX_TOKENS] [TEMPERATURE]
//! ```
//! Prints one line a schema that was refused, cut by length or answered wrongly, then the counts. Exits with 1 where
//! a finished document is not valid.

#[path = "../tests/common/real.rs"]
mod real;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use baton_core::{FinishReason, SamplingParams, StructuredOutput};
use real::RealModel;
use serde_json::Value;

/// Of the schema that the prompt shows.
const SHOWN_CHARS: usize = 240;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, folder, rest @ ..] = args.as_slice() else {
        eprintln!("usage: schemas MODEL FOLDER [MAX_TOKENS] [TEMPERATURE]");
        return ExitCode::from(2);
    };
    let number =
        |index: usize, default: f32| rest.get(index).map_or(default, |text| text.parse().expect("a number"));
    let (max_tokens, temperature) = (number(0, 400.0) as u32, number(1, 1.0));
    let model = RealModel::open(Path::new(model), 64);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("the folder").map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| path.extension().is_some_and(|end| end == "json"));
    files.sort();

    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut running = Vec::new();
    for (seed, path) in (0..).zip(&files) {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let text = std::fs::read_to_string(path).expect("a file");
        let schema: Value = serde_json::from_str(&text).expect("JSON");
        let shown: String = schema.to_string().chars().take(SHOWN_CHARS).collect();
        let prompt = format!("Schema: {shown}\nA short JSON document that is valid for the schema:\n");
        let params = SamplingParams {
            max_tokens: Some(max_tokens),
            temperature,
            seed: Some(seed),
            ..SamplingParams::default()
        };
        match model.submit(&prompt, StructuredOutput::Json(schema.to_string()), params) {
            Ok(pending) => running.push((name, schema, pending)),
            Err(error) => {
                println!("refused  {name}: {error}");
                *counts.entry("refused").or_default() += 1;
            }
        }
    }
    for (name, schema, pending) in running {
        let (text, reason) = pending.finish(&model.tokenizer, 1).remove(0);
        let verdict = verdict(&schema, &text, reason);
        if verdict != "finished and valid" {
            let shown: String = text.chars().take(300).collect();
            println!("{verdict}  {name}: {}", shown.replace('\n', " "));
        }
        *counts.entry(verdict).or_default() += 1;
    }
    println!("{} schemas: {counts:?}", files.len());
    ExitCode::from(u8::from(counts.contains_key("invalid") || counts.contains_key("failed")))
}

fn verdict(schema: &Value, text: &str, reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => return "cut by length",
        FinishReason::Stop => {}
        FinishReason::Abort | FinishReason::Error => return "failed",
    }
    let Ok(value) = serde_json::from_str::<Value>(text) else { return "invalid" };
    match jsonschema::options().should_validate_formats(true).build(schema) {
        Ok(validator) if validator.is_valid(&value) => "finished and valid",
        Ok(_) => "invalid",
        // The schema itself breaks the rules of its draft.
        Err(_) => "not checked",
    }
}
