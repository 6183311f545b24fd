//! One file of a repository into the cache: continued where an earlier attempt ended, verified, renamed when complete.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::client::{Checksum, Client, RemoteFile};
use crate::{ErrorKind, HubError, Progress, RepoName, hex};

/// How often a transfer that brings nothing new is tried again.
const MAX_FRUITLESS: usize = 3;
const BUFFER_BYTES: usize = 1 << 20;

/// Where the file is wanted from, and where its bytes go.
#[derive(Clone, Copy)]
pub struct FileDownload<'a> {
    pub client: &'a Client,
    pub repo: &'a RepoName,
    pub commit: &'a str,
    pub file: &'a RemoteFile,
    pub blobs: &'a Path,
}

/// The blob's path. One that is here already is not fetched again.
pub fn fetch(download: FileDownload<'_>, progress: &mut dyn Progress) -> Result<PathBuf, HubError> {
    let (file, id) = (download.file, download.file.checksum.text());
    let target = download.blobs.join(id);
    let is_here = || std::fs::metadata(&target).is_ok_and(|meta| meta.is_file() && meta.len() == file.size);
    if is_here() {
        return Ok(target);
    }
    let path = download.blobs.join(format!("{id}.incomplete"));
    let failed = |cause| HubError::io("write", &path, cause);
    let mut partial = lock(&path, progress).map_err(failed)?;
    if is_here() {
        // Another process was quicker; what is locked is ours to remove.
        let _ = std::fs::remove_file(&path);
        return Ok(target);
    }
    progress.begin(&file.path, file.size);
    let done = transfer(download, &mut partial, progress);
    progress.end();
    if let Err(error) = done {
        if error.kind() == ErrorKind::Damaged {
            // There is nothing to continue.
            let _ = std::fs::remove_file(&path);
        }
        return Err(error);
    }
    partial.sync_all().map_err(failed)?;
    std::fs::rename(&path, &target).map_err(|cause| HubError::io("write", &target, cause))?;
    Ok(target)
}

/// Opens the unfinished file for this process alone. Whoever had it may have renamed or removed it meanwhile: then it is
/// opened again.
fn lock(path: &Path, progress: &mut dyn Progress) -> std::io::Result<File> {
    loop {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        if file.try_lock().is_err() {
            progress.doing(Some("waiting: another process is fetching the same file"));
            let locked = file.lock();
            progress.doing(None);
            locked?;
        }
        if is_same(&file, path) {
            return Ok(file);
        }
    }
}

#[cfg(unix)]
fn is_same(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let (own, there) = (file.metadata(), std::fs::metadata(path));
    own.is_ok_and(|own| there.is_ok_and(|there| own.ino() == there.ino() && own.dev() == there.dev()))
}

#[cfg(not(unix))]
fn is_same(_: &File, path: &Path) -> bool {
    path.is_file()
}

enum Hasher {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl Hasher {
    fn new(file: &RemoteFile) -> Self {
        match file.checksum {
            Checksum::Sha256(_) => Self::Sha256(Sha256::new()),
            Checksum::GitBlob(_) => {
                let mut hasher = Sha1::new();
                hasher.update(format!("blob {}\0", file.size));
                Self::GitBlob(hasher)
            }
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::GitBlob(hasher) => hasher.update(bytes),
        }
    }

