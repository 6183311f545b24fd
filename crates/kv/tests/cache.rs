//! The habits of the cache that a random test would not notice: who is evicted, what is reported, what is shared.

use baton_core::{SeqId, TokenId};
use baton_kv::{EvictionPolicy, KvCache, KvConfig, KvError, KvEvent, KvGroup, NO_BLOCK, WriteRange};

const BLOCK: usize = 4;

fn cache(num_device_blocks: usize, eviction: EvictionPolicy) -> KvCache {
    KvCache::new(KvConfig {
        num_device_blocks,
        num_host_blocks: 8,
        block_size: BLOCK,
        eviction,
        event_capacity: 100,
        ..KvConfig::default()
    })
    .expect("a valid configuration")
}

fn tokens(first: TokenId, num_blocks: usize) -> Vec<TokenId> {
    (first..first + (num_blocks * BLOCK) as TokenId).collect()
}

/// Computes a sequence and returns how many of its tokens were cached.
fn compute(kv: &mut KvCache, id: u64, token_ids: &[TokenId]) -> usize {
    kv.add_sequence(SeqId(id), None, 0);
    let found = kv.match_prefix(SeqId(id), token_ids, token_ids.len() - 1);
    let start = kv.attach_prefix(SeqId(id), found.num_rows).num_tokens;
    fill(kv, SeqId(id), token_ids);
    start
}

/// Computes what a sequence does not have yet.
fn fill(kv: &mut KvCache, seq_id: SeqId, token_ids: &[TokenId]) {
    let start = kv.num_rows(seq_id) * BLOCK;
    kv.reserve(WriteRange { seq_id, start, end: token_ids.len() }, &mut Vec::new()).expect("room");
    kv.commit(seq_id, token_ids, token_ids.len());
}

fn num_cached(kv: &mut KvCache, token_ids: &[TokenId]) -> usize {
    let id = SeqId(999);
    kv.add_sequence(id, None, 0);
    let found = kv.match_prefix(id, token_ids, token_ids.len());
    kv.remove_sequence(id);
    found.num_rows
}

#[test]
fn the_longest_suffix_is_evicted_first() {
    let mut kv = cache(4, EvictionPolicy::Lru);
    let old = tokens(0, 4);
    compute(&mut kv, 1, &old);
    kv.remove_sequence(SeqId(1));
    assert_eq!(num_cached(&mut kv, &old), 4);
    compute(&mut kv, 2, &tokens(100, 2));
    assert_eq!(num_cached(&mut kv, &old), 2, "two blocks were taken from the end of the old prefix");
    assert_eq!(kv.stats().num_evictions, 2);
}

#[test]
fn lru_evicts_the_oldest_and_lfu_the_least_used() {
    for (eviction, survivor) in [(EvictionPolicy::Lru, 100), (EvictionPolicy::Lfu, 0)] {
        let mut kv = cache(5, eviction);
        let (popular, recent) = (tokens(0, 2), tokens(100, 2));
        for id in 1..4 {
            compute(&mut kv, id, &popular);
            kv.remove_sequence(SeqId(id));
        }
        compute(&mut kv, 10, &recent);
        kv.remove_sequence(SeqId(10));
        compute(&mut kv, 12, &tokens(300, 4));
        assert_eq!(num_cached(&mut kv, &tokens(survivor, 1)), 1, "{eviction:?}");
        assert_eq!(num_cached(&mut kv, &tokens(100 - survivor, 1)), 0, "{eviction:?}");
        kv.check_invariants();
    }
}

#[test]
fn a_block_without_a_hash_is_reused_before_a_cached_one() {
    let mut kv = cache(3, EvictionPolicy::Lru);
    compute(&mut kv, 1, &tokens(0, 3)[..9]);
    kv.remove_sequence(SeqId(1));
    compute(&mut kv, 2, &[50]);
    assert_eq!(num_cached(&mut kv, &tokens(0, 2)), 2);
}

