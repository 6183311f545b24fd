//! Prefixes that are pinned before the first request, and the switch of relay attention.

mod common;

use baton_core::{Request, SamplingParams, TokenId};
use baton_engine::{Engine, EngineConfig, EngineError};
use common::{engine, golden, greedy, reference, small_config, tokens, with_blocks};

const NUM_BLOCKS: usize = 40;
const BLOCK: usize = 4;

/// The tiny model with so many blocks of four tokens; its longest sequence has 96.
fn llama(num_blocks: usize, more: impl Fn(EngineConfig) -> EngineConfig) -> Engine {
    let golden = golden("llama");
    let config = EngineConfig { max_model_len: Some(96), ..small_config(&golden) };
    engine(&golden, reference(), &more(with_blocks(&golden, &config, num_blocks)))
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|index| (index * 7 + seed * 13 + index * index * seed) % 150).collect()
}

/// How much of a prompt that begins with the prefix is found in the cache.
fn num_cached(engine: &mut Engine, prefix: &[TokenId], question: u32) -> u32 {
    let prompts = vec![[prefix, &prompt(question, 9)].concat()];
    engine.generate(prompts, &greedy(2)).expect("completes")[0].num_cached_tokens
}

#[test]
fn a_pinned_prefix_is_found_by_the_first_request_and_after_ten_times_the_cache() {
    let mut engine = llama(NUM_BLOCKS, |config| config);
    let prefix = prompt(3, 30);
    assert_eq!(engine.pin_prefix(&prefix).expect("it fits"), 28, "seven whole blocks");
    assert_eq!(engine.stats().scheduler.kv.num_pinned_blocks, 7);
    assert_eq!(num_cached(&mut engine, &prefix, 1), 28);
    let mut num_computed = 0;
    for seed in 0.. {
        let other = engine.generate(vec![prompt(seed + 10, 90)], &greedy(4)).expect("completes");
        num_computed += 90 - other[0].num_cached_tokens as usize;
        if num_computed >= 10 * NUM_BLOCKS * BLOCK {
            break;
        }
    }
    assert_eq!(num_cached(&mut engine, &prefix, 2), 28);
    engine.reset_prefix_cache();
    assert_eq!(num_cached(&mut engine, &prefix, 2), 28);
    engine.check_invariants();
    assert_eq!(engine.stats().scheduler.kv.num_device_blocks_used, 7);
}

#[test]
fn what_cannot_be_pinned_says_what_to_do() {
    let error =
        |engine: &mut Engine, len| engine.pin_prefix(&prompt(3, len)).expect_err("refused").to_string();
    let mut roomy = llama(NUM_BLOCKS, |config| config);
    let too_long = error(&mut roomy, 96);
    assert!(too_long.contains("96 tokens") && too_long.contains("raise --max-model-len"), "{too_long}");
    // 24 blocks are the longest sequence.
    let mut tight = llama(26, |config| config);
    let too_large = error(&mut tight, 12);
    assert!(too_large.contains("lower --max-model-len to 92, or raise --kv-cache-memory"), "{too_large}");
    assert_eq!(tight.pin_prefix(&prompt(3, 11)).expect("two blocks fit"), 8);
    assert!(error(&mut tight, 8).contains("lower --max-model-len"), "two more do not");
    let mut without = llama(NUM_BLOCKS, |config| EngineConfig { enable_prefix_caching: false, ..config });
    assert!(error(&mut without, 8).contains("--no-enable-prefix-caching"));
    let id = roomy.new_request_id();
    roomy.add_request(Request::new(id, prompt(1, 5), greedy(3))).expect("queued");
    assert!(matches!(roomy.pin_prefix(&prompt(3, 8)), Err(EngineError::PinTooLate)));
}

#[test]
fn a_request_that_only_fits_without_the_pinned_blocks_is_refused() {
    let mut engine = llama(NUM_BLOCKS, |config| config);
    let params = SamplingParams { n: 2, ..greedy(70) };
    // Two of 18 blocks and 2 that they share.
    engine.generate(vec![prompt(1, 8)], &params).expect("38 of 40 blocks");
    engine.pin_prefix(&prompt(3, 12)).expect("three blocks");
    let error = engine.generate(vec![prompt(1, 8)], &params).expect_err("it would wait for ever").to_string();
    assert!(error.contains("37"), "{error}");
    engine.check_invariants();
}

#[test]
fn relay_attention_is_switched_between_steps() {
    let relays = |config| EngineConfig { deterministic: false, block_size: Some(16), ..config };
    // Blocks four times as large.
    let mut engine = llama(4 * NUM_BLOCKS, relays);
    let prefix = prompt(3, 64);
    engine.generate(vec![prefix.clone()], &greedy(1)).expect("cached");
    let mut answers = |enabled: bool| {
        assert_eq!(engine.set_relay_attention(enabled), enabled);
        let before = engine.stats().relay;
        let prompts = (1..=8).map(|seed| [prefix.clone(), prompt(seed, 5)].concat()).collect();
        let outputs = engine.generate(prompts, &greedy(6)).expect("completes");
        let saved = engine.stats().relay.since(&before).num_tokens_saved;
        (outputs.iter().map(tokens).collect::<Vec<_>>(), saved)
    };
    let (plain, none) = answers(false);
    let (relayed, saved) = answers(true);
    assert_eq!((plain == relayed, none, saved > 0), (true, 0, true), "{saved} tokens of KV");
    assert_eq!(answers(false).1, 0);
    // A deterministic engine never shares.
    assert!(!llama(NUM_BLOCKS, |config| config).set_relay_attention(true));
}
