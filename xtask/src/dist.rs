//! `cargo xtask dist`: what is given to others, as one tarball under `target/dist`, unpacked and tried before it is
//! called good.
//!
//! The binary links only what every Linux system has (libc, libm, libgcc); completions and manual pages are asked of
//! the binary itself.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{cargo, root, run, target};

const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/baton"),
    ("fish", "share/fish/vendor_completions.d/baton.fish"),
    ("zsh", "share/zsh/site-functions/_baton"),
];
const COPIES: [(&str, &str); 4] = [
    ("LICENSE", "LICENSE"),
    ("README.md", "README.md"),
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("packaging/baton.service", "lib/systemd/system/baton.service"),
];

/// Builds with this profile and packs.
pub fn build(profile: &str) -> Result<()> {
    cargo(&["build", "--locked", "--package", "baton-cli", "--profile", profile], &[])?;
    // Cargo's own folder for the profile `dev` has another name.
    let folder = if profile == "dev" { "debug" } else { profile };
    let binary = target().join(folder).join("baton");
    let name = format!("baton-{}-{}-linux", version(&binary)?, std::env::consts::ARCH);
    let dist = target().join("dist");
    let staged = dist.join(&name);
    if staged.exists() {
        std::fs::remove_dir_all(&staged).with_context(|| format!("cannot clear {}", staged.display()))?;
    }
    let expected = stage(&binary, &staged)?;
    let tarball = dist.join(format!("{name}.tar.gz"));
    pack(&dist, &name, &tarball)?;
    std::fs::remove_dir_all(&staged)?;
    check(&dist, &name, &tarball, &expected)?;
    let bytes = std::fs::metadata(&tarball)?.len();
    println!("{} ({:.1} MiB)", tarball.display(), bytes as f64 / f64::from(1 << 20));
    Ok(())
}

/// The number that the binary itself gives.
fn version(binary: &Path) -> Result<String> {
    let said = output(Command::new(binary).arg("--version"))?;
    said.split(' ').nth(1).map(str::to_owned).with_context(|| format!("no version in {said:?}"))
}

/// Lays everything out as it will be unpacked; returns the files.
fn stage(binary: &Path, staged: &Path) -> Result<BTreeSet<PathBuf>> {
    let place = |to: &str| -> Result<PathBuf> {
        let path = staged.join(to);
        std::fs::create_dir_all(path.parent().expect("it lies in a folder"))?;
        Ok(path)
    };
    let copied = place("bin/baton")?;
    std::fs::copy(binary, &copied).with_context(|| format!("cannot copy {}", binary.display()))?;
    run(Command::new("strip").arg(&copied))?;
    for (from, to) in COPIES {
        std::fs::copy(root().join(from), place(to)?).with_context(|| format!("cannot copy {from}"))?;
    }
    for (shell, to) in COMPLETIONS {
        std::fs::write(place(to)?, output(Command::new(binary).args(["completions", shell]))?)?;
    }
    let manuals = place("share/man/man1/baton.1")?;
    output(Command::new(binary).args(["man", "--out"]).arg(manuals.parent().expect("a folder")))?;
    files(staged)
}

/// The same files give the same bytes: sorted, without the owner, with the time of the last commit.
fn pack(dist: &Path, name: &str, tarball: &Path) -> Result<()> {
    let time = output(Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(root()));
    let time = time.map_or_else(|_| "@0".to_owned(), |time| format!("@{}", time.trim()));
    run(Command::new("tar")
        .args(["--create", "--gzip", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"])
        .arg(format!("--mtime={time}"))
        .arg("--file")
        .arg(tarball)
        .arg("--directory")
        .arg(dist)
        .arg(name))?;
    let sum = output(Command::new("sha256sum").arg(format!("{name}.tar.gz")).current_dir(dist))?;
    std::fs::write(dist.join(format!("{name}.tar.gz.sha256")), sum)?;
    Ok(())
}

/// Unpacks it elsewhere and tries it.
fn check(dist: &Path, name: &str, tarball: &Path, expected: &BTreeSet<PathBuf>) -> Result<()> {
    run(Command::new("sha256sum")
        .args(["--check", "--quiet"])
        .arg(format!("{name}.tar.gz.sha256"))
        .current_dir(dist))?;
    let trial = dist.join("trial");
    if trial.exists() {
        std::fs::remove_dir_all(&trial)?;
    }
    std::fs::create_dir_all(&trial)?;
    run(Command::new("tar").args(["--extract", "--file"]).arg(tarball).arg("--directory").arg(&trial))?;
    let unpacked = trial.join(name);
    let found = files(&unpacked)?;
    if found != *expected {
        bail!("the tarball holds {found:?} instead of {expected:?}");
    }
    for must in ["bin/baton", "LICENSE", "share/man/man1/baton-serve.1", "lib/systemd/system/baton.service"] {
        if !found.contains(Path::new(must)) {
            bail!("{must} is not in the tarball");
        }
    }
    let binary = unpacked.join("bin/baton");
    println!("{}", output(Command::new(&binary).arg("--version"))?.trim());
    if !output(Command::new(&binary).args(["serve", "--help"]))?.contains("--port") {
        bail!("the unpacked binary does not explain `serve`");
    }
    std::fs::remove_dir_all(&trial)?;
    Ok(())
}

/// All files under a folder, by their path within it.
fn files(folder: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(inner) = folders.pop() {
        for entry in std::fs::read_dir(&inner).with_context(|| format!("cannot list {}", inner.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.strip_prefix(folder)?.to_owned());
            }
        }
    }
    Ok(found)
}

/// What a command prints; fails if it fails.
fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = command.output().with_context(|| format!("cannot start {program}: is it installed?"))?;
    if !done.status.success() {
        bail!("{program} failed ({}): {}", done.status, String::from_utf8_lossy(&done.stderr).trim());
    }
    String::from_utf8(done.stdout).with_context(|| format!("{program} does not print text"))
}
