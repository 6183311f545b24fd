//! Writes `docs/models.md` to standard output.

use std::path::Path;

fn main() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden");
    print!("{}", baton_model::models_page(|name| golden.join(name).join("model.gguf").exists()));
}
