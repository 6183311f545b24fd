//! Names for requests and responses, and the wall clock.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// 32 hexadecimal digits that no other request has had, in this process or another.
pub fn unique() -> String {
    static START: LazyLock<[u8; 32]> = LazyLock::new(|| {
        // Each `RandomState` is keyed by the system's random numbers.
        let words: Vec<u8> =
            (0..4).flat_map(|_| RandomState::new().build_hasher().finish().to_le_bytes()).collect();
        *blake3::hash(&words).as_bytes()
    });
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    blake3::keyed_hash(&START, &count.to_le_bytes()).to_hex()[..32].to_owned()
}

/// A name for a call of a function.
pub fn call() -> String {
    format!("call_{}", &unique()[..24])
}

/// The same for models that were trained on nine letters or digits.
pub fn short_call() -> String {
    unique()[..9].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ() {
        let (first, second) = (unique(), unique());
        assert_ne!(first, second);
        assert_eq!(first.len(), 32);
    }
}