    fn finish(self) -> String {
        match self {
            Self::Sha256(hasher) => hex(&hasher.finalize()),
            Self::GitBlob(hasher) => hex(&hasher.finalize()),
        }
    }
}

/// Fills the file, from what it has to its end, and proves that it is what was announced.
fn transfer(
    download: FileDownload<'_>,
    partial: &mut File,
    progress: &mut dyn Progress,
) -> Result<(), HubError> {
    let (file, mut buffer) = (download.file, vec![0; BUFFER_BYTES]);
    let (mut hasher, mut have) = rehash(partial, file, &mut buffer, progress)?;
    let mut fruitless = 0;
    while have < file.size {
        let before = have;
        let ended = match download.client.open(download.repo, download.commit, &file.path, have) {
            Ok(download) => {
                if let Some(total) = download.total.filter(|&total| total != file.size) {
                    return Err(damaged(file, &format!("the hub sends {total} bytes")));
                }
                if download.start != have {
                    // Only from the beginning: some servers do not continue.
                    restart(partial, 0).map_err(|cause| broken(file, &cause))?;
                    (hasher, have) = (Hasher::new(file), 0);
                }
                copy(download.reader, partial, &mut hasher, file, &mut have, &mut buffer, progress)
            }
            Err(error) if error.kind() == ErrorKind::Network => Err(error),
            Err(error) => return Err(error),
        };
        if let Err(error) = &ended
            && error.kind() != ErrorKind::Network
        {
            return ended;
        }
        fruitless = if have > before { 0 } else { fruitless + 1 };
        if fruitless >= MAX_FRUITLESS {
            let cause =
                ended.err().map_or_else(|| "the hub ends it early".to_owned(), |error| error.to_string());
            let message = format!("{} broke off at byte {have} of {}: {cause}", file.path, file.size);
            return Err(HubError::new(ErrorKind::Network, message)
                .with_hint("run the command again: it continues where it stopped"));
        }
    }
    let digest = hasher.finish();
    if digest != file.checksum.text() {
        return Err(damaged(file, &format!("its checksum is {digest}")));
    }
    Ok(())
}

/// What an earlier attempt has left, hashed.
fn rehash(
    partial: &mut File,
    file: &RemoteFile,
    buffer: &mut [u8],
    progress: &mut dyn Progress,
) -> Result<(Hasher, u64), HubError> {
    let fail = |cause: std::io::Error| broken(file, &cause);
    if partial.metadata().map_err(fail)?.len() > file.size {
        restart(partial, 0).map_err(fail)?;
    }
    partial.seek(SeekFrom::Start(0)).map_err(fail)?;
    let (mut hasher, mut have) = (Hasher::new(file), 0);
    loop {
        let count = partial.read(buffer).map_err(fail)?;
        if count == 0 {
            return Ok((hasher, have));
        }
        hasher.update(&buffer[..count]);
        have += count as u64;
        progress.at(have);
    }
}

fn copy(
    mut reader: Box<dyn Read>,
    partial: &mut File,
    hasher: &mut Hasher,
    file: &RemoteFile,
    have: &mut u64,
    buffer: &mut [u8],
    progress: &mut dyn Progress,
) -> Result<(), HubError> {
    loop {
        let count = reader
            .read(buffer)
            .map_err(|cause| HubError::new(ErrorKind::Network, format!("the transfer broke off: {cause}")))?;
        if count == 0 {
            return Ok(());
        }
        if *have + count as u64 > file.size {
            return Err(damaged(file, "the hub sends more"));
        }
        partial.write_all(&buffer[..count]).map_err(|cause| broken(file, &cause))?;
        hasher.update(&buffer[..count]);
        *have += count as u64;
        progress.at(*have);
    }
}

fn restart(partial: &mut File, length: u64) -> std::io::Result<()> {
    partial.set_len(length)?;
    partial.seek(SeekFrom::Start(length)).map(drop)
}

fn broken(file: &RemoteFile, cause: &dyn std::fmt::Display) -> HubError {
    HubError::new(ErrorKind::Io, format!("cannot write {}: {cause}", file.path))
        .with_hint("is the disk full? HF_HOME or BATON_HOME may name another one")
}

fn damaged(file: &RemoteFile, what: &str) -> HubError {
    let sum = file.checksum.text();
    let message =
        format!("{} is not what the hub announced ({} bytes, checksum {sum}): {what}", file.path, file.size);
    HubError::new(ErrorKind::Damaged, message)
        .with_hint("try again; if it happens again, the hub or a proxy is damaging the file")
}
