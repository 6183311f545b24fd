//! `baton bench report`: result files in, a page and a picture out.

use std::io::Write;

use anyhow::{Context, Result};

use crate::bench_args::ReportArgs;

pub fn run(args: &ReportArgs, out: &mut dyn Write) -> Result<()> {
    let report = baton_bench::Report::read(&args.files, &args.title)?;
    let picture = args.output.with_extension("png");
    std::fs::write(&args.output, report.to_html())
        .with_context(|| format!("cannot write {}", args.output.display()))?;
    std::fs::write(&picture, report.to_png()?)
        .with_context(|| format!("cannot write {}", picture.display()))?;
    write!(out, "{}", report.to_table())?;
    writeln!(out, "written: {} and {}", args.output.display(), picture.display())?;
    Ok(())
}
