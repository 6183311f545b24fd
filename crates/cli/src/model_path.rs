//! From what the user typed as MODEL to a file: a path is taken as it is, a catalogue name is fetched on first use.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::catalogue::{self, Entry};
use crate::errors::hinted;
use crate::fetch;
use crate::size;

/// A model that is on disk.
#[derive(Debug, PartialEq, Eq)]
pub struct ModelPath {
    pub path: PathBuf,
    /// What it is called in output: the catalogue's name, or the file's or directory's.
    pub name: String,
}

/// Finds the model, or the default one where none is named.
pub fn resolve(model: Option<&str>) -> Result<ModelPath> {
    let Some(given) = model else { return from_catalogue(catalogue::DEFAULT) };
    let path = Path::new(given);
    if path.exists() {
        return Ok(ModelPath { name: display_name(path), path: path.to_owned() });
    }
    if let Some(entry) = catalogue::find(given) {
        return from_catalogue(entry);
    }
    Err(hinted(
        format!(
            "there is no model {given:?}: it is neither a file, nor a directory, nor a name of the catalogue"
        ),
        format!(
            "give a .gguf file, a directory with config.json and *.safetensors, or one of: {}",
            catalogue::names()
        ),
    ))
}

fn from_catalogue(entry: &Entry) -> Result<ModelPath> {
    let path = if let Some(path) = fetch::cached(entry)? {
        path
    } else {
        eprintln!("fetching {} ({}), once", entry.name, size::show(entry.size_bytes));
        fetch::download(entry)?
    };
    Ok(ModelPath { path, name: entry.name.to_owned() })
}

/// A file without its extension, a directory as it is; for a `config.json`, the directory it is in.
fn display_name(path: &Path) -> String {
    let is_config = path.extension().is_some_and(|extension| extension == "json");
    let canonical = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let named = match canonical.parent() {
        Some(parent) if is_config && parent.file_name().is_some() => parent,
        _ => &canonical,
    };
    let name = if named.is_dir() { named.file_name() } else { named.file_stem() };
    name.map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_from_paths() {
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("llama-3.1-8b");
        std::fs::create_dir(&inner).unwrap();
        for file in ["model.Q4_1.gguf", "config.json"] {
            std::fs::write(inner.join(file), "").unwrap();
        }
        assert_eq!(display_name(&inner), "llama-3.1-8b");
        assert_eq!(display_name(&inner.join("config.json")), "llama-3.1-8b");
        assert_eq!(display_name(&inner.join("model.Q4_1.gguf")), "model.Q4_1");
    }

    #[test]
    fn an_unknown_model_says_what_is_possible() {
        let error = resolve(Some("no/such/model")).unwrap_err().to_string();
        assert!(error.contains("no/such/model") && error.contains("neither a file"), "{error}");
    }
}
