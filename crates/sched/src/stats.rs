//! Figures for metrics.

use baton_kv::KvStats;
use serde::{Deserialize, Serialize};

use crate::Scheduler;

/// Counters run from the start, the others are of this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedStats {
    /// Requests in each queue.
    pub num_running: usize,
    pub num_waiting: usize,
    pub num_swapped: usize,
    pub num_plans_in_flight: usize,
    pub kv: KvStats,
    pub num_preemptions_swap: u64,
    pub num_preemptions_recompute: u64,
}

impl Scheduler {
    pub fn stats(&self) -> SchedStats {
        SchedStats {
            num_running: self.running.len(),
            num_waiting: self.waiting.len(),
            num_swapped: self.swapped.len(),
            num_plans_in_flight: self.in_flight.len(),
            kv: self.kv.stats(),
            num_preemptions_swap: self.num_preemptions_swap,
            num_preemptions_recompute: self.num_preemptions_recompute,
        }
    }
}
