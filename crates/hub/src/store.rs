//! The cache on disk, in the layout of `huggingface_hub`: `models--owner--name/` with `blobs/` (files by checksum),
//! `snapshots/COMMIT/` (links to them by name) and `refs/` (which commit a branch is).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::{HubError, Picked, RepoName, home, pick};

/// A directory of repositories.
#[derive(Clone, Debug)]
pub struct HubCache {
    root: PathBuf,
}

/// A repository that is here, at least in part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredModel {
    pub repo: RepoName,
    /// The file or directory that can be opened.
    pub path: PathBuf,
    pub size_bytes: u64,
    pub modified: Option<std::time::SystemTime>,
}

impl HubCache {
    /// Where the environment says.
    pub fn open() -> Result<Self, HubError> {
        Ok(Self { root: home::hub_cache()? })
    }

    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub(crate) fn directory(&self, repo: &RepoName) -> PathBuf {
        self.root.join(format!("models--{}--{}", repo.owner, repo.name))
    }

    /// Makes the directory for the files of a repository, by checksum.
    pub(crate) fn blobs(&self, repo: &RepoName) -> Result<PathBuf, HubError> {
        let blobs = self.directory(repo).join("blobs");
        home::create(&blobs)?;
        Ok(blobs)
    }

    /// Gives a blob its name in a snapshot.
    pub(crate) fn link(
        &self,
        repo: &RepoName,
        commit: &str,
        path: &str,
        blob: &str,
    ) -> Result<PathBuf, HubError> {
        let link = self.directory(repo).join("snapshots").join(commit).join(path);
        if let Some(parent) = link.parent() {
            home::create(parent)?;
        }
        let up = "../".repeat(path.matches('/').count() + 2);
        let target = format!("{up}blobs/{blob}");
        if std::fs::read_link(&link).is_ok_and(|old| old == Path::new(&target)) {
            return Ok(link);
        }
        // Under another name first: whoever looks meanwhile finds the old one or the new one.
        let made = beside(&link);
        let _ = std::fs::remove_file(&made);
        #[cfg(unix)]
        let linked = std::os::unix::fs::symlink(&target, &made);
        #[cfg(not(unix))]
        let linked = std::fs::copy(self.directory(repo).join("blobs").join(blob), &made).map(drop);
        linked
            .and_then(|()| std::fs::rename(&made, &link))
            .map_err(|cause| HubError::io("write", &link, cause))?;
        Ok(link)
    }

    pub(crate) fn set_ref(&self, repo: &RepoName, revision: &str, commit: &str) -> Result<(), HubError> {
        if revision == commit || revision.split('/').any(|part| part.is_empty() || part == "..") {
            return Ok(());
        }
        let path = self.directory(repo).join("refs").join(revision);
        if let Some(parent) = path.parent() {
            home::create(parent)?;
        }
        let made = beside(&path);
        std::fs::write(&made, commit)
            .and_then(|()| std::fs::rename(&made, &path))
            .map_err(|cause| HubError::io("write", &path, cause))
    }

    /// The model, where all of its files are here.
    pub fn find(&self, repo: &RepoName, revision: &str) -> Option<PathBuf> {
        let directory = self.directory(repo);
        let commit = match std::fs::read_to_string(directory.join("refs").join(revision)) {
            Ok(commit) => commit.trim().to_owned(),
            Err(_) => revision.to_owned(),
        };
        if commit.is_empty() || commit.contains(['/', '\\']) || commit == ".." {
            return None;
        }
        complete(repo, &directory.join("snapshots").join(commit))
    }

    /// Everything that can be opened.
    pub fn models(&self) -> Vec<StoredModel> {
        let mut models = Vec::new();
        for entry in std::fs::read_dir(&self.root).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some((owner, name)) = name.strip_prefix("models--").and_then(|id| id.split_once("--")) else {
                continue;
            };
            let repo = RepoName { owner: owner.to_owned(), name: name.to_owned(), quant: None };
            let Some(path) = self.find(&repo, "main") else { continue };
            let size_bytes = blob_bytes(&self.directory(&repo));
            let modified = std::fs::metadata(&path).and_then(|meta| meta.modified()).ok();
            models.push(StoredModel { repo, path, size_bytes, modified });
        }
        models.sort_by_key(|model| model.repo.id());
        models
    }

    /// Removes a repository with all of its revisions. False where it was not here.
    pub fn remove(&self, repo: &RepoName) -> Result<bool, HubError> {
        let directory = self.directory(repo);
        if !directory.is_dir() {
            return Ok(false);
        }
        std::fs::remove_dir_all(&directory).map_err(|cause| HubError::io("remove", &directory, cause))?;
        Ok(true)
    }
}

/// A name that no other process uses.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}

fn blob_bytes(directory: &Path) -> u64 {
    let blobs = std::fs::read_dir(directory.join("blobs")).into_iter().flatten().flatten();
    blobs.filter_map(|blob| blob.metadata().ok()).map(|meta| meta.len()).sum()
}

#[derive(Deserialize)]
struct Index {
    weight_map: std::collections::BTreeMap<String, String>,
}

fn complete(repo: &RepoName, snapshot: &Path) -> Option<PathBuf> {
    let names = file_names(snapshot);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    match pick(repo, &names).ok()? {
        Picked::Gguf(files) => Some(snapshot.join(files.first()?)),
        Picked::Directory(files) => {
            let index = std::fs::read(snapshot.join("model.safetensors.index.json")).ok();
            if let Some(index) = index {
                let index: Index = serde_json::from_slice(&index).ok()?;
                let shards: BTreeSet<&String> = index.weight_map.values().collect();
                if !shards.into_iter().all(|shard| files.contains(shard)) {
                    return None;
                }
            }
            Some(snapshot.to_owned())
        }
    }
}

/// The files below a folder whose links lead somewhere, by their path within it.
fn file_names(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![(folder.to_owned(), String::new())];
    while let Some((inner, prefix)) = folders.pop() {
        for entry in std::fs::read_dir(inner).into_iter().flatten().flatten() {
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            match std::fs::metadata(entry.path()) {
                Ok(meta) if meta.is_dir() => folders.push((entry.path(), format!("{name}/"))),
                Ok(_) => names.push(name),
                Err(_) => {}
            }
        }
    }
    names.sort();
    names
}
