//! Progress bars on stderr. indicatif hides them by itself where stderr is no terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over bytes.
pub fn bytes(what: String, total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{msg} {bar:32.cyan/dim} {binary_bytes} of {binary_total_bytes} · {binary_bytes_per_sec}",
    )
    .expect("the template is constant")
    .progress_chars("━━─");
    ProgressBar::new(total).with_style(style).with_message(what)
}

/// A bar over things that are counted.
pub fn count(total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{bar:32.cyan/dim} {pos} of {len} · {elapsed_precise} · {eta} left · {msg}",
    )
    .expect("the template is constant")
    .progress_chars("━━─");
    let bar = ProgressBar::new(total).with_style(style);
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

/// Something of unknown length.
pub fn spinner(what: String) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{spinner} {msg} {elapsed:.dim}").expect("the template is constant");
    let bar = ProgressBar::new_spinner().with_style(style).with_message(what);
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}