#[test]
fn salts_do_not_share() {
    let mut kv = cache(8, EvictionPolicy::Lru);
    compute(&mut kv, 1, &tokens(0, 2));
    kv.add_sequence(SeqId(2), Some("other"), 0);
    assert_eq!(kv.match_prefix(SeqId(2), &tokens(0, 2), 8).num_rows, 0);
}

#[test]
fn salts_share_whole_public_blocks_and_nothing_after_them() {
    let mut kv = cache(32, EvictionPolicy::Lru);
    let prompt = tokens(0, 4);
    let matched = |kv: &mut KvCache, id: u64, salt: Option<&str>, num_public: usize| {
        kv.add_sequence(SeqId(id), salt, num_public);
        kv.match_prefix(SeqId(id), &prompt, prompt.len()).num_rows
    };
    // Two whole blocks and a part of the third are public.
    let num_public = 2 * BLOCK + 1;
    assert_eq!(matched(&mut kv, 1, Some("red"), num_public), 0);
    fill(&mut kv, SeqId(1), &prompt);
    assert_eq!(matched(&mut kv, 2, Some("red"), num_public), 4);
    assert_eq!(matched(&mut kv, 3, Some("blue"), num_public), 2);
    assert_eq!(matched(&mut kv, 4, None, num_public), 2);
    assert_eq!(matched(&mut kv, 5, Some("red"), BLOCK), 1);
    assert_eq!(matched(&mut kv, 6, Some("red"), 0), 0);
    // Another tenant's blocks after the public ones are its own.
    kv.attach_prefix(SeqId(3), 2);
    fill(&mut kv, SeqId(3), &prompt);
    assert_eq!(matched(&mut kv, 7, Some("blue"), num_public), 4);
    assert_eq!(matched(&mut kv, 8, Some("green"), num_public), 2);
}

#[test]
fn events_tell_what_is_stored_and_removed() {
    let mut kv = cache(2, EvictionPolicy::Lru);
    let first = tokens(0, 2);
    compute(&mut kv, 1, &first);
    let events = kv.take_events();
    let [KvEvent::BlockStored { hashes, parent: None, token_ids, block_size: BLOCK, group: 0 }] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!((hashes.len(), token_ids), (2, &first));
    let hashes = hashes.clone();
    kv.remove_sequence(SeqId(1));
    compute(&mut kv, 2, &[9, 9]);
    assert_eq!(kv.take_events(), [KvEvent::BlockRemoved { hashes: vec![hashes[1]], group: 0 }]);
    kv.reset_prefix_cache();
    assert_eq!(kv.take_events(), [KvEvent::AllCleared]);
    assert_eq!(num_cached(&mut kv, &first), 0);
}

#[test]
fn what_was_computed_before_a_reset_is_never_cached_again() {
    let mut kv = cache(8, EvictionPolicy::Lru);
    let mut token_ids = tokens(0, 1);
    compute(&mut kv, 1, &token_ids);
    kv.reset_prefix_cache();
    token_ids.extend(tokens(50, 1));
    kv.reserve(WriteRange { seq_id: SeqId(1), start: 4, end: 8 }, &mut Vec::new()).expect("room");
    kv.commit(SeqId(1), &token_ids, 8);
    assert_eq!(num_cached(&mut kv, &token_ids), 0);
    assert_eq!(kv.stats().num_cached_blocks, 0);
}

#[test]
fn beams_keep_sharing_in_the_host_tier_and_what_stays_cached_needs_no_copy_back() {
    let mut kv = cache(8, EvictionPolicy::Lru);
    let token_ids = tokens(0, 3)[..10].to_vec();
    compute(&mut kv, 1, &token_ids);
    kv.fork(SeqId(1), SeqId(2));
    kv.fork(SeqId(1), SeqId(3));
    let group = [SeqId(1), SeqId(2)];
    let out = kv.swap_out(&group).expect("the host tier has room");
    assert_eq!(out.len(), 3, "shared blocks are saved once");
    assert_eq!(kv.stats().num_device_blocks_used, 3, "the third sequence keeps its blocks");
    kv.check_invariants();
    let back = kv.swap_in(&group).expect("the device has room");
    assert_eq!(back.len(), 1, "only the partial block is not cached on the device");
    assert_eq!(kv.block_tables(SeqId(1)), kv.block_tables(SeqId(2)));
    kv.check_invariants();
}

