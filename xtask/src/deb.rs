//! The Debian package, made from the same files as the tarball.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::dist::output;
use crate::{root, run};

/// Builds the package and looks into it.
pub fn build(dist: &Path, staged: &Path, version: &str, arch: &str) -> Result<PathBuf> {
    let debian_arch = match arch {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let tree = dist.join("deb");
    if tree.exists() {
        std::fs::remove_dir_all(&tree)?;
    }
    let copy = |from: PathBuf, to: &str| -> Result<()> {
        let to = tree.join(to);
        std::fs::create_dir_all(to.parent().context("it lies in a folder")?)?;
        run(Command::new("cp").arg("-R").arg(from).arg(to))
    };
    copy(staged.join("bin"), "usr/bin")?;
    copy(staged.join("share"), "usr/share")?;
    copy(staged.join("LICENSE"), "usr/share/doc/baton/copyright")?;
    copy(root().join("packaging/baton.env"), "etc/baton/baton.env")?;
    let service = std::fs::read_to_string(root().join("packaging/baton.service"))?;
    let place = tree.join("usr/lib/systemd/system/baton.service");
    std::fs::create_dir_all(place.parent().context("it lies in a folder")?)?;
    std::fs::write(place, service.replace("/usr/local/bin/", "/usr/bin/"))?;
    let control = tree.join("DEBIAN");
    std::fs::create_dir_all(&control)?;
    std::fs::write(control.join("control"), control_file(version, debian_arch))?;
    std::fs::write(control.join("conffiles"), "/etc/baton/baton.env\n")?;
    let package = dist.join(format!("baton_{version}_{debian_arch}.deb"));
    run(Command::new("dpkg-deb")
        .args(["--root-owner-group", "--build"])
        .arg(&tree)
        .arg(&package)
        .stdout(std::process::Stdio::null()))?;
    std::fs::remove_dir_all(&tree)?;
    let listed = output(Command::new("dpkg-deb").arg("--contents").arg(&package))?;
    for must in ["./usr/bin/baton", "./etc/baton/baton.env", "./usr/share/man/man1/baton-serve.1"] {
        if !listed.lines().any(|line| line.ends_with(must)) {
            bail!("{must} is not in {}", package.display());
        }
    }
    Ok(package)
}

fn control_file(version: &str, arch: &str) -> String {
    format!(
        "Package: baton\nVersion: {version}\nArchitecture: {arch}\nMaintainer: The Baton authors <baton@localhost>\n\
         Section: net\nPriority: optional\nDepends: libc6 (>= 2.34), libgcc-s1\n\
         Suggests: libnvrtc12, libcublaslt12\nDescription: serving engine for large language models\n \
         One binary with an OpenAI-compatible API, continuous batching, a paged KV cache\n and a web console, \
         for CPUs and NVIDIA GPUs.\n"
    )
}
