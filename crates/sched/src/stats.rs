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

/// How many more requests may wait, of any tenant and of those that have some waiting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueRoom {
    of_others: usize,
    by_tenant: Vec<(u32, usize)>,
}

impl Default for QueueRoom {
    fn default() -> Self {
        Self { of_others: usize::MAX, by_tenant: Vec::new() }
    }
}

impl QueueRoom {
    /// Of those who have requests waiting, and of all others.
    pub fn new(of_others: usize, by_tenant: Vec<(u32, usize)>) -> Self {
        Self { of_others, by_tenant }
    }

    pub fn of(&self, tenant: u32) -> usize {
        let known = self.by_tenant.iter().find(|(other, _)| *other == tenant);
        known.map_or(self.of_others, |(_, room)| *room)
    }
}

impl Scheduler {
    pub fn queue_room(&self) -> QueueRoom {
        let left = |limit: Option<usize>, taken: usize| {
            limit.map_or(usize::MAX, |limit| limit.saturating_sub(taken))
        };
        let of_all = left(self.config.max_num_queued_reqs, self.waiting.len());
        let of_key = |taken: usize| left(self.config.max_num_queued_reqs_per_key, taken).min(of_all);
        let by_tenant = self.num_waiting_of.iter().map(|(&tenant, &taken)| (tenant, of_key(taken)));
        QueueRoom { of_others: of_key(0), by_tenant: by_tenant.collect() }
    }

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
