//! A model with sliding windows serves contexts that are longer than its blocks would hold without them.

mod common;

use baton_core::TokenId;
use baton_engine::EngineConfig;
use common::{Golden, assert_idle, engine, golden, greedy, reference, small_config, tokens, with_blocks};

/// Tokens of a block.
const BLOCK_SIZE: usize = 4;

fn generate(golden: &Golden, config: &EngineConfig, prompt: &[TokenId]) -> Vec<TokenId> {
    let mut engine = engine(golden, reference(), config);
    let num_tokens = golden.max_model_len - prompt.len();
    let outputs =
        engine.generate(vec![prompt.to_vec(); 2], &greedy(num_tokens as u32)).expect("it completes");
    assert_idle(&engine);
    assert_eq!(tokens(&outputs[0]), tokens(&outputs[1]));
    tokens(&outputs[0]).swap_remove(0)
}

#[test]
fn a_context_longer_than_the_pool() {
    let golden = golden("mistral");
    let config = EngineConfig { max_num_seqs: 2, max_num_batched_tokens: 8, ..small_config(&golden) };
    let known = &golden.prompts[0].token_ids;
    let prompt: Vec<TokenId> = known.iter().copied().cycle().take(golden.max_model_len / 2).collect();
    let num_rows = golden.max_model_len / BLOCK_SIZE;
    // Fewer blocks than the context has; each of the two sequences would need all of them.
    let small = with_blocks(&golden, &config, 3 * num_rows / 4);
    let large = with_blocks(&golden, &config, 4 * num_rows);
    assert_eq!(generate(&golden, &small, &prompt), generate(&golden, &large, &prompt));
}
