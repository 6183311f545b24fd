//! `baton quantize`: a model in another format, for this and other engines.

use std::io::Write;

use anyhow::Result;
use baton_model::{LoadFormat, ModelFiles, quantize};

use crate::args::QuantizeArgs;
use crate::session;
use crate::size::show;

pub fn run(args: &QuantizeArgs, out: &mut dyn Write) -> Result<()> {
    let found = session::locate(Some(&args.model))?;
    let files = ModelFiles::open(&found.path, LoadFormat::Auto)?;
    let before = files.describe().total_bytes;
    quantize(&files, args.format, &args.out, &mut |_| ())?;
    let after = ModelFiles::open(&args.out, LoadFormat::Auto)?.describe().total_bytes;
    writeln!(out, "{}: {} of weights, {} before", args.out.display(), show(after), show(before))?;
    Ok(())
}
