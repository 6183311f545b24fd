//! What an engine has done, for logs, metrics and tests.

use crate::blocks::SwapCounts;
use crate::features::FeatureCounts;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GraphStats {
    pub num_steps: u64,
    /// Rows of any stage: each node counts once for each.
    pub rows_computed: u64,
    /// Rows that a request needed and that were there, or that another request was about to compute.
    pub rows_reused: u64,
    pub edges_reduced: u64,
    pub swaps: SwapCounts,
    pub features: FeatureCounts,
    pub requests_finished: u64,
    pub requests_failed: u64,
    pub requests_aborted: u64,
    /// Requests that gave their blocks to others.
    pub preemptions: u64,
    pub num_waiting: usize,
    pub num_running: usize,
    pub num_swapped: usize,
    pub num_device_blocks: usize,
    pub num_device_blocks_used: usize,
    pub num_host_blocks: usize,
    pub num_host_blocks_used: usize,
    pub num_graphs: usize,
    pub moving_seconds: f64,
    pub computing_seconds: f64,
}
