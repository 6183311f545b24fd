//! `cargo xtask dist [PROFILE [TARGET]]`: what is given to others, under `target/dist`: a tarball with its checksum, a
//! Debian package and a Homebrew formula, unpacked and tried before they are called good.
//!
//! The binary links only what every Linux system has (libc, libm, libgcc); completions and manual pages are asked of
//! the binary itself, or of one for this machine where it is made for another.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{cargo, deb, root, run, target};

const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/baton"),
    ("fish", "share/fish/vendor_completions.d/baton.fish"),
    ("zsh", "share/zsh/site-functions/_baton"),
];
const COPIES: [(&str, &str); 6] = [
    ("LICENSE", "LICENSE"),
    ("README.md", "README.md"),
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("packaging/baton.service", "lib/systemd/system/baton.service"),
    ("packaging/baton.env", "share/doc/baton/baton.env"),
    ("packaging/install.sh", "install.sh"),
];
/// Whose pages and pictures go to `share/doc/baton`.
const DOCS: &str = "docs";

/// Builds with this profile, for this or another machine, and packs.
pub fn build(profile: &str, triple: Option<&str>) -> Result<()> {
    let arch = triple.and_then(|triple| triple.split('-').next()).unwrap_or(std::env::consts::ARCH);
    let is_foreign = arch != std::env::consts::ARCH;
    let mut arguments = vec!["build", "--locked", "--package", "baton-cli", "--profile", profile];
    cargo(&arguments, &[])?;
    // Cargo's own folder for the profile `dev` has another name.
    let folder = if profile == "dev" { "debug" } else { profile };
    let native = target().join(folder).join("baton");
    let mut binary = native.clone();
    if let Some(triple) = triple.filter(|_| is_foreign) {
        arguments.extend(["--target", triple]);
        let tools = cross_tools(arch, triple);
        let tools: Vec<(&str, &str)> =
            tools.iter().map(|(name, tool)| (name.as_str(), tool.as_str())).collect();
        cargo(&arguments, &tools)?;
        binary = target().join(triple).join(folder).join("baton");
    }
    let version = version(&native)?;
    let name = format!("baton-{version}-{arch}-linux");
    let dist = target().join("dist");
    let staged = dist.join(&name);
    if staged.exists() {
        std::fs::remove_dir_all(&staged).with_context(|| format!("cannot clear {}", staged.display()))?;
    }
    let expected = stage(&native, &binary, arch, &staged)?;
    let tarball = dist.join(format!("{name}.tar.gz"));
    pack(&dist, &name, &tarball)?;
    let package = deb::build(&dist, &staged, &version, arch)?;
    std::fs::remove_dir_all(&staged)?;
    check(&dist, &name, &tarball, &expected, !is_foreign)?;
    formula(&dist, &version)?;
    for file in [tarball, package] {
        let bytes = std::fs::metadata(&file)?.len();
        println!("{} ({:.1} MiB)", file.display(), bytes as f64 / f64::from(1 << 20));
    }
    Ok(())
}

/// The compilers that Debian has for another machine.
fn cross_tools(arch: &str, triple: &str) -> Vec<(String, String)> {
    let (upper, lower) = (triple.to_uppercase().replace('-', "_"), triple.replace('-', "_"));
    let gcc = format!("{arch}-linux-gnu-gcc");
    vec![
        (format!("CARGO_TARGET_{upper}_LINKER"), gcc.clone()),
        (format!("CC_{lower}"), gcc),
        (format!("CXX_{lower}"), format!("{arch}-linux-gnu-g++")),
        (format!("AR_{lower}"), format!("{arch}-linux-gnu-ar")),
    ]
}

/// The Homebrew formula with the checksums of the tarballs that are here.
fn formula(dist: &Path, version: &str) -> Result<()> {
    let template = std::fs::read_to_string(root().join("packaging/homebrew/baton.rb.in"))?;
    let mut formula = template.replace("@VERSION@", version);
    if let Ok(releases) = std::env::var("BATON_RELEASES") {
        formula = formula.replace("@RELEASES@", releases.trim_end_matches('/'));
    }
    for arch in ["x86_64", "aarch64"] {
        let file = dist.join(format!("baton-{version}-{arch}-linux.tar.gz.sha256"));
        if let Ok(sum) = std::fs::read_to_string(file) {
            let sum = sum.split(' ').next().unwrap_or_default();
            formula = formula.replace(&format!("@SHA256_{}@", arch.to_uppercase()), sum);
        }
    }
    std::fs::write(dist.join("baton.rb"), formula)?;
    Ok(())
}

