//! Tenants share a step.
//!
//! Where only one tenant has work a step is as large as its limits. Where several have, none may make it much longer for
//! another: a step takes at most `max_step_slowdown` times as long as it would for the tenant that asks the least of it.
//! What it may cost is divided evenly; what a tenant does not need goes to the others. A tenant that wants more than its
//! share gives it to its sequences in rotation, the one that was left out longest first, prompts and decodes alike.

use std::collections::{BTreeMap, BTreeSet};

use baton_core::{RequestId, SeqId};

use crate::Scheduler;
use crate::cost::StepCost;
use crate::group::{Group, Place};
use crate::schedule::can_run;

/// What tenants may still have of a step. Those that are not named may have what they want.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shares {
    /// Tokens of running sequences whose tenants do not get all they want.
    granted: BTreeMap<SeqId, usize>,
    /// What is left of the tenants' shares, in tokens.
    left: BTreeMap<u32, f64>,
    /// What the step would cost if only the tenant had work that asks the least of it, in tokens; none where nobody decodes.
    pub(crate) least_cost: Option<f64>,
}

/// What a tenant asks of a step, in tokens.
#[derive(Default)]
struct Demand {
    /// All its sequences that decode, whether they can go on in this step or not.
    decodes: f64,
    /// Those that can go on now.
    wanted: f64,
    runs: Vec<WantedRun>,
    has_prompts: bool,
}

struct WantedRun {
    id: RequestId,
    position: usize,
    last_step: u64,
    /// None for a prompt.
    decode_cost: Option<DecodeCost>,
}

/// What a decode costs, in tokens.
#[derive(Clone, Copy)]
struct DecodeCost {
    /// Where all sequences of its request run and read together what they have in common.
    together: f64,
    /// Where only some of them run.
    apart: f64,
}

impl Shares {
    /// How many tokens a sequence may compute.
    pub(crate) fn allowed(&self, scheduler: &Scheduler, group: &Group, position: usize) -> usize {
        let seq = &group.seqs[position];
        let Some(&left) = self.left.get(&group.request.tenant) else { return usize::MAX };
        if group.place == Place::Running {
            return self.granted.get(&seq.id).copied().unwrap_or(0);
        }
        if left <= 0.0 {
            return 0;
        }
        scheduler.config.cost.longest_run(seq.num_computed, left, scheduler.step_overhead)
    }

    /// The tenant has had its share of the step.
    pub(crate) fn is_spent(&self, tenant: u32) -> bool {
        self.left.get(&tenant).is_some_and(|&left| left <= 0.0)
    }

    /// A request that was not running takes its part.
    pub(crate) fn spend(&mut self, tenant: u32, tokens: f64) {
        if let Some(left) = self.left.get_mut(&tenant) {
            *left -= tokens;
        }
    }
}

impl Scheduler {
    /// How long the device takes to read all weights, in tokens that it computes in that time. The engine measures it; it decides
    /// only how tenants share a step.
    pub fn set_step_overhead(&mut self, tokens: f64) {
        if tokens.is_finite() && tokens >= 0.0 {
            self.step_overhead = tokens;
        }
    }

    /// How much of what a step may take beyond the tenant that asks the least of it is given to the others, 1 at most. The engine
    /// lowers it where steps take longer than their costs say.
    pub fn set_spare_share(&mut self, share: f64) {
        if (0.0..=1.0).contains(&share) {
            self.spare_share = share;
        }
    }

    /// What the Plan that was scheduled last would cost, in tokens, if only that tenant had work that asks the least of it. None
    /// where it was not shared by tenants, or nobody waits for a next token.
    pub fn last_least_cost(&self) -> Option<f64> {
        self.last_least_cost
    }

    /// What the Plan that was scheduled last costs.
    pub fn last_step_cost(&self) -> StepCost {
        self.last_step_cost
    }

    /// Tenants that have requests which have not ended.
    pub(crate) fn tenants_with_work(&self) -> BTreeSet<u32> {
        let held = self.running.values().chain(self.swapped.values());
        let held = held.map(|id| self.groups[id].request.tenant);
        held.chain(self.num_waiting_of.keys().copied()).collect()
    }

    /// None where one tenant has the step for itself.
    pub(crate) fn share_step(&self) -> Option<Shares> {
        if self.config.max_step_slowdown <= 0.0 {
            return None;
        }
        let tenants = self.tenants_with_work();
        if tenants.len() < 2 {
            return None;
        }
        let mut demands: BTreeMap<u32, Demand> =
            tenants.into_iter().map(|id| (id, Demand::default())).collect();
        for &id in self.running.values() {
            let demand = demands.entry(self.groups[&id].request.tenant).or_default();
            self.add_demand(id, demand);
        }
        let queued = self.swapped.values().map(|id| self.groups[id].request.tenant);
        for tenant in queued.chain(self.num_waiting_of.keys().copied()) {
            demands.entry(tenant).or_default().has_prompts = true;
        }
        let least = Self::least_decodes(&demands);
        let overhead = StepCost::WEIGHTS.tokens(self.step_overhead);
        let mut shares = Shares { least_cost: least.map(|least| overhead + least), ..Shares::default() };
        for (tenant, share) in divide(self.step_budget(least), &demands) {
            let demand = demands.get_mut(&tenant).expect("only demands are divided");
            if demand.wanted > share || demand.has_prompts {
                let left = self.grant(demand, share, &mut shares.granted);
                shares.left.insert(tenant, left);
            }
        }
        Some(shares)
    }

