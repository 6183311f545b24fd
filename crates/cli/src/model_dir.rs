//! `--model-dir`: the models of a directory, loaded when a request names them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use baton_serve::{AvailableModel, ModelSource, MoreModels, ServedModel};

use crate::commands::serve::{start_encoder, start_model};
use crate::engine_args::EngineArgs;
use crate::errors::hinted;
use crate::serve_args::ModelDirArgs;
use crate::session::AnySession;

/// A directory, and how its models are opened.
#[derive(Debug)]
pub struct ModelDir {
    path: PathBuf,
    /// Loaded from the start under names of its own; not listed again.
    first: Option<PathBuf>,
    engine: EngineArgs,
}

impl ModelDir {
    /// What is there now, by name. Of two with one name, the directory.
    fn entries(&self) -> Vec<(String, PathBuf)> {
        let mut entries = scan(&self.path).unwrap_or_default();
        entries.retain(|(_, path)| Some(path) != self.first.as_ref());
        entries
    }
}

/// Names and paths of a directory's models, by name.
fn scan(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let cannot = || format!("--model-dir: cannot list {}", folder.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(cannot)? {
        let path = entry.with_context(cannot)?.path();
        let is_gguf = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) && path.is_file();
        let name = if path.join("config.json").is_file() {
            path.file_name()
        } else if is_gguf {
            path.file_stem()
        } else {
            None
        };
        if let Some(name) = name.and_then(|name| name.to_str()) {
            found.push((name.to_owned(), path));
        }
    }
    // A directory sorts before the file of the same name with an ending.
    found.sort();
    found.dedup_by(|a, b| a.0 == b.0);
    Ok(found)
}

/// Of a file, or of a directory's files.
fn size_of(path: &Path) -> u64 {
    let bytes = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
    match std::fs::read_dir(path) {
        Ok(files) => files.flatten().map(|file| bytes(&file.path())).sum(),
        Err(_) => bytes(path),
    }
}

impl ModelSource for ModelDir {
    fn list(&self) -> Vec<AvailableModel> {
        let model = |(name, path): (String, PathBuf)| AvailableModel { name, bytes: size_of(&path) };
        self.entries().into_iter().map(model).collect()
    }

    fn load(&self, name: &str) -> Result<ServedModel, String> {
        let found = self.entries().into_iter().find(|(known, _)| known == name);
        let (_, path) = found.ok_or_else(|| "its file is gone".to_owned())?;
        let path = path.to_str().ok_or_else(|| "its path is not UTF-8".to_owned())?;
        let names = vec![name.to_owned()];
        match AnySession::open(Some(path), &self.engine).map_err(|error| format!("{error:#}"))? {
            AnySession::Decoder(session) => {
                tracing::info!("{}", session.engine.memory_plan());
                Ok(start_model(*session, names, None, None))
            }
            AnySession::Encoder(session) => Ok(start_encoder(*session, names)),
        }
    }
}

/// The model to begin with, and where the others come from.
#[derive(Debug)]
pub struct Chosen {
    pub model: Option<String>,
    /// What it is called where it comes from the directory.
    pub name: Option<String>,
    pub more: Option<MoreModels>,
}

pub fn choose(model: Option<&str>, args: &ModelDirArgs, engine: &EngineArgs) -> Result<Chosen> {
    let Some(folder) = &args.model_dir else {
        return Ok(Chosen { model: model.map(str::to_owned), name: None, more: None });
    };
    let entries = scan(folder)?;
    let (first, name) = if let Some(model) = model {
        let same = |path: &Path| std::fs::canonicalize(path).ok();
        let asked = same(Path::new(model));
        // A name of the directory, or a path into it.
        let is_meant = |name: &str, path: &Path| name == model || asked.is_some() && same(path) == asked;
        let found = entries.iter().find(|(name, path)| is_meant(name, path));
        (found.map(|(_, path)| path.clone()), found.map(|(name, _)| name.clone()))
    } else {
        let (name, path) = entries.first().ok_or_else(|| {
            let what = format!("--model-dir: there is no model in {}", folder.display());
            hinted(what, "put .gguf files or directories with a config.json there, or name a MODEL")
        })?;
        (Some(path.clone()), Some(name.clone()))
    };
    let path = first.as_ref().map(|path| path.display().to_string());
    let source = ModelDir { path: folder.clone(), first, engine: engine.clone() };
    let more = MoreModels {
        source: Arc::new(source),
        max_loaded: usize::from(args.max_loaded_models) - 1,
        idle_timeout: Duration::from_secs_f64(args.model_idle_timeout),
        load_timeout: Duration::from_secs_f64(args.model_load_timeout),
    };
    Ok(Chosen { model: path.or_else(|| model.map(str::to_owned)), name, more: Some(more) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_files_and_directories() {
        let folder = tempfile::tempdir().expect("a directory");
        for name in ["b.gguf", "c.GGUF", "notes.txt", "a/config.json", "b/config.json", "empty/other"] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("makes");
            std::fs::write(&path, "12345").expect("writes");
        }
        let found = scan(folder.path()).expect("lists");
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert!(found[1].1.is_dir(), "{found:?}");
        assert_eq!(size_of(&found[2].1), 5);
        assert!(scan(&folder.path().join("none")).is_err());
    }
}
