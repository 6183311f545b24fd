//! `baton pull`: gets a catalogue model into the cache, or shows what there is.

use std::io::Write;

use anyhow::Result;

use crate::args::PullArgs;
use crate::cache;
use crate::catalogue::{self, ENTRIES, Entry};
use crate::errors::hinted;
use crate::fetch;
use crate::size;
use crate::table::{Align, Table};

pub fn run(args: &PullArgs, out: &mut dyn Write) -> Result<()> {
    if args.list {
        return list(out);
    }
    let entry = match args.name.as_deref() {
        None => catalogue::DEFAULT,
        Some(name) => catalogue::find(name).ok_or_else(|| unknown(name))?,
    };
    if !args.force
        && args.from.is_none()
        && let Some(path) = fetch::cached(entry)?
    {
        if fetch::is_genuine(entry, &path)? {
            writeln!(out, "{} is here: {}", entry.name, path.display())?;
            return Ok(());
        }
        eprintln!("warning: {} is damaged and is fetched again", path.display());
    }
    let path = match &args.from {
        Some(path) => fetch::from_file(entry, path)?,
        None => fetch::download(entry)?,
    };
    writeln!(
        out,
        "{} ({}, {}): {}",
        entry.name,
        size::show(entry.size_bytes),
        entry.licence,
        path.display()
    )?;
    Ok(())
}

fn unknown(name: &str) -> anyhow::Error {
    let hint = if std::path::Path::new(name).exists() {
        format!(
            "a file needs no pull: give its path as MODEL; to put a catalogue model into the cache from a file, use `baton pull --from {name}`"
        )
    } else {
        format!("the catalogue has: {}", catalogue::names())
    };
    hinted(format!("there is no model {name:?} in the catalogue"), hint)
}

fn list(out: &mut dyn Write) -> Result<()> {
    let mut table = Table::new(&[Align::Left, Align::Left, Align::Right, Align::Left, Align::Left]);
    table.row(["NAME", "ALSO", "SIZE", "LICENCE", "STATE"]);
    for entry in ENTRIES {
        let aliases = entry.aliases.join(", ");
        table.row([entry.name, &aliases, &size::show(entry.size_bytes), entry.licence, state(entry)?]);
    }
    write!(out, "{table}")?;
    for entry in ENTRIES {
        writeln!(out, "\n  {}: {}", entry.name, entry.description)?;
    }
    writeln!(out, "\n  cache: {}", cache::home()?.display())?;
    Ok(())
}

fn state(entry: &Entry) -> Result<&'static str> {
    Ok(if fetch::cached(entry)?.is_some() { "here" } else { "to be fetched" })
}
