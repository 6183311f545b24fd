//! The limits and habits of the scheduler, under the names of the flags that set them.

use baton_kv::KvConfig;
use serde::{Deserialize, Serialize};

use crate::{CostModel, SchedError};

/// Who comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// By arrival; tenants take turns.
    #[default]
    Fcfs,
    /// By `Request::priority`, the lowest value first; like `Fcfs` among equals.
    Priority,
}

/// What happens to the KV of a request that has to make room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreemptionMode {
    /// What costs less. A request with several sequences is swapped if the host tier has room.
    #[default]
    Auto,
    /// Moved to the host tier; recomputed where that is full.
    Swap,
    /// Given up and computed again.
    Recompute,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SchedConfig {
    /// The most sequences that run at a time.
    pub max_num_seqs: usize,
    /// The most tokens a step computes.
    pub max_num_batched_tokens: usize,
    /// The most rows of logits a step asks for (samples and scored prompt tokens).
    pub max_num_logit_rows: usize,
    /// The most entries that the samples of a step bring along: tokens under a penalty and biases.
    pub max_num_sample_entries: usize,
    /// The most tokens of a sequence, prompt and output together.
    pub max_model_len: usize,
    /// The most requests that wait; `None` is no limit.
    pub max_num_queued_reqs: Option<usize>,
    /// The most requests of one tenant that wait; `None` is no limit but that of all.
    pub max_num_queued_reqs_per_key: Option<usize>,
    pub policy: Policy,
    pub preemption_mode: PreemptionMode,
    /// The most prompt tokens of one request a step computes; 0 is no limit but the step's own.
    pub long_prefill_token_threshold: usize,
    /// The cost of moving one token's KV in one direction, in the same unit as `recompute_cost_per_token`.
    pub swap_cost_per_token: f64,
    pub recompute_cost_per_token: f64,
    /// Tiers beyond the host's memory are asked only where so many tokens are missing.
    pub min_store_tokens: usize,
    /// Decodes that begin alike stand side by side in a Plan, so that what they share can be read once. A decode has at most so
    /// many tokens. 0: the order is that of the queue.
    pub relay_max_queries: usize,
    /// Tokens that are computed again after a branch of guesses was right draw too: the device has recorded steps in which every row
    /// draws.
    pub redraws: bool,
    /// A tenant may make a step at most so many times as long as it is for the tenant that asks the least of it; 0: there is
    /// no limit but the step's own.
    pub max_step_slowdown: f64,
    pub cost: CostModel,
    /// How many Plans may be scheduled and not yet applied: 1, or 2 to plan a step while one is computed.
    pub max_plans_in_flight: usize,
}

impl Default for SchedConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 128,
            max_num_batched_tokens: 2048,
            max_num_logit_rows: 256,
            max_num_sample_entries: usize::MAX,
            max_model_len: 2048,
            max_num_queued_reqs: None,
            max_num_queued_reqs_per_key: None,
            policy: Policy::Fcfs,
            preemption_mode: PreemptionMode::Auto,
            long_prefill_token_threshold: 0,
            swap_cost_per_token: 1.0,
            recompute_cost_per_token: 4.0,
            min_store_tokens: 0,
            relay_max_queries: 0,
            redraws: false,
            max_step_slowdown: 2.0,
            cost: CostModel::default(),
            max_plans_in_flight: 1,
        }
    }
}

impl SchedConfig {
    /// Checks the limits against each other and against the KV pool, so that every admitted request can run.
    pub fn validate(&self, kv: &KvConfig) -> Result<(), SchedError> {
        kv.validate()?;
        let at_least = |name: &'static str, got: usize, minimum: usize, why: &'static str| {
            if got >= minimum { Ok(()) } else { Err(SchedError::LimitTooLow { name, got, minimum, why }) }
        };
        at_least("max-num-seqs", self.max_num_seqs, 1, "a step needs a sequence")?;
        at_least("max-model-len", self.max_model_len, 2, "a prompt token and an output token")?;
        let every_sequence = "every running sequence gets a token a step (--max-num-seqs)";
        at_least("max-num-batched-tokens", self.max_num_batched_tokens, self.max_num_seqs, every_sequence)?;
        at_least("max-num-logit-rows", self.max_num_logit_rows, self.max_num_seqs, every_sequence)?;
        let max_run = self.max_run();
        let (needed, got) = (kv.peak_blocks_of(self.max_model_len, max_run), kv.num_device_blocks);
        if needed > got {
            let fits = self.longest_sequence(kv);
            return Err(SchedError::PoolTooSmall { max_model_len: self.max_model_len, needed, got, fits });
        }
        if !(1..=2).contains(&self.max_plans_in_flight) {
            return Err(SchedError::PlansInFlight(self.max_plans_in_flight));
        }
        let costs = [self.swap_cost_per_token, self.recompute_cost_per_token];
        if costs.iter().any(|cost| !cost.is_finite() || *cost < 0.0) {
            return Err(SchedError::Cost { swap: costs[0], recompute: costs[1] });
        }
        let slowdown = self.max_step_slowdown;
        if slowdown != 0.0 && !(slowdown.is_finite() && slowdown >= 1.0) {
            return Err(SchedError::Slowdown(slowdown));
        }
        Ok(())
    }

    /// The most tokens of a sequence that are being computed at once, in all Plans in flight.
    pub(crate) fn max_run(&self) -> usize {
        self.max_num_batched_tokens.saturating_mul(self.max_plans_in_flight)
    }

    /// The most tokens of a sequence that the device's blocks hold.
    fn longest_sequence(&self, kv: &KvConfig) -> usize {
        let fits = |rows: &usize| {
            let num_tokens = rows.saturating_mul(kv.block_size);
            kv.peak_blocks_of(num_tokens, self.max_run()) <= kv.num_device_blocks
        };
        let (mut low, mut high) = (0, kv.num_device_blocks + 1);
        while low + 1 < high {
            let middle = usize::midpoint(low, high);
            if fits(&middle) { low = middle } else { high = middle }
        }
        low * kv.block_size
    }
}
