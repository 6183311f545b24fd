//! What breaks the contract stops the oracle, with a message that names the rule.

use super::*;
use crate::{AttentionItem, BackendError, BlockCopy, NO_PARTIAL};

/// A step that is fine: four tokens, one item.
fn good_step() -> StepInput {
    let mut input = StepInput::default();
    Seq::random(&mut Random::new(1), 4, &[2]).add_to(&mut input, 0..4);
    let item = AttentionItem {
        query_start: 0,
        num_queries: 4,
        pages_start: 0,
        kv_start: 0,
        kv_len: 4,
        partial: NO_PARTIAL,
    };
    input.attention = vec![AttentionPlan { items: vec![item], ..AttentionPlan::default() }];
    input.logit_rows = vec![3];
    input.samples = vec![SampleRow::greedy(0)];
    input
}

/// The message of the panic that a change to the good step causes.
fn refusal(change: impl FnOnce(&mut StepInput)) -> String {
    let mut input = good_step();
    change(&mut input);
    let run = std::panic::AssertUnwindSafe(|| Bench::new(&Kind::plain()).run(&input));
    let panic = std::panic::catch_unwind(run).expect_err("the step breaks a rule");
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).expect("a panic with a message")
}

fn item_refusal(change: impl FnOnce(&mut AttentionItem)) -> String {
    refusal(|input| change(&mut input.attention[0].items[0]))
}

#[track_caller]
fn check(message: &str, expected: &str) {
    assert!(message.contains(expected), "{message:?} does not say {expected:?}");
}

#[test]
fn the_good_step_is_good() {
    assert_eq!(Bench::new(&Kind::plain()).run(&good_step()).samples.len(), 1);
}

#[test]
fn broken_steps_are_refused() {
    check(&refusal(|input| input.slots[1] = 128), "slot 128 is not below 128");
    check(&refusal(|input| input.slots[1] = input.slots[0]), "two tokens of a step are written to slot 8");
    check(&refusal(|input| input.positions[0] = 64), "position 64 is not below 64");
    check(&refusal(|input| input.logit_rows[0] = 4), "token row 4 is not below 4");
    check(&refusal(|input| input.samples[0].logit_row = 1), "a sample's row of logits 1 is not below 1");
    check(&refusal(|input| input.samples[0].history = 0..1), "history 0..1 lies outside its 0 entries");
    check(&refusal(|input| input.feedback.push((0, 0))), "from sample 0, which the step before did not draw");
    check(&refusal(|input| input.copies.push(BlockCopy { from: 0, to: 32 })), "copied to block 32 of 32");
    check(&refusal(|input| input.token_ids[2] = 24), "token 24 is outside the vocabulary of 24");
    check(&refusal(|input| input.logit_rows = vec![0; 9]), "9 rows of logits, but the limit is 8");
    check(&refusal(|input| input.attention.clear()), "a step with 0 attention plans");
}

#[test]
fn broken_plans_are_refused() {
    check(&item_refusal(|item| item.num_queries = 3), "no attention item covers query 3");
    check(&item_refusal(|item| item.num_queries = 5), "queries beyond the 4 rows");
    check(&item_refusal(|item| item.kv_len = 5), "pages beyond the 1 there are");
    check(&item_refusal(|item| item.kv_start = 2), "kv_start is not a multiple of the block size 4");
    check(&item_refusal(|item| item.kv_start = 4), "query 0 sees no key");
    check(&item_refusal(|item| item.partial = 0), "partial slot 0 of 0");
    check(&refusal(|input| input.pages[0] = 32), "page 32 is not below 32");
    let unmerged = refusal(|input| {
        input.attention[0].items[0].partial = 0;
        input.attention[0].num_partials = 4;
    });
    check(&unmerged, "is never merged");
    let twice = refusal(|input| {
        let item = input.attention[0].items[0];
        input.attention[0].items.push(item);
    });
    check(&twice, "two items write the result of query 0");
}

#[test]
fn memory_is_counted_and_refused() {
    let mut backend = ReferenceBackend::with_memory(1000);
    backend.set_limits(&limits()).unwrap();
    let tensor = Tensor::from_f32(2, 25, &[0.0; 50]).unwrap();
    backend.load_weight(&[tensor], WeightUse::Linear).unwrap();
    backend.create_buffer(10, 10).unwrap();
    assert_eq!((backend.device().free_bytes, backend.weight_bytes()), (400, 200));
    let refused = backend.create_buffer(usize::MAX, 2).unwrap_err();
    assert!(matches!(refused, BackendError::OutOfMemory { free_bytes: 400, .. }));
    let layer = KvLayerSpec { num_kv_heads: 1, head_dim: 4 };
    let spec = KvSpec::full(layer, 1, KvDtype::F16, 4);
    assert!(backend.create_kv_cache(&spec, 7, 0).is_err());
    backend.create_kv_cache(&spec, 4, 2).unwrap();
    assert_eq!(backend.device().free_bytes, 400 - 6 * 64);
}

#[test]
fn weights_of_unequal_width_are_refused() {
    let mut backend = ReferenceBackend::new();
    let parts = [Tensor::from_f32(1, 2, &[0.0; 2]).unwrap(), Tensor::from_f32(1, 3, &[0.0; 3]).unwrap()];
    let refused = backend.load_weight(&parts, WeightUse::Linear).unwrap_err();
    check(&refused.to_string(), "widths [2, 3]");
    assert!(backend.load_weight(&[], WeightUse::Linear).is_err());
}
