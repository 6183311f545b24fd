//! How a failure reaches the user: one line `error: …`, and where we know what to do about it one line `hint: …`.
//!
//! Libraries return typed errors; here they become `anyhow` errors, some with a hint attached. Nothing here decides
//! what is an error.

use std::fmt;
use std::io::ErrorKind;
use std::process::ExitCode;

use crate::log;

/// An error together with what the user can do about it.
#[derive(Debug)]
struct Hinted {
    error: anyhow::Error,
    hint: String,
}

impl fmt::Display for Hinted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.error)
    }
}

impl std::error::Error for Hinted {}

/// A new error with a hint.
pub fn hinted(message: impl fmt::Display, hint: impl Into<String>) -> anyhow::Error {
    Hinted { error: anyhow::anyhow!("{message}"), hint: hint.into() }.into()
}

/// Attaches a hint to whatever went wrong.
pub trait WithHint<T> {
    fn with_hint(self, hint: impl FnOnce() -> String) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> WithHint<T> for Result<T, E> {
    fn with_hint(self, hint: impl FnOnce() -> String) -> anyhow::Result<T> {
        self.map_err(|error| Hinted { error: error.into(), hint: hint() }.into())
    }
}

/// Prints the error as the user sees it and says which exit code it is.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if is_broken_pipe(error) {
        // The reader of our output has gone (`baton … | head`): that is its right, not our failure.
        return ExitCode::SUCCESS;
    }
    log::say(&format!("error: {}", one_line(&format!("{error:#}"))));
    if let Some(hint) = error.chain().find_map(hint) {
        log::say(&format!("hint: {}", one_line(hint)));
    }
    log::flush();
    ExitCode::FAILURE
}

/// What can be done about a cause, where it says so.
fn hint<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a str> {
    let of_library = || cause.downcast_ref::<baton::Error>().and_then(baton::Error::hint);
    let of_hub = || cause.downcast_ref::<baton_hub::HubError>().and_then(baton_hub::HubError::hint);
    cause.downcast_ref::<Hinted>().map(|hinted| hinted.hint.as_str()).or_else(of_library).or_else(of_hub)
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|cause| cause.kind() == ErrorKind::BrokenPipe)
}

/// Messages may quote other programs; whatever they say, ours is one line.
pub fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Chat templates come with models and run on a thread of this name; `text` makes an error of whatever happens there.
const CONTAINED_THREAD: &str = "chat-template";

/// The server's threads: a panic there is one request's failure, which `baton-serve` answers with a 500.
pub const CONTAINED_HTTP_THREAD: &str = "baton-http";

/// A panic is a defect of Baton. Say so in one line, without a backtrace, and end the process unless the panic is
/// contained where it happened: a half-dead engine helps nobody.
pub fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        if thread.name() == Some(CONTAINED_THREAD) || baton_text::panic_is_contained() {
            return;
        }
        let cause = panic
            .payload()
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| panic.payload().downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "unknown cause".to_owned());
        let place = panic.location().map(|at| format!(" at {}:{}", at.file(), at.line())).unwrap_or_default();
        // A panic in here would end the process whatever the thread: a failed write must not be one.
        log::say(&format!(
            "error: internal: {}{place}; this is a bug in baton, please report it",
            one_line(&cause)
        ));
        let contained = [CONTAINED_HTTP_THREAD, baton_serve::TEXT_THREAD_NAME];
        if !thread.name().is_some_and(|name| contained.contains(&name)) {
            log::flush();
            std::process::exit(101);
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_survives_context() {
        use anyhow::Context;
        let error =
            Err::<(), _>(hinted("no such block", "choose another")).context("while starting").unwrap_err();
        assert_eq!(format!("{error:#}"), "while starting: no such block");
        let hint =
            error.chain().find_map(|cause| cause.downcast_ref::<Hinted>()).map(|found| found.hint.as_str());
        assert_eq!(hint, Some("choose another"));
    }

    #[test]
    fn many_lines_become_one() {
        assert_eq!(one_line("pip failed:\n  no network\r\n"), "pip failed: no network");
    }

    #[test]
    fn a_broken_pipe_is_found_below_context() {
        let error = anyhow::Error::from(std::io::Error::from(ErrorKind::BrokenPipe)).context("cannot write");
        assert!(is_broken_pipe(&error));
        assert!(!is_broken_pipe(&hinted("disk full", "")));
    }
}
