//! Swapped and waiting requests come to the device, in the order of the policy, as long as there is room.
//!
//! Strictly in order: the first that does not fit ends the round, so nobody is overtaken for ever. A swapped request
//! is older than any that never ran, so it comes before those.

use baton_core::RequestId;

use crate::Scheduler;
use crate::group::{Group, Place};
use crate::preempt::live_seq_ids;
use crate::schedule::{Step, writes};

impl Scheduler {
    pub(crate) fn admit(&mut self, step: &mut Step) {
        let mut num_slots: usize = self.running.values().map(|id| self.groups[id].num_slots()).sum();
        while step.tokens_left > 0 {
            let swapped = self.swapped.first_key_value();
            let waiting = self.waiting.first_key_value();
            let Some((_, &id)) = swapped.into_iter().chain(waiting).min() else { break };
            let own_slots = self.groups[&id].num_slots();
            if num_slots + own_slots > self.config.max_num_seqs {
                break;
            }
            let is_in = match self.groups[&id].place {
                Place::Swapped => self.bring_back(id, step),
                _ => self.start(id, step),
            };
            if !is_in {
                break;
            }
            num_slots += own_slots;
        }
    }

    /// Swaps a request in and plans its next tokens. False (and nothing changed) where there is no room.
    fn bring_back(&mut self, id: RequestId, step: &mut Step) -> bool {
        let group = &self.groups[&id];
        let seq_ids = live_seq_ids(group);
        let runs = self.wanted_runs(id, step);
        let needed = self.kv.swap_in_cost(&seq_ids) + self.kv.blocks_needed(&writes(group, &runs));
        if runs.is_empty() || needed + self.num_blocks_kept() > self.kv.num_free_blocks() {
            return false;
        }
        let Some(moves) = self.kv.swap_in(&seq_ids) else { return false };
        step.plan.swap_in.extend(moves);
        step.moved.push(id);
        self.set_running(id);
        self.plan_runs(id, &runs, step);
        true
    }

    /// Gives a waiting request its cached prefix and plans the first chunk. False (and nothing changed) where there
    /// is no room.
    fn start(&mut self, id: RequestId, step: &mut Step) -> bool {
        let num_blocks_kept = self.num_blocks_kept();
        let group = self.groups.get_mut(&id).expect("a waiting request is here");
        let leader = group.live().next().expect("a waiting request has a sequence to compute");
        let seq_id = group.seqs[leader].id;
        let num_tokens = group.seqs[leader].token_ids.len();
        // One token is always computed, and prompt scores need the logits of every position not scored yet.
        let needs_scores = group.request.params.prompt_logprobs.is_some()
            && group.num_scored + 1 < group.num_prompt_tokens();
        let may_be_cached = if needs_scores { group.num_scored } else { num_tokens - 1 };
        let cached = self.kv.match_prefix(seq_id, &group.seqs[leader].token_ids, may_be_cached);
        let total = num_blocks_of(group, self.kv.config().block_size);
        let needed = total - cached.num_blocks + cached.num_free_blocks;
        if needed + num_blocks_kept > self.kv.num_free_blocks() {
            return false;
        }
        let num_cached_tokens = self.kv.attach_prefix(seq_id, cached.num_blocks);
        let is_first_time = group.num_cached_tokens.is_none();
        group.seqs[leader].num_computed = num_cached_tokens;
        group.seqs[leader].num_applied = num_cached_tokens;
        // Where the cache holds the whole prompt, the other sequences of a forked request need not wait for it.
        self.share_prompt(id);
        let runs = self.wanted_runs(id, step);
        if runs.is_empty() {
            self.give_up_computed(id);
            return false;
        }
        if is_first_time {
            let group = self.groups.get_mut(&id).expect("a waiting request is here");
            group.num_cached_tokens = Some(num_cached_tokens as u32);
            self.kv.record_query(num_tokens, num_cached_tokens);
        }
        self.set_running(id);
        self.plan_runs(id, &runs, step);
        true
    }

    fn set_running(&mut self, id: RequestId) {
        self.stop_waiting(id);
        let group = self.groups.get_mut(&id).expect("a queued request is here");
        self.turns.begin(group.key.turn);
        self.swapped.remove(&group.key);
        group.place = Place::Running;
        self.running.insert(group.key, id);
    }

    /// Free blocks that a newcomer may not have: what running prompts are still going to take, and one in a hundred
    /// for the growth of the others. Without this, newcomers would be preempted as soon as they have started.
    fn num_blocks_kept(&self) -> usize {
        if self.running.is_empty() {
            return 0;
        }
        let block_size = self.kv.config().block_size;
        let promised = |id: &RequestId| {
            let group = &self.groups[id];
            if group.live().all(|position| group.seqs[position].num_remaining() <= 1) {
                return 0;
            }
            num_blocks_of(group, block_size).saturating_sub(self.kv.num_distinct_blocks(&live_seq_ids(group)))
        };
        self.kv.config().num_device_blocks / 100 + self.running.values().map(promised).sum::<usize>()
    }
}

/// Blocks that the known tokens of a request fill when all its sequences are computed.
fn num_blocks_of(group: &Group, block_size: usize) -> usize {
    let shared = group.num_shared_blocks(block_size);
    let own = |position: usize| group.seqs[position].token_ids.len().div_ceil(block_size) - shared;
    shared + group.live().map(own).sum::<usize>()
}
