//! One question, one answer: `cargo run --release -p baton --example chat [MODEL]`.

use baton::{Llm, Message};

fn main() -> Result<(), baton::Error> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "smollm2".to_owned());
    let llm = Llm::open(&model)?;
    let answer = llm.chat(&[
        Message::system("You are a helpful assistant. Answer in one sentence."),
        Message::user("What is the capital of France?"),
    ])?;
    println!("{}", answer.text);
    eprintln!("{} tokens, {}", answer.completion_tokens, llm.sampling_defaults());
    Ok(())
}
