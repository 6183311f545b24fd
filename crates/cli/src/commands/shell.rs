//! `baton completions` and `baton man`: generated from the command line itself, so they are never out of date.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use clap_complete::Shell;

pub fn completions(shell: Shell, mut command: clap::Command, out: &mut dyn Write) -> Result<()> {
    // The generator panics where its writer fails, so it writes to memory, which does not.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "baton", &mut script);
    out.write_all(&script)?;
    Ok(())
}

pub fn man(out_dir: Option<&Path>, command: clap::Command, out: &mut dyn Write) -> Result<()> {
    let Some(directory) = out_dir else {
        clap_mangen::Man::new(command).render(out)?;
        return Ok(());
    };
    baton_hub::home::create(directory)?;
    clap_mangen::generate_to(command, directory)
        .with_context(|| format!("cannot write manual pages to {}", directory.display()))?;
    writeln!(out, "manual pages are in {}", directory.display())?;
    Ok(())
}
