//! `cargo xtask hook`: git runs the quick checks before every commit.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::dist::output;
use crate::root;

/// Style and the crate graph take seconds; the tests are for `cargo xtask test`.
const HOOK: &str = "#!/bin/sh\n# Written by `cargo xtask hook`; `git commit --no-verify` passes over it.\n\
                    set -e\ncargo fmt --all --check\ncargo xtask tidy\n";

pub fn install() -> Result<()> {
    let said = output(Command::new("git").args(["rev-parse", "--git-path", "hooks"]).current_dir(root()))?;
    let folder = root().join(PathBuf::from(said.trim()));
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let path = folder.join("pre-commit");
    if std::fs::read_to_string(&path).is_ok_and(|old| old != HOOK) {
        bail!("{} is there already, and is not ours: add `cargo xtask tidy` to it", path.display());
    }
    std::fs::write(&path, HOOK).with_context(|| format!("cannot write {}", path.display()))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    }
    println!("{} runs before every commit", path.display());
    Ok(())
}
