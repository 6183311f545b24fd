//! Text as it comes: `cargo run --release -p baton --example stream [MODEL]`.

use std::io::Write;

use baton::{Llm, Message, Params};

fn main() -> Result<(), baton::Error> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "smollm2".to_owned());
    let llm = Llm::open(&model)?;
    let question = [Message::user("Name three rivers in Europe.")];
    for piece in llm.chat_stream(&question, &Params::new().max_tokens(64))? {
        print!("{}", piece?);
        let _ = std::io::stdout().flush();
    }
    println!();
    Ok(())
}
