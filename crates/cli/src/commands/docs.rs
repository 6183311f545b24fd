//! `baton docs`, for those who work on Baton: writes what the code knows (flags, routes, metrics) into the pages under
//! `docs/`, between `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`. A test runs it with `--check`, so that
//! the pages cannot say anything else than the code.

use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::{Arg, Command};

use crate::args::DocsArgs;

pub fn run(args: &DocsArgs, command: &Command, out: &mut dyn Write) -> Result<()> {
    for path in &args.files {
        let page =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let fresh = fill(&page, command).with_context(|| path.display().to_string())?;
        if fresh == page {
            continue;
        }
        if args.check {
            bail!("{} is out of date: run `cargo run -- docs {0}`", path.display());
        }
        write(path, &fresh)?;
        writeln!(out, "wrote {}", path.display())?;
    }
    Ok(())
}

fn write(path: &Path, page: &str) -> Result<()> {
    std::fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))
}

/// The page with every generated part made anew.
fn fill(page: &str, command: &Command) -> Result<String> {
    const OPEN: &str = "<!-- generated:";
    let mut filled = String::new();
    let mut rest = page;
    while let Some(start) = rest.find(OPEN) {
        let (before, marked) = rest.split_at(start);
        let (name, _) = marked[OPEN.len()..].split_once(" -->").context("a marker does not end")?;
        let close = format!("<!-- /generated:{name} -->");
        let (_, after) =
            marked.split_once(close.as_str()).with_context(|| format!("generated:{name} has no end"))?;
        write!(filled, "{before}{OPEN}{name} -->\n{}{close}", part(name, command)?)?;
        rest = after;
    }
    filled.push_str(rest);
    Ok(filled)
}

fn part(name: &str, command: &Command) -> Result<String> {
    match name.split_once(' ').unwrap_or((name, "")) {
        ("flags", of) => {
            let found = command.find_subcommand(of).with_context(|| format!("there is no command {of:?}"))?;
            Ok(flags(found))
        }
        ("routes", "") => Ok(routes()),
        ("metrics", "") => Ok(metrics()),
        _ => bail!("nothing is known as generated:{name}"),
    }
}

/// One table a heading, in the order of the help.
fn flags(command: &Command) -> String {
    let mut headings: Vec<Option<&str>> = Vec::new();
    let shown = || command.get_arguments().filter(|flag| !flag.is_hide_set() && flag.get_long().is_some());
    for flag in shown() {
        if !headings.contains(&flag.get_help_heading()) {
            headings.push(flag.get_help_heading());
        }
    }
    let mut tables = String::new();
    for heading in headings {
        let _ = writeln!(
            tables,
            "\n**{}**\n\n| Flag | Default | Meaning |\n|---|---|---|",
            heading.unwrap_or("General")
        );
        for flag in shown().filter(|flag| flag.get_help_heading() == heading) {
            let _ = writeln!(tables, "{}", row(flag));
        }
    }
    tables.push('\n');
    tables
}

fn row(flag: &Arg) -> String {
    let value = if flag.get_action().takes_values() {
        let choices: Vec<String> =
            flag.get_possible_values().iter().map(|one| one.get_name().to_owned()).collect();
        let names: Vec<&str> =
            flag.get_value_names().unwrap_or_default().iter().map(clap::builder::Str::as_str).collect();
        let value = if choices.is_empty() { names.join(" ") } else { choices.join("\\|") };
        format!(" {value}")
    } else {
        String::new()
    };
    let default = flag.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy()));
    let default = default.collect::<Vec<_>>().join(" ");
    let help = flag.get_help().map(ToString::to_string).unwrap_or_default().replace('|', "\\|");
    format!("| `--{}{value}` | {default} | {help} |", flag.get_long().unwrap_or_default())
}

fn routes() -> String {
    let mut table = "\n| Route | What it does |\n|---|---|\n".to_owned();
    for route in baton_serve::describe::routes() {
        let _ = writeln!(table, "| `{} {}` | {} |", route.method.to_uppercase(), route.path, route.summary);
    }
    table.push('\n');
    table
}

fn metrics() -> String {
    let mut table = "\n| Metric | Kind | Meaning |\n|---|---|---|\n".to_owned();
    for metric in baton_serve::describe::metrics() {
        let _ = writeln!(table, "| `{}` | {} | {} |", metric.name, metric.kind, metric.help);
    }
    table.push('\n');
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let command = Cli::command();
        let page = "before\n<!-- generated:routes -->\nold\n<!-- /generated:routes -->\nafter\n";
        let fresh = fill(page, &command).unwrap();
        assert!(
            fresh.starts_with("before\n<!-- generated:routes -->\n") && fresh.ends_with("\nafter\n"),
            "{fresh}"
        );
        assert!(fresh.contains("| `POST /v1/chat/completions` |") && !fresh.contains("old"), "{fresh}");
        assert_eq!(fill(&fresh, &command).unwrap(), fresh);
    }

    #[test]
    fn wrong_markers_are_said() {
        for wrong in [
            "<!-- generated:routes -->",
            "<!-- generated:routes",
            "<!-- generated:weather --><!-- /generated:weather -->",
            "<!-- generated:flags dance --><!-- /generated:flags dance -->",
        ] {
            assert!(fill(wrong, &Cli::command()).is_err(), "{wrong}");
        }
    }
}
