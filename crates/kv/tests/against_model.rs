//! Random operations against a model that keeps the tokens of every slot in plain vectors.
//!
//! After every operation each sequence must find exactly its own tokens in its blocks, whatever was shared, copied,
//! swapped or evicted in between, and the books must balance.

use std::collections::BTreeMap;

use baton_core::{SeqId, TokenId};
use baton_kv::{BlockMove, EvictionPolicy, KvCache, KvConfig, KvGroup, NO_BLOCK, WriteRange};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Operation {
    /// A new sequence with this beginning, of which it takes what is cached.
    Add {
        prefix: usize,
        len: usize,
        salt: bool,
    },
    Grow {
        which: usize,
        count: usize,
    },
    Fork {
        which: usize,
    },
    Remove {
        which: usize,
    },
    Release {
        which: usize,
    },
    SwapOut {
        which: usize,
        and: usize,
    },
    SwapIn,
    /// Saves what would be evicted next; the copies may fail.
    Offload {
        count: usize,
        is_done: bool,
    },
    Reset,
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        4 => (0..3usize, 1..20usize, any::<bool>()).prop_map(|(prefix, len, salt)| Operation::Add { prefix, len, salt }),
        6 => (any::<usize>(), 1..9usize).prop_map(|(which, count)| Operation::Grow { which, count }),
        2 => any::<usize>().prop_map(|which| Operation::Fork { which }),
        2 => any::<usize>().prop_map(|which| Operation::Remove { which }),
        1 => any::<usize>().prop_map(|which| Operation::Release { which }),
        2 => (any::<usize>(), any::<usize>()).prop_map(|(which, and)| Operation::SwapOut { which, and }),
        2 => Just(Operation::SwapIn),
        3 => (1..40usize, prop::bool::weighted(0.8)).prop_map(|(count, is_done)| Operation::Offload { count, is_done }),
        1 => Just(Operation::Reset),
    ];
    prop::collection::vec(operation, 1..120)
}

#[derive(Clone, Debug, Default)]
struct Model {
    token_ids: Vec<TokenId>,
    num_computed: usize,
    is_swapped: bool,
    salt: bool,
}

/// What a slot holds: which lane's KV, the salt, and the whole prefix up to it.
type Content = Option<(usize, bool, Vec<TokenId>)>;

struct Harness {
    kv: KvCache,
    sequences: BTreeMap<SeqId, Model>,
    device: Vec<Content>,
    host: Vec<Content>,
    next: u64,
}

impl Harness {
    fn new(config: KvConfig) -> Self {
        Self {
            device: vec![None; config.num_device_blocks * config.block_size],
            host: vec![None; config.num_host_blocks * config.block_size],
            kv: KvCache::new(config).expect("a valid configuration"),
            sequences: BTreeMap::new(),
            next: 0,
        }
    }

    fn pick(&self, which: usize, swapped: bool) -> Option<SeqId> {
        let ids: Vec<_> = self
            .sequences
            .iter()
            .filter(|(_, model)| model.is_swapped == swapped)
            .map(|(id, _)| *id)
            .collect();
        (!ids.is_empty()).then(|| ids[which % ids.len()])
    }

