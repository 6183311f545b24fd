//! A program that embeds Baton.

use baton::{Llm, Message};

fn main() -> Result<(), baton::Error> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "smollm2".to_owned());
    let llm = Llm::open(&model)?;
    let answer = llm.chat(&[Message::user("Name three rivers in Europe.")])?;
    println!("{}", answer.text);
    Ok(())
}
