//! `baton list` and `baton rm`: the models that are here.

use std::io::Write;
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::{Context, Result};
use baton_hub::catalogue::{self, ENTRIES};
use baton_hub::{HubCache, RepoName, cached_entry};
use serde::Serialize;

use crate::args::{ListArgs, RmArgs};
use crate::errors::hinted;
use crate::size;
use crate::table::{Align, Table};

/// A model that is here, as it is shown.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    size_bytes: u64,
    path: PathBuf,
    #[serde(skip)]
    modified: Option<SystemTime>,
}

fn rows() -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for entry in ENTRIES {
        if let Some(path) = cached_entry(entry)? {
            let modified = std::fs::metadata(&path).and_then(|meta| meta.modified()).ok();
            rows.push(Row { name: entry.name.to_owned(), size_bytes: entry.size_bytes, path, modified });
        }
    }
    for model in HubCache::open()?.models() {
        let (size_bytes, modified) = (model.size_bytes, model.modified);
        rows.push(Row { name: model.repo.id(), size_bytes, path: model.path, modified });
    }
    Ok(rows)
}

pub fn list(args: &ListArgs, out: &mut dyn Write) -> Result<()> {
    let rows = rows()?;
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&rows)?)?;
        return Ok(());
    }
    if rows.is_empty() {
        writeln!(
            out,
            "No models have been fetched. `baton pull` fetches one, `baton pull --list` shows what is known by name."
        )?;
        return Ok(());
    }
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Left, Align::Left]);
    table.row(["NAME", "SIZE", "MODIFIED", "PATH"]);
    for row in &rows {
        let path = row.path.display().to_string();
        table.row([&row.name, &size::show(row.size_bytes), &age(row.modified), &path]);
    }
    write!(out, "{table}")?;
    Ok(())
}

/// How long ago that was.
fn age(time: Option<SystemTime>) -> String {
    let Some(age) = time.and_then(|time| time.elapsed().ok()) else { return "–".to_owned() };
    let (count, unit) = match age.as_secs() {
        seconds @ 0..60 => (seconds, "second"),
        seconds @ 60..3600 => (seconds / 60, "minute"),
        seconds @ 3600..86_400 => (seconds / 3600, "hour"),
        seconds => (seconds / 86_400, "day"),
    };
    format!("{count} {unit}{} ago", if count == 1 { "" } else { "s" })
}

pub fn remove(args: &RmArgs, out: &mut dyn Write) -> Result<()> {
    for name in &args.names {
        remove_one(name)?;
        writeln!(out, "removed {name}")?;
    }
    Ok(())
}

fn remove_one(name: &str) -> Result<()> {
    let mut removed = false;
    let repo = match catalogue::find(name) {
        Some(entry) => {
            if let Some(path) = cached_entry(entry)? {
                std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
                removed = true;
            }
            entry.repository.parse::<RepoName>().ok()
        }
        None => name.parse::<RepoName>().ok(),
    };
    if let Some(repo) = repo {
        removed |= HubCache::open()?.remove(&repo)?;
    }
    if removed {
        return Ok(());
    }
    Err(hinted(format!("no model {name:?} has been fetched"), "`baton list` shows those that have been"))
}