    fn add_demand(&self, id: RequestId, demand: &mut Demand) {
        let group = &self.groups[&id];
        let block_size = self.kv.config().block_size;
        for (rank, position) in group.live().enumerate() {
            let seq = &group.seqs[position];
            let is_decode = seq.num_remaining() <= 1;
            let num_live = num_readers(group, group.live().count());
            let together = if is_decode { self.run_cost(group, position, 1, num_live) } else { 0.0 };
            demand.decodes += together;
            if !can_run(group, position, rank, block_size) {
                continue;
            }
            demand.wanted += together;
            demand.has_prompts |= !is_decode;
            let apart = || self.run_cost(group, position, 1, 1);
            let decode_cost = is_decode.then(|| DecodeCost { together, apart: apart() });
            demand.runs.push(WantedRun { id, position, last_step: seq.last_step, decode_cost });
        }
    }

    /// The cost of a run in tokens.
    pub(crate) fn run_cost(&self, group: &Group, position: usize, count: usize, num_readers: usize) -> f64 {
        self.cost_of_run(group, position, count, num_readers).tokens(self.step_overhead)
    }

    /// The cost of a run in a step in which `num_readers` sequences of its request run.
    pub(crate) fn cost_of_run(
        &self,
        group: &Group,
        position: usize,
        count: usize,
        num_readers: usize,
    ) -> StepCost {
        let block_size = self.kv.config().block_size;
        let shared = group.num_shared_rows(block_size) * block_size;
        self.config.cost.run(group.seqs[position].num_computed, count, shared, num_readers)
    }

    /// The decodes of the tenant that asks the least of the step.
    fn least_decodes(demands: &BTreeMap<u32, Demand>) -> Option<f64> {
        let decodes = demands.values().map(|demand| demand.decodes).filter(|&cost| cost > 0.0);
        decodes.min_by(f64::total_cmp)
    }

    /// What a step may cost besides reading the weights.
    fn step_budget(&self, least: Option<f64>) -> f64 {
        let Some(least) = least else {
            // Nobody waits for a next token: there is only the step to be divided.
            return self.config.max_num_batched_tokens as f64;
        };
        let overhead = StepCost::WEIGHTS.tokens(self.step_overhead);
        let spare = (self.config.max_step_slowdown - 1.0) * (overhead + least);
        least + spare * self.spare_share
    }

    /// Gives a tenant's share to its sequences and returns what is left of it. Each tenant has a run of every step, however small
    /// its share is.
    fn grant(&self, demand: &mut Demand, share: f64, granted: &mut BTreeMap<SeqId, usize>) -> f64 {
        // The sort is stable: among those that ran last in the same step the order is that of the queue.
        demand.runs.sort_by_key(|run| run.last_step);
        // Decodes and prompts of one tenant leave each other half of what it has.
        let most_of_prompts = if demand.wanted > 0.0 { share / 2.0 } else { share };
        let all_fit = demand.wanted <= share;
        let cost_of = |cost: DecodeCost| if all_fit { cost.together } else { cost.apart };
        let mut left = share;
        let mut left_to_prompts = most_of_prompts;
        for (number, run) in demand.runs.iter().enumerate() {
            let group = &self.groups[&run.id];
            let seq_id = group.seqs[run.position].id;
            if granted.contains_key(&seq_id) {
                continue;
            }
            if left <= 0.0 || (number > 0 && run.decode_cost.is_some_and(|cost| cost_of(cost) > left)) {
                // It is the first of the next step.
                break;
            }
            let cost = match run.decode_cost {
                // Beams take a step together.
                Some(_) if group.is_beam() && group.forked => {
                    let beams: Vec<usize> = group.live().collect();
                    granted.extend(beams.iter().map(|&position| (group.seqs[position].id, 1)));
                    let num_beams = beams.len();
                    beams.iter().map(|&position| self.run_cost(group, position, 1, num_beams)).sum()
                }
                Some(cost) => {
                    granted.insert(seq_id, 1);
                    cost_of(cost)
                }
                None if left_to_prompts <= 0.0 => continue,
                None => {
                    let seq = &group.seqs[run.position];
                    let budget = left.min(left_to_prompts);
                    let count = self.config.cost.longest_run(seq.num_computed, budget, self.step_overhead);
                    let count = count.min(seq.num_remaining());
                    granted.insert(seq_id, count);
                    let cost = self.run_cost(group, run.position, count, 1);
                    left_to_prompts -= cost;
                    cost
                }
            };
            left -= cost;
        }
        left
    }
}

/// How many sequences of a request read what they have in common together, where so many of them run.
pub(crate) fn num_readers(group: &Group, num_runs: usize) -> usize {
    if group.forked { num_runs } else { 1 }
}

/// Divides evenly; what one does not need goes to the others.
fn divide(budget: f64, demands: &BTreeMap<u32, Demand>) -> Vec<(u32, f64)> {
    let wanted = |demand: &Demand| if demand.has_prompts { f64::INFINITY } else { demand.wanted };
    let mut order: Vec<(u32, f64)> =
        demands.iter().map(|(&tenant, demand)| (tenant, wanted(demand))).collect();
    order.sort_by(|one, other| one.1.total_cmp(&other.1));
    let mut left = budget;
    let num_tenants = order.len();
    for (number, (_, share)) in order.iter_mut().enumerate() {
        *share = share.min(left / (num_tenants - number) as f64);
        left -= *share;
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_does_not_need_goes_to_the_others() {
        let demand = |wanted: f64, has_prompts: bool| Demand { wanted, has_prompts, ..Demand::default() };
        let demands: BTreeMap<u32, Demand> = [
            (1, demand(100.0, false)),
            (2, demand(2.0, false)),
            (3, demand(1.0, true)),
            (4, demand(0.0, false)),
        ]
        .into();
        let mut shares = divide(50.0, &demands);
        shares.sort_by_key(|share| share.0);
        assert_eq!(shares, [(1, 24.0), (2, 2.0), (3, 24.0), (4, 0.0)]);
    }
}
