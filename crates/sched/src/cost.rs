//! What a step costs, as far as tenants have to be held apart by it.
//!
//! A device takes so long for a step as it takes to read the weights once and the KV of every sequence, and to compute
//! its tokens. Reads are counted in reads of all weights, work in tokens that attend to nothing. What a read takes in
//! tokens (`overhead`) is measured by the engine: see [`crate::Scheduler::set_step_overhead`].

use serde::{Deserialize, Serialize};

/// The part of a cost that follows from the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CostModel {
    /// Bytes of one position's KV, in bytes of all weights.
    pub reads_per_position: f64,
    /// Computing with one earlier position, in the work of a token.
    pub work_per_position: f64,
    /// So many sequences read the prompt that they have in common once; 0: each reads its own.
    pub min_sharers: usize,
}

/// A sum of reads and work.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCost {
    pub reads: f64,
    pub work: f64,
}

impl StepCost {
    /// The weights, which every step reads.
    pub const WEIGHTS: Self = Self { reads: 1.0, work: 0.0 };

    /// In tokens.
    pub fn tokens(self, overhead: f64) -> f64 {
        self.reads * overhead + self.work
    }
}

impl std::ops::AddAssign for StepCost {
    fn add_assign(&mut self, other: Self) {
        self.reads += other.reads;
        self.work += other.work;
    }
}

impl CostModel {
    /// Tokens `start..start + count` of a sequence, of whose KV it reads a prefix together with `num_readers` in all.
    pub(crate) fn run(
        &self,
        start: usize,
        count: usize,
        shared_prefix: usize,
        num_readers: usize,
    ) -> StepCost {
        let is_shared = self.min_sharers > 0 && num_readers >= self.min_sharers;
        let shared = if is_shared { shared_prefix.min(start) as f64 } else { 0.0 };
        let (start, count) = (start as f64, count as f64);
        let read = start + count - shared + shared / num_readers.max(1) as f64;
        StepCost {
            reads: self.reads_per_position * read,
            work: count + self.work_per_position * count * (start + f64::midpoint(count, 1.0)),
        }
    }

    /// The longest run from `start` that costs at most `budget` tokens, and one token at least.
    pub(crate) fn longest_run(&self, start: usize, budget: f64, overhead: f64) -> usize {
        let of_start = self.reads_per_position * start as f64 * overhead;
        // The end is taken for as far away as the budget could reach: rather too few tokens than too many.
        let middle = start as f64 + budget.max(0.0) / 2.0;
        let per_token = 1.0 + self.work_per_position * middle + self.reads_per_position * overhead;
        (((budget - of_start) / per_token) as usize).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: CostModel =
        CostModel { reads_per_position: 0.0002, work_per_position: 0.001, min_sharers: 16 };

    #[test]
    fn a_run_costs_the_sum_of_its_tokens_and_reads_its_past_once() {
        let whole = MODEL.run(100, 50, 0, 1);
        let work: f64 = (100..150).map(|position| MODEL.run(position, 1, 0, 1).work).sum();
        assert!((whole.work - work).abs() < 1e-9, "{} and {work}", whole.work);
        assert!((whole.reads - 0.03).abs() < 1e-9);
    }

    #[test]
    fn a_common_prefix_is_read_once_by_as_many_as_share() {
        let alone = MODEL.run(1000, 1, 992, 15).reads;
        assert!((alone - 0.2002).abs() < 1e-9, "{alone}");
        let all: f64 = (0..16).map(|_| MODEL.run(1000, 1, 992, 16).reads).sum();
        assert!((all - 0.0002 * (992.0 + 16.0 * 9.0)).abs() < 1e-9, "{all}");
    }

    #[test]
    fn the_longest_run_stays_within_its_budget_and_is_never_empty() {
        for (start, budget) in [(0, 1.0), (0, 40.0), (0, 900.0), (6000, 40.0), (6000, 900.0)] {
            let count = MODEL.longest_run(start, budget, 16.0);
            assert!(count == 1 || MODEL.run(start, count, 0, 1).tokens(16.0) <= budget, "{start}, {budget}");
        }
        assert!(MODEL.longest_run(0, 40.0, 16.0) > 35);
        assert_eq!(MODEL.longest_run(1 << 20, 1.0, 16.0), 1);
    }
}
