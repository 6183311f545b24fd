//! `baton bench report`: result files of `baton bench` or `vllm bench serve` become a page with charts and a picture.
//!
//! `results` reads the files, `charts` decides what is drawn, `scene` is a drawing of lines, dots and words, which `svg`
//! writes into the page and `png` paints. Both are made from the same drawing, so they cannot differ.
//!
//! `plotters` is not used: its pictures need a font file or the system's font library, where the bitmap font here is a table in the
//! binary, and the 250 lines that draw a scene are no longer than the calls to it would be.

pub(crate) mod charts;
mod html;
mod png;
mod results;
mod scene;
mod svg;

use std::path::PathBuf;

use crate::BenchError;
use charts::Chart;
use results::RunResult;

/// Tables and charts as one page that needs nothing else.
pub(crate) fn page_of(title: &str, text: &str, charts: &[Chart]) -> String {
    html::text_page(title, text, charts)
}

/// Charts as one picture.
pub(crate) fn picture_of(title: &str, charts: &[Chart]) -> Result<Vec<u8>, BenchError> {
    png::paint(&charts::sheet(title, charts))
}

/// What was read, ready to be written.
#[derive(Debug)]
pub struct Report {
    title: String,
    runs: Vec<RunResult>,
    charts: Vec<Chart>,
}

impl Report {
    pub fn read(files: &[PathBuf], title: &str) -> Result<Self, BenchError> {
        let runs: Vec<RunResult> =
            files.iter().map(|file| RunResult::read(file)).collect::<Result<_, _>>()?;
        Ok(Self { title: title.to_owned(), charts: charts::all(&runs), runs })
    }

    /// One page that needs nothing else.
    pub fn to_html(&self) -> String {
        html::page(&self.title, &self.runs, &self.charts)
    }

    /// All charts in one picture.
    pub fn to_png(&self) -> Result<Vec<u8>, BenchError> {
        png::paint(&charts::sheet(&self.title, &self.charts))
    }

    /// The comparison for the console.
    pub fn to_table(&self) -> String {
        results::table(&self.runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(name: &str) -> PathBuf {
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
    }

    #[test]
    fn real_results_become_a_page_and_a_picture() {
        let files = [data("result-c4.json"), data("result-c16.json")];
        let report = Report::read(&files, "Load <& more>").unwrap();
        let html = report.to_html();
        assert!(html.starts_with("<!DOCTYPE html>") && html.contains("Load &lt;&amp; more&gt;"));
        assert_eq!(html.matches("<svg").count(), 4, "throughput and three curves");
        assert!(!html.contains("http://") || html.contains("http://www.w3.org/2000/svg"));
        for word in ["NaN", "inf\""] {
            assert!(!html.contains(word), "{word} in the page");
        }
        let png = report.to_png().unwrap();
        assert_eq!(png[..8], *b"\x89PNG\r\n\x1a\n");
        assert!(png.len() > 10_000, "{} bytes are no picture of four charts", png.len());
        let table = report.to_table();
        assert!(table.contains("output tok/s") && table.lines().count() >= 4, "{table}");
    }

    #[test]
    fn files_that_are_no_results_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (text, expect) in [("{", "EOF"), ("[]", "not a result"), ("{\"a\": 1}", "not a result")] {
            std::fs::write(file.path(), text).unwrap();
            let error = Report::read(&[file.path().to_owned()], "x").unwrap_err().to_string();
            assert!(error.contains(expect) && !error.contains('\n'), "{error}");
        }
        assert!(Report::read(&[data("nothing.json")], "x").is_err());
    }
}
