//! Tenants share the places of running sequences and the KV blocks.
//!
//! One tenant alone may have all of them. When another one comes that has less than its even share and finds no place, it
//! claims one: after a few steps, in which one may become free by itself, the youngest request of whoever has most of what
//! is lacking makes way, and the claimant goes before all others. What is above a tenant's share claims nothing and waits in
//! the order of the queue. The first of the queue is passed by a limited number of claimants, so that it runs in the end.
//!
//! Whoever made way for a claim does so again only when it has computed twice as much as it had then. Two requests that have
//! a right to each other's blocks can therefore not go on evicting each other: the work of both grows between evictions, each
//! is evicted a few times at most, and what is computed again is never more than what it has at the end.

use std::collections::BTreeMap;

use baton_core::RequestId;

use crate::Scheduler;
use crate::admit::num_blocks_of;
use crate::group::{Group, Place};
use crate::preempt::live_seq_ids;
use crate::schedule::Step;

/// Steps that a claimant waits for a place to become free.
const PATIENCE: u32 = 2;
/// Claimants that may pass the first of the queue.
const MAX_OVERTAKEN: u32 = 64;

/// A waiting request whose tenant has less than its share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    id: RequestId,
    num_steps: u32,
}

impl Scheduler {
    /// The request that goes before all others, if one has claimed its place for long enough.
    pub(crate) fn claimant(&self) -> Option<RequestId> {
        let claim = self.claim.filter(|claim| claim.num_steps >= PATIENCE)?;
        let group = self.groups.get(&claim.id)?;
        let is_ready = matches!(group.place, Place::Waiting | Place::Swapped) && !group.waits_for_stores();
        is_ready.then_some(claim.id)
    }

    /// Somebody came in.
    pub(crate) fn settle_claim(&mut self, id: RequestId) {
        if self.claimant() != Some(id) {
            return;
        }
        self.claim = None;
        let first = self.first_in_queue(|_| true);
        if let Some(first) = first.filter(|first| self.groups[first].key < self.groups[&id].key) {
            let group = self.groups.get_mut(&first).expect("a queued request is here");
            group.num_overtaken += 1;
        }
    }

    /// The first of the queue found no place: whoever has a right to one claims it.
    pub(crate) fn make_claim(&mut self) {
        let num_tenants = self.tenants_with_work().len();
        let Some(first) = self.first_in_queue(|_| true).filter(|_| num_tenants > 1) else { return };
        let may_pass = self.groups[&first].num_overtaken < MAX_OVERTAKEN;
        let left = self.left_of_shares(num_tenants);
        let has_right = |group: &Group| {
            let (slots, blocks) = left.get(&group.request.tenant).copied().unwrap_or((0, 0));
            !group.waits_for_stores()
                && group.num_slots() <= slots
                && num_blocks_of(group, self.kv.config(), self.config.max_run()) <= blocks
        };
        let found = match has_right(&self.groups[&first]) {
            true => Some(first),
            false if may_pass && !left.is_empty() => self.first_in_queue(has_right),
            false => None,
        };
        let Some(id) = found else {
            self.claim = None;
            return;
        };
        match &mut self.claim {
            Some(claim) if claim.id == id => claim.num_steps += 1,
            claim => *claim = Some(Claim { id, num_steps: 1 }),
        }
    }

    /// Preempts for the claimant where it still lacks a place, or leaves the victim out of the step so that it can be preempted
    /// when its Plan has been applied.
    pub(crate) fn evict_for_claim(&mut self, step: &mut Step) {
        let Some(claimant) = self.claimant() else { return };
        let Some(victim) = self.find_victim(claimant) else { return };
        step.draining.push(victim);
        if !self.groups[&victim].is_in_flight() {
            let group = self.groups.get_mut(&victim).expect("a victim is running");
            group.safe_below = 2 * num_applied(group).max(1);
            self.preempt(victim, step);
            // The place is for the claimant, which may come in at once.
            step.has_preempted = false;
        }
    }

