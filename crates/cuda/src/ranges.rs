//! Named ranges for NVIDIA's profilers (NVTX): one per step, and one per op where steps are not recorded.
//!
//! The library is looked for when the backend starts, and where it is not found nothing is done, not even a name written.
//! Without a profiler its own calls do nothing either.

use std::ffi::{CString, c_char, c_int};

use baton_backend::StepInput;
use libloading::Library;

/// Of CUDA 13 and of earlier ones.
const LIBRARIES: [&str; 3] = ["libnvtx3interop.so.1", "libnvToolsExt.so.1", "libnvToolsExt.so"];

type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;

/// What kind of step it is, and how large.
pub(crate) fn step_name(input: &StepInput) -> String {
    let (tokens, samples) = (input.num_tokens(), input.samples.len());
    let moved = input.swap_out.len() + input.swap_in.len() + input.copies.len();
    format!("{}: {tokens} tokens, {samples} samples, {moved} blocks moved", input.kind().name())
}

#[derive(Debug, Default)]
pub(crate) struct Ranges {
    calls: Option<(Push, Pop)>,
    /// Kept because the calls are in it.
    _library: Option<Library>,
}

impl Ranges {
    pub(crate) fn new() -> Self {
        LIBRARIES.iter().find_map(|name| Self::load(name)).unwrap_or_default()
    }

    fn load(name: &str) -> Option<Self> {
        // SAFETY: NVIDIA's library, whose initialisers look for a profiler and nothing else.
        let library = unsafe { Library::new(name) }.ok()?;
        // SAFETY: the types are those of nvToolsExt.h; the library is kept as long as the calls.
        let calls = unsafe {
            (*library.get::<Push>("nvtxRangePushA").ok()?, *library.get::<Pop>("nvtxRangePop").ok()?)
        };
        Some(Self { calls: Some(calls), _library: Some(library) })
    }

    /// A range from here until what is returned is dropped. The name is made only if somebody may see it.
    pub(crate) fn enter(&self, name: impl FnOnce() -> String) -> Range {
        let Some((push, pop)) = self.calls else { return Range(None) };
        let name = CString::new(name()).unwrap_or_default();
        // SAFETY: the text ends with a zero and is copied by the call.
        unsafe { push(name.as_ptr()) };
        Range(Some(pop))
    }
}

/// Ends its range when dropped; on the thread that entered it, as the whole backend is used.
#[must_use]
#[derive(Debug)]
pub(crate) struct Range(Option<Pop>);

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(pop) = self.0 {
            // SAFETY: pairs with the push of `enter`.
            unsafe { pop() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_library_no_name_is_made() {
        assert!(Ranges::load("libsurely_not_there.so").is_none());
        let _range = Ranges::default().enter(|| unreachable!("nobody sees it"));
    }

    #[test]
    fn ranges_nest_where_the_library_is() {
        let ranges = Ranges::new();
        let mut num_named = 0;
        {
            let _outer = ranges.enter(|| {
                num_named += 1;
                "outer".to_owned()
            });
            let _inner = ranges.enter(|| "a name with \0 in it".to_owned());
        }
        assert_eq!(num_named, i32::from(ranges.calls.is_some()));
    }
}
