//! Several prompts in one batch: `cargo run --release -p baton --example generate [MODEL]`.

use baton::{Llm, Params};

fn main() -> Result<(), baton::Error> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "smollm2".to_owned());
    let llm = Llm::open(&model)?;
    let prompts = ["The capital of France is", "Water boils at", "The first month of the year is"];
    let params = Params::new().max_tokens(8).temperature(0.0).stop(".");
    for (prompt, answer) in prompts.iter().zip(llm.generate(&prompts, &params)?) {
        println!("{prompt}{}", answer.text);
    }
    Ok(())
}
