//! Making room: a running request goes back to a queue, with its KV saved in the host tier or given up.

use baton_core::{RequestId, SeqId};

use crate::group::{Group, Place};
use crate::schedule::Step;
use crate::{PreemptionMode, Scheduler};

impl Scheduler {
    /// Takes a request that no Plan in flight uses off the device.
    pub(crate) fn preempt(&mut self, id: RequestId, step: &mut Step) {
        step.has_preempted = true;
        let group = &self.groups[&id];
        debug_assert!(!group.is_in_flight(), "request {id} is in flight");
        let seq_ids = live_seq_ids(group);
        let moves = if self.prefers_swap(group, &seq_ids) { self.kv.swap_out(&seq_ids) } else { None };
        let group = self.groups.get_mut(&id).expect("a running request is here");
        group.seqs.iter_mut().for_each(|seq| seq.drafts.clear());
        self.running.remove(&group.key);
        if let Some(moves) = moves {
            group.place = Place::Swapped;
            self.swapped.insert(group.key, id);
            step.plan.swap_out.extend(moves);
            step.moved.push(id);
            self.num_preemptions_swap += 1;
            return;
        }
        self.start_waiting(id);
        self.give_up_computed(id);
        self.num_preemptions_recompute += 1;
    }

    /// Gives back all blocks of a request; it has to be computed again.
    pub(crate) fn give_up_computed(&mut self, id: RequestId) {
        let group = self.groups.get_mut(&id).expect("a queued request is here");
        for position in group.live().collect::<Vec<_>>() {
            let seq = &mut group.seqs[position];
            self.kv.release(seq.id);
            seq.forget_computed();
        }
    }

    fn prefers_swap(&self, group: &Group, seq_ids: &[SeqId]) -> bool {
        let num_blocks = self.kv.num_distinct_blocks(seq_ids);
        // Sequences that still wait for the prompt of the first one could not get it in the host tier.
        if group.live().any(|position| group.seqs[position].num_computed == 0) {
            return false;
        }
        if num_blocks == 0 || num_blocks > self.kv.num_free_host_blocks() {
            return false;
        }
        match self.config.preemption_mode {
            PreemptionMode::Swap => true,
            PreemptionMode::Recompute => false,
            PreemptionMode::Auto if seq_ids.len() > 1 => true,
            PreemptionMode::Auto => {
                let num_tokens: usize = group.live().map(|position| group.seqs[position].num_computed).sum();
                // Out and back in.
                let swapped_tokens = 2 * num_blocks * self.kv.config().block_size;
                self.config.swap_cost_per_token * swapped_tokens as f64
                    <= self.config.recompute_cost_per_token * num_tokens as f64
            }
        }
    }
}

pub(crate) fn live_seq_ids(group: &Group) -> Vec<SeqId> {
    group.live().map(|position| group.seqs[position].id).collect()
}
