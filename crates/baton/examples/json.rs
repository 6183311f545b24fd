//! An answer that is valid JSON, whatever the model: `cargo run --release -p baton --example json [MODEL]`.

use baton::{Llm, Message, Params};

const SCHEMA: &str = r#"{"type": "object", "required": ["name", "year"], "properties": {
    "name": {"type": "string", "maxLength": 30}, "year": {"type": "integer", "minimum": 1000, "maximum": 2100}}}"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "smollm2".to_owned());
    let llm = Llm::open(&model)?;
    let question = [Message::user("Who painted the Mona Lisa, and when? Answer as JSON.")];
    let answer = llm.chat_with(&question, &Params::new().json_schema(SCHEMA))?;
    let painter: serde_json::Value = serde_json::from_str(&answer.text)?;
    println!("{} in {}", painter["name"], painter["year"]);
    Ok(())
}