    fn apply(&mut self, operation: &Operation) {
        match *operation {
            Operation::Add { prefix, len, salt } => self.add(prefix, len, salt),
            Operation::Grow { which, count } => {
                if let Some(id) = self.pick(which, false) {
                    let last = self.sequences[&id].token_ids.len() as TokenId;
                    let model = self.sequences.get_mut(&id).expect("picked");
                    model.token_ids.extend((0..count as TokenId).map(|i| (id.0 as TokenId + last + i) % 3));
                    self.compute(id);
                }
            }
            Operation::Fork { which } => {
                if let Some(id) = self.pick(which, false) {
                    let child = self.new_id();
                    self.kv.fork(id, child);
                    self.sequences.insert(child, self.sequences[&id].clone());
                }
            }
            Operation::Remove { which } => {
                if let Some(id) = self.pick(which, which % 2 == 0) {
                    self.kv.remove_sequence(id);
                    self.sequences.remove(&id);
                }
            }
            Operation::Release { which } => {
                if let Some(id) = self.pick(which, false) {
                    self.kv.release(id);
                    self.sequences.get_mut(&id).expect("picked").num_computed = 0;
                    self.take_cached(id);
                    self.compute(id);
                }
            }
            Operation::SwapOut { which, and } => self.swap_out(which, and),
            Operation::SwapIn => self.swap_in(),
            Operation::Offload { count, is_done } => {
                let moves = self.kv.offload(count, usize::MAX);
                let size = self.kv.config().block_size;
                for BlockMove { from, to } in &moves {
                    for slot in 0..size {
                        let content = self.device[from.index() * size + slot].clone();
                        self.host[to.index() * size + slot] = is_done.then_some(content).flatten();
                    }
                }
                self.kv.check_invariants();
                self.kv.confirm_saved(&moves, is_done);
            }
            Operation::Reset => self.kv.reset_prefix_cache(),
        }
    }

    fn new_id(&mut self) -> SeqId {
        self.next += 1;
        SeqId(self.next)
    }

    fn add(&mut self, prefix: usize, len: usize, salt: bool) {
        let id = self.new_id();
        self.kv.add_sequence(id, salt.then_some("salt"), 0);
        let token_ids = (0..len).map(|i| ((i * (prefix + 1)) % 7) as TokenId).collect();
        self.sequences.insert(id, Model { token_ids, salt, ..Model::default() });
        self.take_cached(id);
        self.compute(id);
    }

    fn take_cached(&mut self, id: SeqId) {
        let model = self.sequences.get_mut(&id).expect("just added");
        let found = self.kv.match_prefix(id, &model.token_ids, model.token_ids.len() - 1);
        let free = self.kv.num_free_blocks();
        if found.num_free_blocks > free {
            return;
        }
        let attached = self.kv.attach_prefix(id, found.num_rows);
        model.num_computed = attached.num_tokens;
        assert_eq!(self.kv.num_free_blocks(), free - found.num_free_blocks);
        assert_eq!(self.kv.num_distinct_blocks(&[id]), found.num_blocks);
        assert!(model.num_computed < model.token_ids.len());
        self.kv.check_invariants();
        let size = self.kv.config().block_size;
        for BlockMove { from, to } in attached.fetches {
            for slot in 0..size {
                let content = self.host[from.index() * size + slot].clone();
                self.device[to.index() * size + slot] = content;
            }
        }
        self.kv.end_fetch(id);
    }

    /// Computes all tokens that are not computed yet, if there is room.
    fn compute(&mut self, id: SeqId) {
        let model = self.sequences[&id].clone();
        self.kv.trim(id, model.num_computed);
        let write = WriteRange { seq_id: id, start: model.num_computed, end: model.token_ids.len() };
        let (needed, free) = (self.kv.blocks_needed(&[write]), self.kv.num_free_blocks());
        let mut copies = Vec::new();
        let outcome = self.kv.reserve(write, &mut copies);
        assert_eq!(outcome.is_ok(), needed <= free);
        if outcome.is_err() {
            assert!(copies.is_empty() && self.kv.num_free_blocks() == free);
            return;
        }
        assert_eq!(self.kv.num_free_blocks(), free - needed);
        let size = self.kv.config().block_size;
        for BlockMove { from, to } in copies {
            for slot in 0..size {
                let content = self.device[from.index() * size + slot].clone();
                self.device[to.index() * size + slot] = content;
            }
        }
        for (lane, blocks) in self.kv.block_tables(id).iter().enumerate() {
            for position in write.start..write.end {
                let slot = blocks[position / size].index() * size + position % size;
                self.device[slot] = Some((lane, model.salt, model.token_ids[..=position].to_vec()));
            }
        }
        self.kv.commit(id, &model.token_ids, write.end);
        self.sequences.get_mut(&id).expect("here").num_computed = write.end;
    }

