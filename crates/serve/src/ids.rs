//! Names for requests and responses, and the wall clock.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Now, as `2026-01-31T23:59:59Z`.
pub fn now_text() -> String {
    time_text(unix_seconds())
}

/// Seconds since 1970 as a date and time of day in UTC.
pub fn time_text(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years are counted from March, so that a leap day is the last of its year; 400 years have 146,097 days.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest % 3600 / 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
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
    fn times_are_dates() {
        assert_eq!(time_text(0), "1970-01-01T00:00:00Z");
        assert_eq!(time_text(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(time_text(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(time_text(4_102_444_800), "2100-01-01T00:00:00Z");
    }

    #[test]
    fn ids_differ() {
        let (first, second) = (unique(), unique());
        assert_ne!(first, second);
        assert_eq!(first.len(), 32);
    }
}
