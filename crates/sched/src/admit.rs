//! Swapped and waiting requests come to the device, in the order of the policy, as long as there is room.
//!
//! Strictly in order: the first that does not fit ends the round, so nobody is overtaken for ever. A swapped request
//! is older than any that never ran, so it comes before those. Where several tenants have work, those that have had their
//! share of the step are passed over, and one that has claimed a place goes first: see `claims`.

use baton_core::{RequestId, SeqId};
use baton_kv::{BlockMove, KvConfig};

use crate::group::{Group, Place};
use crate::preempt::live_seq_ids;
use crate::schedule::{Run, Step};
use crate::shares::num_readers;
use crate::{Fetch, Scheduler, Wait};

impl Scheduler {
    pub(crate) fn admit(&mut self, step: &mut Step) {
        let mut num_slots: usize = self.running.values().map(|id| self.groups[id].num_slots()).sum();
        while step.tokens_left > 0 {
            let Some(id) = self.next_to_admit(step) else { break };
            let own_slots = self.groups[&id].num_slots();
            let has_slots = num_slots + own_slots <= self.config.max_num_seqs;
            if has_slots && self.query_stores(id) {
                continue;
            }
            let is_in = has_slots
                && match self.groups[&id].place {
                    Place::Swapped => self.bring_back(id, step),
                    _ => self.start(id, step),
                };
            if !is_in {
                self.make_claim();
                break;
            }
            num_slots += own_slots;
        }
    }

    fn next_to_admit(&self, step: &Step) -> Option<RequestId> {
        let is_spent = |tenant: u32| step.shares.as_ref().is_some_and(|shares| shares.is_spent(tenant));
        let may_come = |group: &Group| {
            !is_spent(group.request.tenant)
                && !step.draining.contains(&group.request.id)
                && !group.waits_for_stores()
        };
        if let Some(claimant) = self.claimant().filter(|id| may_come(&self.groups[id])) {
            return Some(claimant);
        }
        // The tenants are few, the requests that wait may be thousands.
        let has_any = self.num_waiting_of.keys().any(|&tenant| !is_spent(tenant));
        (has_any || !self.swapped.is_empty()).then(|| self.first_in_queue(may_come)).flatten()
    }

    /// Swaps a request in and plans its next tokens. False (and nothing changed) where there is no room.
    fn bring_back(&mut self, id: RequestId, step: &mut Step) -> bool {
        let group = &self.groups[&id];
        let seq_ids = live_seq_ids(group);
        let runs = self.wanted_runs(id, step);
        let needed = self.kv.swap_in_cost(&seq_ids) + self.kv.blocks_needed(&self.writes(group, &runs));
        if runs.is_empty() || needed + self.num_blocks_kept() > self.kv.num_free_blocks() {
            return false;
        }
        let Some(moves) = self.kv.swap_in(&seq_ids) else { return false };
        step.plan.swap_in.extend(moves);
        step.moved.push(id);
        self.spend_share(id, &runs, step);
        self.set_running(id);
        self.plan_runs(id, &runs, step);
        true
    }