    fn find_victim(&self, claimant: RequestId) -> Option<RequestId> {
        let group = &self.groups[&claimant];
        let num_tenants = self.tenants_with_work().len();
        let slots = self.slots_by_tenant();
        let lacks_slots = slots.values().sum::<usize>() + group.num_slots() > self.config.max_num_seqs;
        let needed = num_blocks_of(group, self.kv.config(), self.config.max_run());
        let lacks_blocks = || needed + self.num_blocks_kept() > self.kv.num_free_blocks();
        let (held, share) = if lacks_slots {
            (slots, self.config.max_num_seqs / num_tenants)
        } else if lacks_blocks() {
            (self.blocks_by_tenant(), self.kv.config().num_device_blocks / num_tenants)
        } else {
            return None;
        };
        let others = held.into_iter().filter(|(tenant, _)| *tenant != group.request.tenant);
        let (tenant, _) = others.filter(|(_, held)| *held > share).max_by_key(|(_, held)| *held)?;
        let of_tenant = |id: &&RequestId| {
            let victim = &self.groups[id];
            victim.request.tenant == tenant
                && victim.key.priority >= group.key.priority
                && num_applied(victim) >= victim.safe_below
        };
        self.running.values().rev().find(of_tenant).copied()
    }

    /// Places and blocks that tenants which wait have less than their shares. The tenants are few, their requests may be
    /// thousands.
    fn left_of_shares(&self, num_tenants: usize) -> BTreeMap<u32, (usize, usize)> {
        let slots = self.config.max_num_seqs / num_tenants;
        let blocks = self.kv.config().num_device_blocks / num_tenants;
        let queued = self.swapped.values().map(|id| self.groups[id].request.tenant);
        let queued = queued.chain(self.num_waiting_of.keys().copied());
        let mut left: BTreeMap<u32, (usize, usize)> =
            queued.map(|tenant| (tenant, (slots, blocks))).collect();
        for id in self.running.values() {
            if let Some((slots, _)) = left.get_mut(&self.groups[id].request.tenant) {
                *slots = slots.saturating_sub(self.groups[id].num_slots());
            }
        }
        left.retain(|_, (slots, _)| *slots > 0);
        for id in self.running.values() {
            if let Some((_, blocks)) = left.get_mut(&self.groups[id].request.tenant) {
                *blocks = blocks.saturating_sub(self.num_blocks_held(*id));
            }
        }
        left
    }

    fn num_blocks_held(&self, id: RequestId) -> usize {
        self.kv.num_distinct_blocks(&live_seq_ids(&self.groups[&id]))
    }

    fn blocks_by_tenant(&self) -> BTreeMap<u32, usize> {
        self.by_tenant(|id| self.num_blocks_held(id))
    }

    fn slots_by_tenant(&self) -> BTreeMap<u32, usize> {
        self.by_tenant(|id| self.groups[&id].num_slots())
    }

    /// Sums over the running requests of each tenant.
    fn by_tenant(&self, of_request: impl Fn(RequestId) -> usize) -> BTreeMap<u32, usize> {
        let mut sums = BTreeMap::new();
        for id in self.running.values() {
            *sums.entry(self.groups[id].request.tenant).or_default() += of_request(*id);
        }
        sums
    }

    /// The first swapped or waiting request that is as asked.
    pub(crate) fn first_in_queue(&self, is_wanted: impl Fn(&Group) -> bool) -> Option<RequestId> {
        let find = |queue: &crate::scheduler::Queue| {
            let mut entries = queue.iter().map(|(key, id)| (*key, *id));
            entries.find(|(_, id)| is_wanted(&self.groups[id]))
        };
        let first = [find(&self.swapped), find(&self.waiting)].into_iter().flatten().min();
        first.map(|(_, id)| id)
    }
}

/// Tokens that a request has computed.
fn num_applied(group: &Group) -> usize {
    group.live().map(|position| group.seqs[position].num_applied).sum()
}
