//! Where models are kept.
//!
//! Baton's own directory is `$BATON_HOME`, else `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`. Repositories of a hub
//! are shared with the hub's own tools: `$HF_HUB_CACHE`, else `$HF_HOME/hub`, else `$BATON_HOME/hub`, else
//! `~/.cache/huggingface/hub`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::{ErrorKind, HubError};

const WRITABLE: &str = "set BATON_HOME to a directory that you can write to";

/// Baton's own directory. It may not exist yet.
pub fn home() -> Result<PathBuf, HubError> {
    own(&|name| std::env::var_os(name)).ok_or_else(nowhere)
}

/// The directory of the hub's repositories. It may not exist yet.
pub fn hub_cache() -> Result<PathBuf, HubError> {
    shared(&|name| std::env::var_os(name)).ok_or_else(nowhere)
}

/// Where the hub's own tools keep their token.
pub(crate) fn token_file() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("HF_TOKEN_PATH")
        .or_else(|| variable("HF_HOME").map(|home| home.join("token")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/huggingface/token")))
}

fn nowhere() -> HubError {
    HubError::new(ErrorKind::Io, "there is no directory to keep models in").with_hint(WRITABLE)
}

type Variables<'a> = &'a dyn Fn(&str) -> Option<OsString>;

fn set(variable: Variables<'_>, name: &str) -> Option<PathBuf> {
    variable(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn user_cache(variable: Variables<'_>) -> Option<PathBuf> {
    set(variable, "XDG_CACHE_HOME").or_else(|| {
        set(variable, "HOME").or_else(|| set(variable, "USERPROFILE")).map(|path| path.join(".cache"))
    })
}

fn own(variable: Variables<'_>) -> Option<PathBuf> {
    set(variable, "BATON_HOME").or_else(|| Some(user_cache(variable)?.join("baton")))
}

fn shared(variable: Variables<'_>) -> Option<PathBuf> {
    set(variable, "HF_HUB_CACHE")
        .or_else(|| set(variable, "HF_HOME").map(|path| path.join("hub")))
        .or_else(|| set(variable, "BATON_HOME").map(|path| path.join("hub")))
        .or_else(|| Some(user_cache(variable)?.join("huggingface").join("hub")))
}

/// The directory of the catalogue's own files, made if need be.
pub fn models_dir() -> Result<PathBuf, HubError> {
    let directory = home()?.join("models");
    create(&directory)?;
    Ok(directory)
}

/// Makes a directory and those above it.
pub fn create(directory: &Path) -> Result<(), HubError> {
    std::fs::create_dir_all(directory)
        .map_err(|cause| HubError::io("make the directory", directory, cause).with_hint(WRITABLE))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Find = fn(Variables<'_>) -> Option<PathBuf>;

    fn check(find: Find, variables: &[(&str, &str)], expect: Option<&str>) {
        let found =
            find(&|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()));
        assert_eq!(found, expect.map(PathBuf::from), "{variables:?}");
    }

    #[test]
    fn the_first_variable_that_is_set_wins() {
        check(own, &[("BATON_HOME", "/b"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")], Some("/b"));
        check(own, &[("BATON_HOME", ""), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")], Some("/x/baton"));
        check(own, &[("HOME", "/h")], Some("/h/.cache/baton"));
        check(own, &[], None);
        check(shared, &[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/f")], Some("/c"));
        check(shared, &[("HF_HOME", "/f"), ("BATON_HOME", "/b")], Some("/f/hub"));
        check(shared, &[("BATON_HOME", "/b"), ("HOME", "/h")], Some("/b/hub"));
        check(shared, &[("HOME", "/h")], Some("/h/.cache/huggingface/hub"));
    }
}
