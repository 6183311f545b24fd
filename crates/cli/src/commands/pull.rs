//! `baton pull`: fetches a model by name, or shows the catalogue.

use std::io::Write;

use anyhow::Result;
use baton_hub::catalogue::{self, ENTRIES, Entry};
use baton_hub::{HubCache, Located, Origin, RepoName, cached_entry, home, is_genuine};

use crate::args::PullArgs;
use crate::errors::hinted;
use crate::session::Bars;
use crate::size;
use crate::table::{Align, Table};

pub fn run(args: &PullArgs, out: &mut dyn Write) -> Result<()> {
    if args.list {
        return list(out);
    }
    let bars = &mut Bars::default();
    let entry = match args.name.as_deref() {
        None => Some(catalogue::DEFAULT),
        Some(name) => catalogue::find(name),
    };
    if let Some(path) = &args.from {
        let entry = entry.ok_or_else(|| unknown(args.name.as_deref().unwrap_or_default()))?;
        return said(&baton_hub::pull_from(entry, path, bars)?, out);
    }
    let name = args.name.as_deref();
    if entry.is_none() && !name.is_some_and(RepoName::looks_like) {
        return Err(unknown(name.unwrap_or_default()));
    }
    if !args.force
        && let Some(entry) = entry
        && let Some(path) = cached_entry(entry)?
    {
        if is_genuine(entry, &path, bars)? {
            writeln!(out, "{} is already there: {}", entry.name, path.display())?;
            return Ok(());
        }
        eprintln!("warning: {} is damaged and is fetched again", path.display());
    }
    said(&baton_hub::pull(name, args.revision.as_deref(), bars)?, out)
}

fn said(found: &Located, out: &mut dyn Write) -> Result<()> {
    match &found.origin {
        Origin::Catalogue(entry) => {
            writeln!(out, "{} ({}): {}", found.name, entry.licence, found.path.display())?;
        }
        _ => writeln!(out, "{}: {}", found.name, found.path.display())?,
    }
    Ok(())
}

fn unknown(name: &str) -> anyhow::Error {
    let hint = if std::path::Path::new(name).exists() {
        format!(
            "a file needs no pull: give its path as MODEL; to put a catalogue model into the cache from a file, use `baton pull --from {name}`"
        )
    } else {
        format!("give a repository (owner/name), or one of: {}", catalogue::names())
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
    writeln!(out)?;
    for entry in ENTRIES {
        writeln!(out, "  {}: {} ({}:{})", entry.name, entry.description, entry.repository, entry.quant)?;
    }
    writeln!(out, "\n  any other model of the hub: baton pull owner/name[:QUANT]")?;
    writeln!(out, "  cache: {} and {}", home::home()?.display(), home::hub_cache()?.display())?;
    Ok(())
}

fn state(entry: &Entry) -> Result<&'static str> {
    let repo: RepoName = entry.repository.parse()?;
    let repo = RepoName { quant: Some(entry.quant.to_owned()), ..repo };
    let is_here = cached_entry(entry)?.is_some() || HubCache::open()?.find(&repo, "main").is_some();
    Ok(if is_here { "here" } else { "to be fetched" })
}
