//! The budget of one rendering. The counters are thread-local: every rendering has its own.
//!
//! The template engine counts its instructions (fuel), but a single instruction can double a string, sort a list or
//! compare two trees. Everything whose cost depends on the size of a value is charged here before it is done.

use std::cell::{Cell, RefCell};
use std::fmt;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Bytes that may be made, and items that may be looked at, in one rendering. A conversation that fills the longest
/// context windows in use needs a few per cent of it.
const MAX_WORK: u64 = 128 << 20;
/// The assumed size of a sequence that cannot tell its length.
const UNKNOWN_LENGTH: u64 = 100_000;
/// What one item of a list costs, or one small piece of text, in bytes: it takes about as long as copying that many.
pub(super) const ITEM_BYTES: u64 = 32;

thread_local! {
    static WORK_LEFT: Cell<u64> = const { Cell::new(0) };
    static REFUSAL: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Begins a rendering on this thread.
pub(super) fn reset() {
    WORK_LEFT.set(MAX_WORK);
    REFUSAL.take();
}

/// True once a rendering has used up its work.
pub(super) fn is_exhausted() -> bool {
    WORK_LEFT.get() == 0
}

/// Takes `amount` from the work that is left.
pub(super) fn charge(amount: u64) -> Result<(), Error> {
    if let Some(left) = WORK_LEFT.get().checked_sub(amount).filter(|&left| left > 0) {
        WORK_LEFT.set(left);
        return Ok(());
    }
    WORK_LEFT.set(0);
    Err(Error::new(ErrorKind::OutOfFuel, "it works on more data than any conversation needs"))
}

/// Remembers what the template itself said when it refused the conversation.
pub(super) fn refuse(message: String) {
    REFUSAL.set(Some(message));
}

pub(super) fn take_refusal() -> Option<String> {
    REFUSAL.take()
}

/// The length of a value: bytes of a text, items of a container.
pub(super) fn length(value: &Value) -> u64 {
    if let Some(text) = value.as_str() {
        return text.len() as u64;
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            value.len().map_or(UNKNOWN_LENGTH, |length| length as u64)
        }
        ValueKind::Bytes => value.as_bytes().map_or(0, |bytes| bytes.len() as u64),
        _ => 1,
    }
}

/// Charges for looking at a value's length once.
pub(super) fn charge_length(value: &Value) -> Result<(), Error> {
    charge(length(value))
}

/// Charges for looking at a value and everything in it; gives how much that was. A container that is reachable on
/// many ways counts as often: that is also what comparing or printing it costs.
pub(super) fn charge_deep(value: &Value) -> Result<u64, Error> {
    let own = ITEM_BYTES + length(value) / 16;
    charge(own)?;
    let mut total = own;
    match value.kind() {
        ValueKind::Seq => {
            for item in value.try_iter()? {
                total += charge_deep(&item)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                // Finding an entry takes longer than going to the next item.
                charge(4 * ITEM_BYTES)?;
                let item = value.get_item(&key)?;
                total += charge_deep(&key)? + charge_deep(&item)?;
            }
        }
        ValueKind::Iterable => {
            charge(length(value))?;
            total += length(value);
        }
        _ => {}
    }
    Ok(total)
}

/// A text under construction: writing to it is charged, and fails when nothing is left.
#[derive(Default)]
pub(super) struct ChargedText(pub(super) String);

impl fmt::Write for ChargedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        charge(ITEM_BYTES + text.len() as u64).map_err(|_| fmt::Error)?;
        self.0.push_str(text);
        Ok(())
    }
}