#[test]
fn the_last_holder_of_a_shared_block_writes_in_place() {
    let mut kv = cache(8, EvictionPolicy::Lru);
    compute(&mut kv, 1, &tokens(0, 2)[..6]);
    kv.fork(SeqId(1), SeqId(2));
    let writes = [1, 2].map(|id| WriteRange { seq_id: SeqId(id), start: 6, end: 7 });
    assert_eq!(kv.blocks_needed(&writes), 1);
    let mut copies = Vec::new();
    for write in writes {
        kv.reserve(write, &mut copies).expect("room");
    }
    assert_eq!(copies.len(), 1);
    assert_eq!(kv.block_tables(SeqId(1))[0][0], kv.block_tables(SeqId(2))[0][0]);
    assert_ne!(kv.block_tables(SeqId(1))[0][1], kv.block_tables(SeqId(2))[0][1]);
}

#[test]
fn wrong_configurations_are_refused() {
    let refuse = |config: KvConfig| KvCache::new(config).expect_err("must be refused");
    assert_eq!(refuse(KvConfig { num_device_blocks: 0, ..KvConfig::default() }), KvError::NoBlocks);
    assert_eq!(refuse(KvConfig { block_size: 0, ..KvConfig::default() }), KvError::BlockSize);
    let huge = refuse(KvConfig { num_host_blocks: usize::MAX, ..KvConfig::default() });
    assert!(matches!(huge, KvError::TooManyBlocks { tier: "host", .. }));
}

#[test]
fn a_pinned_prefix_outlives_eviction_and_a_reset() {
    let mut kv = cache(6, EvictionPolicy::Lru);
    let pinned = tokens(0, 2);
    compute(&mut kv, 1, &pinned);
    kv.remove_sequence(SeqId(1));
    assert_eq!(kv.pin_prefix(SeqId(50), &pinned), 2);
    assert_eq!(kv.pin_prefix(SeqId(51), &pinned[..BLOCK]), 1, "a shorter one shares its block");
    assert_eq!(kv.pin_prefix(SeqId(52), &tokens(900, 2)), 0, "what was never computed");
    assert_eq!((kv.stats().num_pinned_blocks, kv.num_unpinned_blocks()), (2, 4));
    for round in 1..=10 {
        assert_eq!(compute(&mut kv, 2, &tokens(100 * round, 4)), 0);
        kv.remove_sequence(SeqId(2));
    }
    assert_eq!((num_cached(&mut kv, &pinned), kv.num_free_blocks()), (2, 4));
    kv.reset_prefix_cache();
    assert_eq!((num_cached(&mut kv, &pinned), num_cached(&mut kv, &tokens(1000, 4))), (2, 0));
    // Who begins with it shares its blocks, and may let go of them.
    let longer = [pinned.clone(), tokens(500, 1)].concat();
    assert_eq!(compute(&mut kv, 3, &longer), 2 * BLOCK);
    kv.remove_sequence(SeqId(3));
    assert_eq!(num_cached(&mut kv, &longer), 3);
    kv.check_invariants();
}

fn windowed(num_device_blocks: usize, num_host_blocks: usize) -> KvCache {
    let groups = vec![KvGroup::default(), KvGroup { window: Some(2 * BLOCK), lanes: 2 }];
    let config =
        KvConfig { num_device_blocks, num_host_blocks, block_size: BLOCK, groups, ..KvConfig::default() };
    KvCache::new(config).expect("a valid configuration")
}

