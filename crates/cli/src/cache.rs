//! Where Baton keeps what it downloads and remembers: `$BATON_HOME`, else `$XDG_CACHE_HOME/baton`, else
//! `~/.cache/baton`. Models are in `models/`, the chat history in `chat_history.txt`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::errors::{WithHint, hinted};

/// The cache directory. It may not exist yet.
pub fn home() -> Result<PathBuf> {
    locate(|name| std::env::var_os(name)).ok_or_else(|| {
        hinted(
            "there is no directory to keep models in",
            "set BATON_HOME to a directory that you can write to",
        )
    })
}

fn locate(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("BATON_HOME")
        .or_else(|| set("XDG_CACHE_HOME").map(|path| path.join("baton")))
        .or_else(|| set("HOME").or_else(|| set("USERPROFILE")).map(|path| path.join(".cache").join("baton")))
}

/// The directory of the models, made if need be.
pub fn models_dir() -> Result<PathBuf> {
    let directory = home()?.join("models");
    create(&directory)?;
    Ok(directory)
}

/// Makes a directory and those above it.
pub fn create(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make the directory {}", directory.display()))
        .with_hint(|| "set BATON_HOME to a directory that you can write to".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(variables: &[(&str, &str)], expect: Option<&str>) {
        let found =
            locate(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()));
        assert_eq!(found, expect.map(PathBuf::from));
    }

    #[test]
    fn the_first_variable_that_is_set_wins() {
        check(&[("BATON_HOME", "/b"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")], Some("/b"));
        check(&[("BATON_HOME", ""), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")], Some("/x/baton"));
        check(&[("HOME", "/h")], Some("/h/.cache/baton"));
        check(&[], None);
    }
}
