//! Which text is nearest to a question: `cargo run --release -p baton --example embed [MODEL]`.

use baton::Llm;

fn main() -> Result<(), baton::Error> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "smollm2".to_owned());
    let llm = Llm::open(&model)?;
    let texts = ["A recipe for bread", "The history of Rome", "How to bake a cake"];
    let vectors = llm.embed(&texts)?;
    for (text, vector) in texts.iter().zip(&vectors).skip(1) {
        let likeness: f32 = vectors[0].iter().zip(vector).map(|(one, other)| one * other).sum();
        println!("{} ~ {text}: {likeness:.3}", texts[0]);
    }
    Ok(())
}
