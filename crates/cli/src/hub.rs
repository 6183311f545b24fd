//! Downloads a catalogue file from the Hugging Face hub (cargo feature `hub`). `HF_ENDPOINT`, `HF_TOKEN` and
//! the proxy variables work as they do for the hub's own tools.

use std::path::PathBuf;

use anyhow::{Context, Result};
use hf_hub::HFClient;
use hf_hub::progress::{DownloadEvent, Progress, ProgressEvent, ProgressHandler};

use crate::cache;
use crate::catalogue::Entry;
use crate::fetch;
use crate::progress;

struct Bar(indicatif::ProgressBar);

impl ProgressHandler for Bar {
    fn on_progress(&self, event: &ProgressEvent) {
        match event {
            ProgressEvent::Download(DownloadEvent::Progress { files }) => {
                if let Some(file) = files.first() {
                    self.0.set_position(file.bytes_completed);
                }
            }
            ProgressEvent::Download(DownloadEvent::AggregateProgress { bytes_completed, .. }) => {
                self.0.set_position(*bytes_completed);
            }
            _ => {}
        }
    }
}

/// Fetches into a temporary directory; the file is then checked and stored like any other.
pub fn download(entry: &Entry, owner: &str, repository: &str, file: &str) -> Result<PathBuf> {
    let what = || format!("cannot fetch {file} from {owner}/{repository} on the hub");
    let directory = tempfile::Builder::new()
        .prefix(".hub-")
        .tempdir_in(cache::models_dir()?)
        .context("cannot make a temporary directory in the cache")?;
    let bar = progress::bytes("downloading", entry.size_bytes);
    // There is another source: do not insist.
    let client = HFClient::builder().retry_max_attempts(1).build_sync().with_context(what)?;
    let downloaded = client
        .model(owner, repository)
        .download_file()
        .filename(file)
        .local_dir(directory.path())
        .progress(Progress::new(Bar(bar.clone())))
        .send();
    bar.finish_and_clear();
    fetch::from_file(entry, &downloaded.with_context(what)?)
}
