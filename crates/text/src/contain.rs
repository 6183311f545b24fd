//! Catches panics of libraries that were written for trusted input.
//!
//! A caught panic becomes an error. A program whose panic hook ends the process asks [`panic_is_contained`] first.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Runs `work`; `None` where it panicked.
pub(crate) fn contain<T>(work: impl FnOnce() -> T) -> Option<T> {
    DEPTH.set(DEPTH.get() + 1);
    let result = std::panic::catch_unwind(AssertUnwindSafe(work));
    DEPTH.set(DEPTH.get() - 1);
    result.ok()
}

/// Whether a panic of the calling thread becomes an error of this crate.
pub fn panic_is_contained() -> bool {
    DEPTH.get() > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_contained_where_it_happens_and_nowhere_else() {
        assert!(!panic_is_contained());
        assert_eq!(contain(|| contain(panic_is_contained)), Some(Some(true)));
        assert_eq!(contain(|| -> u32 { panic!("a bad file") }), None);
        assert!(!panic_is_contained());
    }
}