/// The number that the binary itself gives.
fn version(binary: &Path) -> Result<String> {
    let said = output(Command::new(binary).arg("--version"))?;
    said.split(' ').nth(1).map(str::to_owned).with_context(|| format!("no version in {said:?}"))
}

/// Lays everything out as it will be unpacked; returns the files.
fn stage(native: &Path, binary: &Path, arch: &str, staged: &Path) -> Result<BTreeSet<PathBuf>> {
    let place = |to: &str| -> Result<PathBuf> {
        let path = staged.join(to);
        std::fs::create_dir_all(path.parent().expect("it lies in a folder"))?;
        Ok(path)
    };
    let copied = place("bin/baton")?;
    std::fs::copy(binary, &copied).with_context(|| format!("cannot copy {}", binary.display()))?;
    let strip = if binary == native { "strip".to_owned() } else { format!("{arch}-linux-gnu-strip") };
    run(Command::new(strip).arg(&copied))?;
    let docs = root().join(DOCS);
    for page in files(&docs)? {
        let to = place(&format!("share/doc/baton/{}", page.display()))?;
        std::fs::copy(docs.join(&page), to).with_context(|| format!("cannot copy {}", page.display()))?;
    }
    for (from, to) in COPIES {
        std::fs::copy(root().join(from), place(to)?).with_context(|| format!("cannot copy {from}"))?;
    }
    for (shell, to) in COMPLETIONS {
        std::fs::write(place(to)?, output(Command::new(native).args(["completions", shell]))?)?;
    }
    let manuals = place("share/man/man1/baton.1")?;
    output(Command::new(native).args(["man", "--out"]).arg(manuals.parent().expect("a folder")))?;
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
fn check(dist: &Path, name: &str, tarball: &Path, expected: &BTreeSet<PathBuf>, runs: bool) -> Result<()> {
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
    for must in [
        "bin/baton",
        "LICENSE",
        "share/doc/baton/server.md",
        "share/doc/baton/kernels/README.md",
        "share/doc/baton/baton.env",
        "share/man/man1/baton-serve.1",
        "lib/systemd/system/baton.service",
    ] {
        if !found.contains(Path::new(must)) {
            bail!("{must} is not in the tarball");
        }
    }
    if runs {
        try_installed(&trial, tarball)?;
    }
    std::fs::remove_dir_all(&trial)?;
    Ok(())
}

/// Installs the tarball with its own script, which must refuse one that was changed.
fn try_installed(trial: &Path, tarball: &Path) -> Result<()> {
    let script = root().join("packaging/install.sh");
    let prefix = trial.join("prefix");
    let said = output(Command::new("sh").arg(&script).arg(tarball).env("PREFIX", &prefix))?;
    println!("{}", said.lines().next().unwrap_or_default());
    let binary = prefix.join("bin/baton");
    if !output(Command::new(&binary).args(["serve", "--help"]))?.contains("--port") {
        bail!("the installed binary does not explain `serve`");
    }
    let changed = trial.join("changed.tar.gz");
    std::fs::write(&changed, b"not the tarball")?;
    std::fs::copy(format!("{}.sha256", tarball.display()), trial.join("changed.tar.gz.sha256"))?;
    if output(Command::new("sh").arg(&script).arg(&changed).env("PREFIX", &prefix)).is_ok() {
        bail!("install.sh takes a tarball with a wrong checksum");
    }
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
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = command.output().with_context(|| format!("cannot start {program}: is it installed?"))?;
    if !done.status.success() {
        bail!("{program} failed ({}): {}", done.status, String::from_utf8_lossy(&done.stderr).trim());
    }
    String::from_utf8(done.stdout).with_context(|| format!("{program} does not print text"))
}