    /// Gives a waiting request its cached prefix and plans the first chunk. False (and nothing changed) where there
    /// is no room.
    fn start(&mut self, id: RequestId, step: &mut Step) -> bool {
        let num_blocks_kept = self.num_blocks_kept();
        let fetching_pays = self.fetching_pays();
        let group = self.groups.get_mut(&id).expect("a waiting request is here");
        let leader = group.live().next().expect("a waiting request has a sequence to compute");
        let seq_id = group.seqs[leader].id;
        let num_tokens = group.seqs[leader].token_ids.len();
        let may_be_cached = group.num_cacheable_tokens(self.kv.config().block_size);
        let token_ids = &group.seqs[leader].token_ids;
        let cached = if fetching_pays {
            self.kv.match_prefix(seq_id, token_ids, may_be_cached)
        } else {
            self.kv.match_device_prefix(seq_id, token_ids, may_be_cached)
        };
        let total = num_blocks_of(group, self.kv.config(), self.config.max_run());
        let needed = total.saturating_sub(cached.num_blocks) + cached.num_free_blocks;
        if needed + num_blocks_kept > self.kv.num_free_blocks() {
            return false;
        }
        // One at least in a step, however long it is; more only while they take no longer than a prompt may.
        let fetch_tokens = cached.num_host_rows * self.kv.config().block_size;
        if fetch_tokens > step.fetch_tokens_left && !step.plan.fetches.is_empty() {
            return false;
        }
        step.fetch_tokens_left = step.fetch_tokens_left.saturating_sub(fetch_tokens);
        step.fetched_tokens += fetch_tokens;
        let attached = self.kv.attach_prefix(seq_id, cached.num_rows);
        let num_cached_tokens = attached.num_tokens;
        let is_first_time = group.num_cached_tokens.is_none();
        group.seqs[leader].num_computed = num_cached_tokens;
        group.seqs[leader].num_applied = num_cached_tokens;
        if !attached.fetches.is_empty() {
            self.begin_fetch(id, seq_id, attached.fetches, step);
        }
        // Where the cache holds the whole prompt, the other sequences of a forked request need not wait for it.
        self.share_prompt(id);
        let runs = self.wanted_runs(id, step);
        if runs.is_empty() && self.groups[&id].fetch.is_none() {
            self.give_up_computed(id);
            return false;
        }
        if is_first_time {
            self.kv.record_host_hits(fetch_tokens.min(num_cached_tokens));
            let group = self.groups.get_mut(&id).expect("a waiting request is here");
            group.num_cached_tokens = Some(num_cached_tokens as u32);
            self.kv.record_query(num_tokens, num_cached_tokens);
        }
        self.spend_share(id, &runs, step);
        self.set_running(id);
        self.plan_runs(id, &runs, step);
        true
    }

    /// Whether it takes less time to copy a token's KV back from the host tier than to compute it again.
    pub(crate) fn fetching_pays(&self) -> bool {
        self.config.swap_cost_per_token < self.config.recompute_cost_per_token
    }

    /// Puts the copies of a request's cached prefix into the step. Its sequence waits until they are done.
    fn begin_fetch(&mut self, id: RequestId, seq_id: SeqId, moves: Vec<BlockMove>, step: &mut Step) {
        let fetch = self.next_fetch;
        self.next_fetch += 1;
        self.fetches.insert(fetch, id);
        self.groups.get_mut(&id).expect("a waiting request is here").fetch = Some(fetch);
        self.wait(seq_id, Wait::Transfer);
        step.plan.fetches.push(Fetch { id: fetch, moves });
    }

    fn spend_share(&self, id: RequestId, runs: &[Run], step: &mut Step) {
        let group = &self.groups[&id];
        let num_readers = num_readers(group, runs.len());
        let cost = runs.iter().map(|run| self.run_cost(group, run.position, run.count, num_readers)).sum();
        if let Some(shares) = &mut step.shares {
            shares.spend(group.request.tenant, cost);
        }
    }

    fn set_running(&mut self, id: RequestId) {
        self.settle_claim(id);
        self.stop_waiting(id);
        let group = self.groups.get_mut(&id).expect("a queued request is here");
        self.turns.begin(group.key.turn);
        self.swapped.remove(&group.key);
        group.place = Place::Running;
        self.running.insert(group.key, id);
    }

    /// Free blocks that a newcomer may not have: what running prompts are still going to take, and one in a hundred
    /// for the growth of the others. Without this, newcomers would be preempted as soon as they have started.
    pub(crate) fn num_blocks_kept(&self) -> usize {
        if self.running.is_empty() {
            return 0;
        }
        let promised = |id: &RequestId| {
            let group = &self.groups[id];
            if group.live().all(|position| group.seqs[position].num_remaining() <= 1) {
                return 0;
            }
            let total = num_blocks_of(group, self.kv.config(), self.config.max_run());
            total.saturating_sub(self.kv.num_distinct_blocks(&live_seq_ids(group)))
        };
        self.kv.config().num_device_blocks / 100 + self.running.values().map(promised).sum::<usize>()
    }
}

/// Blocks that the known tokens of a request fill when all its sequences are computed.
pub(crate) fn num_blocks_of(group: &Group, kv: &KvConfig, max_run: usize) -> usize {
    let shared = group.num_shared_rows(kv.block_size);
    let own = |position: usize| kv.rows_for(group.seqs[position].token_ids.len()) - shared;
    let own: Vec<usize> = group.live().map(own).collect();
    kv.peak_blocks(shared, &own, max_run)
}
