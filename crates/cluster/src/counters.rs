//! The counters of a store, which any thread may count up.

use std::sync::atomic::{AtomicU64, Ordering};

use baton_engine::StoreStats;

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) asked: Counter,
    pub(crate) found: Counter,
    pub(crate) fetched: Counter,
    pub(crate) stored: Counter,
    pub(crate) bytes_fetched: Counter,
    pub(crate) bytes_stored: Counter,
    pub(crate) timeouts: Counter,
    pub(crate) corrupt: Counter,
    pub(crate) failures: Counter,
    pub(crate) skipped: Counter,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: usize) {
        self.0.fetch_add(count as u64, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    pub(crate) fn stats(&self, name: &'static str) -> StoreStats {
        StoreStats {
            name,
            num_rows_asked: self.asked.get(),
            num_rows_found: self.found.get(),
            num_rows_fetched: self.fetched.get(),
            num_rows_stored: self.stored.get(),
            bytes_fetched: self.bytes_fetched.get(),
            bytes_stored: self.bytes_stored.get(),
            num_timeouts: self.timeouts.get(),
            num_corrupt: self.corrupt.get(),
            num_failures: self.failures.get(),
            num_skipped: self.skipped.get(),
            ..StoreStats::default()
        }
    }
}