#[test]
fn rows_behind_a_window_are_given_back_and_a_hit_needs_the_last_ones_only() {
    let mut kv = windowed(64, 0);
    let prompt = tokens(0, 8);
    compute(&mut kv, 1, &prompt);
    assert_eq!(kv.stats().num_device_blocks_used, 8 + 2 * 8);
    kv.trim(SeqId(1), prompt.len());
    assert_eq!(kv.stats().num_device_blocks_used, 8 + 2 * 2, "a window of two rows is left");
    let tables = kv.block_tables(SeqId(1));
    assert_eq!(tables.len(), 3, "a table for each lane");
    assert!(tables[0].iter().all(|block| *block != NO_BLOCK));
    assert_eq!(tables[1].iter().filter(|block| **block == NO_BLOCK).count(), 6);
    kv.add_sequence(SeqId(2), None, 0);
    let longer = [prompt.clone(), vec![7]].concat();
    let found = kv.match_prefix(SeqId(2), &longer, prompt.len());
    assert_eq!((found.num_rows, found.num_blocks, found.num_free_blocks), (8, 8 + 2 * 2, 0));
    assert_eq!(kv.attach_prefix(SeqId(2), 8).num_tokens, 8 * BLOCK);
    assert_eq!(kv.block_tables(SeqId(2)), tables);
    kv.check_invariants();
    // A sequence of its own takes all that is free; of the windowed group the last rows stay with the first one.
    kv.remove_sequence(SeqId(2));
    compute(&mut kv, 3, &tokens(500, 17)[..17 * BLOCK - 1]);
    assert_eq!(num_cached(&mut kv, &prompt), 8);
    assert_eq!(num_cached(&mut kv, &prompt[..7 * BLOCK]), 0, "the window before the seventh row is gone");
    kv.check_invariants();
}

#[test]
fn what_left_the_device_is_found_in_the_host_tier() {
    let mut kv = windowed(16, 24);
    let prompt = tokens(0, 4);
    compute(&mut kv, 1, &prompt);
    kv.remove_sequence(SeqId(1));
    assert!(kv.offload(100, 4).is_empty(), "four empty blocks are left");
    let first = kv.offload(100, 6);
    let rest = kv.offload(100, 16);
    assert_eq!((first.len(), rest.len()), (2, 10), "what is evicted next, and nothing twice");
    let saved = [first, rest].concat();
    kv.check_invariants();
    kv.add_sequence(SeqId(2), None, 0);
    compute(&mut kv, 3, &tokens(100, 5));
    assert_eq!(kv.match_prefix(SeqId(2), &prompt, 16).num_rows, 0, "the copies may still fail");
    kv.confirm_saved(&saved, true);
    kv.remove_sequence(SeqId(3));
    let found = kv.match_prefix(SeqId(2), &prompt, 16);
    assert_eq!((found.num_rows, found.num_host_rows, found.num_blocks), (4, 6, 8));
    let attached = kv.attach_prefix(SeqId(2), 4);
    assert_eq!((attached.num_tokens, attached.fetches.len()), (16, 8), "of the windowed group two rows");
    assert_eq!(kv.stats().num_host_blocks_used, 8);
    kv.check_invariants();
    kv.end_fetch(SeqId(2));
    kv.commit(SeqId(2), &prompt, 16);
    assert_eq!((kv.stats().num_host_blocks_used, kv.stats().num_host_cached_blocks), (0, 8));
    kv.check_invariants();
    // What failed cannot be found.
    kv.remove_sequence(SeqId(2));
    let lost = kv.offload(100, 16);
    kv.confirm_saved(&lost, false);
    kv.reset_prefix_cache();
    assert_eq!(kv.stats().num_host_cached_blocks, 0);
    kv.check_invariants();
}

#[test]
fn rows_of_tokens_that_did_not_come_are_given_back() {
    let mut kv = windowed(64, 0);
    compute(&mut kv, 1, &tokens(0, 2));
    kv.reserve(WriteRange { seq_id: SeqId(1), start: 8, end: 15 }, &mut Vec::new()).expect("room");
    assert_eq!(kv.num_rows(SeqId(1)), 4);
    kv.truncate(SeqId(1), 9);
    assert_eq!((kv.num_rows(SeqId(1)), kv.stats().num_device_blocks_used), (3, 9));
    kv.check_invariants();
}