    fn swap_out(&mut self, which: usize, and: usize) {
        let mut ids: Vec<SeqId> = [which, and].iter().filter_map(|&which| self.pick(which, false)).collect();
        ids.dedup();
        let (needed, free) = (self.kv.num_distinct_blocks(&ids), self.kv.num_free_host_blocks());
        let moves = self.kv.swap_out(&ids);
        assert_eq!(moves.is_some(), needed <= free);
        let Some(moves) = moves else { return };
        // What was copied ahead of need is not copied again.
        assert!(moves.len() <= needed, "every block is moved once");
        let size = self.kv.config().block_size;
        for BlockMove { from, to } in moves {
            for slot in 0..size {
                let content = self.device[from.index() * size + slot].clone();
                self.host[to.index() * size + slot] = content;
            }
        }
        for id in ids {
            self.sequences.get_mut(&id).expect("picked").is_swapped = true;
        }
    }

    fn swap_in(&mut self) {
        let ids: Vec<SeqId> =
            self.sequences.iter().filter(|(_, model)| model.is_swapped).map(|(id, _)| *id).collect();
        let (needed, free) = (self.kv.swap_in_cost(&ids), self.kv.num_free_blocks());
        let moves = self.kv.swap_in(&ids);
        assert_eq!(moves.is_some(), needed <= free);
        let Some(moves) = moves else { return };
        assert!(self.kv.num_free_blocks() >= free - needed);
        let size = self.kv.config().block_size;
        for BlockMove { from, to } in moves {
            for slot in 0..size {
                let content = self.host[from.index() * size + slot].clone();
                self.device[to.index() * size + slot] = content;
            }
        }
        for id in ids {
            self.sequences.get_mut(&id).expect("picked").is_swapped = false;
        }
    }

    fn check(&self) {
        self.kv.check_invariants();
        let size = self.kv.config().block_size;
        for (id, model) in &self.sequences {
            assert_eq!(self.kv.is_swapped(*id), model.is_swapped);
            let tier = if model.is_swapped { &self.host } else { &self.device };
            let groups = self.kv.config().groups.iter().enumerate();
            let lanes = groups.flat_map(|(group, spec)| std::iter::repeat_n(group, spec.lanes));
            for ((lane, blocks), group) in self.kv.block_tables(*id).iter().enumerate().zip(lanes) {
                let first = self.kv.config().first_row(group, model.num_computed) * size;
                for position in first..model.num_computed {
                    assert!(blocks[position / size] != NO_BLOCK, "sequence {id}, position {position}");
                    let slot = blocks[position / size].index() * size + position % size;
                    let expected = Some((lane, model.salt, model.token_ids[..=position].to_vec()));
                    assert_eq!(tier[slot], expected, "sequence {id}, lane {lane}, position {position}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_sequence_finds_its_own_tokens(
        operations in operations(),
        block_size in 1..5usize,
        num_device_blocks in 8..60usize,
        num_host_blocks in 0..40usize,
        windows in prop::collection::vec((prop::option::of(1..12usize), 1..4usize), 1..4),
        enable_prefix_caching in prop::bool::weighted(0.8),
        is_lfu in any::<bool>(),
    ) {
        let eviction = if is_lfu { EvictionPolicy::Lfu } else { EvictionPolicy::Lru };
        let mut harness = Harness::new(KvConfig {
            num_device_blocks,
            num_host_blocks,
            block_size,
            groups: windows.iter().map(|&(window, lanes)| KvGroup { window, lanes }).collect(),
            enable_prefix_caching,
            enable_host_cache: true,
            eviction,
            store: baton_kv::StorePolicy::Off,
            event_capacity: 8,
        });
        for operation in &operations {
            harness.apply(operation);
            harness.check();
        }
        for id in harness.sequences.keys().copied().collect::<Vec<_>>() {
            harness.kv.remove_sequence(id);
        }
        prop_assert_eq!(harness.kv.num_free_blocks(), num_device_blocks);
        prop_assert_eq!(harness.kv.num_free_host_blocks(), num_host_blocks);
    }
}
