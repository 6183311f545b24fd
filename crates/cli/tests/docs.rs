//! The pages under `docs/` say what the code does.

mod common;

use std::path::Path;

use common::Baton;

#[test]
fn generated_parts_are_up_to_date() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let pages: Vec<String> = std::fs::read_dir(&docs)
        .expect("docs/ is here")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|end| end == "md"))
        .map(|path| path.display().to_string())
        .collect();
    let generated =
        pages.iter().filter(|page| std::fs::read_to_string(page).unwrap().contains("<!-- generated:"));
    assert!(generated.count() >= 2, "server.md and operations.md have generated parts");
    let mut arguments = vec!["docs", "--check"];
    arguments.extend(pages.iter().map(String::as_str));
    Baton::new().ok(&arguments);
}
