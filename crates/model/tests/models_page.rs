//! `docs/models.md` is what the tables say, and every golden model that it names is there.

use std::path::Path;

#[test]
fn the_page_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let golden = root.join("tests/data/golden");
    let page = baton_model::models_page(|name| {
        let folder = golden.join(name);
        assert!(folder.join("config.json").exists(), "docs/models.md names {name}, which is not there");
        folder.join("model.gguf").exists()
    });
    let written = std::fs::read_to_string(root.join("../../docs/models.md")).unwrap_or_default();
    assert!(
        page == written,
        "docs/models.md is stale: run `cargo run -p baton-model --example models-page > docs/models.md`"
    );
}
